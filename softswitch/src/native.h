/* SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 */
/* The data path in plain memory, for what brings packets to it: the relay, or whoever calls atp_switch_process(). */
#ifndef ATP_NATIVE_H
#define ATP_NATIVE_H

#include "switch.h"

/* What brings packets by itself, in a thread of its own; closing the switch stops it. */
struct atp_packet_source {
    void (*stop)(struct atp_switch *sw);
};

struct atp_native {
    uint8_t *aggregators;
    size_t stride; /* bytes of one aggregator: head and pairs */
    struct atp_counters counters[ATP_JOBS];
    bool test_clock; /* tests: the clock stands at test_clock_ns */
    uint64_t test_clock_ns;
    uint64_t last_ns; /* of the last packet: the clock for sweeps of a switch whose time is an argument */
    struct atp_packet_source *source; /* NULL: packets come through atp_switch_process() */
};

/* One packet through the core, the switch locked. */
typedef void (*atp_forward_fn)(void *context, uint32_t egress_port, uint32_t dst_ip, uint16_t dst_port,
                               const uint8_t *payload, size_t length, int ecn);
int atp_native_packet(struct atp_switch *sw, uint32_t ingress_port, uint32_t dst_ip, int ce, uint8_t *payload,
                      size_t length, uint64_t now_ns, atp_forward_fn forward, void *context);
/* The clock: monotonic, that of the last packet, or the test's. */
uint64_t atp_native_now(const struct atp_switch *sw);
void atp_native_count(struct atp_switch *sw, uint8_t job_id, enum atp_counter counter, uint64_t add);

#endif
