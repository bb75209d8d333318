/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Step 9: the header of a packet that leaves after it met an aggregator. `cover` is the aggregator's bitmap, `ecn` the
 * packet's own mark, `mark` the aggregator's.
 */
    action emit_rack() {
        hdr.atp.bitmap0 = meta.cover;
        hdr.atp.edge_switch_identifier = 1;
    }

    action emit_part_of_rack() {
        hdr.atp.bitmap0 = meta.cover;
    }

    action emit_racks() {
        hdr.atp.bitmap1 = meta.cover;
        hdr.atp.edge_switch_identifier = 1;
    }

    /* The first copy of a result, which a repeat completed. It has resend=0; the three bits are one field to the ALU. */
    action emit_first_rack() {
        hdr.atp.bitmap0 = meta.cover;
        hdr.atp.edge_switch_identifier = 1;
        hdr.atp.resend = 0;
        hdr.atp.collision = 0;
    }

    action emit_first_racks() {
        hdr.atp.bitmap1 = meta.cover;
        hdr.atp.edge_switch_identifier = 1;
        hdr.atp.resend = 0;
        hdr.atp.collision = 0;
    }

    /* A repeat that passes and is its whole rack. */
    action emit_whole() {
        hdr.atp.edge_switch_identifier = 1;
    }

    action emit_collision() {
        hdr.atp.collision = 1;
        hdr.atp.resend = 1;
    }

    @hidden table emission {
        key = { meta.kind : ternary @name("kind"); meta.verdict : ternary @name("verdict"); meta.missing_result : ternary @name("missing_result"); }
        actions = {
            emit_rack; emit_part_of_rack; emit_racks; emit_first_rack; emit_first_racks; emit_whole; emit_collision;
            NoAction;
        }
        const default_action = NoAction();
        const entries = {
            (ANY, V_COLLISION, ANY) : emit_collision();
            (K_REPEAT0, V_RESEND_PASSED, TAKE_DONE) : emit_whole();
            (K_REPEAT0, V_RESEND_STALE, TAKE_DONE) : emit_whole();
            (ANY, V_RESEND_PASSED, ANY) : NoAction();
            (ANY, V_RESEND_STALE, ANY) : NoAction();
            (K_GRAD0, ANY, ANY) : emit_rack();
            (K_REPEAT0, V_COMPLETED, ANY) : emit_first_rack();
            (K_REPEAT1, V_COMPLETED, ANY) : emit_first_racks();
            (K_REPEAT0, ANY, ANY) : emit_rack();
            (K_REPEAT1, ANY, ANY) : emit_racks();
            (K_RESEND0, V_PARTIAL, ANY) : emit_part_of_rack();
            (K_RESEND0, V_PARTIAL_ADDED, ANY) : emit_part_of_rack();
            (K_RESEND0, ANY, ANY) : emit_rack();
            (K_GRAD1, ANY, ANY) : emit_racks();
            (K_RESEND1, ANY, ANY) : emit_racks();
        }
    }

    action emit_marked() {
        hdr.atp.ecn = 1;
    }

    /*
     * ECN, which is only ever added: `mark` has what was in `ecn`, and that what was in the header. A table of its own, since
     * an action of Tofino writes constants or a field into one header word, not both.
     */
    @hidden table marking {
        key = { meta.verdict : ternary @name("verdict"); meta.mark : ternary @name("mark"); meta.ecn : ternary @name("ecn"); }
        actions = { emit_marked; NoAction; }
        const default_action = NoAction();
        const entries = {
            (V_RESEND_PASSED, ANY, 1) : emit_marked();
            (V_RESEND_PASSED, ANY, ANY) : NoAction();
            (ANY, 1, ANY) : emit_marked();
            /* no packet that met an aggregator */
            (V_NONE, ANY, ANY) : NoAction();
            (V_RELEASED, ANY, ANY) : NoAction();
            (0 &&& 0xF0, ANY, 1) : emit_marked();
        }
    }
