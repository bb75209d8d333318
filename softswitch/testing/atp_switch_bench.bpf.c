/* SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 */
/*
 * The programs, and one for benchmarks: it turns one buffer that is run again and again into the packets of 31 workers
 * out of a rack of 32, one sequence after the other, so that every run takes the path that allocates or adds and none
 * completes.
 */
#include "bpf/atp_switch.bpf.c"

SEC("xdp")
int atp_xdp_bench(struct xdp_md *ctx) {
    void *data = (void *)(long)ctx->data;
    void *data_end = (void *)(long)ctx->data_end;
    uint32_t *w = data + ATP_OFF_HEADER;
    uint32_t bit, word;

    if (data + ATP_OFF_VALUES > data_end)
        return XDP_ABORTED;
    bit = bpf_ntohl(w[1]) << 1;
    if (bit == 0x80000000u) {
        bit = 1;
        word = bpf_ntohl(w[0]);
        w[0] = bpf_htonl((word & 0xff000000u) | ((word + 1) & ATP_SEQUENCE_MASK));
        word = bpf_ntohl(w[3]);
        w[3] = bpf_htonl((word & 0xffff0000u) | ((word + 1) & (atp_settings.aggregators - 1)));
    }
    w[1] = bpf_htonl(bit);
    return atp_xdp_main(ctx);
}
