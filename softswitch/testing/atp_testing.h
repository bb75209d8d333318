/* SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 */
/*
 * What tests and benchmarks need of the software switch beyond atp_control.h: a clock that stands still until it is
 * set, and runs of the BPF programs on given frames (BPF_PROG_TEST_RUN).
 */
#ifndef ATP_TESTING_H
#define ATP_TESTING_H

#include "atp_control.h"

enum atp_program {
    ATP_PROGRAM_TC,
    ATP_PROGRAM_TC_ACK,
    ATP_PROGRAM_XDP,
    ATP_PROGRAM_XDP_BENCH, /* only in objects compiled with ATP_BENCH */
};

/* Like atp_switch_open_bpf() and atp_switch_open_native(), with the clock at atp_test_set_clock(). */
int atp_test_open_bpf(const struct atp_switch_options *options, struct atp_switch **out);
int atp_test_open_native(const struct atp_switch_options *options, struct atp_switch **out);
int atp_test_set_clock(struct atp_switch *sw, uint64_t now_ns);
/* From now on attach as on kernels without tcx (before 6.6). */
int atp_test_use_classic_tc(struct atp_switch *sw);

/*
 * Run a program `repeat` times on one frame that came in at ifindex; the changes of one run are the input of the next.
 * `out` takes at most `capacity` bytes and may be NULL; `out_length` is what the frame has become.
 */
int atp_test_run(struct atp_switch *sw, enum atp_program program, uint32_t ifindex, const uint8_t *frame, size_t length,
                 uint32_t repeat, uint8_t *out, size_t capacity, size_t *out_length, int32_t *verdict,
                 uint32_t *ns_per_run);

#endif
