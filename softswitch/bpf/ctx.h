/* SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 */
/*
 * A frame at either hook of the kernel, so that tc and XDP share what is done with it. `hook` is a constant wherever
 * these functions are inlined: the compiler keeps one side of each, and the verifier sees accesses to one kind of
 * context.
 */
#ifndef ATP_BPF_CTX_H
#define ATP_BPF_CTX_H

#include <linux/bpf.h>
#include <linux/pkt_cls.h>

#include <bpf/bpf_helpers.h>

enum atp_hook {
    ATP_HOOK_TC,
    ATP_HOOK_XDP,
};

struct atp_ctx {
    enum atp_hook hook;
    void *buffer; /* struct __sk_buff or struct xdp_md */
    /* What is in reach of the frame. */
    void *data;
    void *data_end;
};

enum atp_verdict {
    ATP_VERDICT_PASS,
    ATP_VERDICT_DROP,
};

static __always_inline struct __sk_buff *atp_ctx_skb(const struct atp_ctx *ctx) {
    return ctx->buffer;
}

static __always_inline struct xdp_md *atp_ctx_xdp(const struct atp_ctx *ctx) {
    return ctx->buffer;
}

/* Again after whatever may have moved the frame. */
static __always_inline void atp_ctx_reach(struct atp_ctx *ctx) {
    if (ctx->hook == ATP_HOOK_TC) {
        ctx->data = (void *)(long)atp_ctx_skb(ctx)->data;
        ctx->data_end = (void *)(long)atp_ctx_skb(ctx)->data_end;
    } else {
        ctx->data = (void *)(long)atp_ctx_xdp(ctx)->data;
        ctx->data_end = (void *)(long)atp_ctx_xdp(ctx)->data_end;
    }
}

static __always_inline struct atp_ctx atp_ctx_of_skb(struct __sk_buff *skb) {
    struct atp_ctx ctx = {.hook = ATP_HOOK_TC, .buffer = skb};

    atp_ctx_reach(&ctx);
    return ctx;
}

static __always_inline struct atp_ctx atp_ctx_of_xdp(struct xdp_md *xdp) {
    struct atp_ctx ctx = {.hook = ATP_HOOK_XDP, .buffer = xdp};

    atp_ctx_reach(&ctx);
    return ctx;
}

/* Where the frame came in. */
static __always_inline uint32_t atp_ctx_port(const struct atp_ctx *ctx) {
    return ctx->hook == ATP_HOOK_TC ? atp_ctx_skb(ctx)->ifindex : atp_ctx_xdp(ctx)->ingress_ifindex;
}

static __always_inline uint32_t atp_ctx_bytes(const struct atp_ctx *ctx) {
    return ctx->hook == ATP_HOOK_TC ? atp_ctx_skb(ctx)->len : (uint32_t)(ctx->data_end - ctx->data);
}

/* Bring so many bytes into reach. XDP has the whole frame there, for these programs take no frame of several buffers.
 */
static __always_inline int atp_ctx_pull(struct atp_ctx *ctx, uint32_t bytes) {
    if (ctx->hook == ATP_HOOK_XDP || ctx->data + bytes <= ctx->data_end)
        return 1;
    if (bpf_skb_pull_data(atp_ctx_skb(ctx), bytes))
        return 0;
    atp_ctx_reach(ctx);
    return 1;
}

/* Several packets in one buffer (UDP segmentation offload). XDP gets them one by one. */
static __always_inline int atp_ctx_is_superframe(const struct atp_ctx *ctx) {
    return ctx->hook == ATP_HOOK_TC && atp_ctx_skb(ctx)->gso_size != 0;
}

/*
 * What the kernel is told. Whatever passes tc is TC_ACT_UNSPEC, not TC_ACT_OK: programs of others on the same hook have
 * their turn.
 */
static __always_inline int atp_ctx_answer(const struct atp_ctx *ctx, enum atp_verdict verdict) {
    if (ctx->hook == ATP_HOOK_TC)
        return verdict == ATP_VERDICT_PASS ? TC_ACT_UNSPEC : TC_ACT_SHOT;
    return verdict == ATP_VERDICT_PASS ? XDP_PASS : XDP_DROP;
}

#endif
