/* SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 */
/*
 * Inside libatp_switch: a switch, its tables, and what a data path does for the control plane (struct atp_backend). The
 * control plane (jobs.c, hosts.c, groups.c, queues.c, aggregators.c, tables.c) knows no data path, and these know of it
 * only what is declared here; the relay knows the native one, which knows no relay.
 */
#ifndef ATP_SWITCH_INTERNAL_H
#define ATP_SWITCH_INTERNAL_H

#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>

#include "atp_control.h"
#include "core/aggregator.h"
#include "core/guard.h"
#include "core/queue.h"

#define ATP_EXPORT __attribute__((visibility("default")))

struct atp_switch;
struct atp_held_host;

/* What a data path does for the control plane. Called with the switch locked. */
struct atp_backend {
    /* Wait until no packet uses what it read from the tables before. */
    void (*barrier)(struct atp_switch *sw);
    /* Visit all aggregators; returns how many matched, or a negative errno. */
    int (*scan)(struct atp_switch *sw, enum atp_scan_op op, uint8_t job_id);
    int (*read_counters)(struct atp_switch *sw, uint8_t job_id, uint64_t *out);
    /* Copy head and pairs as of one moment. */
    int (*read_aggregator)(struct atp_switch *sw, uint32_t index, struct atp_aggregator_head *head, uint64_t *pairs);
    /* Set (or with NULL delete) a host; read the ports at which something was dropped. NULL: packets have no addresses.
     */
    int (*write_host)(struct atp_switch *sw, uint32_t address, const struct atp_host *host);
    int (*write_sources)(struct atp_switch *sw, uint32_t port, const struct atp_sources *sources);
    int (*read_drops)(struct atp_switch *sw, struct atp_port_drops *out, uint32_t count);
    /* All hosts, in any order; returns how many. */
    int (*read_hosts)(struct atp_switch *sw, struct atp_held_host *out, uint32_t count);
    /* How many known jobs have no host. NULL: nobody asks. */
    void (*set_unguarded)(struct atp_switch *sw, uint32_t jobs);
    void (*close)(struct atp_switch *sw);
};

/* The tables are memory of the data path: that of the process, or of the BPF maps, mapped. */
struct atp_tables {
    uint64_t *job_slots;            /* [ATP_JOBS] */
    struct atp_job_entry *jobs;     /* [2 * ATP_JOBS] */
    uint64_t *group_slots;          /* [ATP_GROUPS] */
    struct atp_group_entry *groups; /* [2 * ATP_GROUPS] */
    struct atp_queue *queues;       /* [ATP_QUEUES] */
};

struct atp_bpf;
struct atp_native;

/* A host as it was set. */
struct atp_held_host {
    uint32_t address;
    struct atp_host host;
};

struct atp_switch {
    const struct atp_backend *backend;
    struct atp_tables tables;
    pthread_mutex_t lock;
    uint32_t aggregators;
    uint32_t values;
    uint64_t stale_ns;
    /* Which of its two entries a job or group uses. */
    uint8_t job_half[ATP_JOBS];
    uint8_t group_half[ATP_GROUPS];
    struct atp_held_host *hosts; /* in order of addresses */
    uint32_t host_count;
    uint32_t host_room;
    struct atp_bpf *bpf;       /* NULL: native */
    struct atp_native *native; /* NULL: BPF */
};

static inline int locked(struct atp_switch *sw) {
    return pthread_mutex_lock(&sw->lock);
}

static inline int unlocked(struct atp_switch *sw, int result) {
    pthread_mutex_unlock(&sw->lock);
    return result;
}

/* What packets read meanwhile is stored as a whole. */
static inline void store64(uint64_t *word, uint64_t value) {
    __atomic_store_n(word, value, __ATOMIC_RELEASE);
}

static inline void store32(uint32_t *word, uint32_t value) {
    __atomic_store_n(word, value, __ATOMIC_RELEASE);
}

/* Check the options and make the common part; the caller fills in tables and backend. */
int atp_switch_new(const struct atp_switch_options *options, struct atp_switch **out);
bool atp_is_profile(uint32_t values);
/* The tables hold what an earlier switch wrote: find out what that is. */
int atp_switch_take_over(struct atp_switch *sw);

/* The entry of a job that packets use, or would if the job were known. */
struct atp_job_entry *atp_job_entry(struct atp_switch *sw, uint32_t job_id);
/* Tell the data path how many jobs the switch knows but has no host of. */
void atp_count_unguarded(struct atp_switch *sw);
/* A job's packets towards the PS fill the phantom queue of its first PS port: find that again. */
void atp_link_queue(struct atp_switch *sw, struct atp_job_entry *entry);
int atp_hosts_take_over(struct atp_switch *sw);
int atp_hosts_clear(struct atp_switch *sw);

#endif
