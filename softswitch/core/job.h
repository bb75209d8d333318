/* SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 */
/* What a data path knows of jobs, and its multicast groups and counters: the layout of its tables. */
#ifndef ATP_CORE_JOB_H
#define ATP_CORE_JOB_H

#include "atp_tables.h"
#include "core/header.h"

#define ATP_LEVEL_BITS 32u
#define ATP_PORTS_PER_BIT 4u
#define ATP_PS_PORTS_MAX 8u

/*
 * What the data path knows of one job. Written by the control plane one aligned word at a time while packets flow, or
 * as a whole in the slot that no packet uses.
 */
struct atp_job_entry {
    uint32_t values;
    uint32_t full0;
    uint32_t full1;
    uint32_t group;
    struct atp_region region[ATP_REGIONS_MAX]; /* unused ones have size 0 */
    uint64_t lane[ATP_LEVELS];                 /* 2^k in both halves, from the fan-in of the level */
    uint32_t queue;                            /* 1 + slot of the phantom queue towards the PS; 0: none */
    uint32_t hosts;                            /* how many hosts of this job the switch has; 0: not guarded */
    uint32_t ps_port[ATP_PS_PORTS_MAX];        /* 0: unused, here and below */
    uint32_t admission[ATP_LEVELS][ATP_LEVEL_BITS][ATP_PORTS_PER_BIT]; /* by level and atp_bit_slot() */
    uint64_t transit[ATP_LEVEL_BITS][ATP_PORTS_PER_BIT];               /* port << 32 | allowed mask0 */
};

struct atp_group_entry {
    uint32_t count;
    uint32_t zero[3];
    struct atp_replica replica[ATP_REPLICAS_MAX];
};

struct atp_counters {
    uint64_t c[ATP_COUNTERS];
};

/* A perfect hash of the 32 one-bit words (a de Bruijn sequence): BPF has no count of trailing zeros. */
ATP_INLINE uint32_t atp_bit_slot(uint32_t bit) {
    return (bit * 0x077CB531u) >> 27;
}

/* The port towards the PS: the first that is configured, 0 if none. */
ATP_INLINE uint32_t atp_ps_port(const struct atp_job_entry *job) {
    for (uint32_t i = 0; i < ATP_PS_PORTS_MAX; i++)
        if (job->ps_port[i] != 0)
            return job->ps_port[i];
    return 0;
}

#endif
