/* SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 */
/*
 * The aggregation state machine (docs/protocol.md, "What a switch does", steps 4, 8 and 9): aggregator and packet in,
 * what to do with the values out. Who calls it holds the aggregator's lock and moves the bytes.
 */
#ifndef ATP_CORE_AGGREGATOR_H
#define ATP_CORE_AGGREGATOR_H

#include "core/admission.h"

/* Head of an aggregator; its pairs follow. */
struct atp_aggregator_head {
    uint32_t lock;
    uint32_t key; /* 0: free */
    uint32_t bitmap;
    uint8_t level;
    uint8_t complete;
    uint8_t ecn;
    uint8_t hot; /* a value was too large for the sums to be safe from overflow: add lane by lane */
    uint64_t timestamp_ns;
    uint64_t offset;
};

enum atp_values_op {
    ATP_VALUES_KEEP,
    ATP_VALUES_STORE,
    ATP_VALUES_ADD,
};

/* Result of atp_decide(): first the values, then the release, then forward (emit or pass) or drop. */
struct atp_step {
    uint32_t op;      /* enum atp_values_op */
    uint32_t load;    /* the aggregator's values replace the packet's */
    uint32_t release; /* free the aggregator after the values were read */
    uint32_t forward; /* 0: drop */
};

ATP_INLINE void atp_release(struct atp_aggregator_head *a) {
    a->key = 0;
    a->bitmap = 0;
    a->level = 0;
    a->complete = 0;
    a->ecn = 0;
    a->hot = 0;
    a->timestamp_ns = 0;
}

ATP_INLINE int atp_is_stale(const struct atp_aggregator_head *a, uint64_t now_ns, uint64_t stale_ns) {
    /* Signed: another core may have stamped a time just after ours. */
    return (int64_t)(now_ns - a->timestamp_ns) > (int64_t)stale_ns;
}

/* Step 4: does this ACK release the aggregator? */
ATP_INLINE int atp_decide_ack(struct atp_aggregator_head *a, const struct atp_header *h) {
    if (a->key != h->key)
        return 0;
    atp_release(a);
    return 1;
}

/* Step 9: the aggregator's coverage goes into the header. */
ATP_INLINE void atp_emit_header(const struct atp_aggregator_head *a, struct atp_header *h, uint32_t level) {
    if (level) {
        h->bitmap1 = a->bitmap;
        h->flags |= ATP_F_EDGE;
    } else {
        h->bitmap0 = a->bitmap;
        if (a->complete)
            h->flags |= ATP_F_EDGE;
    }
    if (a->ecn)
        h->flags |= ATP_F_ECN;
}

/*
 * Steps 8 and 9, under the aggregator's lock. `h` has the packet's ECN already (step 7) and leaves as it must be
 * forwarded. The head of the aggregator is brought up to date here; the values are the caller's, see struct atp_step.
 */
ATP_INLINE void atp_decide(struct atp_aggregator_head *a, struct atp_header *h, const struct atp_admitted *p,
                           uint64_t now_ns, uint64_t stale_ns, uint64_t *c, struct atp_step *step) {
    const uint32_t resend = h->flags & ATP_F_RESEND;
    const uint32_t repeat = !resend && (h->flags & ATP_F_COLLISION);
    const uint32_t used = a->key != 0;
    const uint32_t stale = used && atp_is_stale(a, now_ns, stale_ns);
    const uint32_t own = a->key == h->key && a->level == p->level;

    step->op = ATP_VALUES_KEEP;
    step->load = 0;
    step->release = 0;
    step->forward = 1;

    if (resend) {
        if (own && stale) {
            c[ATP_C_STALE_TAKEOVERS]++;
            c[ATP_C_RESEND_PASSED]++;
            atp_release(a);
            return;
        }
        if (!own || (p->level && !a->complete && !(a->bitmap & p->bits))) {
            c[ATP_C_RESEND_PASSED]++;
            return;
        }
        if (h->flags & ATP_F_ECN)
            a->ecn = 1;
        step->load = 1;
        if (a->complete) {
            c[ATP_C_REEMITTED]++;
        } else {
            c[ATP_C_RESEND_PARTIALS]++;
            step->release = 1;
            if (!(a->bitmap & p->bits)) {
                c[ATP_C_AGGREGATED]++;
                step->op = ATP_VALUES_ADD;
                a->bitmap |= p->bits;
                if (a->bitmap == p->full) {
                    a->complete = 1;
                    c[ATP_C_COMPLETED]++;
                }
            }
        }
        atp_emit_header(a, h, p->level);
        return;
    }
    if (repeat && (!own || stale)) {
        /* Like a resend it never allocates. */
        if (own) {
            c[ATP_C_STALE_TAKEOVERS]++;
            atp_release(a);
        }
        c[ATP_C_RESEND_PASSED]++;
        if (!p->level && p->bits == p->full)
            h->flags |= ATP_F_EDGE; /* a rack of one is complete without an aggregator: level 1 may lack just this */
        return;
    }
    if (!used || stale) {
        c[ATP_C_STALE_TAKEOVERS] += stale;
        c[ATP_C_ALLOCATED]++;
        c[ATP_C_AGGREGATED]++;
        step->op = ATP_VALUES_STORE;
        a->key = h->key;
        a->level = (uint8_t)p->level;
        a->bitmap = p->bits;
        a->ecn = (h->flags & ATP_F_ECN) != 0;
        a->timestamp_ns = now_ns;
        a->complete = p->bits == p->full;
    } else if (!own) {
        c[ATP_C_COLLISIONS]++;
        h->flags |= ATP_F_COLLISION | ATP_F_RESEND;
        return;
    } else {
        if (h->flags & ATP_F_ECN)
            a->ecn = 1;
        if (a->bitmap & p->bits) {
            /* All workers repeat what was lost behind the aggregator: one copy of the result is enough. */
            if (!a->complete || (repeat && !(p->bits & 1))) {
                c[ATP_C_DUPLICATES]++;
                step->forward = 0;
                return;
            }
            c[ATP_C_REEMITTED]++;
            step->load = 1;
            atp_emit_header(a, h, p->level);
            return;
        }
        c[ATP_C_AGGREGATED]++;
        step->op = ATP_VALUES_ADD;
        a->bitmap |= p->bits;
        if (!repeat)
            a->timestamp_ns = now_ns;
        a->complete = a->bitmap == p->full;
    }
    if (!a->complete) {
        step->forward = 0;
        return;
    }
    c[ATP_C_COMPLETED]++;
    h->flags &= ~ATP_F_COLLISION;            /* the first copy of the result, whatever completed it */
    step->load = step->op == ATP_VALUES_ADD; /* a fan-in of 1 carries its own values already */
    atp_emit_header(a, h, p->level);
}

/* Visits to all aggregators, on behalf of the control plane. */
enum atp_scan_op {
    ATP_SCAN_COUNT, /* aggregators of the job, 0: of any */
    ATP_SCAN_FREE,  /* free those of the job */
    ATP_SCAN_SWEEP, /* free the stale ones */
    ATP_SCAN_READ,  /* copy the last one visited */
};

/* Whether a scan counts or frees this aggregator. */
ATP_INLINE int atp_scan_matches(const struct atp_aggregator_head *a, uint32_t op, uint32_t job_id, uint64_t now_ns,
                                uint64_t stale_ns) {
    if (a->key == 0)
        return 0;
    if (op == ATP_SCAN_SWEEP)
        return atp_is_stale(a, now_ns, stale_ns);
    return job_id == 0 || a->key >> ATP_JOB_ID_SHIFT == job_id;
}

#endif
