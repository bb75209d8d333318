/* SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 */
/*
 * The software switch in the kernel: a tc program for the ingress of the pods' host-side veths, an XDP program for that
 * of NICs. Compiled once per profile; ATP_PROFILE is the largest number of values per packet.
 *
 * A gradient is handled in place: dropped, or rewritten and left to the kernel's own forwarding (bridge or route) that
 * was taking it to the PS anyway. An ACK is replicated in tc, also where XDP aggregates: clones leave through the
 * egress queues, so rate limits hold, and any number of replicas may sit behind one port.
 *
 * What may pass at all is the guard's to say (atp_guard.h), here for what comes in, and at the egress of a pod's veth
 * for what would reach a job's host by another way.
 *
 * Packets that are forwarded return TC_ACT_UNSPEC, not TC_ACT_OK: programs of others on the same hook have their turn.
 */
#include <linux/bpf.h>
#include <linux/if_ether.h>
#include <linux/in.h>
#include <linux/ip.h>
#include <linux/pkt_cls.h>
#include <linux/udp.h>

#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#include "atp_guard.h"
#include "atp_switch_shared.h"

#ifndef ATP_PROFILE
#error "ATP_PROFILE must be 62, 350 or 870"
#endif

/* Offsets in a frame without IP options. */
#define ATP_OFF_UDP (ETH_HLEN + 20)
#define ATP_OFF_HEADER (ETH_HLEN + 28)
#define ATP_OFF_VALUES (ATP_OFF_HEADER + ATP_HEADER_BYTES)
#define ATP_FRAGMENT 0x3fff        /* more fragments, or an offset */
#define ATP_FRAGMENT_OFFSET 0x1fff /* in units of 8 bytes: the UDP header is in the first fragment */
#define ATP_SEGMENTS_MAX 128u      /* of a superframe: UDP_MAX_SEGMENTS of the kernel */

/*
 * The kernel knows a fixed list of strings (include/linux/license.h) and lets only those use GPL-only helpers. "GPL"
 * names the one licence of the SPDX line above that is on it; no string there says "or Apache".
 */
char LICENSE[] SEC("license") = "GPL";

struct atp_aggregator {
    struct atp_aggregator_head head;
    uint64_t pairs[ATP_PROFILE / 2];
};

const volatile struct atp_settings atp_settings = {.stale_ns = ATP_STALE_NS};
struct atp_control_area atp_control_area;

struct {
    __uint(type, BPF_MAP_TYPE_ARRAY);
    __uint(max_entries, 1); /* set by the loader */
    __type(key, uint32_t);
    __type(value, struct atp_aggregator);
} atp_aggregators SEC(".maps");

#define ATP_CONTROL_MAP(name, entries, type_)                                                                          \
    struct {                                                                                                           \
        __uint(type, BPF_MAP_TYPE_ARRAY);                                                                              \
        __uint(map_flags, BPF_F_MMAPABLE);                                                                             \
        __uint(max_entries, entries);                                                                                  \
        __type(key, uint32_t);                                                                                         \
        __type(value, type_);                                                                                          \
    } name SEC(".maps")

ATP_CONTROL_MAP(atp_job_slots, ATP_JOBS, uint64_t); /* 0: unknown job, else 1 + index in atp_jobs */
ATP_CONTROL_MAP(atp_jobs, 2 * ATP_JOBS, struct atp_job_entry);
ATP_CONTROL_MAP(atp_group_slots, ATP_GROUPS, uint64_t); /* 0: no such group, else 1 + index in atp_groups */
ATP_CONTROL_MAP(atp_groups, 2 * ATP_GROUPS, struct atp_group_entry);
ATP_CONTROL_MAP(atp_queues, ATP_QUEUES, struct atp_queue);

struct {
    __uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
    __uint(max_entries, ATP_JOBS);
    __type(key, uint32_t);
    __type(value, struct atp_counters);
} atp_counters SEC(".maps");

/* Hosts of jobs by IPv4 address. Not preallocated: an entry that is replaced stays whole for those who read it. */
struct {
    __uint(type, BPF_MAP_TYPE_HASH);
    __uint(map_flags, BPF_F_NO_PREALLOC);
    __uint(max_entries, ATP_HOSTS);
    __type(key, uint32_t);
    __type(value, struct atp_host);
} atp_hosts SEC(".maps");

/* Ports of pods, whose addresses are known. */
struct {
    __uint(type, BPF_MAP_TYPE_HASH);
    __uint(map_flags, BPF_F_NO_PREALLOC);
    __uint(max_entries, 4096);
    __type(key, uint32_t);
    __type(value, struct atp_sources);
} atp_sources SEC(".maps");

/* By ingress port. Of many that misbehave those that stopped long ago are forgotten first. */
struct {
    __uint(type, BPF_MAP_TYPE_LRU_HASH);
    __uint(max_entries, 1024);
    __type(key, uint32_t);
    __type(value, struct atp_port_drops);
} atp_drops SEC(".maps");

/*
 * T is many ticks long, so ticks are fine enough for it; reading them is a load, where any clock of the kernel is a
 * call that costs a fifth of the whole packet.
 */
static __always_inline uint64_t atp_coarse_now(void) {
    uint64_t tick_ns = atp_control_area.tick_ns;

    if (atp_settings.test_clock)
        return *(volatile uint64_t *)&atp_control_area.test_clock_ns;
    if (tick_ns == 0)
        return bpf_ktime_get_coarse_ns();
    return bpf_jiffies64() * tick_ns + atp_control_area.base_ns;
}

static __always_inline uint64_t atp_fine_now(void) {
    if (atp_settings.test_clock)
        return *(volatile uint64_t *)&atp_control_area.test_clock_ns;
    return bpf_ktime_get_ns();
}

/* Whether nobody has looked after the tables for long: what they say of jobs and hosts may not be true any more. */
static __always_inline int atp_is_abandoned(void) {
    uint64_t expires_ns = atp_control_area.expires_ns;

    return expires_ns != 0 && atp_coarse_now() > expires_ns;
}

/*
 * The lock of an aggregator. Not bpf_spin_lock(): that turns interrupts off and on, which costs more than adding 62
 * values (39 of 96 ns, measured). It need not: these programs run with softirqs off and never in an interrupt, so no
 * holder is interrupted by another taker on its core. Where that does not hold (PREEMPT_RT, test runs of old kernels),
 * the wait is bounded and the packet is lost like any other.
 */
#define ATP_LOCK_TRIES 8192

static __always_inline int atp_try_lock(struct atp_aggregator_head *head) {
    return __sync_val_compare_and_swap(&head->lock, 0, 1) == 0;
}

struct atp_wait {
    struct atp_aggregator_head *head;
    uint64_t locked;
};

static long atp_lock_again(uint32_t i, struct atp_wait *wait) {
    (void)i;
    wait->locked = (uint64_t)atp_try_lock(wait->head);
    return (long)wait->locked;
}

static __always_inline int atp_lock(struct atp_aggregator_head *head) {
    struct atp_wait wait = {.head = head};

    if (atp_try_lock(head))
        return 1;
    bpf_loop(ATP_LOCK_TRIES, atp_lock_again, &wait, 0);
    return wait.locked != 0;
}

static __always_inline void atp_unlock(struct atp_aggregator_head *head) {
#ifdef ATP_ORDERED_STORES
    __asm__ volatile("" ::: "memory");
    *(volatile uint32_t *)&head->lock = 0;
#else
    (void)__sync_lock_test_and_set(&head->lock, 0);
#endif
}

static __always_inline struct atp_job_entry *atp_find_job(uint32_t job_id) {
    const uint64_t *slot = bpf_map_lookup_elem(&atp_job_slots, &job_id);
    uint32_t entry;

    if (!slot || *slot == 0)
        return NULL;
    entry = (uint32_t)*slot - 1;
    return bpf_map_lookup_elem(&atp_jobs, &entry);
}

static __always_inline uint64_t *atp_find_counters(uint32_t job_id) {
    struct atp_counters *counters = bpf_map_lookup_elem(&atp_counters, &job_id);

    return counters ? counters->c : NULL;
}

static __always_inline struct atp_queue *atp_find_queue(const struct atp_job_entry *job) {
    uint32_t slot = job->queue;

    if (slot == 0)
        return NULL;
    slot--;
    return bpf_map_lookup_elem(&atp_queues, &slot);
}

struct atp_frame {
    struct atp_header h;
    const struct atp_host *from; /* of a packet between hosts of a job; else NULL */
    uint32_t length;             /* ATP header and values, bytes */
    uint32_t bytes;              /* frame without padding */
    uint32_t ce;                 /* the IP header has the congestion mark */
};

enum atp_shape {
    ATP_SHAPE_FOREIGN, /* not to the ATP port */
    ATP_SHAPE_PLAIN,
    ATP_SHAPE_ODD, /* to the ATP port, but with IP options, or the first fragment of a datagram */
};

static __always_inline enum atp_shape atp_shape_of(const void *data, const void *data_end) {
    const struct ethhdr *eth = data;
    const struct iphdr *ip = data + ETH_HLEN;
    const struct udphdr *udp;
    uint32_t words;

    if (data + ATP_OFF_HEADER > data_end)
        return ATP_SHAPE_FOREIGN;
    words = ip->ihl;
    if (eth->h_proto != bpf_htons(ETH_P_IP) || ip->version != 4 || words < 5 || ip->protocol != IPPROTO_UDP ||
        (ip->frag_off & bpf_htons(ATP_FRAGMENT_OFFSET)))
        return ATP_SHAPE_FOREIGN;
    udp = (const void *)ip + 4 * words;
    if ((const void *)(udp + 1) > data_end || udp->dest != bpf_htons(ATP_UDP_PORT))
        return ATP_SHAPE_FOREIGN;
    return words == 5 && !(ip->frag_off & bpf_htons(ATP_FRAGMENT)) ? ATP_SHAPE_PLAIN : ATP_SHAPE_ODD;
}

/* Lengths come from the IP header, so the padding of a short frame does not count. 0: malformed, not ours to judge. */
static __always_inline int atp_lengths(const void *data, uint32_t frame_bytes, struct atp_frame *f) {
    const struct iphdr *ip = data + ETH_HLEN;
    const struct udphdr *udp = data + ATP_OFF_UDP;
    uint32_t total = bpf_ntohs(ip->tot_len);

    if (total < 28 || total + ETH_HLEN > frame_bytes || bpf_ntohs(udp->len) != total - 20)
        return 0;
    f->bytes = total + ETH_HLEN;
    f->length = total - 28;
    f->ce = (ip->tos & 3) == 3;
    return 1;
}

/* From the four words of an ATP header. */
static __always_inline void atp_read_header(const uint32_t *w, struct atp_header *h) {
    h->key = bpf_ntohl(w[0]);
    h->bitmap0 = bpf_ntohl(w[1]);
    h->bitmap1 = bpf_ntohl(w[2]);
    h->flags = bpf_ntohl(w[3]);
}

static __always_inline void atp_write_header(void *data, const struct atp_header *h) {
    struct udphdr *udp = data + ATP_OFF_UDP;
    uint32_t *w = data + ATP_OFF_HEADER;

    w[1] = bpf_htonl(h->bitmap0);
    w[2] = bpf_htonl(h->bitmap1);
    w[3] = bpf_htonl(h->flags);
    udp->check = 0;
}

/* ---- guard ---- */

static __always_inline uint32_t atp_source(const void *data) {
    const struct iphdr *ip = data + ETH_HLEN;

    return bpf_ntohl(ip->saddr);
}

static __always_inline const struct atp_host *atp_find_host(uint32_t address) {
    return bpf_map_lookup_elem(&atp_hosts, &address);
}

/* A packet that is dropped is counted where it came in: that names who sent it. */
static __noinline void atp_count_drop(uint32_t port, uint32_t source, enum atp_drop reason) {
    struct atp_port_drops *drops = bpf_map_lookup_elem(&atp_drops, &port);

    if (!drops) {
        struct atp_port_drops none = {.port = port};
        bpf_map_update_elem(&atp_drops, &port, &none, BPF_NOEXIST);
        drops = bpf_map_lookup_elem(&atp_drops, &port);
    }
    if (!drops || reason >= ATP_DROPS)
        return;
    drops->last_source = source;
    __sync_fetch_and_add(&drops->dropped[reason], 1);
}

static __always_inline enum atp_drop atp_drop_of(enum atp_guard_verdict verdict) {
    return verdict == ATP_GUARD_SOURCE ? ATP_D_SOURCE : ATP_D_DESTINATION;
}

/* Whether the guard lets a packet in that came in at a port; `f->from` is set for one between hosts of a job. */
static __always_inline int atp_is_let_in(const void *data, uint32_t port, struct atp_frame *f) {
    const struct iphdr *ip = data + ETH_HLEN;
    const uint32_t source = atp_source(data);
    const struct atp_host *from = atp_find_host(source);
    enum atp_guard_verdict verdict = atp_guard(from, atp_find_host(bpf_ntohl(ip->daddr)), port);

    if (verdict == ATP_GUARD_FOREIGN && !atp_is_source(bpf_map_lookup_elem(&atp_sources, &port), source))
        verdict = ATP_GUARD_SOURCE; /* the addressee may be a host that another switch guards */
    f->from = verdict == ATP_GUARD_JOB ? from : NULL;
    if (verdict == ATP_GUARD_JOB || verdict == ATP_GUARD_FOREIGN)
        return 1;
    atp_count_drop(port, source, atp_drop_of(verdict));
    return 0;
}

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

/* ---- tc ---- */

/* Rewrite the destination of the copy that is about to leave. */
static __always_inline int atp_readdress(struct __sk_buff *skb, const struct atp_replica *replica) {
    void *data = (void *)(long)skb->data;
    void *data_end = (void *)(long)skb->data_end;
    struct ethhdr *eth = data;
    struct iphdr *ip = data + ETH_HLEN;
    struct udphdr *udp = data + ATP_OFF_UDP;
    uint32_t before, after, sum;

    if (data + ATP_OFF_HEADER > data_end)
        return -1;
    __builtin_memcpy(eth->h_dest, replica->dst_mac, ETH_ALEN);
    before = ip->daddr;
    after = bpf_htonl(replica->dst_ip);
    /* RFC 1624: HC' = ~(~HC + ~m + m'), in 16-bit words of either byte order. */
    sum = (uint16_t)~ip->check + (uint16_t)~before + (uint16_t)(~before >> 16) + (uint16_t)after + (after >> 16);
    sum = (sum & 0xffff) + (sum >> 16);
    sum = (sum & 0xffff) + (sum >> 16);
    ip->check = (uint16_t)~sum;
    ip->daddr = after;
    if (replica->dst_port)
        udp->dest = bpf_htons(replica->dst_port);
    udp->check = 0;
    return 0;
}

static __always_inline int atp_replicate(struct __sk_buff *skb, const struct atp_job_entry *job, uint32_t bytes,
                                         uint64_t *c) {
    const struct atp_group_entry *group;
    uint32_t id = job->group;
    const uint64_t *slot;
    uint32_t entry;

    c[ATP_C_ACKS]++;
    if (id == 0) {
        c[ATP_C_BYTES_OUT] += bytes;
        return TC_ACT_UNSPEC;
    }
    slot = bpf_map_lookup_elem(&atp_group_slots, &id);
    if (!slot || *slot == 0)
        return TC_ACT_SHOT; /* a group without members */
    entry = (uint32_t)*slot - 1;
    group = bpf_map_lookup_elem(&atp_groups, &entry);
    if (!group)
        return TC_ACT_SHOT;
    for (uint32_t i = 0; i < ATP_REPLICAS_MAX; i++) {
        if (i >= group->count)
            break;
        if (atp_readdress(skb, &group->replica[i]))
            break;
        if (bpf_clone_redirect(skb, group->replica[i].port, 0) == 0)
            c[ATP_C_BYTES_OUT] += bytes;
    }
    return TC_ACT_SHOT;
}

/* What a superframe holds: each of its packets must be its sender's own. */
struct atp_segments {
    struct __sk_buff *skb;
    const struct atp_host *from;
    uint32_t size; /* bytes of a segment */
    uint32_t forged;
};

static long atp_check_segment(uint32_t i, struct atp_segments *s) {
    struct atp_header h;
    uint32_t w[4];

    if (bpf_skb_load_bytes(s->skb, ATP_OFF_HEADER + i * s->size, w, sizeof(w))) {
        s->forged = 1;
        return 1;
    }
    atp_read_header(w, &h);
    s->forged = !atp_is_own(s->from, &h);
    return s->forged;
}

/* Several packets in one buffer are not aggregated, so they must be such as need no switch. */
static __always_inline int atp_superframe_is_own(struct __sk_buff *skb, const struct atp_host *from) {
    struct atp_segments s = {.skb = skb, .from = from, .size = skb->gso_size};
    uint32_t bytes = skb->len - ATP_OFF_HEADER;

    if (skb->len <= ATP_OFF_HEADER || s.size < ATP_HEADER_BYTES || bytes > s.size * ATP_SEGMENTS_MAX)
        return 0;
    bpf_loop((bytes + s.size - 1) / s.size, atp_check_segment, &s, 0);
    return !s.forged;
}

static __always_inline int atp_tc_main(struct __sk_buff *skb, const int acks_only) {
    void *data = (void *)(long)skb->data;
    void *data_end = (void *)(long)skb->data_end;
    const uint32_t port = skb->ifindex;
    struct atp_admitted admitted = {0};
    struct atp_frame f = {0};
    struct atp_job_entry *job = NULL;
    enum atp_shape shape;
    uint32_t wanted, source;
    uint64_t *c = NULL;

    shape = atp_shape_of(data, data_end);
    if (shape == ATP_SHAPE_FOREIGN) /* atp_tc_entry() has seen that it is not; this is for the verifier */
        return TC_ACT_UNSPEC;
    source = atp_source(data);
    if (!atp_is_let_in(data, port, &f))
        return TC_ACT_SHOT;
    if (shape == ATP_SHAPE_ODD)
        goto odd;
    if (skb->gso_size) {
        c = atp_find_counters(0);
        if (c && !acks_only)
            c[ATP_C_PASSED_GSO]++;
        if (f.from && !atp_superframe_is_own(skb, f.from))
            goto forged;
        return TC_ACT_UNSPEC;
    }
    if (!atp_lengths(data, skb->len, &f))
        goto odd;
    if (f.length < ATP_HEADER_BYTES) {
        if (f.from || acks_only || !atp_rejects_short(&f))
            goto odd;
        return TC_ACT_SHOT;
    }
    wanted = f.bytes;
    if (wanted > ATP_OFF_VALUES + 4 * ATP_PROFILE)
        wanted = ATP_OFF_VALUES; /* too long for any job here: the header is enough to count it */
    if (data + wanted > data_end) {
        if (bpf_skb_pull_data(skb, wanted))
            goto odd;
        data = (void *)(long)skb->data;
        data_end = (void *)(long)skb->data_end;
    }
    if (data + ATP_OFF_VALUES > data_end)
        goto odd;
    atp_read_header(data + ATP_OFF_HEADER, &f.h);
    if (acks_only && (f.h.flags & (ATP_F_ACK | ATP_F_RAW)) != ATP_F_ACK)
        return TC_ACT_UNSPEC; /* judged in XDP, and a sum by now perhaps */
    switch (atp_meet_job(&f, &job, &c)) {
    case ATP_MET_FORGED:
        goto forged;
    case ATP_MET_NOBODY:
        return TC_ACT_UNSPEC;
    case ATP_MET_JOB:
        break;
    }
    switch (atp_admit(job, &f.h, port, f.length, job->hosts != 0, c, &admitted)) {
    case ATP_ACK:
        atp_release_by_ack(&f.h, c);
        return atp_replicate(skb, job, f.bytes, c);
    case ATP_ACK_ONE:
        atp_release_by_ack(&f.h, c);
        c[ATP_C_BYTES_OUT] += f.bytes;
        return TC_ACT_UNSPEC;
    case ATP_DROP:
        atp_count_drop(port, source, ATP_D_ADMISSION);
        return TC_ACT_SHOT;
    case ATP_AGGREGATE:
        if (acks_only || !atp_aggregate(data, data_end, &f, job, &admitted, c))
            return TC_ACT_SHOT;
        break;
    case ATP_PASS:
        break;
    }
    atp_account(job, &f, c);
    return TC_ACT_UNSPEC;

odd: /* an end host would not make sense of it; between others it is none of ours */
    if (!f.from)
        return TC_ACT_UNSPEC;
    atp_count_drop(port, source, ATP_D_MALFORMED);
    return TC_ACT_SHOT;
forged:
    atp_count_drop(port, source, ATP_D_FORGED);
    return TC_ACT_SHOT;
}

SEC("tc")
int atp_tc_work(struct __sk_buff *skb) {
    return atp_tc_main(skb, 0);
}

SEC("tc")
int atp_tc_ack_work(struct __sk_buff *skb) {
    return atp_tc_main(skb, 1);
}

enum atp_tail_call {
    ATP_TAIL_WORK,
    ATP_TAIL_ACK_WORK,
};

struct {
    __uint(type, BPF_MAP_TYPE_PROG_ARRAY);
    __uint(max_entries, 2);
    __uint(key_size, sizeof(uint32_t));
    __array(values, int(void *));
} atp_tail_calls SEC(".maps") = {
    .values = {[ATP_TAIL_WORK] = (void *)&atp_tc_work, [ATP_TAIL_ACK_WORK] = (void *)&atp_tc_ack_work},
};

/*
 * Whether a frame is to the ATP port. With a VLAN tag, which the kernel keeps beside the frame, it is ordinary traffic.
 * Everything up to the UDP header is in reach then.
 */
static __always_inline enum atp_shape atp_tc_shape(struct __sk_buff *skb) {
    void *data = (void *)(long)skb->data;
    void *data_end = (void *)(long)skb->data_end;

    if (skb->protocol != bpf_htons(ETH_P_IP) || skb->vlan_present)
        return ATP_SHAPE_FOREIGN;
    if (data + ATP_OFF_HEADER > data_end) {
        if (skb->len < ATP_OFF_HEADER || bpf_skb_pull_data(skb, ATP_OFF_HEADER))
            return ATP_SHAPE_FOREIGN;
        data = (void *)(long)skb->data;
        data_end = (void *)(long)skb->data_end;
        if (data + ATP_OFF_HEADER > data_end)
            return ATP_SHAPE_FOREIGN;
    }
    if (*(const uint8_t *)(data + ETH_HLEN) != 0x45) { /* IP options: the UDP header is behind them */
        if (bpf_skb_pull_data(skb, skb->len < ATP_OFF_HEADER + 40 ? skb->len : ATP_OFF_HEADER + 40))
            return ATP_SHAPE_FOREIGN;
        data = (void *)(long)skb->data;
        data_end = (void *)(long)skb->data_end;
    }
    return atp_shape_of(data, data_end);
}

/*
 * Everybody's traffic passes here. A program that writes to packets makes the kernel unshare each one that it meets,
 * before its first instruction; so this one only reads, and leaves ATP to another.
 */
static __always_inline int atp_tc_entry(struct __sk_buff *skb, const uint32_t next) {
    if (atp_tc_shape(skb) != ATP_SHAPE_FOREIGN && !atp_is_abandoned())
        bpf_tail_call(skb, &atp_tail_calls, next);
    return TC_ACT_UNSPEC;
}

SEC("tc")
int atp_tc(struct __sk_buff *skb) {
    return atp_tc_entry(skb, ATP_TAIL_WORK);
}

/* Beside the XDP program of the same port, which has seen everything but the ACKs. */
SEC("tc")
int atp_tc_ack(struct __sk_buff *skb) {
    return atp_tc_entry(skb, ATP_TAIL_ACK_WORK);
}

/*
 * At the egress of a port: what is about to reach a host of a job behind it, by whatever way it came. Programs at the
 * ports where it came in have seen most of it; this sees what came in elsewhere, from this machine itself too. The port
 * where it came in is not always told: a bridge that routes puts itself there. What is told of a pod's port holds.
 */
SEC("tc")
int atp_tc_guard(struct __sk_buff *skb) {
    uint32_t port = skb->ingress_ifindex;
    enum atp_guard_verdict verdict;
    const struct atp_host *to;
    enum atp_shape shape = atp_tc_shape(skb);
    void *data = (void *)(long)skb->data;
    void *data_end = (void *)(long)skb->data_end;
    const struct iphdr *ip = data + ETH_HLEN;
    const struct atp_host *from;

    if (shape == ATP_SHAPE_FOREIGN || data + ATP_OFF_HEADER > data_end || atp_is_abandoned())
        return TC_ACT_UNSPEC;
    to = atp_find_host(bpf_ntohl(ip->daddr));
    if (!to || to->port != skb->ifindex)
        return TC_ACT_UNSPEC;
    from = atp_find_host(bpf_ntohl(ip->saddr));
    verdict = atp_guard(from, to, from && !bpf_map_lookup_elem(&atp_sources, &port) ? from->port : port);
    if (verdict == ATP_GUARD_JOB && shape == ATP_SHAPE_PLAIN)
        return TC_ACT_UNSPEC;
    atp_count_drop(port, bpf_ntohl(ip->saddr), verdict == ATP_GUARD_JOB ? ATP_D_MALFORMED : atp_drop_of(verdict));
    return TC_ACT_SHOT;
}

/* ---- XDP ---- */

static __always_inline int atp_xdp_main(struct xdp_md *ctx) {
    void *data = (void *)(long)ctx->data;
    void *data_end = (void *)(long)ctx->data_end;
    const uint32_t port = ctx->ingress_ifindex;
    struct atp_admitted admitted = {0};
    struct atp_frame f = {0};
    struct atp_job_entry *job = NULL;
    enum atp_shape shape;
    uint32_t source;
    uint64_t *c = NULL;

    shape = atp_shape_of(data, data_end);
    if (shape == ATP_SHAPE_FOREIGN || data + ATP_OFF_HEADER > data_end || atp_is_abandoned())
        return XDP_PASS;
    source = atp_source(data);
    if (!atp_is_let_in(data, port, &f))
        return XDP_DROP;
    if (shape == ATP_SHAPE_ODD || !atp_lengths(data, (uint32_t)(data_end - data), &f))
        goto odd;
    if (f.length < ATP_HEADER_BYTES) {
        if (f.from || !atp_rejects_short(&f))
            goto odd;
        return XDP_DROP;
    }
    if (data + ATP_OFF_VALUES > data_end)
        goto odd;
    atp_read_header(data + ATP_OFF_HEADER, &f.h);
    if ((f.h.flags & (ATP_F_ACK | ATP_F_RAW)) == ATP_F_ACK)
        return XDP_PASS; /* for atp_tc_ack, which judges it */
    switch (atp_meet_job(&f, &job, &c)) {
    case ATP_MET_FORGED:
        goto forged;
    case ATP_MET_NOBODY:
        return XDP_PASS;
    case ATP_MET_JOB:
        break;
    }
    switch (atp_admit(job, &f.h, port, f.length, job->hosts != 0, c, &admitted)) {
    case ATP_AGGREGATE:
        if (!atp_aggregate(data, data_end, &f, job, &admitted, c))
            return XDP_DROP;
        break;
    case ATP_PASS:
        break;
    case ATP_ACK:
    case ATP_ACK_ONE:
    case ATP_DROP:
        atp_count_drop(port, source, ATP_D_ADMISSION);
        return XDP_DROP;
    }
    atp_account(job, &f, c);
    return XDP_PASS;

odd:
    if (!f.from)
        return XDP_PASS;
    atp_count_drop(port, source, ATP_D_MALFORMED);
    return XDP_DROP;
forged:
    atp_count_drop(port, source, ATP_D_FORGED);
    return XDP_DROP;
}

SEC("xdp")
int atp_xdp(struct xdp_md *ctx) {
    return atp_xdp_main(ctx);
}

/* ---- control ---- */

static __always_inline void atp_copy_out(const struct atp_aggregator *agg) {
    const uint64_t *from = (const uint64_t *)agg;

    ATP_ROLLED
    for (uint32_t i = 0; i < sizeof(*agg) / sizeof(*from); i++)
        atp_control_area.copy[i] = from[i];
}

static long atp_scan_one(uint32_t i, uint64_t *now_ns) {
    const uint32_t op = atp_control_area.op;
    const uint32_t job_id = atp_control_area.job_id;
    uint32_t index = atp_control_area.start + i;
    struct atp_aggregator *agg = bpf_map_lookup_elem(&atp_aggregators, &index);

    if (!agg)
        return 1;
    if (agg->head.key == 0 && op != ATP_SCAN_READ)
        return 0;
    if (!atp_lock(&agg->head)) {
        atp_control_area.busy++;
        return 0;
    }
    if (op == ATP_SCAN_READ) {
        atp_copy_out(agg);
    } else if (agg->head.key != 0 &&
               (op == ATP_SCAN_SWEEP ? atp_is_stale(&agg->head, *now_ns, atp_settings.stale_ns)
                                     : job_id == 0 || agg->head.key >> ATP_JOB_ID_SHIFT == job_id)) {
        atp_control_area.found++;
        if (op != ATP_SCAN_COUNT)
            atp_release(&agg->head);
    }
    atp_unlock(&agg->head);
    return 0;
}

SEC("tc")
int atp_scan(struct __sk_buff *skb) {
    uint64_t now_ns = atp_coarse_now();

    (void)skb;
    atp_control_area.seen_jiffies = bpf_jiffies64();
    atp_control_area.seen_ns = bpf_ktime_get_coarse_ns();
    atp_control_area.found = 0;
    atp_control_area.busy = 0;
    bpf_loop(atp_control_area.end - atp_control_area.start, atp_scan_one, &now_ns, 0);
    return 0;
}

#ifdef ATP_BENCH
/*
 * Benchmarks only: turns one buffer that is run again and again into the packets of 31 workers out of a rack of 32, one
 * sequence after the other, so that every run takes the path that allocates or adds and none completes.
 */
SEC("xdp")
int atp_xdp_bench(struct xdp_md *ctx) {
    void *data = (void *)(long)ctx->data;
    void *data_end = (void *)(long)ctx->data_end;
    uint32_t *w = data + ATP_OFF_HEADER;
    uint32_t bit, word;

    if (data + ATP_OFF_VALUES > data_end)
        return XDP_ABORTED;
    bit = bpf_ntohl(w[1]) << 1;
    if (bit == 0x80000000u) {
        bit = 1;
        word = bpf_ntohl(w[0]);
        w[0] = bpf_htonl((word & 0xff000000u) | ((word + 1) & ATP_SEQUENCE_MASK));
        word = bpf_ntohl(w[3]);
        w[3] = bpf_htonl((word & 0xffff0000u) | ((word + 1) & (atp_settings.aggregators - 1)));
    }
    w[1] = bpf_htonl(bit);
    return atp_xdp_main(ctx);
}
#endif
