/* SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 */
/*
 * Steps 2 to 6 of docs/protocol.md, "What a switch does": may this packet of a known job do what it asks for? Nothing
 * of an aggregator is touched before.
 */
#ifndef ATP_CORE_ADMISSION_H
#define ATP_CORE_ADMISSION_H

#include "core/job.h"

enum atp_action {
    ATP_PASS,      /* ordinary traffic, forward untouched */
    ATP_DROP,      /* rejected */
    ATP_ACK,       /* release the aggregator, replicate */
    ATP_ACK_ONE,   /* release the aggregator, pass to its addressee alone */
    ATP_AGGREGATE, /* atp_decide() under the aggregator's lock */
};

/* Result of the checks before the aggregator is touched. */
struct atp_admitted {
    uint32_t level;
    uint32_t full;
    uint64_t lane;
    uint32_t bits; /* of the packet, at this level */
};

ATP_INLINE int atp_is_admitted(const struct atp_job_entry *job, uint32_t level, uint32_t bits, uint32_t port) {
    const uint32_t *ports = job->admission[level & 1][atp_bit_slot(bits) & (ATP_LEVEL_BITS - 1)];

    if (!atp_is_one_bit(bits))
        return 0;
    return ports[0] == port || ports[1] == port || ports[2] == port || ports[3] == port;
}

ATP_INLINE int atp_may_transit(const struct atp_job_entry *job, const struct atp_header *h, uint32_t port) {
    const uint64_t *cells = job->transit[atp_bit_slot(h->bitmap1) & (ATP_LEVEL_BITS - 1)];
    uint32_t mask = 0;

    if (!atp_is_one_bit(h->bitmap1) || h->bitmap0 == 0)
        return 0;
    for (uint32_t i = 0; i < ATP_PORTS_PER_BIT; i++) {
        uint64_t cell = cells[i];
        if ((uint32_t)(cell >> 32) == port)
            mask = (uint32_t)cell;
    }
    return (h->bitmap0 & ~mask) == 0;
}

ATP_INLINE int atp_is_ps_port(const struct atp_job_entry *job, uint32_t port) {
    for (uint32_t i = 0; i < ATP_PS_PORTS_MAX; i++)
        if (job->ps_port[i] == port)
            return 1;
    return 0;
}

/* Raw packets are never summed, so all that matters is whose they are: one worker's, or the PS's. */
ATP_INLINE int atp_admits_raw(const struct atp_job_entry *job, const struct atp_header *h, uint32_t port) {
    if (h->flags & ATP_F_ACK)
        return atp_is_ps_port(job, port);
    if (h->flags & ATP_F_EDGE)
        return atp_is_admitted(job, 1, h->bitmap1, port);
    return atp_is_admitted(job, 0, h->bitmap0, port) || (atp_is_one_bit(h->bitmap0) && atp_may_transit(job, h, port));
}

ATP_INLINE int atp_in_regions(const struct atp_job_entry *job, uint32_t index) {
    return index - job->region[0].start < job->region[0].size || index - job->region[1].start < job->region[1].size ||
           index - job->region[2].start < job->region[2].size || index - job->region[3].start < job->region[3].size;
}

/*
 * Steps 2 to 6: is this packet of a known job allowed to do what it asks for?
 * `length` is that of ATP header and values. `admit_raw`: raw packets must be their port's too. Counters are the job's.
 */
ATP_INLINE enum atp_action atp_admit(const struct atp_job_entry *job, const struct atp_header *h, uint32_t port,
                                     uint32_t length, const int admit_raw, uint64_t *c, struct atp_admitted *out) {
    const uint32_t index = h->flags & ATP_AGGREGATOR_INDEX_MASK;

    if (h->flags & ATP_F_RAW) {
        if (admit_raw && !atp_admits_raw(job, h, port)) {
            c[h->flags & ATP_F_ACK ? ATP_C_REJECTED_ACK_SOURCE : ATP_C_REJECTED_BIT]++;
            return ATP_DROP;
        }
        c[ATP_C_PASSED_RAW_FLOAT]++;
        return ATP_PASS;
    }
    if (length != ATP_HEADER_BYTES + 4 * job->values) {
        c[ATP_C_REJECTED_LENGTH]++;
        return ATP_DROP;
    }
    if (h->flags & ATP_F_ACK) {
        if (atp_is_ps_port(job, port))
            return h->flags & ATP_F_EDGE ? ATP_ACK_ONE : ATP_ACK;
        c[ATP_C_REJECTED_ACK_SOURCE]++;
        return ATP_DROP;
    }
    if (!atp_in_regions(job, index)) {
        c[ATP_C_REJECTED_INDEX]++;
        return ATP_DROP;
    }
    if (h->flags & ATP_F_EDGE) {
        if (!atp_is_admitted(job, 1, h->bitmap1, port))
            goto reject;
        if (!job->full1)
            goto transit;
        out->level = 1;
    } else if (atp_is_admitted(job, 0, h->bitmap0, port)) {
        if (!job->full0)
            goto transit;
        out->level = 0;
    } else if (atp_may_transit(job, h, port)) {
        /* Level 1 combines complete racks only, but a resend may fetch what it holds of its rack. */
        if (!job->full1 || !(h->flags & ATP_F_RESEND))
            goto transit;
        out->level = 1;
    } else {
        goto reject;
    }
    if (out->level) {
        out->full = job->full1;
        out->lane = job->lane[1];
        out->bits = h->bitmap1;
    } else {
        out->full = job->full0;
        out->lane = job->lane[0];
        out->bits = h->bitmap0;
    }
    if (out->bits & ~out->full)
        goto reject; /* the entry admits a bit that the job does not have */
    return ATP_AGGREGATE;

transit:
    c[ATP_C_PASSED_TRANSIT]++;
    return ATP_PASS;
reject:
    c[ATP_C_REJECTED_BIT]++;
    return ATP_DROP;
}

#endif
