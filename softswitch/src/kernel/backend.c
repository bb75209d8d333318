/* SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 */
/* What the data path in the kernel does for the control plane. */
#define _GNU_SOURCE
#include <errno.h>
#include <linux/membarrier.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "kernel.h"

static void bpf_barrier(struct atp_switch *sw) {
    struct timespec rest = {.tv_nsec = 50000000};

    (void)sw;
    /* Returns after an RCU grace period, and BPF programs run inside RCU read sections. */
    if (syscall(__NR_membarrier, MEMBARRIER_CMD_GLOBAL, 0, 0) != 0)
        nanosleep(&rest, NULL); /* not on nohz_full kernels: no packet takes that long */
}

/* One run of atp_scan over [start, end), at most ATP_SCAN_MAX of them. */
static int scan_once(struct atp_bpf *b, enum atp_scan_op op, uint8_t job_id, uint32_t start, uint32_t end) {
    uint8_t frame[64] = {0};
    LIBBPF_OPTS(bpf_test_run_opts, run, .data_in = frame, .data_size_in = sizeof(frame), .repeat = 1);
    int result;

    b->area->op = op;
    b->area->job_id = job_id;
    b->area->start = start;
    b->area->end = end;
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
    result = bpf_prog_test_run_opts(b->scan, &run);
    if (result != 0)
        return result;
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
    return b->area->busy != 0 ? -EAGAIN : (int)b->area->found;
}

static int bpf_scan(struct atp_switch *sw, enum atp_scan_op op, uint8_t job_id) {
    int found = 0;

    for (uint32_t start = 0; start < sw->aggregators; start += ATP_SCAN_MAX) {
        uint32_t left = sw->aggregators - start;
        int result = scan_once(sw->bpf, op, job_id, start, start + (left < ATP_SCAN_MAX ? left : ATP_SCAN_MAX));

        if (result < 0)
            return result;
        found += result;
    }
    return found;
}

/*
 * The programs count time in ticks, whose length only the kernel's configuration says: measure it. When that gives no
 * known tick length, they use the clock that needs a call.
 */
int atp_bpf_calibrate(struct atp_bpf *b) {
    static const uint64_t ticks_ns[] = {1000000, 3333333, 4000000, 10000000};
    const struct timespec wait = {.tv_nsec = 60000000};
    uint64_t jiffies, ns, tick;
    int result = scan_once(b, ATP_SCAN_COUNT, 0, 0, 0);

    if (result < 0)
        return result;
    jiffies = b->area->seen_jiffies;
    ns = b->area->seen_ns;
    nanosleep(&wait, NULL);
    result = scan_once(b, ATP_SCAN_COUNT, 0, 0, 0);
    if (result < 0)
        return result;
    if (b->area->seen_jiffies == jiffies)
        return 0;
    tick = (b->area->seen_ns - ns) / (b->area->seen_jiffies - jiffies);
    for (size_t i = 0; i < sizeof(ticks_ns) / sizeof(ticks_ns[0]); i++) {
        if (tick < ticks_ns[i] * 9 / 10 || tick > ticks_ns[i] * 11 / 10)
            continue;
        b->area->base_ns = b->area->seen_ns - b->area->seen_jiffies * ticks_ns[i];
        b->area->tick_ns = ticks_ns[i];
    }
    return 0;
}

static int bpf_read_counters(struct atp_switch *sw, uint8_t job_id, uint64_t *out) {
    const struct atp_bpf *b = sw->bpf;
    struct atp_counters *cores = calloc((size_t)b->cpus, sizeof(*cores));
    uint32_t key = job_id;
    int result;

    if (cores == NULL)
        return -ENOMEM;
    result = bpf_map_lookup_elem(b->counters, &key, cores);
    memset(out, 0, sizeof(*cores));
    for (int cpu = 0; result == 0 && cpu < b->cpus; cpu++)
        for (uint32_t i = 0; i < ATP_COUNTERS; i++)
            out[i] += cores[cpu].c[i];
    free(cores);
    return result;
}

static int bpf_read_aggregator(struct atp_switch *sw, uint32_t index, struct atp_aggregator_head *head,
                               uint64_t *pairs) {
    const struct atp_bpf *b = sw->bpf;
    int result = scan_once(sw->bpf, ATP_SCAN_READ, 0, index, index + 1);

    if (result < 0)
        return result;
    memcpy(head, b->area->copy, sizeof(*head));
    memcpy(pairs, (const uint8_t *)b->area->copy + sizeof(*head), b->aggregator_size - sizeof(*head));
    return 0;
}

static int bpf_write_host(struct atp_switch *sw, uint32_t address, const struct atp_host *host) {
    const struct atp_bpf *b = sw->bpf;

    return host != NULL ? bpf_map_update_elem(b->hosts, &address, host, BPF_ANY)
                        : bpf_map_delete_elem(b->hosts, &address);
}

static int bpf_write_sources(struct atp_switch *sw, uint32_t port, const struct atp_sources *sources) {
    const struct atp_bpf *b = sw->bpf;

    return sources != NULL ? bpf_map_update_elem(b->sources, &port, sources, BPF_ANY)
                           : bpf_map_delete_elem(b->sources, &port);
}

static int bpf_read_drops(struct atp_switch *sw, struct atp_port_drops *out, uint32_t count) {
    const struct atp_bpf *b = sw->bpf;
    uint32_t found = 0;
    uint32_t key;
    int result = bpf_map_get_next_key(b->drops, NULL, &key);

    while (result == 0 && found < count) {
        uint32_t next;

        /* An entry may be forgotten between the two calls. */
        found += bpf_map_lookup_elem(b->drops, &key, &out[found]) == 0;
        result = bpf_map_get_next_key(b->drops, &key, &next);
        key = next;
    }
    return result != 0 && result != -ENOENT ? result : (int)found;
}

static int bpf_read_hosts(struct atp_switch *sw, struct atp_held_host *out, uint32_t count) {
    const struct atp_bpf *b = sw->bpf;
    uint32_t found = 0;
    uint32_t key;
    int result = bpf_map_get_next_key(b->hosts, NULL, &key);

    while (result == 0) {
        if (found == count)
            return -ENOSPC;
        result = bpf_map_lookup_elem(b->hosts, &key, &out[found].host);
        out[found].address = key;
        found++;
        if (result == 0)
            result = bpf_map_get_next_key(b->hosts, &key, &key);
    }
    return result == -ENOENT ? (int)found : result;
}

static void bpf_set_unguarded(struct atp_switch *sw, uint32_t jobs) {
    __atomic_store_n(&sw->bpf->area->unguarded_jobs, jobs, __ATOMIC_RELEASE);
}

static void bpf_close(struct atp_switch *sw) {
    struct atp_bpf *b = sw->bpf;

    atp_bpf_let_go(b);
    for (size_t i = 0; i < sizeof(b->mapping) / sizeof(b->mapping[0]); i++)
        if (b->mapping[i].address != NULL)
            munmap(b->mapping[i].address, b->mapping[i].length);
    bpf_object__close(b->object);
    atp_pins_close(b->pins);
    free(b);
    sw->bpf = NULL;
}

const struct atp_backend atp_bpf_backend = {
    .barrier = bpf_barrier,
    .scan = bpf_scan,
    .read_counters = bpf_read_counters,
    .read_aggregator = bpf_read_aggregator,
    .write_host = bpf_write_host,
    .write_sources = bpf_write_sources,
    .read_drops = bpf_read_drops,
    .read_hosts = bpf_read_hosts,
    .set_unguarded = bpf_set_unguarded,
    .close = bpf_close,
};
