/* SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 */
/*
 * Control interface of the software switch: one handle, three data paths (tc BPF, XDP, native core behind a UDP relay).
 * The P4Runtime server (softswitch/atp_softswitch) is its only user besides tests; it calls it through ctypes.
 * Every function returns 0 or a negative errno and is safe to call from one thread at a time: -EINVAL for arguments
 * that can never be right, -ENOENT for what is not there, -ENOSPC when a table is full (4 ports for each bit of a
 * level, 4 for each rack in transit, 8 PS ports a job, 16,384 hosts, 256 phantom queues), -ERANGE for regions beyond
 * the aggregators, -EMSGSIZE for a profile larger than the switch's. Setting what is set already changes nothing.
 *
 * The tables are independent, as in P4Runtime: admission, transit, PS ports and groups may be set before their job, and
 * outlive atp_switch_delete_job(). Gradients leave towards the first PS port of the job, whose phantom queue they fill.
 * bytes_in and bytes_out count Ethernet frames without padding and checksum; an ACK counts once for each copy.
 */
#ifndef ATP_CONTROL_H
#define ATP_CONTROL_H

#include <stddef.h>
#include <stdint.h>

#include "atp_tables.h"

struct atp_switch_options {
    uint32_t aggregators; /* number of aggregators, 1..65536 */
    uint32_t values;      /* largest profile: 62, 350 or 870 */
    uint64_t stale_ns;    /* T; 0: ATP_STALE_NS */
    /* BPF: where the compiled objects are; NULL: $ATP_SWITCH_OBJECT_DIR, else the directory of this library. */
    const char *object_dir;
    /*
     * BPF: a folder of a BPF file system where maps and attachments outlive the switch; whoever opens it next takes
     * them over as they are. Only one at a time. NULL: all goes with the switch. -EMEDIUMTYPE: no BPF file system.
     */
    const char *pin_dir;
};

struct atp_switch;

/* Open a data path. The native one needs no privilege; its packets come from the relay or from atp_switch_process(). */
int atp_switch_open_bpf(const struct atp_switch_options *options, struct atp_switch **out);
int atp_switch_open_native(const struct atp_switch_options *options, struct atp_switch **out);
void atp_switch_close(struct atp_switch *sw);

/* A number of the tables, the same in every switch that takes them over; 0: they go with this one. */
uint64_t atp_switch_token(const struct atp_switch *sw);
/* Empty all tables and free all aggregators: jobs first, their guard last. */
int atp_switch_reset(struct atp_switch *sw);
/* With pin_dir: after so long without a call everything is ordinary traffic, until somebody calls. 0: never. */
int atp_switch_keep(struct atp_switch *sw, uint32_t seconds);
/* BPF: interfaces that an earlier switch of this pin_dir left attached; returns how many, at most `count`. */
int atp_switch_left_attached(struct atp_switch *sw, uint32_t *ifindexes, uint32_t count);

/* Set or change a job. Other values, bitmaps or regions free its aggregators: old sums must meet no new packets. */
int atp_switch_set_job(struct atp_switch *sw, uint8_t job_id, const struct atp_job_config *config);
/* Forget a job and free every aggregator it holds; afterwards no packet in flight can allocate for it any more. */
int atp_switch_delete_job(struct atp_switch *sw, uint8_t job_id);
int atp_switch_set_admission(struct atp_switch *sw, const struct atp_admission_key *key);
int atp_switch_delete_admission(struct atp_switch *sw, const struct atp_admission_key *key);
int atp_switch_set_transit(struct atp_switch *sw, const struct atp_transit_key *key, uint32_t mask0);
int atp_switch_delete_transit(struct atp_switch *sw, const struct atp_transit_key *key);
int atp_switch_set_ps_port(struct atp_switch *sw, uint8_t job_id, uint32_t port);
int atp_switch_delete_ps_port(struct atp_switch *sw, uint8_t job_id, uint32_t port);
/* -EEXIST: the address is a host of another job. At most ATP_HOSTS. */
int atp_switch_set_host(struct atp_switch *sw, uint32_t address, const struct atp_host *host);
int atp_switch_delete_host(struct atp_switch *sw, uint32_t address);
/*
 * The addresses of the pod behind a port, at most ATP_SOURCES_MAX: nothing with another source leaves it for the ATP
 * port of anybody, also where this switch does not know the job. A port that is not set, or was deleted, is not checked
 * so.
 */
int atp_switch_set_sources(struct atp_switch *sw, uint32_t port, const uint32_t *addresses, uint32_t count);
int atp_switch_delete_sources(struct atp_switch *sw, uint32_t port);
/* Replace a multicast group as a whole; count 0 deletes it. At most 64 replicas. Groups 1..1023. */
int atp_switch_set_group(struct atp_switch *sw, uint32_t group, const struct atp_replica *replicas, uint32_t count);

/* out[ATP_COUNTERS], summed over cores. */
int atp_switch_read_counters(struct atp_switch *sw, uint8_t job_id, uint64_t *out);
const char *const *atp_counter_names(void);
/* BPF: ports at which something was dropped, up to `count`; returns how many, or a negative errno. */
int atp_switch_read_drops(struct atp_switch *sw, struct atp_port_drops *out, uint32_t count);
const char *const *atp_drop_names(void);
int atp_switch_read_aggregator(struct atp_switch *sw, uint32_t index, struct atp_aggregator_state *state,
                               int32_t *values);
/* Free stale aggregators; returns how many, or a negative errno. */
int atp_switch_sweep(struct atp_switch *sw);
/* Number of aggregators in use, in all or of one job (job_id 0: all). */
int atp_switch_occupancy(struct atp_switch *sw, uint8_t job_id);

/*
 * BPF: attach to and detach from an interface of the caller's network namespace; what is attached goes with the switch,
 * unless it has a pin_dir. Where an earlier switch left something attached, the program is replaced without a gap. An
 * interface has either. XDP: at a NIC, for profiles whose frames fit one page (62 and 350); it brings a tc program for
 * the ACKs along. tc: between pods.
 */
int atp_switch_attach_tc(struct atp_switch *sw, uint32_t ifindex);
int atp_switch_detach_tc(struct atp_switch *sw, uint32_t ifindex);
int atp_switch_attach_xdp(struct atp_switch *sw, uint32_t ifindex);
int atp_switch_detach_xdp(struct atp_switch *sw, uint32_t ifindex);
/* Phantom queue of a port: mark ECN when more than threshold bytes would wait at this rate; 0 turns it off. */
int atp_switch_set_port_rate(struct atp_switch *sw, uint32_t port, uint64_t bits_per_second, uint32_t threshold_bytes);

/*
 * Native: one packet (ATP header and values) through the core at time now_ns; emits through the callback, during the
 * call. egress_port: the job's PS port for a gradient, the replica's port for an ACK, 0 for ordinary traffic, which
 * goes on to dst_ip. `payload` is rewritten in place. `ecn` is the header's bit as it leaves.
 */
typedef void (*atp_emit_fn)(void *context, uint32_t egress_port, uint32_t dst_ip, const uint8_t *payload, size_t length,
                            int ecn);
int atp_switch_process(struct atp_switch *sw, uint32_t ingress_port, uint32_t dst_ip, int ce, uint8_t *payload,
                       size_t length, uint64_t now_ns, atp_emit_fn emit, void *context);

/* Native: the relay loop on a UDP socket bound to address:port (host order), in a thread of its own, until stop. */
int atp_relay_start(struct atp_switch *sw, uint32_t address, uint16_t port);
int atp_relay_stop(struct atp_switch *sw);

#endif
