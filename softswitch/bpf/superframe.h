/* SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 */
/*
 * Superframes (UDP segmentation offload): tc sees many packets in one buffer. They are not aggregated, so each must be
 * one that needs no switch.
 */
#ifndef ATP_BPF_SUPERFRAME_H
#define ATP_BPF_SUPERFRAME_H

#include <linux/bpf.h>

#include <bpf/bpf_helpers.h>

#include "bpf/frame.h"

#define ATP_SEGMENTS_MAX 128u /* UDP_MAX_SEGMENTS of the kernel */

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

/* Whether each packet of a superframe is its sender's own. */
static __always_inline int atp_superframe_is_own(struct __sk_buff *skb, const struct atp_host *from) {
    struct atp_segments s = {.skb = skb, .from = from, .size = skb->gso_size};
    uint32_t bytes = skb->len - ATP_OFF_HEADER;

    if (skb->len <= ATP_OFF_HEADER || s.size < ATP_HEADER_BYTES || bytes > s.size * ATP_SEGMENTS_MAX)
        return 0;
    bpf_loop((bytes + s.size - 1) / s.size, atp_check_segment, &s, 0);
    return !s.forged;
}

#endif
