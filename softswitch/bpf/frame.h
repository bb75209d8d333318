/* SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 */
/* From Ethernet to the ATP header: what a frame is, and what its headers say. */
#ifndef ATP_BPF_FRAME_H
#define ATP_BPF_FRAME_H

#include <linux/if_ether.h>
#include <linux/in.h>
#include <linux/ip.h>
#include <linux/udp.h>

#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#include "core/guard.h"
#include "core/header.h"

/* Offsets in a frame without IP options. */
#define ATP_OFF_UDP (ETH_HLEN + 20)
#define ATP_OFF_HEADER (ETH_HLEN + 28)
#define ATP_OFF_VALUES (ATP_OFF_HEADER + ATP_HEADER_BYTES)
#define ATP_FRAGMENT 0x3fff        /* more fragments, or an offset */
#define ATP_FRAGMENT_OFFSET 0x1fff /* in units of 8 bytes: the UDP header is in the first fragment */

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

static __always_inline uint32_t atp_source(const void *data) {
    const struct iphdr *ip = data + ETH_HLEN;

    return bpf_ntohl(ip->saddr);
}

#endif
