/* SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 */
/*
 * A frame to the ATP port: guard, admission, aggregation, ACKs. The body of the programs of both hooks. It is handled
 * in place: dropped, or rewritten and left to the kernel's own forwarding (bridge or route) that was taking it to the
 * PS anyway.
 */
#ifndef ATP_BPF_HANDLE_H
#define ATP_BPF_HANDLE_H

#include "bpf/acks.h"
#include "bpf/aggregate.h"
#include "bpf/ctx.h"
#include "bpf/frame.h"
#include "bpf/guard.h"
#include "bpf/maps.h"
#include "bpf/superframe.h"

/* What a program does itself; the rest passes, for the program at the other hook of the same port. */
#define ATP_DUTY_GRADIENTS 1u /* and raw packets */
#define ATP_DUTY_ACKS 2u

enum atp_met {
    ATP_MET_JOB,    /* the state machine's to judge */
    ATP_MET_NOBODY, /* ordinary traffic, passes as it is */
    ATP_MET_FORGED, /* not what its host may send */
};

/* The job of a packet whose header is read, and the counters that it counts in. */
static __always_inline enum atp_met atp_meet_job(const struct atp_frame *f, struct atp_job_entry **job, uint64_t **c) {
    const uint32_t job_id = f->h.key >> ATP_JOB_ID_SHIFT;

    if (f->from && !atp_may_send(f->from, &f->h))
        return ATP_MET_FORGED;
    *job = atp_find_job(job_id);
    if (*job && (*job)->hosts && !f->from)
        return ATP_MET_NOBODY; /* it looks like a packet of this job, but none of its hosts has to do with it */
    *c = atp_find_counters(*job ? job_id : 0);
    if (!*c)
        return ATP_MET_NOBODY;
    if (f->from && (!*job || (f->h.flags & ATP_F_RAW)) && !atp_is_own(f->from, &f->h))
        return ATP_MET_FORGED;
    (*c)[ATP_C_BYTES_IN] += f->bytes;
    if (*job)
        return ATP_MET_JOB;
    (*c)[ATP_C_PASSED_UNKNOWN_JOB]++;
    (*c)[ATP_C_BYTES_OUT] += f->bytes;
    return ATP_MET_NOBODY;
}

/* Shorter than the header, and from nobody's host. Returns whether it is dropped. */
static __always_inline int atp_rejects_short(const struct atp_frame *f) {
    uint64_t *c;

    if (!atp_control_area.unguarded_jobs)
        return 0;
    c = atp_find_counters(0);
    if (c) {
        c[ATP_C_REJECTED_SHORT]++;
        c[ATP_C_BYTES_IN] += f->bytes;
    }
    return 1;
}

static __always_inline int atp_is_ack(const struct atp_header *h) {
    return (h->flags & (ATP_F_ACK | ATP_F_RAW)) == ATP_F_ACK;
}

static __always_inline int atp_has_duty(const struct atp_header *h, const uint32_t duties) {
    return (duties & (atp_is_ack(h) ? ATP_DUTY_ACKS : ATP_DUTY_GRADIENTS)) != 0;
}

/* `shape`: of the frame in reach, not ATP_SHAPE_FOREIGN. `duties` is a constant. */
static __always_inline enum atp_verdict atp_handle(struct atp_ctx *ctx, enum atp_shape shape, const uint32_t duties) {
    const uint32_t port = atp_ctx_port(ctx);
    const uint32_t source = atp_source(ctx->data);
    struct atp_admitted admitted = {0};
    struct atp_frame f = {0};
    struct atp_job_entry *job = NULL;
    uint32_t wanted;
    uint64_t *c = NULL;

    if (!atp_is_let_in(ctx->data, port, &f))
        return ATP_VERDICT_DROP;
    if (shape == ATP_SHAPE_ODD)
        goto odd;
    if (atp_ctx_is_superframe(ctx)) {
        c = atp_find_counters(0);
        if (c && (duties & ATP_DUTY_GRADIENTS))
            c[ATP_C_PASSED_GSO]++;
        if (f.from && !atp_superframe_is_own(atp_ctx_skb(ctx), f.from))
            goto forged;
        return ATP_VERDICT_PASS;
    }
    if (!atp_lengths(ctx->data, atp_ctx_bytes(ctx), &f))
        goto odd;
    if (f.length < ATP_HEADER_BYTES) {
        if (f.from || !(duties & ATP_DUTY_GRADIENTS) || !atp_rejects_short(&f))
            goto odd;
        return ATP_VERDICT_DROP;
    }
    wanted = f.bytes;
    if (wanted > ATP_OFF_VALUES + 4 * ATP_PROFILE)
        wanted = ATP_OFF_VALUES; /* too long for any job here: the header is enough to count it */
    if (!atp_ctx_pull(ctx, wanted) || ctx->data + ATP_OFF_VALUES > ctx->data_end)
        goto odd;
    atp_read_header(ctx->data + ATP_OFF_HEADER, &f.h);
    if (!atp_has_duty(&f.h, duties))
        return ATP_VERDICT_PASS;
    switch (atp_meet_job(&f, &job, &c)) {
    case ATP_MET_FORGED:
        goto forged;
    case ATP_MET_NOBODY:
        return ATP_VERDICT_PASS;
    case ATP_MET_JOB:
        break;
    }
    switch (atp_admit(job, &f.h, port, f.length, job->hosts != 0, c, &admitted)) {
    case ATP_AGGREGATE:
        if (!(duties & ATP_DUTY_GRADIENTS) || !atp_aggregate(ctx->data, ctx->data_end, &f, job, &admitted, c))
            return ATP_VERDICT_DROP;
        break;
    case ATP_PASS:
        break;
    case ATP_ACK:
        if (!(duties & ATP_DUTY_ACKS))
            goto refused;
        atp_release_by_ack(&f.h, c);
        return atp_replicate(atp_ctx_skb(ctx), job, f.bytes, c);
    case ATP_ACK_ONE:
        if (!(duties & ATP_DUTY_ACKS))
            goto refused;
        atp_release_by_ack(&f.h, c);
        c[ATP_C_BYTES_OUT] += f.bytes;
        return ATP_VERDICT_PASS;
    case ATP_DROP:
        goto refused;
    }
    atp_account(job, &f, c);
    return ATP_VERDICT_PASS;

odd: /* an end host would not make sense of it; between others it is none of ours */
    if (!f.from)
        return ATP_VERDICT_PASS;
    atp_count_drop(port, source, ATP_D_MALFORMED);
    return ATP_VERDICT_DROP;
forged:
    atp_count_drop(port, source, ATP_D_FORGED);
    return ATP_VERDICT_DROP;
refused:
    atp_count_drop(port, source, ATP_D_ADMISSION);
    return ATP_VERDICT_DROP;
}

#endif
