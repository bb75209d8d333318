/* SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 */
/* What the BPF programs and the library that loads them share besides the structures of core/. */
#ifndef ATP_BPF_SHARED_H
#define ATP_BPF_SHARED_H

#include <stdint.h>

#include "atp_wire.h"

/* Head (4 words) and values of an aggregator of the largest profile. */
#define ATP_COPY_WORDS (4 + ATP_VALUES_JUMBO / 2)

/*
 * Maps that outlive a switch's process (atp_switch_options.pin_dir) are taken over by the next one only if this number
 * is the same: raise it when a word of them changes its meaning. Sizes are compared anyway.
 */
#define ATP_PINNED_LAYOUT 1u

/* Section .rodata: fixed before the programs are loaded. */
struct atp_settings {
    uint64_t stale_ns;
    uint32_t aggregators;
    uint32_t test_clock; /* 1: the clock is atp_control_area.test_clock_ns */
};

/*
 * Section .bss. A scan is one run of the program atp_scan over [start, end): compare and free must be one step under
 * the aggregator's lock, and a copy must be of one moment, which accesses from user space are not.
 */
struct atp_control_area {
    uint64_t test_clock_ns;
    /* Data path clock: jiffies * tick_ns + base_ns; tick_ns 0: the kernel's coarse monotonic clock. */
    uint64_t tick_ns;
    uint64_t base_ns;
    /* Known jobs without hosts: then whoever sends to the ATP port counts as a part of them, see core/guard.h. */
    uint64_t unguarded_jobs;
    /* Drawn when the maps are made: whoever keeps books about them can tell them from others. */
    uint64_t token;
    /* On the data path clock: nobody looks after the tables any more, everything is ordinary traffic. 0: never. */
    uint64_t expires_ns;
    /* Each scan notes both clocks. */
    uint64_t seen_jiffies;
    uint64_t seen_ns;
    uint32_t op;
    uint32_t job_id;
    uint32_t start;
    uint32_t end;
    uint32_t found;
    uint32_t busy; /* aggregators that could not be locked */
    uint64_t copy[ATP_COPY_WORDS];
};

/* The most aggregators that one run of atp_scan visits: it runs with preemption off. */
#define ATP_SCAN_MAX 4096u

#endif
