/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Stage of the bitmaps: which action each of the four registers runs, from the kind of the packet and the outcome of the
 * key. `missing` holds the workers still to come, `present` and `cover` the workers seen (two copies, since a register
 * tells one thing a packet: whether the packet's bit is in it, or the whole bitmap), `mark` the ECN bit.
 */
    @hidden table missing_access {
        key = { meta.kind : ternary; meta.key_result : ternary; }
        actions = { missing_take; missing_add; missing_peek; missing_weigh; @defaultonly NoAction; }
        const default_action = NoAction();
        const entries = {
            (K_GRAD, KEY_VACANT) : missing_take();
            (K_GRAD, KEY_OWN_STALE) : missing_take();
            (K_GRAD, KEY_OWN) : missing_add();
            (K_REPEAT, KEY_OWN) : missing_add();
            (K_RESEND0, KEY_OWN) : missing_add();
            (K_RESEND1, KEY_OWN) : missing_peek();
            /* a repeat that passes: is it its whole rack? */
            (K_REPEAT0, ANY) : missing_weigh();
        }
    }

    @hidden table present_access {
        key = { meta.kind : ternary; meta.key_result : ternary; }
        actions = { present_take; present_add; present_peek; present_clear; @defaultonly NoAction; }
        const default_action = NoAction();
        const entries = {
            (K_GRAD, KEY_VACANT) : present_take();
            (K_GRAD, KEY_OWN_STALE) : present_take();
            (K_GRAD, KEY_OWN) : present_add();
            (K_REPEAT, KEY_OWN) : present_add();
            (K_RESEND0, KEY_OWN) : present_add();
            (K_RESEND1, KEY_OWN) : present_peek();
            /* every release empties it: a bitmap that is not empty tells a stale aggregator from a free one */
            (K_RESEND, KEY_OWN_STALE) : present_clear();
            (K_REPEAT, KEY_OWN_STALE) : present_clear();
            (K_KEEP, KEY_OWN_STALE) : present_clear();
            (K_FREE, KEY_OWN) : present_clear();
            (K_ANY_ACK, P_FIRST) : present_clear();
            (K_ANY_ACK, P_SECOND) : present_clear();
        }
    }

    @hidden table cover_access {
        key = { meta.kind : ternary; meta.key_result : ternary; }
        actions = { cover_take; cover_add; cover_read; cover_compare; @defaultonly NoAction; }
        const default_action = NoAction();
        const entries = {
            (K_GRAD, KEY_VACANT) : cover_take();
            (K_GRAD, KEY_OWN_STALE) : cover_take();
            (K_GRAD, KEY_OWN) : cover_add();
            (K_REPEAT, KEY_OWN) : cover_add();
            (K_RESEND0, KEY_OWN) : cover_add();
            (K_RESEND1, KEY_OWN) : cover_read();
            (K_FREE, KEY_OWN) : cover_compare();
        }
    }

    @hidden table mark_access {
        key = { meta.kind : ternary; meta.key_result : ternary; }
        actions = { mark_take; mark_add; @defaultonly NoAction; }
        const default_action = NoAction();
        const entries = {
            (K_GRAD, KEY_VACANT) : mark_take();
            (K_GRAD, KEY_OWN_STALE) : mark_take();
            (K_GRAD, KEY_OWN) : mark_add();
            (K_REPEAT, KEY_OWN) : mark_add();
            (K_RESEND, KEY_OWN) : mark_add();
        }
    }
