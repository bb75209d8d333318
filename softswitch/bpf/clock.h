/* SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 */
/* The clock of the data path. */
#ifndef ATP_BPF_CLOCK_H
#define ATP_BPF_CLOCK_H

#include <linux/bpf.h>

#include <bpf/bpf_helpers.h>

#include "bpf/maps.h"

/*
 * T is many ticks long, so ticks are fine enough for it; reading them is a load, where any clock of the kernel is a
 * call that costs a fifth of the whole packet.
 */
static __always_inline uint64_t atp_coarse_now(void) {
    uint64_t tick_ns = atp_control_area.tick_ns;

    if (atp_settings.test_clock)
        return *(volatile uint64_t *)&atp_control_area.test_clock_ns;
    if (tick_ns == 0)
        return bpf_ktime_get_coarse_ns();
    return bpf_jiffies64() * tick_ns + atp_control_area.base_ns;
}

static __always_inline uint64_t atp_fine_now(void) {
    if (atp_settings.test_clock)
        return *(volatile uint64_t *)&atp_control_area.test_clock_ns;
    return bpf_ktime_get_ns();
}

/* Whether nobody has looked after the tables for long: what they say of jobs and hosts may not be true any more. */
static __always_inline int atp_is_abandoned(void) {
    uint64_t expires_ns = atp_control_area.expires_ns;

    return expires_ns != 0 && atp_coarse_now() > expires_ns;
}

#endif
