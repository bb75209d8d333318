/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The guard and steps 1 to 6 of docs/protocol.md, "What a switch does", as one table: the first entry that matches decides.
 * Its action is also the one access to the key register. The includer defines the actions set_kind, key_gradient, key_resend,
 * key_ack and key_release, each with the kind as parameter.
 */
#define ZERO 0 &&& 0xFFFFFFFF
#define NOTHING 0 &&& 0xFF
/* Columns of an entry, by the steps that look at them. Those of the guard come last. */
#define UNGUARDED ANY, ANY, ANY, ANY, ANY, ANY, ANY, ANY, ANY, ANY
#define GATE_SECOND(kind, known) \
    (true, kind, ANY, known, ANY, ANY, ANY, ANY, ANY, ANY, ANY, ANY, ANY, ANY, ANY, ANY, ANY, ANY, ANY, ANY, UNGUARDED)
#define GATE_PARSED(kind, atp, known, raw, whole, ack, from_ps, in_region) \
    (false, kind, atp, known, raw, whole, ack, from_ps, in_region, ANY, ANY, ANY, ANY, ANY, ANY, ANY, ANY, ANY, ANY, ANY, UNGUARDED)
#define GATE_ACK(from_ps, edge) \
    (false, ANY, true, 1, 0, true, 1, from_ps, ANY, edge, ANY, ANY, ANY, ANY, ANY, ANY, ANY, ANY, ANY, ANY, UNGUARDED)
#define GATE_LEVEL1(admitted, resend, collision, full1, outside1) \
    (false, ANY, true, 1, 0, true, 0, ANY, 1, 1, admitted, ANY, resend, collision, ANY, ANY, full1, ANY, outside1, ANY, UNGUARDED)
#define GATE_LEVEL0(admitted, transit, resend, collision, bitmap0, full0, full1, outside0, outside1, excess) \
    (false, ANY, true, 1, 0, true, 0, ANY, 1, 0, admitted, transit, resend, collision, bitmap0, full0, full1, outside0, outside1, excess, UNGUARDED)
/* Packets with an end that is, or is not, a host: by address and port, then by job, then by what the packet says. */
#define GATE_ENDS(kind, from_host, from_server, to_host, to_server, elsewhere) \
    (false, kind, ANY, ANY, ANY, ANY, ANY, ANY, ANY, ANY, ANY, ANY, ANY, ANY, ANY, ANY, ANY, ANY, ANY, ANY, \
     from_host, from_server, to_host, to_server, elsewhere, ANY, ANY, ANY, ANY, ANY)
#define GATE_JOBS(from_other, to_other) \
    (false, ANY, ANY, ANY, ANY, ANY, ANY, ANY, ANY, ANY, ANY, ANY, ANY, ANY, ANY, ANY, ANY, ANY, ANY, ANY, \
     1, ANY, ANY, ANY, ANY, from_other, to_other, ANY, ANY, ANY)
#define GATE_SAYS(known, raw, ack, from_server, in_place, own) \
    (false, ANY, ANY, known, raw, ANY, ack, ANY, ANY, ANY, ANY, ANY, ANY, ANY, ANY, ANY, ANY, ANY, ANY, ANY, \
     1, from_server, ANY, ANY, ANY, ANY, ANY, in_place, own, ANY)
#define GATE_ADMITTED0(from_host, from_server, own) \
    (false, ANY, true, 1, 0, ANY, 0, ANY, ANY, 0, 1, ANY, ANY, ANY, ANY, ANY, ANY, ANY, ANY, ANY, \
     from_host, from_server, ANY, ANY, ANY, ANY, ANY, ANY, own, ANY)
#define GATE_NOBODYS(known, guarded) \
    (false, 0, true, known, ANY, ANY, ANY, ANY, ANY, ANY, ANY, ANY, ANY, ANY, ANY, ANY, ANY, ANY, ANY, ANY, \
     0, ANY, ANY, ANY, ANY, ANY, ANY, ANY, ANY, guarded)
/* "Is not 0" is one entry for each bit. */
#define SET(bit) bit &&& bit
#define ENTRIES_OF_8(entry) \
    entry(0x01) entry(0x02) entry(0x04) entry(0x08) entry(0x10) entry(0x20) entry(0x40) entry(0x80)
#define FROM_ELSEWHERE(bit) GATE_ENDS(ANY, 1, ANY, ANY, ANY, SET(bit)) : set_kind(K_SOURCE);
#define TO_ANOTHER_JOB(bit) GATE_JOBS(NOTHING, SET(bit)) : set_kind(K_DESTINATION);
#define FROM_ANOTHER_JOB(bit) GATE_JOBS(SET(bit), NOTHING) : set_kind(K_DESTINATION);
#define FOREIGN_JOB_ID(bit) GATE_JOBS(SET(bit), ANY) : set_kind(K_FORGED);
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
            meta.from_host                 : ternary @name("from_host");
            meta.from_server               : ternary @name("from_server");
            meta.to_host                   : ternary @name("to_host");
            meta.to_server                 : ternary @name("to_server");
            meta.elsewhere                 : ternary @name("elsewhere");
            meta.from_other                : ternary @name("from_other");
            meta.to_other                  : ternary @name("to_other");
            meta.in_place                  : ternary @name("in_place");
            meta.own                       : ternary @name("own");
            meta.guarded                   : ternary @name("guarded");
        }
        actions = { set_kind; key_gradient; key_resend; key_ack; key_release; }
        const default_action = set_kind(K_ORDINARY);
        const entries = {
            /* second pass; the job may be gone by now */
            GATE_SECOND(K_KEEP, 1) : key_resend(K_KEEP);
            GATE_SECOND(K_FREE, 1) : key_release(K_FREE);
            GATE_SECOND(ANY, ANY) : set_kind(K_KEEP);
            GATE_PARSED(0, false, ANY, ANY, ANY, ANY, ANY, ANY) : set_kind(K_ORDINARY);
            /* the guard, 2. */
            GATE_ENDS(ANY, 0, ANY, 1, ANY, ANY) : set_kind(K_SOURCE);
            GATE_ENDS(ANY, 1, ANY, ANY, ANY, SET(0x100)) : set_kind(K_SOURCE);
            ENTRIES_OF_8(FROM_ELSEWHERE)
            /* the guard, 3. and 4. */
            GATE_ENDS(ANY, 1, ANY, 0, ANY, ANY) : set_kind(K_DESTINATION);
            GATE_ENDS(ANY, 1, 0, ANY, 0, ANY) : set_kind(K_DESTINATION);
            GATE_ENDS(ANY, 1, 1, ANY, 1, ANY) : set_kind(K_DESTINATION);
            GATE_ENDS(K_SHORT, 1, ANY, ANY, ANY, ANY) : set_kind(K_MALFORMED);
            GATE_ENDS(K_ODD, 1, ANY, ANY, ANY, ANY) : set_kind(K_MALFORMED);
            ENTRIES_OF_8(TO_ANOTHER_JOB)
            ENTRIES_OF_8(FROM_ANOTHER_JOB)
            /* the guard, 5. */
            ENTRIES_OF_8(FOREIGN_JOB_ID)
            GATE_SAYS(ANY, ANY, 1, 0, ANY, ANY) : set_kind(K_FORGED);
            GATE_SAYS(ANY, ANY, 0, 1, ANY, ANY) : set_kind(K_FORGED);
            GATE_SAYS(ANY, ANY, ANY, 0, 0, ANY) : set_kind(K_FORGED);
            GATE_SAYS(0, ANY, ANY, 0, ANY, 0) : set_kind(K_FORGED);
            GATE_SAYS(ANY, 1, ANY, 0, ANY, 0) : set_kind(K_FORGED);
            /* several workers may be behind one port: only their own bits of those that it may set */
            GATE_ADMITTED0(1, 0, 0) : set_kind(K_FORGED);
            /* it looks like a packet of this job, but none of its hosts has to do with it */
            GATE_NOBODYS(1, 1) : set_kind(K_ORDINARY);
            /* 1. */
            GATE_PARSED(K_ODD, ANY, ANY, ANY, ANY, ANY, ANY, ANY) : set_kind(K_ORDINARY);
            GATE_PARSED(K_SHORT, ANY, ANY, ANY, ANY, ANY, ANY, ANY) : set_kind(K_SHORT);
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
