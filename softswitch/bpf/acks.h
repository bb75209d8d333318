/* SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 */
/*
 * ACKs: one copy for each member of the job's multicast group. In tc, also where XDP aggregates: clones leave through
 * the egress queues, so rate limits hold, and any number of replicas may sit behind one port.
 */
#ifndef ATP_BPF_ACKS_H
#define ATP_BPF_ACKS_H

#include <bpf/bpf_helpers.h>

#include "bpf/ctx.h"
#include "bpf/frame.h"
#include "bpf/maps.h"

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

/* The original goes no further: all who wait for it are members, or there is no group. */
static __always_inline enum atp_verdict atp_replicate(struct __sk_buff *skb, const struct atp_job_entry *job,
                                                      uint32_t bytes, uint64_t *c) {
    const struct atp_group_entry *group;
    uint32_t id = job->group;
    const uint64_t *slot;
    uint32_t entry;

    c[ATP_C_ACKS]++;
    if (id == 0) {
        c[ATP_C_BYTES_OUT] += bytes;
        return ATP_VERDICT_PASS;
    }
    slot = bpf_map_lookup_elem(&atp_group_slots, &id);
    if (!slot || *slot == 0)
        return ATP_VERDICT_DROP; /* a group without members */
    entry = (uint32_t)*slot - 1;
    group = bpf_map_lookup_elem(&atp_groups, &entry);
    if (!group)
        return ATP_VERDICT_DROP;
    for (uint32_t i = 0; i < ATP_REPLICAS_MAX; i++) {
        if (i >= group->count)
            break;
        if (atp_readdress(skb, &group->replica[i]))
            break;
        if (bpf_clone_redirect(skb, group->replica[i].port, 0) == 0)
            c[ATP_C_BYTES_OUT] += bytes;
    }
    return ATP_VERDICT_DROP;
}

#endif
