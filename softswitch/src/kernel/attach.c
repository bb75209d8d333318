/* SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 */
/* Programs at interfaces: tc at ingress and egress, XDP; put on, taken off, replaced where an earlier switch left some.
 */
#include <errno.h>
#include <linux/if_link.h>
#include <stdlib.h>
#include <unistd.h>

#include "kernel.h"

/* BPF_TCX_INGRESS and BPF_TCX_EGRESS, which the headers of Linux 6.1 do not have. */
#define TCX_INGRESS 46
#define TCX_EGRESS 47
/* Our place among the classic tc filters of an interface. */
#define TC_HANDLE 0x1u
#define TC_PRIORITY 10800u

static struct attachment *find_attachment(struct atp_bpf *b, uint32_t ifindex) {
    for (uint32_t i = 0; i < b->attached; i++)
        if (b->attachments[i].ifindex == ifindex)
            return &b->attachments[i];
    return NULL;
}

static void detach_classic_tc(uint32_t ifindex, enum bpf_tc_attach_point where) {
    LIBBPF_OPTS(bpf_tc_hook, hook, .ifindex = (int)ifindex, .attach_point = where);
    LIBBPF_OPTS(bpf_tc_opts, filter, .handle = TC_HANDLE, .priority = TC_PRIORITY);

    /* The clsact qdisc stays: others may have filters there, and an empty one does nothing. */
    (void)bpf_tc_detach(&hook, &filter);
}

/* Returns 0 and the tcx link, or -1 in its place for a classic filter (kernels before 6.6). */
static int attach_tc(int program, uint32_t ifindex, enum bpf_tc_attach_point where, bool classic, int *link) {
    const enum bpf_attach_type tcx = (enum bpf_attach_type)(where == BPF_TC_INGRESS ? TCX_INGRESS : TCX_EGRESS);
    LIBBPF_OPTS(bpf_tc_hook, hook, .ifindex = (int)ifindex, .attach_point = where);
    LIBBPF_OPTS(bpf_tc_opts, filter, .prog_fd = program, .handle = TC_HANDLE, .priority = TC_PRIORITY,
                .flags = BPF_TC_F_REPLACE);
    int result;

    *link = classic ? -EOPNOTSUPP : bpf_link_create(program, (int)ifindex, tcx, NULL);
    if (*link >= 0)
        return 0;
    if (*link != -EINVAL && *link != -EOPNOTSUPP)
        return *link;
    *link = -1;
    result = bpf_tc_hook_create(&hook);
    if (result != 0 && result != -EEXIST)
        return result;
    return bpf_tc_attach(&hook, &filter);
}

static int attach_xdp(int program, uint32_t ifindex, int *link) {
    LIBBPF_OPTS(bpf_link_create_opts, generic, .flags = XDP_FLAGS_SKB_MODE);

    *link = bpf_link_create(program, (int)ifindex, BPF_XDP, NULL);
    if (*link < 0 && *link != -EBUSY && *link != -EPERM && *link != -ENODEV)
        *link = bpf_link_create(program, (int)ifindex, BPF_XDP, &generic); /* the driver cannot, or not now */
    return *link < 0 ? *link : 0;
}

static void detach_link(struct atp_bpf *b, uint32_t ifindex, enum atp_pinned_hook hook, int link) {
    if (b->pins != NULL)
        atp_unpin_link(b->pins, ifindex, hook);
    close(link);
}

static enum atp_pinned_hook ingress_hook(enum attach_kind kind) {
    return kind == ATTACH_TC ? ATP_PINNED_TC : ATP_PINNED_TC_ACK;
}

/* Take off what attach() put on, in any order of failure: what is not there stays so. */
static void detach(struct atp_bpf *b, const struct attachment *a) {
    if (a->xdp_link >= 0)
        detach_link(b, a->ifindex, ATP_PINNED_XDP, a->xdp_link);
    if (a->tc_link >= 0)
        detach_link(b, a->ifindex, ingress_hook(a->kind), a->tc_link);
    else
        detach_classic_tc(a->ifindex, BPF_TC_INGRESS);
    if (a->guard_link >= 0)
        detach_link(b, a->ifindex, ATP_PINNED_GUARD, a->guard_link);
    else
        detach_classic_tc(a->ifindex, BPF_TC_EGRESS);
}

static int pin_links(const struct atp_bpf *b, const struct attachment *a) {
    int result = 0;

    if (b->pins == NULL)
        return 0;
    if (a->tc_link >= 0)
        result = atp_pin_link(b->pins, a->ifindex, ingress_hook(a->kind), a->tc_link);
    if (result == 0 && a->guard_link >= 0)
        result = atp_pin_link(b->pins, a->ifindex, ATP_PINNED_GUARD, a->guard_link);
    if (result == 0 && a->xdp_link >= 0)
        result = atp_pin_link(b->pins, a->ifindex, ATP_PINNED_XDP, a->xdp_link);
    return result;
}

/* When no program of an earlier switch is attached any more, maps of another layout have no use. */
static void forget_other_layouts(const struct atp_bpf *b) {
    for (uint32_t i = 0; i < b->attached; i++)
        if (b->attachments[i].left)
            return;
    if (b->pins != NULL)
        atp_pins_forget_others(b->pins);
}

/* Put the programs of this switch where an earlier one left its own: each packet meets the one or the other. */
static int replace_programs(const struct atp_bpf *b, struct attachment *a) {
    int result = 0;

    if (a->tc_link < 0 || a->guard_link < 0 || (a->kind == ATTACH_XDP) != (a->xdp_link >= 0))
        return -ENOENT; /* something of it is missing */
    result = bpf_link_update(a->guard_link, b->tc_guard, NULL);
    if (result == 0)
        result = bpf_link_update(a->tc_link, a->kind == ATTACH_TC ? b->tc : b->tc_ack, NULL);
    if (result == 0 && a->kind == ATTACH_XDP)
        result = bpf_link_update(a->xdp_link, b->xdp, NULL);
    a->left = result != 0;
    return result;
}

static void remove_attachment(struct atp_bpf *b, struct attachment *a) {
    detach(b, a);
    *a = b->attachments[--b->attached];
    forget_other_layouts(b);
}

static int add_attachment(struct atp_bpf *b, const struct attachment *new) {
    struct attachment *more = realloc(b->attachments, (b->attached + 1) * sizeof(*more));

    if (more == NULL)
        return -ENOMEM;
    b->attachments = more;
    b->attachments[b->attached++] = *new;
    return 0;
}

static int attach(struct atp_switch *sw, uint32_t ifindex, enum attach_kind kind) {
    struct atp_bpf *b = sw->bpf;
    struct attachment *old = find_attachment(b, ifindex);
    struct attachment new = {.ifindex = ifindex, .kind = kind, .tc_link = -1, .guard_link = -1, .xdp_link = -1};
    int result;

    if (old != NULL && !old->left)
        return old->kind == kind ? 0 : -EBUSY;
    if (old != NULL && old->kind == kind && replace_programs(b, old) == 0) {
        forget_other_layouts(b);
        return 0;
    }
    if (old != NULL)
        remove_attachment(b, old);
    result = attach_tc(kind == ATTACH_TC ? b->tc : b->tc_ack, ifindex, BPF_TC_INGRESS, b->classic_tc, &new.tc_link);
    if (result != 0)
        return result;
    result = attach_tc(b->tc_guard, ifindex, BPF_TC_EGRESS, b->classic_tc, &new.guard_link);
    if (result == 0 && kind == ATTACH_XDP)
        result = attach_xdp(b->xdp, ifindex, &new.xdp_link);
    if (result == 0)
        result = pin_links(b, &new);
    if (result == 0)
        result = add_attachment(b, &new);
    if (result != 0)
        detach(b, &new);
    return result;
}

/* One link that an earlier switch left. */
static int take_over_link(void *context, uint32_t ifindex, enum atp_pinned_hook hook, int link) {
    struct atp_bpf *b = context;
    struct attachment *a = find_attachment(b, ifindex);
    const struct attachment none = {
        .ifindex = ifindex, .kind = ATTACH_TC, .tc_link = -1, .guard_link = -1, .xdp_link = -1, .left = true};
    int result = 0;

    if (a == NULL) {
        result = add_attachment(b, &none);
        a = find_attachment(b, ifindex);
    }
    if (result != 0)
        return result;
    switch (hook) {
    case ATP_PINNED_TC_ACK:
        a->kind = ATTACH_XDP;
        a->tc_link = link;
        break;
    case ATP_PINNED_TC:
        a->tc_link = link;
        break;
    case ATP_PINNED_GUARD:
        a->guard_link = link;
        break;
    case ATP_PINNED_XDP:
        a->kind = ATTACH_XDP;
        a->xdp_link = link;
        break;
    }
    return 0;
}

static int change_attachment(struct atp_switch *sw, uint32_t ifindex, enum attach_kind kind, bool on) {
    struct attachment *a;
    int result = 0;

    if (sw->bpf == NULL)
        return -ENOTSUP;
    if (ifindex == 0)
        return -EINVAL;
    pthread_mutex_lock(&sw->lock);
    a = find_attachment(sw->bpf, ifindex);
    if (on) {
        result = attach(sw, ifindex, kind);
    } else if (a == NULL || a->kind != kind) {
        result = -ENOENT;
    } else {
        remove_attachment(sw->bpf, a);
    }
    pthread_mutex_unlock(&sw->lock);
    return result;
}

ATP_EXPORT int atp_switch_attach_tc(struct atp_switch *sw, uint32_t ifindex) {
    return change_attachment(sw, ifindex, ATTACH_TC, true);
}

ATP_EXPORT int atp_switch_detach_tc(struct atp_switch *sw, uint32_t ifindex) {
    return change_attachment(sw, ifindex, ATTACH_TC, false);
}

ATP_EXPORT int atp_switch_attach_xdp(struct atp_switch *sw, uint32_t ifindex) {
    return change_attachment(sw, ifindex, ATTACH_XDP, true);
}

ATP_EXPORT int atp_switch_detach_xdp(struct atp_switch *sw, uint32_t ifindex) {
    return change_attachment(sw, ifindex, ATTACH_XDP, false);
}

ATP_EXPORT int atp_switch_left_attached(struct atp_switch *sw, uint32_t *ifindexes, uint32_t count) {
    uint32_t found = 0;

    if (ifindexes == NULL && count != 0)
        return -EINVAL;
    if (sw->bpf == NULL)
        return 0;
    pthread_mutex_lock(&sw->lock);
    for (uint32_t i = 0; i < sw->bpf->attached && found < count; i++)
        if (sw->bpf->attachments[i].left)
            ifindexes[found++] = sw->bpf->attachments[i].ifindex;
    pthread_mutex_unlock(&sw->lock);
    return (int)found;
}

int atp_bpf_find_left(struct atp_bpf *b) {
    int result = b->pins != NULL ? atp_pins_each_link(b->pins, take_over_link, b) : 0;

    if (result == 0)
        forget_other_layouts(b);
    return result;
}

/* What is pinned stays attached when the last descriptor of it is closed. */
static void leave(const struct attachment *a) {
    if (a->xdp_link >= 0)
        close(a->xdp_link);
    if (a->tc_link >= 0)
        close(a->tc_link);
    if (a->guard_link >= 0)
        close(a->guard_link);
}

void atp_bpf_let_go(struct atp_bpf *b) {
    for (uint32_t i = 0; i < b->attached; i++)
        b->pins != NULL ? leave(&b->attachments[i]) : detach(b, &b->attachments[i]);
    free(b->attachments);
}
