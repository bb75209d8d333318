/* SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 */
/* The tables, and how packets find their way through them. The control plane maps those of ATP_CONTROL_MAP. */
#ifndef ATP_BPF_MAPS_H
#define ATP_BPF_MAPS_H

#include <linux/bpf.h>

#include <bpf/bpf_helpers.h>

#include "bpf/shared.h"
#include "core/aggregator.h"
#include "core/guard.h"
#include "core/queue.h"

#ifndef ATP_PROFILE
#error "ATP_PROFILE must be 62, 350 or 870"
#endif

struct atp_aggregator {
    struct atp_aggregator_head head;
    uint64_t pairs[ATP_PROFILE / 2];
};

const volatile struct atp_settings atp_settings = {.stale_ns = ATP_STALE_NS};
struct atp_control_area atp_control_area;

struct {
    __uint(type, BPF_MAP_TYPE_ARRAY);
    __uint(max_entries, 1); /* set by the loader */
    __type(key, uint32_t);
    __type(value, struct atp_aggregator);
} atp_aggregators SEC(".maps");

#define ATP_CONTROL_MAP(name, entries, type_)                                                                          \
    struct {                                                                                                           \
        __uint(type, BPF_MAP_TYPE_ARRAY);                                                                              \
        __uint(map_flags, BPF_F_MMAPABLE);                                                                             \
        __uint(max_entries, entries);                                                                                  \
        __type(key, uint32_t);                                                                                         \
        __type(value, type_);                                                                                          \
    } name SEC(".maps")

ATP_CONTROL_MAP(atp_job_slots, ATP_JOBS, uint64_t); /* 0: unknown job, else 1 + index in atp_jobs */
ATP_CONTROL_MAP(atp_jobs, 2 * ATP_JOBS, struct atp_job_entry);
ATP_CONTROL_MAP(atp_group_slots, ATP_GROUPS, uint64_t); /* 0: no such group, else 1 + index in atp_groups */
ATP_CONTROL_MAP(atp_groups, 2 * ATP_GROUPS, struct atp_group_entry);
ATP_CONTROL_MAP(atp_queues, ATP_QUEUES, struct atp_queue);

struct {
    __uint(type, BPF_MAP_TYPE_PERCPU_ARRAY);
    __uint(max_entries, ATP_JOBS);
    __type(key, uint32_t);
    __type(value, struct atp_counters);
} atp_counters SEC(".maps");

/* Hosts of jobs by IPv4 address. Not preallocated: an entry that is replaced stays whole for those who read it. */
struct {
    __uint(type, BPF_MAP_TYPE_HASH);
    __uint(map_flags, BPF_F_NO_PREALLOC);
    __uint(max_entries, ATP_HOSTS);
    __type(key, uint32_t);
    __type(value, struct atp_host);
} atp_hosts SEC(".maps");

/* Ports of pods, whose addresses are known. */
struct {
    __uint(type, BPF_MAP_TYPE_HASH);
    __uint(map_flags, BPF_F_NO_PREALLOC);
    __uint(max_entries, 4096);
    __type(key, uint32_t);
    __type(value, struct atp_sources);
} atp_sources SEC(".maps");

/* By ingress port. Of many that misbehave those that stopped long ago are forgotten first. */
struct {
    __uint(type, BPF_MAP_TYPE_LRU_HASH);
    __uint(max_entries, 1024);
    __type(key, uint32_t);
    __type(value, struct atp_port_drops);
} atp_drops SEC(".maps");

static __always_inline struct atp_job_entry *atp_find_job(uint32_t job_id) {
    const uint64_t *slot = bpf_map_lookup_elem(&atp_job_slots, &job_id);
    uint32_t entry;

    if (!slot || *slot == 0)
        return NULL;
    entry = (uint32_t)*slot - 1;
    return bpf_map_lookup_elem(&atp_jobs, &entry);
}

static __always_inline uint64_t *atp_find_counters(uint32_t job_id) {
    struct atp_counters *counters = bpf_map_lookup_elem(&atp_counters, &job_id);

    return counters ? counters->c : NULL;
}

static __always_inline struct atp_queue *atp_find_queue(const struct atp_job_entry *job) {
    uint32_t slot = job->queue;

    if (slot == 0)
        return NULL;
    slot--;
    return bpf_map_lookup_elem(&atp_queues, &slot);
}

static __always_inline const struct atp_host *atp_find_host(uint32_t address) {
    return bpf_map_lookup_elem(&atp_hosts, &address);
}

#endif
