/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Steps 1 to 6 of docs/protocol.md, "What a switch does", as one table: the first entry that matches decides. Its action
 * is also the one access to the key register. The includer defines the actions set_kind, key_gradient, key_resend,
 * key_ack and key_release, each with the kind as parameter.
 */
#define ANY _
#define ZERO 0 &&& 0xFFFFFFFF
/* Columns of an entry, by the steps that look at them. */
#define GATE_SECOND(kind, known) \
    (true, kind, ANY, known, ANY, ANY, ANY, ANY, ANY, ANY, ANY, ANY, ANY, ANY, ANY, ANY, ANY, ANY, ANY, ANY)
#define GATE_PARSED(kind, atp, known, raw, whole, ack, from_ps, in_region) \
    (false, kind, atp, known, raw, whole, ack, from_ps, in_region, ANY, ANY, ANY, ANY, ANY, ANY, ANY, ANY, ANY, ANY, ANY)
#define GATE_ACK(from_ps, edge) \
    (false, ANY, true, 1, 0, true, 1, from_ps, ANY, edge, ANY, ANY, ANY, ANY, ANY, ANY, ANY, ANY, ANY, ANY)
#define GATE_LEVEL1(admitted, resend, collision, full1, outside1) \
    (false, ANY, true, 1, 0, true, 0, ANY, 1, 1, admitted, ANY, resend, collision, ANY, ANY, full1, ANY, outside1, ANY)
#define GATE_LEVEL0(admitted, transit, resend, collision, bitmap0, full0, full1, outside0, outside1, excess) \
    (false, ANY, true, 1, 0, true, 0, ANY, 1, 0, admitted, transit, resend, collision, bitmap0, full0, full1, outside0, outside1, excess)
    @hidden table gate {
        key = {
            hdr.second.isValid()           : ternary @name("second_pass");
            meta.kind                      : ternary @name("kind");
            hdr.atp.isValid()              : ternary @name("atp");
            meta.known                     : ternary @name("known");
            hdr.atp.raw_float              : ternary @name("raw_float");
            hdr.values.isValid()           : ternary @name("whole");
            hdr.atp.is_ack                 : ternary @name("is_ack");
            meta.from_ps                   : ternary @name("from_ps");
            meta.in_region                 : ternary @name("in_region");
            hdr.atp.edge_switch_identifier : ternary @name("edge");
            meta.admitted                  : ternary @name("admitted");
            meta.transit                   : ternary @name("transit");
            hdr.atp.resend                 : ternary @name("resend");
            hdr.atp.collision              : ternary @name("collision");
            hdr.atp.bitmap0                : ternary @name("bitmap0");
            meta.full0                     : ternary @name("full0");
            meta.full1                     : ternary @name("full1");
            meta.outside0                  : ternary @name("outside0");
            meta.outside1                  : ternary @name("outside1");
            meta.excess                    : ternary @name("excess");
        }
        actions = { set_kind; key_gradient; key_resend; key_ack; key_release; }
        const default_action = set_kind(K_ORDINARY);
        const entries = {
            /* second pass; the job may be gone by now */
            GATE_SECOND(K_KEEP, 1) : key_resend(K_KEEP);
            GATE_SECOND(K_FREE, 1) : key_release(K_FREE);
            GATE_SECOND(ANY, ANY) : set_kind(K_KEEP);
            /* 1. */
            GATE_PARSED(K_SHORT, ANY, ANY, ANY, ANY, ANY, ANY, ANY) : set_kind(K_SHORT);
            GATE_PARSED(ANY, false, ANY, ANY, ANY, ANY, ANY, ANY) : set_kind(K_ORDINARY);
            /* 2. */
            GATE_PARSED(ANY, true, 0, ANY, ANY, ANY, ANY, ANY) : set_kind(K_UNKNOWN);
            GATE_PARSED(ANY, true, 1, 1, ANY, ANY, ANY, ANY) : set_kind(K_RAW);
            /* 3. */
            GATE_PARSED(ANY, true, 1, 0, false, ANY, ANY, ANY) : set_kind(K_LENGTH);
            /* 4. */
            GATE_ACK(1, 0) : key_ack(K_ACK);
            GATE_ACK(1, 1) : key_ack(K_ACK_ONE);
            GATE_ACK(0, ANY) : set_kind(K_ACK_SOURCE);
            /* 5. */
            GATE_PARSED(ANY, true, 1, 0, true, 0, ANY, 0) : set_kind(K_INDEX);
            /* 6. level 1 */
            GATE_LEVEL1(0, ANY, ANY, ANY, ANY) : set_kind(K_BIT);
            GATE_LEVEL1(1, ANY, ANY, ZERO, ANY) : set_kind(K_TRANSIT);
            GATE_LEVEL1(1, 0, 0, ANY, ZERO) : key_gradient(K_GRAD1);
            GATE_LEVEL1(1, 0, 1, ANY, ZERO) : key_resend(K_REPEAT1);
            GATE_LEVEL1(1, 1, ANY, ANY, ZERO) : key_resend(K_RESEND1);
            GATE_LEVEL1(1, ANY, ANY, ANY, ANY) : set_kind(K_BIT);
            /* 6. level 0 */
            GATE_LEVEL0(1, ANY, ANY, ANY, ANY, ZERO, ANY, ANY, ANY, ANY) : set_kind(K_TRANSIT);
            GATE_LEVEL0(1, ANY, 0, 0, ANY, ANY, ANY, ZERO, ANY, ANY) : key_gradient(K_GRAD0);
            GATE_LEVEL0(1, ANY, 0, 1, ANY, ANY, ANY, ZERO, ANY, ANY) : key_resend(K_REPEAT0);
            GATE_LEVEL0(1, ANY, 1, ANY, ANY, ANY, ANY, ZERO, ANY, ANY) : key_resend(K_RESEND0);
            /* 6. level 0 of another rack, on its way: a resend may fetch what level 1 holds of its rack */
            GATE_LEVEL0(0, 1, ANY, ANY, ZERO, ANY, ANY, ANY, ANY, ANY) : set_kind(K_BIT);
            GATE_LEVEL0(0, 1, 0, ANY, ANY, ANY, ANY, ANY, ANY, ZERO) : set_kind(K_TRANSIT);
            GATE_LEVEL0(0, 1, 1, ANY, ANY, ANY, ZERO, ANY, ANY, ZERO) : set_kind(K_TRANSIT);
            GATE_LEVEL0(0, 1, 1, ANY, ANY, ANY, ANY, ANY, ZERO, ZERO) : key_resend(K_RESEND1);
            GATE_LEVEL0(ANY, ANY, ANY, ANY, ANY, ANY, ANY, ANY, ANY, ANY) : set_kind(K_BIT);
        }
    }
