/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Steps 8 and 9 of docs/protocol.md as one table over what the registers said. `present` is what the packet's bits and the
 * aggregator's have in common (when the aggregator was taken: what a stale owner left in it).
 */
#define BIT_0 1 &&& 1
    action decide(bit<8> verdict, bit<8> op, bit<8> out_) {
        meta.verdict = verdict;
        meta.op = op;
        meta.out_ = out_;
    }

    @hidden table decision {
        key = {
            meta.kind           : ternary @name("kind");
            meta.key_result     : ternary @name("key_result");
            meta.missing_result : ternary @name("missing_result");
            meta.present        : ternary @name("present");
            meta.cover_result   : ternary @name("cover_result");
        }
        actions = { decide; }
        const default_action = decide(V_NONE, OP_NONE, OUT_FORWARD);
        const entries = {
            /* gradients: free or stale */
            (K_GRAD, KEY_VACANT, TAKE_DONE, ZERO, ANY) : decide(V_ALLOCATED_DONE, OP_WRITE, OUT_FORWARD);
            (K_GRAD, KEY_VACANT, TAKE_MORE, ZERO, ANY) : decide(V_ALLOCATED, OP_WRITE, OUT_DROP);
            (K_GRAD, KEY_VACANT, TAKE_DONE, ANY, ANY) : decide(V_TAKEOVER_DONE, OP_WRITE, OUT_FORWARD);
            (K_GRAD, KEY_VACANT, TAKE_MORE, ANY, ANY) : decide(V_TAKEOVER, OP_WRITE, OUT_DROP);
            (K_GRAD, KEY_OWN_STALE, TAKE_DONE, ANY, ANY) : decide(V_TAKEOVER_DONE, OP_WRITE, OUT_FORWARD);
            (K_GRAD, KEY_OWN_STALE, TAKE_MORE, ANY, ANY) : decide(V_TAKEOVER, OP_WRITE, OUT_DROP);
            /* gradients: key differs */
            (K_GRAD, KEY_OTHER, ANY, ANY, ANY) : decide(V_COLLISION, OP_NONE, OUT_FORWARD);
            /* gradients: own */
            (K_GRAD, KEY_OWN, MISSING_THIS, ZERO, ANY) : decide(V_COMPLETED, OP_ADD, OUT_CARRY_KEEP);
            (K_GRAD, KEY_OWN, MISSING_MORE, ZERO, ANY) : decide(V_ADDED, OP_ADD, OUT_DROP);
            (K_GRAD, KEY_OWN, MISSING_NONE, ANY, ANY) : decide(V_REEMITTED, OP_READ, OUT_CARRY_KEEP);
            (K_GRAD, KEY_OWN, ANY, ANY, ANY) : decide(V_DUPLICATE, OP_NONE, OUT_DROP);
            /* repeats: the result, which all workers ask for, goes out once, for bit 0 */
            (K_REPEAT, KEY_OWN_STALE, ANY, ANY, ANY) : decide(V_RESEND_STALE, OP_NONE, OUT_FORWARD);
            (K_REPEAT, KEY_OWN, MISSING_THIS, ZERO, ANY) : decide(V_COMPLETED, OP_ADD, OUT_CARRY_KEEP);
            (K_REPEAT, KEY_OWN, MISSING_MORE, ZERO, ANY) : decide(V_ADDED, OP_ADD, OUT_DROP);
            (K_REPEAT, KEY_OWN, MISSING_NONE, BIT_0, ANY) : decide(V_REEMITTED, OP_READ, OUT_CARRY_KEEP);
            (K_REPEAT, KEY_OWN, ANY, ANY, ANY) : decide(V_DUPLICATE, OP_NONE, OUT_DROP);
            (K_REPEAT, ANY, ANY, ANY, ANY) : decide(V_RESEND_PASSED, OP_NONE, OUT_FORWARD);
            /* resends */
            (K_RESEND, KEY_OWN_STALE, ANY, ANY, ANY) : decide(V_RESEND_STALE, OP_NONE, OUT_FORWARD);
            (K_RESEND, KEY_OWN, MISSING_NONE, ANY, ANY) : decide(V_REEMITTED, OP_READ, OUT_CARRY_KEEP);
            (K_RESEND0, KEY_OWN, MISSING_THIS, ZERO, ANY) : decide(V_PARTIAL_DONE, OP_ADD, OUT_CARRY_FREE);
            (K_RESEND0, KEY_OWN, MISSING_MORE, ZERO, ANY) : decide(V_PARTIAL_ADDED, OP_ADD, OUT_CARRY_FREE);
            (K_RESEND1, KEY_OWN, ANY, ZERO, ANY) : decide(V_RESEND_PASSED, OP_NONE, OUT_FORWARD);
            (K_RESEND, KEY_OWN, ANY, ANY, ANY) : decide(V_PARTIAL, OP_READ, OUT_CARRY_FREE);
            (K_RESEND, ANY, ANY, ANY, ANY) : decide(V_RESEND_PASSED, OP_NONE, OUT_FORWARD);
            /* second pass */
            (K_KEEP, KEY_OWN, ANY, ANY, ANY) : decide(V_SECOND, OP_READ_SECOND, OUT_FORWARD);
            (K_KEEP, KEY_OWN_STALE, ANY, ANY, ANY) : decide(V_SECOND_STALE, OP_NONE, OUT_DROP);
            (K_FREE, KEY_OWN, ANY, ANY, COVER_SAME) : decide(V_SECOND_FREED, OP_READ_SECOND, OUT_FORWARD);
            (K_FREE, KEY_OWN, ANY, ANY, ANY) : decide(V_SECOND_TORN, OP_NONE, OUT_DROP);
            (K_KEEP, ANY, ANY, ANY, ANY) : decide(V_SECOND_LOST, OP_NONE, OUT_DROP);
            (K_FREE, ANY, ANY, ANY, ANY) : decide(V_SECOND_LOST, OP_NONE, OUT_DROP);
            /* ACKs */
            (K_ACK, ACK_MISS, ANY, ANY, ANY) : decide(V_ACK, OP_NONE, OUT_MULTICAST);
            (K_ACK, ANY, ANY, ANY, ANY) : decide(V_RELEASED, OP_NONE, OUT_MULTICAST);
            (K_ACK_ONE, ACK_MISS, ANY, ANY, ANY) : decide(V_ACK_ONE, OP_NONE, OUT_FORWARD);
            (K_ACK_ONE, ANY, ANY, ANY, ANY) : decide(V_RELEASED_ONE, OP_NONE, OUT_FORWARD);
            /* the rest */
            (K_UNKNOWN, ANY, ANY, ANY, ANY) : decide(V_UNKNOWN, OP_NONE, OUT_FORWARD);
            (K_RAW, ANY, ANY, ANY, ANY) : decide(V_RAW, OP_NONE, OUT_FORWARD);
            (K_TRANSIT, ANY, ANY, ANY, ANY) : decide(V_TRANSIT, OP_NONE, OUT_FORWARD);
            (K_SHORT, ANY, ANY, ANY, ANY) : decide(V_SHORT, OP_NONE, OUT_DROP);
            (K_LENGTH, ANY, ANY, ANY, ANY) : decide(V_LENGTH, OP_NONE, OUT_DROP);
            (K_ACK_SOURCE, ANY, ANY, ANY, ANY) : decide(V_ACK_SOURCE, OP_NONE, OUT_DROP);
            (K_INDEX, ANY, ANY, ANY, ANY) : decide(V_INDEX, OP_NONE, OUT_DROP);
            (K_BIT, ANY, ANY, ANY, ANY) : decide(V_BIT, OP_NONE, OUT_DROP);
            (K_GUARDED, ANY, ANY, ANY, ANY) : decide(V_NONE, OP_NONE, OUT_DROP);
        }
    }
