/* SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 */
/*
 * Control interface of the software switch: one handle, three data paths (tc BPF, XDP, native core behind a UDP relay).
 * The P4Runtime server (softswitch/atp_softswitch) is its only user besides tests; it calls it through ctypes.
 * Every function returns 0 or a negative errno and is safe to call from one thread at a time: -EINVAL for arguments that
 * can never be right, -ENOENT for what is not there, -ENOSPC when a table is full (4 ports for each bit of a level, 4 for
 * each rack in transit, 8 PS ports a job, 16,384 hosts, 256 phantom queues), -ERANGE for regions beyond the aggregators,
 * -EMSGSIZE for a profile larger than the switch's. Setting what is set already changes nothing.
 *
 * The tables are independent, as in P4Runtime: admission, transit, PS ports and groups may be set before their job, and
 * outlive atp_switch_delete_job(). Gradients leave towards the first PS port of the job, whose phantom queue they fill.
 * bytes_in and bytes_out count Ethernet frames without padding and checksum; an ACK counts once for each copy.
 */
#ifndef ATP_CONTROL_H
#define ATP_CONTROL_H

#include <stddef.h>
#include <stdint.h>

#include "atp_wire.h"

#define ATP_REGIONS_MAX 4u
#define ATP_JOBS 256u
#define ATP_HOSTS 16384u
#define ATP_SOURCES_MAX 8u

struct atp_region {
    uint32_t start; /* first aggregatorIndex */
    uint32_t size;  /* number of indexes */
};

/* Table job: what the switch knows of one job. */
struct atp_job_config {
    uint32_t values;       /* 32-bit values per packet: 62, 350 or 870, at most the switch's */
    uint32_t full0;        /* bitmap of all workers of this switch's rack; 0: not level 0 of the job */
    uint32_t full1;        /* bitmap of all racks; 0: not level 1 of the job */
    uint32_t group;        /* multicast group for ACKs; 0: forward ACKs as they are, after the release */
    uint32_t region_count; /* 1..ATP_REGIONS_MAX */
    struct atp_region region[ATP_REGIONS_MAX];
};

/* Table admission: this ingress port may set exactly this bit at this level. `bitmap` has one bit. */
struct atp_admission_key {
    uint32_t port; /* ifindex (BPF), IPv4 address in host order (relay) */
    uint32_t bitmap;
    uint8_t job_id;
    uint8_t edge; /* edgeSwitchIdentifier of the packet: 0 or 1 */
    uint16_t zero;
};

/* Table transit: edge=0 packets of one rack may pass through this port. */
struct atp_transit_key {
    uint32_t port;
    uint32_t bitmap1; /* the rack's bit */
    uint8_t job_id;
    uint8_t zero[3];
};

/* One copy of an ACK. */
struct atp_replica {
    uint32_t port;   /* egress port: ifindex (BPF), IPv4 address in host order (relay) */
    uint32_t dst_ip; /* host order */
    uint8_t dst_mac[6];
    uint16_t dst_port; /* 0: leave */
};

enum atp_host_role {
    ATP_HOST_WORKER = 1,
    ATP_HOST_PS = 2,
};

/*
 * Table host: an address that is one of a job's, by that address. A job of which the switch has a host is guarded: its
 * packets, raw ones too, pass only between its hosts, each from its own port (atp_guard.h).
 */
struct atp_host {
    uint32_t port;    /* the port that it is behind */
    uint32_t mark;    /* hosts of one job have the same; also jobs without aggregators, whose job ID is not theirs alone */
    uint32_t bitmap0; /* of the packets that a worker makes; 0: PS */
    uint32_t bitmap1;
    uint8_t job_id;
    uint8_t role; /* enum atp_host_role */
    uint8_t edge; /* of the packets that a worker makes */
    uint8_t zero;
};

/* What was dropped of the packets that came in at one port. One home of their order: atp_drop_names(). */
enum atp_drop {
    ATP_D_SOURCE,      /* sent to a job's host by somebody who is none of that job, or with another port's address */
    ATP_D_DESTINATION, /* sent by a job's host to somebody who is none of its job */
    ATP_D_MALFORMED,   /* between hosts of a job: fragment, IP options, lengths that disagree, shorter than the header */
    ATP_D_FORGED,      /* between hosts of a job: another's bits, an ACK by a worker, another job ID */
    ATP_D_ADMISSION,   /* refused by the state machine; also counted by job */
    ATP_DROPS
};

struct atp_port_drops {
    uint32_t port;
    uint32_t last_source; /* IPv4 address of the last packet that was dropped, host order */
    uint64_t dropped[ATP_DROPS];
};

/* Counters of one job; of job 0: packets that belong to no known job. One home of their order: atp_counter_names(). */
enum atp_counter {
    ATP_C_ALLOCATED,
    ATP_C_AGGREGATED,
    ATP_C_COMPLETED,
    ATP_C_COLLISIONS,
    ATP_C_DUPLICATES,
    ATP_C_REEMITTED,
    ATP_C_STALE_TAKEOVERS,
    ATP_C_RESEND_PARTIALS,
    ATP_C_RESEND_PASSED,
    ATP_C_RELEASED,
    ATP_C_ACKS,
    ATP_C_ECN_MARKED,
    ATP_C_PASSED_RAW_FLOAT,
    ATP_C_PASSED_TRANSIT,
    ATP_C_PASSED_UNKNOWN_JOB,
    ATP_C_REJECTED_SHORT,
    ATP_C_REJECTED_LENGTH,
    ATP_C_REJECTED_BIT,
    ATP_C_REJECTED_INDEX,
    ATP_C_REJECTED_ACK_SOURCE,
    ATP_C_BYTES_IN,
    ATP_C_BYTES_OUT,
    ATP_C_PASSED_GSO,       /* tc: superframes, which are checked packet by packet but not aggregated */
    ATP_C_DROPPED_NO_ROUTE, /* relay: nothing says where the packet must go */
    ATP_C_DROPPED_BUSY,     /* BPF: another core held the aggregator for longer than a program may wait */
    ATP_COUNTERS
};

/* State of one aggregator, for register reads, sweeps and tests. */
struct atp_aggregator_state {
    uint32_t key;   /* job ID and sequence, as in the header's first word; 0 free */
    uint32_t level; /* 0 or 1 */
    uint32_t bitmap;
    uint32_t complete;
    uint32_t ecn;
    uint64_t timestamp_ns; /* data path clock of the last update */
};

struct atp_switch_options {
    uint32_t aggregators; /* number of aggregators, 1..65536 */
    uint32_t values;      /* largest profile: 62, 350 or 870 */
    uint64_t stale_ns;    /* T; 0: ATP_STALE_NS */
    /* Where the compiled BPF objects are (BPF only); NULL: $ATP_SWITCH_OBJECT_DIR, else the directory of this library. */
    const char *object_dir;
    /*
     * BPF: a folder of a BPF file system where maps and attachments outlive the switch; whoever opens it next takes them
     * over as they are. Only one at a time. NULL: all goes with the switch. -EMEDIUMTYPE: no BPF file system.
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
/* With pin_dir: when nobody has called this for so long, everything is ordinary traffic until somebody does. 0: for ever. */
int atp_switch_keep(struct atp_switch *sw, uint32_t seconds);
/* BPF: interfaces that an earlier switch of this pin_dir left attached; returns how many, at most `count`. */
int atp_switch_left_attached(struct atp_switch *sw, uint32_t *ifindexes, uint32_t count);

/* Set or change a job. A change of values, bitmaps or regions frees its aggregators: old sums must meet no new packets. */
int atp_switch_set_job(struct atp_switch *sw, uint8_t job_id, const struct atp_job_config *config);
/* Forget a job and free every aggregator it holds; when it returns, no packet in flight can allocate for it any more. */
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
 * The addresses of the pod behind a port, at most ATP_SOURCES_MAX: nothing with another source leaves it for the ATP port
 * of anybody, also where this switch does not know the job. A port that is not set, or was deleted, is not checked so.
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
int atp_switch_read_aggregator(struct atp_switch *sw, uint32_t index, struct atp_aggregator_state *state, int32_t *values);
/* Free stale aggregators; returns how many, or a negative errno. */
int atp_switch_sweep(struct atp_switch *sw);
/* Number of aggregators in use, in all or of one job (job_id 0: all). */
int atp_switch_occupancy(struct atp_switch *sw, uint8_t job_id);

/*
 * BPF: attach to and detach from an interface of the caller's network namespace; what is attached goes with the switch,
 * unless it has a pin_dir. Where an earlier switch left something attached, the program is replaced without a gap. An
 * interface has either. XDP: at a NIC, for profiles whose frames fit one page (62 and 350); it brings a tc program for the
 * ACKs along. tc: between pods.
 */
int atp_switch_attach_tc(struct atp_switch *sw, uint32_t ifindex);
int atp_switch_detach_tc(struct atp_switch *sw, uint32_t ifindex);
int atp_switch_attach_xdp(struct atp_switch *sw, uint32_t ifindex);
int atp_switch_detach_xdp(struct atp_switch *sw, uint32_t ifindex);
/* Phantom queue of a port: mark ECN when more than threshold bytes would wait at this rate; 0 turns it off. */
int atp_switch_set_port_rate(struct atp_switch *sw, uint32_t port, uint64_t bits_per_second, uint32_t threshold_bytes);

/*
 * Native: one packet (ATP header and values) through the core at time now_ns; emits through the callback, during the call.
 * egress_port: the job's PS port for a gradient, the replica's port for an ACK, 0 for ordinary traffic, which goes on to
 * dst_ip. `payload` is rewritten in place. `ecn` is the header's bit as it leaves.
 */
typedef void (*atp_emit_fn)(void *context, uint32_t egress_port, uint32_t dst_ip, const uint8_t *payload, size_t length,
                            int ecn);
int atp_switch_process(struct atp_switch *sw, uint32_t ingress_port, uint32_t dst_ip, int ce, uint8_t *payload,
                       size_t length, uint64_t now_ns, atp_emit_fn emit, void *context);

/* Native: the relay loop on a UDP socket bound to address:port (host order), in a thread of its own, until stop. */
int atp_relay_start(struct atp_switch *sw, uint32_t address, uint16_t port);
int atp_relay_stop(struct atp_switch *sw);

#endif
