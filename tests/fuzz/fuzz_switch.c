/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Whole sequences of packets and control operations through the switch core, next to a model written from
 * docs/protocol.md ("What a switch does") in the plainest way: one value after the other, no clever arithmetic. After
 * each step the emissions, the counters and the touched aggregator must be those of the model.
 */
#include <errno.h>

#include "fuzz.h"

#define AGGREGATORS 8u
#define VALUES_MAX ATP_VALUES_LARGE
#define JOBS 3u   /* IDs 1..3; 4 stays unknown */
#define BITS 3u   /* bits that packets and entries use */
#define PORTS 7u  /* 0 is not a port */
#define GROUPS 2u /* 1..2 */
#define COPIES_MAX 8u
#define STALE 1000000u

/* ---- input ---- */

struct input {
    const uint8_t *data;
    size_t left;
};

static uint32_t byte(struct input *in) {
    if (in->left == 0)
        return 0;
    in->left--;
    return *in->data++;
}

/* ---- model ---- */

struct model_aggregator {
    uint32_t key, level, bitmap, full;
    bool ecn;
    uint64_t at;
    int32_t v[VALUES_MAX];
};

struct model_job {
    bool known;
    struct atp_job_config c;
    uint32_t admission[2][32][4];
    uint32_t transit_port[32][4], transit_mask[32][4];
    uint32_t ps[ATP_PS_PORTS_MAX];
};

struct model_queue {
    uint32_t port;
    uint64_t rate, threshold, busy;
};

struct out {
    uint32_t port, dst;
    uint8_t *payload;
};

static struct {
    struct model_job job[JOBS + 2];
    struct model_aggregator a[AGGREGATORS];
    uint32_t group_count[GROUPS + 1];
    struct atp_replica group[GROUPS + 1][COPIES_MAX];
    struct model_queue queue[PORTS];
    uint64_t counters[JOBS + 2][ATP_COUNTERS];
    uint64_t now, last; /* last: of the last packet, the clock of a sweep */
} m;

static struct atp_switch *sw;
static uint64_t start[JOBS + 2][ATP_COUNTERS];

static int32_t sticky(int32_t a, int32_t b) {
    int64_t sum = (int64_t)a + b;

    if (a == INT32_MAX || b == INT32_MAX)
        return INT32_MAX;
    if (a == INT32_MIN || b == INT32_MIN)
        return INT32_MIN;
    return sum > INT32_MAX ? INT32_MAX : sum < INT32_MIN ? INT32_MIN : (int32_t)sum;
}

static uint32_t ps_port(const struct model_job *job) {
    for (uint32_t i = 0; i < ATP_PS_PORTS_MAX; i++)
        if (job->ps[i])
            return job->ps[i];
    return 0;
}

static bool one_bit(uint32_t b) {
    return __builtin_popcount(b) == 1;
}

static bool has(const uint32_t *cells, uint32_t count, uint32_t port) {
    for (uint32_t i = 0; i < count; i++)
        if (cells[i] == port)
            return true;
    return false;
}

static bool admitted(const struct model_job *job, uint32_t level, uint32_t bits, uint32_t port) {
    return one_bit(bits) && has(job->admission[level][__builtin_ctz(bits)], 4, port);
}

static bool transits(const struct model_job *job, uint32_t bitmap0, uint32_t bitmap1, uint32_t port) {
    if (!one_bit(bitmap1) || bitmap0 == 0)
        return false;
    for (uint32_t i = 0; i < 4; i++)
        if (job->transit_port[__builtin_ctz(bitmap1)][i] == port)
            return (bitmap0 & ~job->transit_mask[__builtin_ctz(bitmap1)][i]) == 0;
    return false;
}

static bool in_regions(const struct model_job *job, uint32_t index) {
    for (uint32_t i = 0; i < job->c.region_count; i++)
        if (index >= job->c.region[i].start && index < job->c.region[i].start + job->c.region[i].size)
            return true;
    return false;
}

static void release(struct model_aggregator *a) {
    memset(a, 0, sizeof(*a));
}

static void free_job(uint32_t id) {
    for (uint32_t i = 0; i < AGGREGATORS; i++)
        if (m.a[i].key >> 24 == id)
            release(&m.a[i]);
}

/* The packet of the expected emission is written over `p`; returns how many copies there are in `out`. */
static uint32_t model_packet(uint32_t port, uint32_t dst, bool ce, uint8_t *p, size_t length, struct out *out) {
    uint32_t id = length < 16 ? 0 : p[0], count = 0;
    bool known = id >= 1 && id <= JOBS && m.job[id].known;
    uint64_t *c = m.counters[known ? id : 0];
    struct model_job *job = &m.job[known ? id : 0];
    uint32_t key, b0, b1, f, index, level, bits, full;
    struct model_aggregator *a;
    struct model_queue *q = NULL;
    bool emit, stale, own, partial = false, repeat = false;

    m.last = m.now;
    c[ATP_C_BYTES_IN] += length + 42;
    if (length < 16) {
        c[ATP_C_REJECTED_SHORT]++;
        return 0;
    }
    if (!known) {
        c[ATP_C_PASSED_UNKNOWN_JOB]++;
        out[count++] = (struct out){0, dst, p};
        goto sent;
    }
    key = be32(p), b0 = be32(p + 4), b1 = be32(p + 8), f = be32(p + 12), index = f & 0xffff;
    if (f & ATP_F_RAW) {
        c[ATP_C_PASSED_RAW_FLOAT]++;
        if (f & ATP_F_ACK) {
            out[count++] = (struct out){0, dst, p};
            goto sent;
        }
        goto towards_ps;
    }
    if (length != 16 + 4 * (size_t)job->c.values) {
        c[ATP_C_REJECTED_LENGTH]++;
        return 0;
    }
    if (f & ATP_F_ACK) {
        if (!has(job->ps, ATP_PS_PORTS_MAX, port)) {
            c[ATP_C_REJECTED_ACK_SOURCE]++;
            return 0;
        }
        if (index < AGGREGATORS && m.a[index].key == key) {
            release(&m.a[index]);
            c[ATP_C_RELEASED]++;
        }
        if (f & ATP_F_EDGE) {
            out[count++] = (struct out){0, dst, p};
            goto sent;
        }
        c[ATP_C_ACKS]++;
        if (job->c.group == 0)
            out[count++] = (struct out){0, dst, p};
        else
            for (uint32_t i = 0; i < m.group_count[job->c.group]; i++)
                out[count++] = (struct out){m.group[job->c.group][i].port, m.group[job->c.group][i].dst_ip, p};
        goto sent;
    }
    if (!in_regions(job, index)) {
        c[ATP_C_REJECTED_INDEX]++;
        return 0;
    }
    if (f & ATP_F_EDGE) {
        if (!admitted(job, 1, b1, port))
            goto reject;
        level = 1;
        if (job->c.full1 == 0)
            goto transit;
    } else if (admitted(job, 0, b0, port)) {
        level = 0;
        if (job->c.full0 == 0)
            goto transit;
    } else if (transits(job, b0, b1, port)) {
        level = 1;
        if (job->c.full1 == 0 || !(f & ATP_F_RESEND))
            goto transit;
    } else {
        goto reject;
    }
    bits = level ? b1 : b0;
    full = level ? job->c.full1 : job->c.full0;
    if (bits & ~full)
        goto reject;
    for (uint32_t i = 0; i < PORTS; i++)
        if (m.queue[i].rate && m.queue[i].port == ps_port(job))
            q = &m.queue[i];
    if (!(f & ATP_F_ECN) && (ce || (q && (int64_t)(q->busy - m.now) > (int64_t)q->threshold))) {
        f |= ATP_F_ECN;
        c[ATP_C_ECN_MARKED]++;
    }
    a = &m.a[index];
    stale = a->key != 0 && (int64_t)(m.now - a->at) > STALE;
    own = a->key == key && a->level == level;
    emit = false;
    if (f & ATP_F_RESEND) {
        if (own && stale) {
            c[ATP_C_STALE_TAKEOVERS]++;
            c[ATP_C_RESEND_PASSED]++;
            release(a);
        } else if (own && a->bitmap == a->full) {
            c[ATP_C_REEMITTED]++;
            a->ecn |= (f & ATP_F_ECN) != 0;
            emit = true;
        } else if (own && (level == 0 || a->bitmap & bits)) {
            c[ATP_C_RESEND_PARTIALS]++;
            partial = true;
            a->ecn |= (f & ATP_F_ECN) != 0;
            emit = true;
            if (!(a->bitmap & bits)) {
                for (uint32_t i = 0; i < job->c.values; i++)
                    a->v[i] = sticky(a->v[i], (int32_t)be32(p + 16 + 4 * i));
                a->bitmap |= bits;
                c[ATP_C_AGGREGATED]++;
                c[ATP_C_COMPLETED] += a->bitmap == a->full;
            }
        } else {
            c[ATP_C_RESEND_PASSED]++;
        }
        if (emit)
            goto emission;
        put32(p + 12, f);
        goto towards_ps;
    }
    repeat = (f & ATP_F_COLLISION) != 0;
    if (repeat && !(own && !stale)) {
        c[ATP_C_RESEND_PASSED]++;
        if (own) {
            c[ATP_C_STALE_TAKEOVERS]++;
            release(a);
        }
        if (level == 0 && bits == full)
            f |= ATP_F_EDGE;
        put32(p + 12, f);
        goto towards_ps;
    }
    if (a->key == 0 || stale) {
        c[ATP_C_STALE_TAKEOVERS] += stale;
        c[ATP_C_ALLOCATED]++;
        c[ATP_C_AGGREGATED]++;
        *a = (struct model_aggregator){.key = key, .level = level, .bitmap = bits, .full = full, .at = m.now};
        a->ecn = (f & ATP_F_ECN) != 0;
        for (uint32_t i = 0; i < job->c.values; i++)
            a->v[i] = (int32_t)be32(p + 16 + 4 * i);
    } else if (!own) {
        c[ATP_C_COLLISIONS]++;
        put32(p + 12, f | ATP_F_COLLISION | ATP_F_RESEND);
        goto towards_ps;
    } else {
        a->ecn |= (f & ATP_F_ECN) != 0;
        if (a->bitmap & bits) {
            if (a->bitmap != a->full || (repeat && bits != 1)) {
                c[ATP_C_DUPLICATES]++;
                return 0;
            }
            c[ATP_C_REEMITTED]++;
            goto emission;
        }
        c[ATP_C_AGGREGATED]++;
        if (!repeat)
            a->at = m.now;
        a->bitmap |= bits;
        for (uint32_t i = 0; i < job->c.values; i++)
            a->v[i] = sticky(a->v[i], (int32_t)be32(p + 16 + 4 * i));
    }
    if (a->bitmap != a->full)
        return 0;
    c[ATP_C_COMPLETED]++;
    f &= ~ATP_F_COLLISION;
emission:
    put32(p + (level ? 8 : 4), a->bitmap);
    if (level || a->bitmap == a->full)
        f |= ATP_F_EDGE;
    if (a->ecn)
        f |= ATP_F_ECN;
    put32(p + 12, f);
    for (uint32_t i = 0; i < job->c.values; i++)
        put32(p + 16 + 4 * i, (uint32_t)a->v[i]);
    if (partial)
        release(a);
    goto towards_ps;
transit:
    c[ATP_C_PASSED_TRANSIT]++;
towards_ps:
    for (uint32_t i = 0; i < PORTS; i++)
        if (m.queue[i].rate && m.queue[i].port == ps_port(job)) {
            q = &m.queue[i];
            if ((int64_t)(q->busy - m.now) < 0)
                q->busy = m.now;
            q->busy += ((length + 42) * q->rate) >> 10;
        }
    out[count++] = (struct out){ps_port(job), dst, p};
    goto sent;
reject:
    c[ATP_C_REJECTED_BIT]++;
    return 0;
sent:
    c[ATP_C_BYTES_OUT] += count * (length + 42);
    return count;
}

/* ---- control operations, with what they must answer ---- */

static void set_job(struct input *in) {
    static const uint32_t fulls[] = {0, 1, 3, 7, 5, 2, 0xffffffff, 6};
    static const uint32_t profiles[] = {62, 62, 350, 62, 870, 61, 62, 62};
    uint32_t id = byte(in) % (JOBS + 1), shape = byte(in), place = byte(in);
    struct model_job *job = &m.job[id];
    struct atp_job_config c = {
        .values = profiles[shape & 7], .full0 = fulls[shape >> 3 & 7], .full1 = fulls[byte(in) & 7]};
    int expected = 0;

    c.group = (place & 3) % (GROUPS + 1);
    c.region_count = place >> 2 & 7;
    for (uint32_t i = 0; i < ATP_REGIONS_MAX; i++) {
        uint32_t at = byte(in);
        c.region[i] = (struct atp_region){at & 15, (at >> 4) % 9};
    }
    if (id == 0 || c.values == 61 || c.region_count == 0 || c.region_count > ATP_REGIONS_MAX)
        expected = -EINVAL;
    else if (c.values == 870)
        expected = -EMSGSIZE;
    for (uint32_t i = 0; expected == 0 && i < c.region_count; i++)
        if (c.region[i].size == 0)
            expected = -EINVAL;
        else if (c.region[i].start + c.region[i].size > AGGREGATORS)
            expected = -ERANGE;
    MUST(atp_switch_set_job(sw, (uint8_t)id, &c) == expected);
    if (expected != 0)
        return;
    memset(&c.region[c.region_count], 0, (ATP_REGIONS_MAX - c.region_count) * sizeof(c.region[0]));
    c.region_count = ATP_REGIONS_MAX;
    if (job->known && (c.values != job->c.values || c.full0 != job->c.full0 || c.full1 != job->c.full1 ||
                       memcmp(c.region, job->c.region, sizeof(c.region)) != 0))
        free_job(id);
    job->known = true;
    job->c = c;
}

static int change(uint32_t *cells, uint32_t count, uint32_t port, bool add) {
    for (uint32_t i = 0; i < count; i++)
        if (cells[i] == port) {
            cells[i] = add ? port : 0;
            return 0;
        }
    for (uint32_t i = 0; add && i < count; i++)
        if (cells[i] == 0) {
            cells[i] = port;
            return 0;
        }
    return add ? -ENOSPC : -ENOENT;
}

static void admission(struct input *in, bool add) {
    uint32_t who = byte(in), what = byte(in);
    struct atp_admission_key key = {
        .port = (who & 15) % PORTS, .bitmap = (what & 15) % 7, .job_id = (who >> 4) % (JOBS + 1)};
    int expected = -EINVAL;

    key.edge = (what >> 4) % 3;
    if (key.port && key.job_id && key.edge < 2 && one_bit(key.bitmap))
        expected = change(m.job[key.job_id].admission[key.edge][__builtin_ctz(key.bitmap)], 4, key.port, add);
    MUST((add ? atp_switch_set_admission(sw, &key) : atp_switch_delete_admission(sw, &key)) == expected);
}

static void transit(struct input *in, bool add) {
    uint32_t who = byte(in), what = byte(in);
    struct atp_transit_key key = {
        .port = (who & 15) % PORTS, .bitmap1 = (what & 15) % 7, .job_id = (who >> 4) % (JOBS + 1)};
    uint32_t mask = what >> 4;
    int expected = -EINVAL;

    if (key.port && key.job_id && one_bit(key.bitmap1) && (!add || mask)) {
        uint32_t bit = (uint32_t)__builtin_ctz(key.bitmap1);
        uint32_t *ports = m.job[key.job_id].transit_port[bit];
        expected = change(ports, 4, key.port, add);
        for (uint32_t i = 0; add && i < 4; i++)
            if (ports[i] == key.port)
                m.job[key.job_id].transit_mask[bit][i] = mask;
    }
    MUST((add ? atp_switch_set_transit(sw, &key, mask) : atp_switch_delete_transit(sw, &key)) == expected);
}

static void group(struct input *in) {
    struct atp_replica replicas[COPIES_MAX];
    uint32_t id = byte(in) % (GROUPS + 2), count = byte(in) % (COPIES_MAX + 1);
    int expected = 0;

    memset(replicas, 0, sizeof(replicas));
    for (uint32_t i = 0; i < count; i++) {
        replicas[i].port = byte(in) % PORTS;
        replicas[i].dst_ip = 100 + i;
        if (replicas[i].port == 0)
            expected = -EINVAL;
    }
    if (id == GROUPS + 1)
        id = ATP_GROUPS; /* beyond the table */
    if (id == 0 || id > GROUPS)
        expected = -EINVAL;
    else if (expected == 0 && count == 0 && m.group_count[id] == 0)
        expected = -ENOENT;
    MUST(atp_switch_set_group(sw, id, replicas, count) == expected);
    if (expected != 0)
        return;
    m.group_count[id] = count;
    memcpy(m.group[id], replicas, sizeof(replicas));
}

static void rate(struct input *in) {
    uint32_t port = byte(in) % PORTS, how = byte(in), threshold = byte(in) * 16;
    uint64_t bits = how & 1 ? 1000000ull << (how >> 4) : 0;
    struct model_queue *q = NULL;
    int expected = 0;

    for (uint32_t i = 0; i < PORTS; i++)
        if (m.queue[i].rate && m.queue[i].port == port)
            q = &m.queue[i];
    if (port == 0)
        expected = -EINVAL;
    else if (bits == 0 && q == NULL)
        expected = -ENOENT;
    MUST(atp_switch_set_port_rate(sw, port, bits, threshold) == expected);
    if (expected != 0)
        return;
    for (uint32_t i = 0; q == NULL && i < PORTS; i++)
        if (m.queue[i].rate == 0) {
            q = &m.queue[i];
            q->busy = 0; /* nothing waits for a port that has just got a rate */
        }
    MUST(q != NULL);
    q->port = port;
    q->rate = bits ? 1024ull * 8 * 1000000000 / bits : 0;
    q->threshold = threshold * q->rate >> 10;
}

/* ---- packets ---- */

struct expected {
    struct out out[COPIES_MAX + 1];
    uint32_t count, next;
    size_t length;
};

static void emit(void *context, uint32_t egress_port, uint32_t dst_ip, const uint8_t *payload, size_t length, int ecn) {
    struct expected *e = context;
    struct out *out = &e->out[e->next];

    MUST(e->next < e->count);
    e->next++;
    MUST(egress_port == out->port && dst_ip == out->dst && length == e->length);
    MUST(memcmp(payload, out->payload, length) == 0);
    MUST(length < 16 || ((be32(payload + 12) & ATP_F_ECN) != 0) == (ecn != 0));
}

static void check_aggregator(uint32_t index) {
    struct atp_aggregator_state state;
    int32_t values[VALUES_MAX];
    struct model_aggregator *a = &m.a[index];

    MUST(atp_switch_read_aggregator(sw, index, &state, values) == 0);
    MUST(state.key == a->key && state.level == a->level && state.bitmap == a->bitmap && (state.ecn != 0) == a->ecn);
    MUST(state.timestamp_ns == a->at && (state.complete != 0) == (a->key != 0 && a->bitmap == a->full));
    if (a->key != 0)
        MUST(memcmp(values, a->v, 4 * m.job[a->key >> 24].c.values) == 0);
}

struct shape {
    uint32_t key, bitmap0, bitmap1, flags, port, pattern;
    bool ce;
    size_t length;
};

static void packet(const struct shape *p) {
    /* Many near 2^30, where the sums of a few values leave int32. */
    static const int32_t edges[] = {
        0,          (1 << 30) - 1, -1,      INT32_MAX,      INT32_MIN, INT32_MAX - 1, (1 << 30) - 1, 1 << 30,
        -(1 << 30), (1 << 30) - 1, 1 << 29, -(1 << 29) - 1, 1 << 26,   INT32_MIN + 1, -(1 << 30),    1000};
    struct expected e = {.length = p->length};
    uint8_t *payload = calloc(1, p->length ? p->length : 1); /* so that one byte too far is found */
    uint8_t *model = calloc(1, p->length ? p->length : 1);

    MUST(payload != NULL && model != NULL);
    if (p->length >= 16) {
        put32(payload, p->key);
        put32(payload + 4, p->bitmap0);
        put32(payload + 8, p->bitmap1);
        put32(payload + 12, p->flags);
    }
    for (size_t i = 16; i + 4 <= p->length; i += 4)
        put32(payload + i, (uint32_t)edges[(p->pattern + (i / 4 - 4) % 7 * (p->pattern >> 4)) & 15]);
    memcpy(model, payload, p->length);
    e.count = model_packet(p->port, 77, p->ce, model, p->length, e.out);
    MUST(atp_switch_process(sw, p->port, 77, p->ce, payload, p->length, m.now, emit, &e) == 0);
    MUST(e.next == e.count);
    free(payload);
    free(model);
    check_aggregator(p->flags & 7);
}

static size_t length_of(uint32_t id) {
    return 16 + 4 * (size_t)(id <= JOBS && m.job[id].known ? m.job[id].c.values : 62);
}

/* Any header, any port, now and then any length. */
static void any_packet(struct input *in) {
    static const uint32_t sequences[] = {0, 1, 0xffffff, 0x800000};
    uint32_t who = byte(in), bits = byte(in), flags = byte(in), place = byte(in), id = 1 + (who & 3);
    struct shape p = {.key = id << 24 | sequences[who >> 6],
                      .bitmap0 = bits & 8 ? 1u << (bits & 3) % BITS : bits & 7,
                      .bitmap1 = bits & 0x80 ? 1u << (bits >> 4 & 3) % BITS : bits >> 4 & 7,
                      .flags = (flags & 0x3f) << 16 | (place & 15) | (uint32_t)(place >> 6 == 3) << 15 |
                               (place & 0x20) << 22,
                      .port = 1 + (who >> 2 & 7) % (PORTS - 1),
                      .pattern = byte(in),
                      .ce = flags >> 6 & 1,
                      .length = length_of(id)};

    if (flags & 0x80)
        p.length = byte(in) * 6;
    packet(&p);
}

/* What a worker, or the switch below, would send: admitted, right length, right index; most often whoever is missing.
 */
static void gradient(struct input *in) {
    uint32_t who = byte(in), how = byte(in), id = 1 + (who & 3) % JOBS, bit = (who >> 4 & 3) % BITS;
    const struct model_job *job = &m.job[id];
    const struct atp_region *region = &job->c.region[0];
    uint32_t level = job->c.full1 && job->c.full0 ? who >> 3 & 1 : job->c.full1 != 0;
    uint32_t key = id << 24 | ((how & 0x40) && (who >> 2 & 1)), index = region->start;
    struct shape p = {.key = key, .pattern = byte(in), .ce = (how & 0x30) == 0x30, .length = length_of(id)};

    if (region->size > 1)
        index += how >> 6 & 1;
    if (!(how & 0x80) && index < AGGREGATORS && m.a[index].key == key && m.a[index].level == level)
        for (uint32_t i = 0; i < BITS; i++)
            if (m.a[index].full & ~m.a[index].bitmap & 1u << i)
                bit = i;
    p.flags = index;
    p.bitmap0 = level ? 1 : 1u << bit;
    p.bitmap1 = level ? 1u << bit : 1;
    p.port = job->admission[level][bit][0];
    if ((how & 3) == 3)
        p.flags |= ATP_F_RESEND;
    if ((how & 12) == 12)
        p.flags |= ATP_F_ECN;
    if (level && (who & 0xc0) == 0xc0)
        p.port = job->transit_port[bit][0]; /* a rack that is not complete */
    else if (level)
        p.flags |= ATP_F_EDGE;
    if (p.port == 0)
        p.port = 1;
    packet(&p);
}

/* The parameter server's answer to what an aggregator holds. */
static void ack(struct input *in) {
    uint32_t which = byte(in), index = which & 7, id = m.a[index].key >> 24;
    struct shape p = {.flags = ATP_F_ACK | index, .port = PORT_PS};

    id = id ? id : 1;
    p.key = m.a[index].key ? m.a[index].key : id << 24;
    p.flags |= which & 8 ? ATP_F_EDGE : 0;
    p.flags |= which & 16 ? ATP_F_COLLISION : 0;
    p.length = length_of(id);
    if (ps_port(&m.job[id]))
        p.port = ps_port(&m.job[id]);
    packet(&p);
}

static void check_counters(void) {
    static const uint8_t ids[] = {0, 1, 2, 3};
    uint64_t c[ATP_COUNTERS];

    for (uint32_t i = 0; i < sizeof(ids); i++) {
        MUST(atp_switch_read_counters(sw, ids[i], c) == 0);
        for (uint32_t k = 0; k < ATP_COUNTERS; k++)
            if (c[k] - start[ids[i]][k] != m.counters[ids[i]][k]) {
                fprintf(stderr, "job %u: %s is %llu, the model has %llu\n", ids[i], atp_counter_names()[k],
                        (unsigned long long)(c[k] - start[ids[i]][k]), (unsigned long long)m.counters[ids[i]][k]);
                abort();
            }
    }
}

static uint32_t model_occupancy(uint32_t id) {
    uint32_t used = 0;

    for (uint32_t i = 0; i < AGGREGATORS; i++)
        used += m.a[i].key != 0 && (id == 0 || m.a[i].key >> 24 == id);
    return used;
}

static void sweep(void) {
    int freed = 0;

    for (uint32_t i = 0; i < AGGREGATORS; i++)
        if (m.a[i].key != 0 && (int64_t)(m.last - m.a[i].at) > STALE) {
            release(&m.a[i]);
            freed++;
        }
    MUST(atp_switch_sweep(sw) == freed);
}

static void step(struct input *in) {
    uint32_t op = byte(in), id = op >> 4, port;
    int expected;
    bool add;

    if (op >= 0xe0) {
        ack(in);
        return;
    }
    if (op >= 0x80) {
        gradient(in);
        return;
    }
    if (op >= 0x60) {
        any_packet(in);
        return;
    }
    switch (op & 15) {
    case 0:
        set_job(in);
        break;
    case 1:
        id %= JOBS + 1;
        expected = id == 0 ? -EINVAL : m.job[id].known ? 0 : -ENOENT;
        MUST(atp_switch_delete_job(sw, (uint8_t)id) == expected);
        if (expected == 0)
            free_job(id);
        m.job[id].known = false;
        break;
    case 2:
        admission(in, id != 0);
        break;
    case 3:
        transit(in, id != 0);
        break;
    case 4:
        add = id != 0;
        id = byte(in) % (JOBS + 1);
        port = byte(in) % PORTS;
        expected = id == 0 || port == 0 ? -EINVAL : change(m.job[id].ps, ATP_PS_PORTS_MAX, port, add);
        MUST((add ? atp_switch_set_ps_port(sw, (uint8_t)id, port) : atp_switch_delete_ps_port(sw, (uint8_t)id, port)) ==
             expected);
        break;
    case 5:
        group(in);
        break;
    case 6:
        rate(in);
        break;
    case 7:
        m.now += id << 16; /* 0 to about a third of T */
        break;
    case 8:
        m.now += id ? STALE + id : 0;
        break;
    case 9:
        m.now -= id * 100; /* cores whose clocks differ a little */
        break;
    case 10:
        sweep();
        break;
    case 11:
        id %= JOBS + 1;
        MUST(atp_switch_occupancy(sw, (uint8_t)id) == (int)model_occupancy(id));
        MUST(model_occupancy(0) <= AGGREGATORS);
        break;
    default:
        break;
    }
}

/* Jobs that work, so that short inputs reach the aggregators: job 1 at level 0, job 2 at level 1 with larger packets.
 */
static void setup(void) {
    static const uint8_t prologue[] = {
        0x00, 1,    0x18, 0x05, 0,    0x80, 0,    0,    0, /* job 1: 62 values, full0 = 0b111, group 1, all indexes */
        0x12, 0x11, 0x01, 0x12, 0x12, 0x02, 0x12, 0x13, 0x04, /* ports 1..3 set bits 0..2 at level 0 */
        0x14, 1,    5,                                        /* PS port 5 */
        0x05, 1,    2,    1,    2,                            /* group 1 */
        0x00, 2,    0x02, 0x04, 3,    0x80, 0,    0,    0,    /* job 2: 350 values, full1 = 0b111, no group */
        0x12, 0x21, 0x11, 0x12, 0x22, 0x12, 0x12, 0x23, 0x14, /* ports 1..3 set bits 0..2 at level 1 */
        0x13, 0x24, 0xf1, 0x13, 0x24, 0xf2,                   /* transit of racks 0 and 1 at port 4 */
        0x14, 2,    5,
    };
    struct input in = {prologue, sizeof(prologue)};

    while (in.left)
        step(&in);
}

/* The switch stays open (its tables are large); what the last input left is taken out. */
static void clear(void) {
    const struct atp_switch_options options = {.aggregators = AGGREGATORS, .values = VALUES_MAX, .stale_ns = STALE};

    if (sw == NULL)
        MUST(atp_switch_open_native(&options, &sw) == 0);
    for (uint8_t id = 1; id <= JOBS; id++) {
        if (m.job[id].known)
            MUST(atp_switch_delete_job(sw, id) == 0);
        for (uint32_t bit = 0; bit < 32; bit++)
            for (uint32_t i = 0; i < 4; i++) {
                for (uint8_t edge = 0; edge < 2; edge++) {
                    const struct atp_admission_key key = {m.job[id].admission[edge][bit][i], 1u << bit, id, edge, 0};
                    if (key.port)
                        MUST(atp_switch_delete_admission(sw, &key) == 0);
                }
                const struct atp_transit_key way = {m.job[id].transit_port[bit][i], 1u << bit, id, {0}};
                if (way.port)
                    MUST(atp_switch_delete_transit(sw, &way) == 0);
            }
        for (uint32_t i = 0; i < ATP_PS_PORTS_MAX; i++)
            if (m.job[id].ps[i])
                MUST(atp_switch_delete_ps_port(sw, id, m.job[id].ps[i]) == 0);
    }
    for (uint32_t id = 1; id <= GROUPS; id++)
        if (m.group_count[id])
            MUST(atp_switch_set_group(sw, id, NULL, 0) == 0);
    for (uint32_t i = 0; i < PORTS; i++)
        if (m.queue[i].rate)
            MUST(atp_switch_set_port_rate(sw, m.queue[i].port, 0, 0) == 0);
    MUST(atp_switch_occupancy(sw, 0) == 0);
    memset(&m, 0, sizeof(m));
    m.now = m.last = 1000000000;
    MUST(atp_switch_process(sw, 1, 0, 0, NULL, 0, m.now, NULL, NULL) == 0); /* sets the clock */
    for (uint8_t id = 0; id <= JOBS; id++)
        MUST(atp_switch_read_counters(sw, id, start[id]) == 0);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);
int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    struct input in = {data, size};

    if (size > 2048)
        return 0;
    clear();
    if (byte(&in) != 0xff)
        setup();
    while (in.left)
        step(&in);
    check_counters();
    for (uint32_t i = 0; i < AGGREGATORS; i++)
        check_aggregator(i);
    MUST(atp_switch_occupancy(sw, 0) == (int)model_occupancy(0));
    return 0;
}
