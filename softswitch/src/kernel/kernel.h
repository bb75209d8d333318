/* SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 */
/* The data path in the kernel, as the library sees it: programs, maps and attachments of one switch. */
#ifndef ATP_KERNEL_H
#define ATP_KERNEL_H

#include <bpf/bpf.h>
#include <bpf/libbpf.h>

#include "bpf/shared.h"
#include "pins.h"
#include "src/switch.h"

enum attach_kind { ATTACH_TC = 1, ATTACH_XDP };

/* What is attached to one interface. */
struct attachment {
    uint32_t ifindex;
    enum attach_kind kind;
    int tc_link;    /* tcx; -1: a classic tc filter */
    int guard_link; /* the same at the egress */
    int xdp_link;   /* -1: none */
    bool left;      /* by an earlier switch, with its programs */
};

struct atp_bpf {
    struct bpf_object *object;
    int tc, tc_ack, tc_guard, xdp, scan; /* programs */
    int counters, hosts, sources, drops; /* maps */
    size_t aggregator_size;
    int cpus;
    bool classic_tc;
    struct atp_control_area *area;
    struct {
        void *address;
        size_t length;
    } mapping[6];
    struct attachment *attachments;
    uint32_t attached;
    struct atp_pins *pins; /* NULL: everything goes with the switch */
};

/* `test_clock`: the programs read atp_control_area.test_clock_ns in place of a clock. */
int atp_bpf_open(const struct atp_switch_options *options, bool test_clock, struct atp_switch **out);

/* backend.c: what it does for the control plane, and its end. */
extern const struct atp_backend atp_bpf_backend;
/* Find out how the programs can tell the time; once, after they are loaded. */
int atp_bpf_calibrate(struct atp_bpf *b);

/* attach.c: take over what an earlier switch left attached; let go of everything. */
int atp_bpf_find_left(struct atp_bpf *b);
void atp_bpf_let_go(struct atp_bpf *b);

#endif
