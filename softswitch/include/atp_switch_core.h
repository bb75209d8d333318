/* SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 */
/*
 * The aggregation state machine of an ATP switch (docs/protocol.md, "What a switch does"): state and packet in, verdict
 * and state out. It compiles to BPF (tc and XDP) and to native code, so it uses no library, no global and no clock.
 * Who calls it parses the frame, holds the aggregator's lock and moves the bytes.
 *
 * Values are kept in pairs: one 64-bit word P = (first << 32) + second, both signed, so that one 64-bit add sums two
 * lanes. The stored word is P + offset, where `offset` is one number for the whole aggregator: each packet is added as
 * P + lane with lane = 2^k in both halves, which makes the halves of small values non-negative and shows in the high
 * bits of an OR over the packet whether any value left [-2^k, 2^k). k is chosen from the fan-in such that no sum of
 * values in that range can overflow; a packet that leaves it is taken back exactly (64-bit arithmetic wraps) and added
 * again lane by lane with sticky saturation. Thus saturation costs the common packet one OR a pair.
 */
#ifndef ATP_SWITCH_CORE_H
#define ATP_SWITCH_CORE_H

#include "atp_control.h"

#define ATP_INLINE static inline __attribute__((always_inline, unused))

#define ATP_LEVEL_BITS 32u
#define ATP_PORTS_PER_BIT 4u
#define ATP_PS_PORTS_MAX 8u
#define ATP_GROUPS 1024u
#define ATP_REPLICAS_MAX 64u
#define ATP_QUEUES 256u

/* Bits of the header's fourth word. */
#define ATP_F_EDGE (1u << ATP_EDGE_SWITCH_IDENTIFIER_SHIFT)
#define ATP_F_RESEND (1u << ATP_RESEND_SHIFT)
#define ATP_F_COLLISION (1u << ATP_COLLISION_SHIFT)
#define ATP_F_ECN (1u << ATP_ECN_SHIFT)
#define ATP_F_ACK (1u << ATP_IS_ACK_SHIFT)
#define ATP_F_RAW (1u << ATP_RAW_FLOAT_SHIFT)

/* The ATP header as four words in host order. */
struct atp_header {
    uint32_t key; /* job ID and sequence */
    uint32_t bitmap0;
    uint32_t bitmap1;
    uint32_t flags;
};

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

/* Phantom queue: the time at which a port of this rate would have sent all it was given. */
struct atp_queue {
    uint32_t port;
    uint32_t ns_per_kib;   /* time to send 1,024 bytes; 0: off */
    uint64_t threshold_ns; /* time to send the threshold */
    uint64_t busy_until_ns;
    uint64_t zero;
};

struct atp_counters {
    uint64_t c[ATP_COUNTERS];
};

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

/* A perfect hash of the 32 one-bit words (a de Bruijn sequence): BPF has no count of trailing zeros. */
ATP_INLINE uint32_t atp_bit_slot(uint32_t bit) {
    return (bit * 0x077CB531u) >> 27;
}

ATP_INLINE int atp_is_one_bit(uint32_t bits) {
    return bits != 0 && (bits & (bits - 1)) == 0;
}

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

/* ---- phantom queue: cores that add at once may lose a packet's length, which a threshold does not notice ---- */

ATP_INLINE int atp_queue_is_over(const struct atp_queue *q, uint64_t now_ns) {
    return q->ns_per_kib != 0 && (int64_t)(q->busy_until_ns - now_ns) > (int64_t)q->threshold_ns;
}

ATP_INLINE void atp_queue_add(struct atp_queue *q, uint64_t now_ns, uint32_t bytes) {
    uint64_t busy = q->busy_until_ns;

    if (q->ns_per_kib == 0)
        return;
    if ((int64_t)(busy - now_ns) < 0)
        busy = now_ns;
    q->busy_until_ns = busy + (((uint64_t)bytes * q->ns_per_kib) >> 10);
}

/* ---- values ---- */

#define ATP_LOW_SIGN 0x80000000ull

/* The largest lane whose sums of `fan_in` values cannot leave int32. */
ATP_INLINE uint64_t atp_lane(uint32_t fan_in) {
    uint32_t k = 30;

    for (uint32_t n = 2; n < fan_in && k > 26; n <<= 1)
        k--;
    return (1ull << k) | (1ull << (k + 32));
}

/* The bits of (P + lane) that are 0 while both values are in [-lane, lane). */
ATP_INLINE uint64_t atp_unsafe_bits(uint64_t lane) {
    return ~((lane << 1) - 0x100000001ull);
}

#if defined(__bpf__)
/* The verifier allows unaligned packet access where the machine does. */
#define ATP_LOAD64(p) (*(const uint64_t *)(p))
#define ATP_STORE64(p, v) (*(uint64_t *)(p) = (v))
#else
ATP_INLINE uint64_t atp_load64(const uint8_t *p) {
    uint64_t v;
    __builtin_memcpy(&v, p, 8);
    return v;
}
ATP_INLINE void atp_store64(uint8_t *p, uint64_t v) {
    __builtin_memcpy(p, &v, 8);
}
#define ATP_LOAD64(p) atp_load64(p)
#define ATP_STORE64(p, v) atp_store64((p), (v))
#endif

#if __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
#define ATP_SWAP64(v) __builtin_bswap64(v)
#else
#define ATP_SWAP64(v) (v)
#endif

/* Two values of the wire as P + 2^31, without the carry that a negative second value would take from the first. */
#define ATP_PAIR(p) (ATP_SWAP64(ATP_LOAD64(p)) ^ ATP_LOW_SIGN)

/*
 * Saturating add of both values of a pair, sticky at both ends; INT32_MAX wins over INT32_MIN. Branch-free, both lanes
 * in one register: `..._h` words have a lane's answer in its highest bit. `a` and `b` are two's complement, lane by
 * lane.
 */
ATP_INLINE uint64_t atp_lanes_saturating_add(uint64_t a, uint64_t b) {
    const uint64_t high = 0x8000000080000000ull;
    const uint64_t rest = 0x7fffffff7fffffffull;
    const uint64_t ones = 0x0000000100000001ull;
    uint64_t a_rest = a & rest;
    uint64_t b_rest = b & rest;
    uint64_t sum = (a_rest + b_rest) ^ ((a ^ b) & high);
    uint64_t overflow_h = ~(a ^ b) & (a ^ sum);
    uint64_t max_h = (~a & (a_rest + ones)) | (~b & (b_rest + ones));
    uint64_t min_h = (a & ~(a_rest + rest)) | (b & ~(b_rest + rest));
    uint64_t negative_h = ~max_h & (min_h | a) & high;
    uint64_t saturated = ((overflow_h | max_h | min_h) & high) >> 31;
    uint64_t end = rest + (negative_h >> 31);

    return sum ^ ((sum ^ end) & ((saturated << 32) - saturated));
}

/* Lane-wise saturating add of a packet's pair to P, the stored pair without its offset. */
ATP_INLINE uint64_t atp_pair_saturating_add(uint64_t stored, uint64_t added) {
    uint64_t sum = atp_lanes_saturating_add((stored + ATP_LOW_SIGN) ^ ATP_LOW_SIGN, added ^ ATP_LOW_SIGN);

    return (sum ^ ATP_LOW_SIGN) - ATP_LOW_SIGN;
}

#if defined(__bpf__)
/*
 * Keep a loop of the verifier's liking rolled in a way that suits it: a block of ATP_BLOCK pairs is straight code, the
 * block count is a constant.
 */
#define ATP_UNROLL _Pragma("clang loop unroll(full)")
#define ATP_ROLLED _Pragma("clang loop unroll(disable)")
#define ATP_OPAQUE(v) __asm__ volatile("" : "+r"(v))
#else
#define ATP_UNROLL
#define ATP_ROLLED
#define ATP_OPAQUE(v) ((void)(v))
#endif

/* Pairs of a block of straight code, by pairs of a packet. */
#define ATP_BLOCK_OF(count) ((count) == 31 ? 31u : (count) == 175 ? 25u : 29u)

/* The first packet of a sequence. */
ATP_INLINE void atp_values_store(struct atp_aggregator_head *a, uint64_t *pairs, const uint8_t *values, uint64_t lane,
                                 const uint32_t count, const uint32_t block) {
    uint64_t shift = lane - ATP_LOW_SIGN;
    uint64_t seen = 0;

    ATP_ROLLED
    for (uint32_t i = 0; i < count; i += block) {
        ATP_UNROLL
        for (uint32_t j = 0; j < block; j++) {
            uint64_t pair = ATP_PAIR(values + 8 * (i + j)) + shift;
            seen |= pair;
            pairs[i + j] = pair;
        }
    }
    a->offset = lane;
    a->hot = (seen & atp_unsafe_bits(lane)) != 0;
}

/* Any other packet of a sequence. */
ATP_INLINE void atp_values_add(struct atp_aggregator_head *a, uint64_t *pairs, const uint8_t *values, uint64_t lane,
                               const uint32_t count, const uint32_t block) {
    const uint64_t offset = a->offset;
    uint64_t shift = lane - ATP_LOW_SIGN;
    uint64_t seen = 0;
    uint64_t taken = 0;

    if (!a->hot) {
        ATP_ROLLED
        for (uint32_t i = 0; i < count; i += block) {
            ATP_UNROLL
            for (uint32_t j = 0; j < block; j++) {
                uint64_t pair = ATP_PAIR(values + 8 * (i + j)) + shift;
                seen |= pair;
                pairs[i + j] += pair;
            }
        }
        if (!(seen & atp_unsafe_bits(lane))) {
            a->offset = offset + lane;
            return;
        }
        a->hot = 1;
        taken = ~0ull;
    }
    ATP_ROLLED
    for (uint32_t i = 0; i < count; i++) {
        uint64_t pair = ATP_PAIR(values + 8 * i);
        uint64_t before = pairs[i] - ((pair + shift) & taken) - offset;
        pairs[i] = atp_pair_saturating_add(before, pair) + offset;
    }
}

/* The sum into the packet. */
ATP_INLINE void atp_values_load(const struct atp_aggregator_head *a, const uint64_t *pairs, uint8_t *values,
                                const uint32_t count, const uint32_t block) {
    uint64_t shift = ATP_LOW_SIGN - a->offset;

    ATP_ROLLED
    for (uint32_t i = 0; i < count; i += block) {
        ATP_UNROLL
        for (uint32_t j = 0; j < block; j++)
            ATP_STORE64(values + 8 * (i + j), ATP_SWAP64((pairs[i + j] + shift) ^ ATP_LOW_SIGN));
    }
}

#endif
