/* SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 */
/* What the BPF programs and the library that loads them share besides the state machine's own structures. */
#ifndef ATP_SWITCH_SHARED_H
#define ATP_SWITCH_SHARED_H

#include <stdint.h>

/* Section .rodata: fixed before the programs are loaded. */
struct atp_settings {
    uint64_t stale_ns;
    uint32_t aggregators;
    uint32_t test_clock; /* 1: the clock is atp_control_area.test_clock_ns */
};

enum atp_scan_op {
    ATP_SCAN_COUNT, /* aggregators of the job, 0: of any */
    ATP_SCAN_FREE,  /* free those of the job */
    ATP_SCAN_SWEEP, /* free the stale ones */
};

/*
 * Section .bss. A scan is one run of the program atp_scan over [start, end): compare and free must be one step under
 * the aggregator's lock, which a read and a write from user space are not.
 */
struct atp_control_area {
    uint64_t test_clock_ns;
    uint32_t op;
    uint32_t job_id;
    uint32_t start;
    uint32_t end;
    uint32_t found;
    uint32_t zero;
};

/* The most aggregators that one run of atp_scan visits: it runs with preemption off. */
#define ATP_SCAN_MAX 4096u

#endif
