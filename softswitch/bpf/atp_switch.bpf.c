/* SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 */
/*
 * The software switch in the kernel: tc programs for the host-side veths of pods, an XDP program for NICs. Compiled
 * once per profile; ATP_PROFILE is the largest number of values per packet. What is done with a frame is the same at
 * both hooks (handle.h).
 *
 * What may pass at all is the guard's to say, here for what comes in, and at the egress of a pod's veth for what would
 * reach a job's host by another way.
 */
#include <linux/bpf.h>
#include <linux/pkt_cls.h>

#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>

#include "bpf/clock.h"
#include "bpf/ctx.h"
#include "bpf/frame.h"
#include "bpf/guard.h"
#include "bpf/handle.h"
#include "bpf/maps.h"
#include "bpf/scan.h"

/*
 * The kernel knows a fixed list of strings (include/linux/license.h) and lets only those use GPL-only helpers. "GPL"
 * names the one licence of the SPDX line above that is on it; no string there says "or Apache".
 */
char LICENSE[] SEC("license") = "GPL";

/* ---- tc ---- */

static __always_inline int atp_tc_main(struct __sk_buff *skb, const uint32_t duties) {
    struct atp_ctx ctx = atp_ctx_of_skb(skb);
    const enum atp_shape shape = atp_shape_of(ctx.data, ctx.data_end);

    if (shape == ATP_SHAPE_FOREIGN) /* atp_tc_entry() has seen that it is not; this is for the verifier */
        return TC_ACT_UNSPEC;
    return atp_ctx_answer(&ctx, atp_handle(&ctx, shape, duties));
}

SEC("tc")
int atp_tc_work(struct __sk_buff *skb) {
    return atp_tc_main(skb, ATP_DUTY_GRADIENTS | ATP_DUTY_ACKS);
}

SEC("tc")
int atp_tc_ack_work(struct __sk_buff *skb) {
    return atp_tc_main(skb, ATP_DUTY_ACKS);
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
static __always_inline enum atp_shape atp_tc_shape(struct atp_ctx *ctx) {
    const struct __sk_buff *skb = atp_ctx_skb(ctx);

    if (skb->protocol != bpf_htons(ETH_P_IP) || skb->vlan_present)
        return ATP_SHAPE_FOREIGN;
    if (ctx->data + ATP_OFF_HEADER > ctx->data_end && (skb->len < ATP_OFF_HEADER || !atp_ctx_pull(ctx, ATP_OFF_HEADER)))
        return ATP_SHAPE_FOREIGN;
    if (ctx->data + ATP_OFF_HEADER > ctx->data_end)
        return ATP_SHAPE_FOREIGN;
    if (*(const uint8_t *)(ctx->data + ETH_HLEN) != 0x45) { /* IP options: the UDP header is behind them */
        if (bpf_skb_pull_data(atp_ctx_skb(ctx), skb->len < ATP_OFF_HEADER + 40 ? skb->len : ATP_OFF_HEADER + 40))
            return ATP_SHAPE_FOREIGN;
        atp_ctx_reach(ctx);
    }
    return atp_shape_of(ctx->data, ctx->data_end);
}

/*
 * Everybody's traffic passes here. A program that writes to packets makes the kernel unshare each one that it meets,
 * before its first instruction; so this one only reads, and leaves ATP to another.
 */
static __always_inline int atp_tc_entry(struct __sk_buff *skb, const uint32_t next) {
    struct atp_ctx ctx = atp_ctx_of_skb(skb);

    if (atp_tc_shape(&ctx) != ATP_SHAPE_FOREIGN && !atp_is_abandoned())
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
    struct atp_ctx ctx = atp_ctx_of_skb(skb);
    const enum atp_shape shape = atp_tc_shape(&ctx);
    const struct iphdr *ip = ctx.data + ETH_HLEN;
    enum atp_guard_verdict verdict;
    const struct atp_host *from, *to;

    if (shape == ATP_SHAPE_FOREIGN || ctx.data + ATP_OFF_HEADER > ctx.data_end || atp_is_abandoned())
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

/* ACKs pass, for atp_tc_ack at the same port. */
static __always_inline int atp_xdp_main(struct xdp_md *xdp) {
    struct atp_ctx ctx = atp_ctx_of_xdp(xdp);
    const enum atp_shape shape = atp_shape_of(ctx.data, ctx.data_end);

    if (shape == ATP_SHAPE_FOREIGN || ctx.data + ATP_OFF_HEADER > ctx.data_end || atp_is_abandoned())
        return XDP_PASS;
    return atp_ctx_answer(&ctx, atp_handle(&ctx, shape, ATP_DUTY_GRADIENTS));
}

SEC("xdp")
int atp_xdp(struct xdp_md *xdp) {
    return atp_xdp_main(xdp);
}

/* ---- control ---- */

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
