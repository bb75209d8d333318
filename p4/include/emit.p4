/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Step 9: the header of a packet that leaves after it met an aggregator. `cover` is the aggregator's bitmap, `ecn` the
 * packet's own mark, `mark` the aggregator's.
 */
    action emit_rack() {
        hdr.atp.bitmap0 = meta.cover;
        hdr.atp.ecn = meta.mark[0:0];
        hdr.atp.edge_switch_identifier = 1;
    }

    action emit_part_of_rack() {
        hdr.atp.bitmap0 = meta.cover;
        hdr.atp.ecn = meta.mark[0:0];
    }

    action emit_racks() {
        hdr.atp.bitmap1 = meta.cover;
        hdr.atp.ecn = meta.mark[0:0];
        hdr.atp.edge_switch_identifier = 1;
    }

    /* The first copy of a result, which a repeat completed. */
    action emit_first_rack() {
        hdr.atp.bitmap0 = meta.cover;
        hdr.atp.ecn = meta.mark[0:0];
        hdr.atp.edge_switch_identifier = 1;
        hdr.atp.collision = 0;
    }

    action emit_first_racks() {
        hdr.atp.bitmap1 = meta.cover;
        hdr.atp.ecn = meta.mark[0:0];
        hdr.atp.edge_switch_identifier = 1;
        hdr.atp.collision = 0;
    }

    /* A repeat that passes and is its whole rack. */
    action emit_whole() {
        hdr.atp.ecn = meta.ecn[0:0];
        hdr.atp.edge_switch_identifier = 1;
    }

    action emit_collision() {
        hdr.atp.ecn = meta.ecn[0:0];
        hdr.atp.collision = 1;
        hdr.atp.resend = 1;
    }

    action emit_as_is() {
        hdr.atp.ecn = meta.ecn[0:0];
    }

    @hidden table emission {
        key = { meta.kind : ternary @name("kind"); meta.verdict : ternary @name("verdict"); meta.needed : ternary @name("needed"); }
        actions = {
            emit_rack; emit_part_of_rack; emit_racks; emit_first_rack; emit_first_racks; emit_whole; emit_collision; emit_as_is;
            @defaultonly NoAction;
        }
        const default_action = NoAction();
        const entries = {
            (ANY, V_COLLISION, ANY) : emit_collision();
            (K_REPEAT0, V_RESEND_PASSED, ZERO) : emit_whole();
            (K_REPEAT0, V_RESEND_STALE, ZERO) : emit_whole();
            (ANY, V_RESEND_PASSED, ANY) : emit_as_is();
            (ANY, V_RESEND_STALE, ANY) : emit_as_is();
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
