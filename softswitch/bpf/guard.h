/* SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 */
/* The guard (core/guard.h) on frames: who may send what comes in at a port, and the count of what may not pass. */
#ifndef ATP_BPF_GUARD_H
#define ATP_BPF_GUARD_H

#include "bpf/frame.h"
#include "bpf/maps.h"

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

#endif
