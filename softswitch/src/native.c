/* SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 */
/* The data path in plain memory: for the relay, simulations and fuzzers. Needs no privilege. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "core/values.h"
#include "native.h"

static struct atp_aggregator_head *native_head(const struct atp_native *n, uint32_t index) {
    return (struct atp_aggregator_head *)(void *)(n->aggregators + n->stride * index);
}

static uint64_t *native_pairs(struct atp_aggregator_head *head) {
    return (uint64_t *)(void *)(head + 1);
}

static void native_barrier(struct atp_switch *sw) {
    (void)sw; /* packets hold the switch's lock */
}

static int native_scan(struct atp_switch *sw, enum atp_scan_op op, uint8_t job_id) {
    uint64_t now_ns = atp_native_now(sw);
    int found = 0;

    for (uint32_t i = 0; i < sw->aggregators; i++) {
        struct atp_aggregator_head *head = native_head(sw->native, i);
        if (!atp_scan_matches(head, op, job_id, now_ns, sw->stale_ns))
            continue;
        found++;
        if (op != ATP_SCAN_COUNT)
            atp_release(head);
    }
    return found;
}

static int native_read_counters(struct atp_switch *sw, uint8_t job_id, uint64_t *out) {
    memcpy(out, sw->native->counters[job_id].c, sizeof(sw->native->counters[job_id].c));
    return 0;
}

static int native_read_aggregator(struct atp_switch *sw, uint32_t index, struct atp_aggregator_head *head,
                                  uint64_t *pairs) {
    struct atp_aggregator_head *from = native_head(sw->native, index);

    *head = *from;
    memcpy(pairs, native_pairs(from), sw->values / 2 * sizeof(*pairs));
    return 0;
}

static void native_free(struct atp_switch *sw) {
    free(sw->tables.job_slots);
    free(sw->tables.jobs);
    free(sw->tables.group_slots);
    free(sw->tables.groups);
    free(sw->tables.queues);
    if (sw->native != NULL)
        free(sw->native->aggregators);
    free(sw->native);
    sw->native = NULL;
}

static void native_close(struct atp_switch *sw) {
    if (sw->native->source != NULL)
        sw->native->source->stop(sw);
    native_free(sw);
}

static const struct atp_backend native_backend = {
    .barrier = native_barrier,
    .scan = native_scan,
    .read_counters = native_read_counters,
    .read_aggregator = native_read_aggregator,
    .close = native_close,
};

ATP_EXPORT int atp_switch_open_native(const struct atp_switch_options *options, struct atp_switch **out) {
    struct atp_switch *sw;
    struct atp_tables *t;
    int result = atp_switch_new(options, &sw);

    if (result != 0)
        return result;
    sw->backend = &native_backend;
    t = &sw->tables;
    sw->native = calloc(1, sizeof(*sw->native));
    t->job_slots = calloc(ATP_JOBS, sizeof(*t->job_slots));
    t->jobs = calloc((size_t)2 * ATP_JOBS, sizeof(*t->jobs));
    t->group_slots = calloc(ATP_GROUPS, sizeof(*t->group_slots));
    t->groups = calloc((size_t)2 * ATP_GROUPS, sizeof(*t->groups));
    t->queues = calloc(ATP_QUEUES, sizeof(*t->queues));
    if (sw->native != NULL) {
        sw->native->stride = sizeof(struct atp_aggregator_head) + sw->values / 2 * sizeof(uint64_t);
        sw->native->aggregators = calloc(sw->aggregators, sw->native->stride);
    }
    if (sw->native == NULL || sw->native->aggregators == NULL || t->job_slots == NULL || t->jobs == NULL ||
        t->group_slots == NULL || t->groups == NULL || t->queues == NULL) {
        native_free(sw);
        sw->backend = NULL;
        atp_switch_close(sw);
        return -ENOMEM;
    }
    *out = sw;
    return 0;
}

uint64_t atp_native_now(const struct atp_switch *sw) {
    struct timespec now;

    if (sw->native->test_clock)
        return sw->native->test_clock_ns;
    if (sw->native->source == NULL && sw->native->last_ns != 0)
        return sw->native->last_ns;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (uint64_t)now.tv_sec * 1000000000u + (uint64_t)now.tv_nsec;
}

void atp_native_count(struct atp_switch *sw, uint8_t job_id, enum atp_counter counter, uint64_t add) {
    sw->native->counters[job_id].c[counter] += add;
}

static uint32_t load32(const uint8_t *p) {
    return (uint32_t)p[0] << 24 | (uint32_t)p[1] << 16 | (uint32_t)p[2] << 8 | p[3];
}

static void store_be32(uint8_t *p, uint32_t v) {
    p[0] = (uint8_t)(v >> 24);
    p[1] = (uint8_t)(v >> 16);
    p[2] = (uint8_t)(v >> 8);
    p[3] = (uint8_t)v;
}

/* Steps 7 to 10. Returns whether the packet goes on. */
static bool native_aggregate(struct atp_switch *sw, const struct atp_job_entry *job, struct atp_header *h,
                             const struct atp_admitted *p, int ce, uint8_t *payload, uint64_t now_ns, uint64_t *c) {
    struct atp_aggregator_head *head = native_head(sw->native, h->flags & ATP_AGGREGATOR_INDEX_MASK);
    const struct atp_queue *queue = job->queue ? &sw->tables.queues[job->queue - 1] : NULL;
    uint64_t *pairs = native_pairs(head);
    uint8_t *values = payload + ATP_HEADER_BYTES;
    const uint32_t count = job->values / 2;
    const uint32_t block = ATP_BLOCK_OF(count);
    struct atp_step step;

    if (!(h->flags & ATP_F_ECN) && (ce || (queue != NULL && atp_queue_is_over(queue, now_ns)))) {
        h->flags |= ATP_F_ECN;
        c[ATP_C_ECN_MARKED]++;
    }
    atp_decide(head, h, p, now_ns, sw->stale_ns, c, &step);
    if (step.op == ATP_VALUES_ADD)
        atp_values_add(head, pairs, values, p->lane, count, block);
    else if (step.op == ATP_VALUES_STORE)
        atp_values_store(head, pairs, values, p->lane, count, block);
    if (step.load)
        atp_values_load(head, pairs, values, count, block);
    if (step.release)
        atp_release(head);
    if (!step.forward)
        return false;
    store_be32(payload + 4, h->bitmap0);
    store_be32(payload + 8, h->bitmap1);
    store_be32(payload + 12, h->flags);
    return true;
}

static void native_replicate(struct atp_switch *sw, const struct atp_job_entry *job, uint32_t dst_ip,
                             const struct atp_header *h, const uint8_t *payload, size_t length, uint64_t *c,
                             uint32_t bytes, atp_forward_fn forward, void *context) {
    const int ecn = (h->flags & ATP_F_ECN) != 0;
    const struct atp_group_entry *group;

    c[ATP_C_ACKS]++;
    if (job->group == 0) {
        c[ATP_C_BYTES_OUT] += bytes;
        forward(context, 0, dst_ip, 0, payload, length, ecn);
        return;
    }
    if (sw->tables.group_slots[job->group] == 0)
        return;
    group = &sw->tables.groups[sw->tables.group_slots[job->group] - 1];
    for (uint32_t i = 0; i < group->count; i++) {
        const struct atp_replica *replica = &group->replica[i];
        c[ATP_C_BYTES_OUT] += bytes;
        forward(context, replica->port, replica->dst_ip, replica->dst_port, payload, length, ecn);
    }
}

int atp_native_packet(struct atp_switch *sw, uint32_t ingress_port, uint32_t dst_ip, int ce, uint8_t *payload,
                      size_t length, uint64_t now_ns, atp_forward_fn forward, void *context) {
    const uint32_t bytes = (uint32_t)length + ATP_FRAME_HEADER_BYTES - ATP_HEADER_BYTES;
    struct atp_native *n = sw->native;
    struct atp_admitted admitted = {0};
    const struct atp_job_entry *job;
    struct atp_header h;
    uint32_t job_id;
    int admit_raw;
    uint64_t *c = n->counters[0].c;

    n->last_ns = now_ns;
    if (length < ATP_HEADER_BYTES) {
        c[ATP_C_BYTES_IN] += bytes;
        c[ATP_C_REJECTED_SHORT]++;
        return 0;
    }
    h = (struct atp_header){load32(payload), load32(payload + 4), load32(payload + 8), load32(payload + 12)};
    job_id = h.key >> ATP_JOB_ID_SHIFT;
    if (sw->tables.job_slots[job_id] == 0) {
        c[ATP_C_BYTES_IN] += bytes;
        c[ATP_C_PASSED_UNKNOWN_JOB]++;
        c[ATP_C_BYTES_OUT] += bytes;
        forward(context, 0, dst_ip, 0, payload, length, (h.flags & ATP_F_ECN) != 0);
        return 0;
    }
    job = &sw->tables.jobs[sw->tables.job_slots[job_id] - 1];
    c = n->counters[job_id].c;
    c[ATP_C_BYTES_IN] += bytes;
    /* Behind a relay all packets have its address, so that the PS could not tell who sends raw ones. */
    admit_raw = n->source != NULL || job->hosts != 0;
    switch (atp_admit(job, &h, ingress_port, (uint32_t)length, admit_raw, c, &admitted)) {
    case ATP_ACK:
    case ATP_ACK_ONE:
        if ((h.flags & ATP_AGGREGATOR_INDEX_MASK) < sw->aggregators)
            c[ATP_C_RELEASED] += (uint64_t)atp_decide_ack(native_head(n, h.flags & ATP_AGGREGATOR_INDEX_MASK), &h);
        if (h.flags & ATP_F_EDGE) {
            c[ATP_C_BYTES_OUT] += bytes;
            forward(context, 0, dst_ip, 0, payload, length, (h.flags & ATP_F_ECN) != 0);
        } else {
            native_replicate(sw, job, dst_ip, &h, payload, length, c, bytes, forward, context);
        }
        return 0;
    case ATP_DROP:
        return 0;
    case ATP_AGGREGATE:
        if (!native_aggregate(sw, job, &h, &admitted, ce, payload, now_ns, c))
            return 0;
        break;
    case ATP_PASS:
        break;
    }
    c[ATP_C_BYTES_OUT] += bytes;
    if (h.flags & ATP_F_ACK) { /* a raw result, on its way to one worker */
        forward(context, 0, dst_ip, 0, payload, length, (h.flags & ATP_F_ECN) != 0);
        return 0;
    }
    if (job->queue)
        atp_queue_add(&sw->tables.queues[job->queue - 1], now_ns, bytes);
    forward(context, atp_ps_port(job), dst_ip, 0, payload, length, (h.flags & ATP_F_ECN) != 0);
    return 0;
}

struct public_emit {
    atp_emit_fn emit;
    void *context;
};

static void forward_public(void *context, uint32_t egress_port, uint32_t dst_ip, uint16_t dst_port,
                           const uint8_t *payload, size_t length, int ecn) {
    const struct public_emit *to = context;

    (void)dst_port;
    if (to->emit != NULL)
        to->emit(to->context, egress_port, dst_ip, payload, length, ecn);
}

ATP_EXPORT int atp_switch_process(struct atp_switch *sw, uint32_t ingress_port, uint32_t dst_ip, int ce,
                                  uint8_t *payload, size_t length, uint64_t now_ns, atp_emit_fn emit, void *context) {
    struct public_emit to = {emit, context};
    int result;

    if (sw->native == NULL)
        return -ENOTSUP;
    if (length > UINT16_MAX || (length != 0 && payload == NULL))
        return -EINVAL;
    pthread_mutex_lock(&sw->lock);
    result = atp_native_packet(sw, ingress_port, dst_ip, ce, payload, length, now_ns, forward_public, &to);
    pthread_mutex_unlock(&sw->lock);
    return result;
}
