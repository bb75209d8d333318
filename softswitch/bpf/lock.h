/* SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 */
/*
 * The lock of an aggregator. Not bpf_spin_lock(): that turns interrupts off and on, which costs more than adding 62
 * values (39 of 96 ns, measured). It need not: these programs run with softirqs off and never in an interrupt, so no
 * holder is interrupted by another taker on its core. Where that does not hold (PREEMPT_RT, test runs of old kernels),
 * the wait is bounded and the packet is lost like any other.
 */
#ifndef ATP_BPF_LOCK_H
#define ATP_BPF_LOCK_H

#include <linux/bpf.h>

#include <bpf/bpf_helpers.h>

#include "core/aggregator.h"

#define ATP_LOCK_TRIES 8192

static __always_inline int atp_try_lock(struct atp_aggregator_head *head) {
    return __sync_val_compare_and_swap(&head->lock, 0, 1) == 0;
}

struct atp_wait {
    struct atp_aggregator_head *head;
    uint64_t locked;
};

static long atp_lock_again(uint32_t i, struct atp_wait *wait) {
    (void)i;
    wait->locked = (uint64_t)atp_try_lock(wait->head);
    return (long)wait->locked;
}

static __always_inline int atp_lock(struct atp_aggregator_head *head) {
    struct atp_wait wait = {.head = head};

    if (atp_try_lock(head))
        return 1;
    bpf_loop(ATP_LOCK_TRIES, atp_lock_again, &wait, 0);
    return wait.locked != 0;
}

static __always_inline void atp_unlock(struct atp_aggregator_head *head) {
#ifdef ATP_ORDERED_STORES
    __asm__ volatile("" ::: "memory");
    *(volatile uint32_t *)&head->lock = 0;
#else
    (void)__sync_lock_test_and_set(&head->lock, 0);
#endif
}

#endif
