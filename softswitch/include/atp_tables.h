/* SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 */
/*
 * What the software switch is told and what it tells: entries of its tables, counters, states. Shared by the control
 * interface (atp_control.h) and all data paths, BPF ones too: so no functions here.
 */
#ifndef ATP_TABLES_H
#define ATP_TABLES_H

#include <stdint.h>

#include "atp_counters.h"
#include "atp_wire.h"

#define ATP_REGIONS_MAX 4u
#define ATP_JOBS 256u
#define ATP_HOSTS 16384u
#define ATP_SOURCES_MAX 8u
#define ATP_GROUPS 1024u /* 0: none */
#define ATP_REPLICAS_MAX 64u

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
 * packets, raw ones too, pass only between its hosts, each from its own port (docs/security.md).
 */
struct atp_host {
    uint32_t port; /* the port that it is behind */
    uint32_t mark; /* hosts of one job have the same; also jobs without aggregators, whose job ID is not theirs alone */
    uint32_t bitmap0; /* of the packets that a worker makes; 0: PS */
    uint32_t bitmap1;
    uint8_t job_id;
    uint8_t role; /* enum atp_host_role */
    uint8_t edge; /* of the packets that a worker makes */
    uint8_t zero;
};

struct atp_port_drops {
    uint32_t port;
    uint32_t last_source; /* IPv4 address of the last packet that was dropped, host order */
    uint64_t dropped[ATP_DROPS];
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

#endif
