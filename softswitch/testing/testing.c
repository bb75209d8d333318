/* SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 */
/* atp_testing.h, linked with the sources of libatp_switch into a library for tests; the shipped one has none of it. */
#include "atp_testing.h"

#include <errno.h>

#include "src/kernel/kernel.h"
#include "src/native.h"

ATP_EXPORT int atp_test_open_bpf(const struct atp_switch_options *options, struct atp_switch **out) {
    return atp_bpf_open(options, true, out);
}

ATP_EXPORT int atp_test_open_native(const struct atp_switch_options *options, struct atp_switch **out) {
    int result = atp_switch_open_native(options, out);

    if (result == 0)
        (*out)->native->test_clock = true;
    return result;
}

ATP_EXPORT int atp_test_set_clock(struct atp_switch *sw, uint64_t now_ns) {
    pthread_mutex_lock(&sw->lock);
    if (sw->bpf != NULL)
        __atomic_store_n(&sw->bpf->area->test_clock_ns, now_ns, __ATOMIC_SEQ_CST);
    else
        sw->native->test_clock_ns = now_ns;
    pthread_mutex_unlock(&sw->lock);
    return 0;
}

ATP_EXPORT int atp_test_use_classic_tc(struct atp_switch *sw) {
    if (sw->bpf == NULL)
        return -ENOTSUP;
    sw->bpf->classic_tc = true;
    return 0;
}

ATP_EXPORT int atp_test_run(struct atp_switch *sw, enum atp_program program, uint32_t ifindex, const uint8_t *frame,
                            size_t length, uint32_t repeat, uint8_t *out, size_t capacity, size_t *out_length,
                            int32_t *verdict, uint32_t *ns_per_run) {
    struct __sk_buff skb = {.ifindex = ifindex};
    struct xdp_md xdp = {.data_end = (uint32_t)length, .ingress_ifindex = ifindex};
    LIBBPF_OPTS(bpf_test_run_opts, run, .data_in = frame, .data_size_in = (uint32_t)length, .data_out = out,
                .data_size_out = (uint32_t)capacity, .repeat = (int)repeat);
    static const char *const names[] = {
        [ATP_PROGRAM_TC] = "atp_tc",
        [ATP_PROGRAM_TC_ACK] = "atp_tc_ack",
        [ATP_PROGRAM_XDP] = "atp_xdp",
        [ATP_PROGRAM_XDP_BENCH] = "atp_xdp_bench",
    };
    const struct bpf_program *found;
    int result;

    if (sw->bpf == NULL)
        return -ENOTSUP;
    found = bpf_object__find_program_by_name(sw->bpf->object, names[program]);
    if (found == NULL)
        return -ENOENT;
    if (program == ATP_PROGRAM_XDP || program == ATP_PROGRAM_XDP_BENCH) {
        run.ctx_in = &xdp;
        run.ctx_size_in = sizeof(xdp);
    } else {
        run.ctx_in = &skb;
        run.ctx_size_in = sizeof(skb);
    }
    result = bpf_prog_test_run_opts(bpf_program__fd(found), &run);
    if (result != 0)
        return result;
    if (out_length != NULL)
        *out_length = run.data_size_out;
    if (verdict != NULL)
        *verdict = (int32_t)run.retval;
    if (ns_per_run != NULL)
        *ns_per_run = run.duration;
    return 0;
}
