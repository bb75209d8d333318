/* SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 */
/* A packet of a job and its aggregator: steps 7 to 10 of docs/protocol.md, "What a switch does". */
#ifndef ATP_BPF_AGGREGATE_H
#define ATP_BPF_AGGREGATE_H

#include "bpf/clock.h"
#include "bpf/frame.h"
#include "bpf/lock.h"
#include "bpf/maps.h"
#include "core/values.h"

enum atp_locked_result {
    ATP_LOCKED_DROP,
    ATP_LOCKED_FORWARD,
    ATP_LOCKED_OUT_OF_REACH, /* the values are not in the linear part */
    ATP_LOCKED_BUSY,
};

/* Steps 8 to 10 for a packet of COUNT pairs. */
#define ATP_DEFINE_LOCKED(COUNT)                                                                                       \
    static __always_inline int atp_locked_##COUNT(struct atp_aggregator *agg, void *data, void *data_end,              \
                                                  struct atp_header *h, const struct atp_admitted *p, uint64_t *c) {   \
        struct atp_aggregator_head *head = &agg->head;                                                                 \
        uint8_t *values = data + ATP_OFF_VALUES;                                                                       \
        uint64_t now_ns = atp_coarse_now();                                                                            \
        struct atp_step step;                                                                                          \
                                                                                                                       \
        if (data + ATP_OFF_VALUES + 8 * (COUNT) > data_end)                                                            \
            return ATP_LOCKED_OUT_OF_REACH;                                                                            \
        if (!atp_lock(head))                                                                                           \
            return ATP_LOCKED_BUSY;                                                                                    \
        atp_decide(head, h, p, now_ns, atp_settings.stale_ns, c, &step);                                               \
        if (step.op == ATP_VALUES_ADD)                                                                                 \
            atp_values_add(head, agg->pairs, values, p->lane, COUNT, ATP_BLOCK_OF(COUNT));                             \
        else if (step.op == ATP_VALUES_STORE)                                                                          \
            atp_values_store(head, agg->pairs, values, p->lane, COUNT, ATP_BLOCK_OF(COUNT));                           \
        if (step.load)                                                                                                 \
            atp_values_load(head, agg->pairs, values, COUNT, ATP_BLOCK_OF(COUNT));                                     \
        if (step.release)                                                                                              \
            atp_release(head);                                                                                         \
        atp_unlock(head);                                                                                              \
        return step.forward ? ATP_LOCKED_FORWARD : ATP_LOCKED_DROP;                                                    \
    }

ATP_DEFINE_LOCKED(31)
#if ATP_PROFILE >= 350
ATP_DEFINE_LOCKED(175)
#endif
#if ATP_PROFILE >= 870
ATP_DEFINE_LOCKED(435)
#endif

/* Steps 7 to 10. Returns whether the packet goes on. */
static __always_inline int atp_aggregate(void *data, void *data_end, struct atp_frame *f,
                                         const struct atp_job_entry *job, const struct atp_admitted *p, uint64_t *c) {
    const uint32_t index = f->h.flags & ATP_AGGREGATOR_INDEX_MASK;
    struct atp_aggregator *agg = bpf_map_lookup_elem(&atp_aggregators, &index);
    struct atp_queue *queue = atp_find_queue(job);
    int result = ATP_LOCKED_OUT_OF_REACH;

    if (!agg) { /* the control plane refuses such regions */
        c[ATP_C_REJECTED_INDEX]++;
        return 0;
    }
    if (!(f->h.flags & ATP_F_ECN) && (f->ce || (queue && atp_queue_is_over(queue, atp_fine_now())))) {
        f->h.flags |= ATP_F_ECN;
        c[ATP_C_ECN_MARKED]++;
    }
    if (f->length == ATP_HEADER_BYTES + 4 * 62)
        result = atp_locked_31(agg, data, data_end, &f->h, p, c);
#if ATP_PROFILE >= 350
    else if (f->length == ATP_HEADER_BYTES + 4 * 350)
        result = atp_locked_175(agg, data, data_end, &f->h, p, c);
#endif
#if ATP_PROFILE >= 870
    else if (f->length == ATP_HEADER_BYTES + 4 * 870)
        result = atp_locked_435(agg, data, data_end, &f->h, p, c);
#endif
    if (result == ATP_LOCKED_OUT_OF_REACH) {
        c[ATP_C_REJECTED_LENGTH]++;
        return 0;
    }
    if (result == ATP_LOCKED_BUSY) {
        c[ATP_C_DROPPED_BUSY]++;
        return 0;
    }
    if (result == ATP_LOCKED_DROP)
        return 0;
    atp_write_header(data, &f->h);
    return 1;
}

/* A packet towards the PS leaves by the port of its phantom queue. */
static __always_inline void atp_account(const struct atp_job_entry *job, const struct atp_frame *f, uint64_t *c) {
    struct atp_queue *queue = atp_find_queue(job);

    c[ATP_C_BYTES_OUT] += f->bytes;
    if (queue && !(f->h.flags & ATP_F_ACK)) /* not a raw result, which goes to a worker */
        atp_queue_add(queue, atp_fine_now(), f->bytes);
}

static __always_inline void atp_release_by_ack(const struct atp_header *h, uint64_t *c) {
    const uint32_t index = h->flags & ATP_AGGREGATOR_INDEX_MASK;
    struct atp_aggregator *agg = bpf_map_lookup_elem(&atp_aggregators, &index);

    if (!agg || !atp_lock(&agg->head))
        return; /* then it goes stale */
    c[ATP_C_RELEASED] += (uint64_t)atp_decide_ack(&agg->head, h);
    atp_unlock(&agg->head);
}

#endif
