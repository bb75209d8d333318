/* SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 */
/*
 * The control interface of atp_control.h over the tables of any data path. Packets read the tables while they change:
 * an aligned word is stored at once; whatever is larger is written in the half that no packet uses, then the slot is
 * turned over, and the old half rests until the backend's barrier says that the last reader has left.
 */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "switch.h"

static const char *const counter_names[ATP_COUNTERS + 1] = {
    [ATP_C_ALLOCATED] = "allocated",
    [ATP_C_AGGREGATED] = "aggregated",
    [ATP_C_COMPLETED] = "completed",
    [ATP_C_COLLISIONS] = "collisions",
    [ATP_C_DUPLICATES] = "duplicates",
    [ATP_C_REEMITTED] = "reemitted",
    [ATP_C_STALE_TAKEOVERS] = "stale_takeovers",
    [ATP_C_RESEND_PARTIALS] = "resend_partials",
    [ATP_C_RESEND_PASSED] = "resend_passed",
    [ATP_C_RELEASED] = "released",
    [ATP_C_ACKS] = "acks",
    [ATP_C_ECN_MARKED] = "ecn_marked",
    [ATP_C_PASSED_RAW_FLOAT] = "passed_raw_float",
    [ATP_C_PASSED_TRANSIT] = "passed_transit",
    [ATP_C_PASSED_UNKNOWN_JOB] = "passed_unknown_job",
    [ATP_C_REJECTED_SHORT] = "rejected_short",
    [ATP_C_REJECTED_LENGTH] = "rejected_length",
    [ATP_C_REJECTED_BIT] = "rejected_bit",
    [ATP_C_REJECTED_INDEX] = "rejected_index",
    [ATP_C_REJECTED_ACK_SOURCE] = "rejected_ack_source",
    [ATP_C_BYTES_IN] = "bytes_in",
    [ATP_C_BYTES_OUT] = "bytes_out",
    [ATP_C_PASSED_GSO] = "passed_gso",
    [ATP_C_DROPPED_NO_ROUTE] = "dropped_no_route",
    [ATP_C_DROPPED_BUSY] = "dropped_busy",
};

static const char *const drop_names[ATP_DROPS + 1] = {
    [ATP_D_SOURCE] = "source", [ATP_D_DESTINATION] = "destination", [ATP_D_MALFORMED] = "malformed",
    [ATP_D_FORGED] = "forged", [ATP_D_ADMISSION] = "admission",
};

ATP_EXPORT const char *const *atp_counter_names(void) {
    return counter_names;
}

ATP_EXPORT const char *const *atp_drop_names(void) {
    return drop_names;
}

bool atp_is_profile(uint32_t values) {
    return values == ATP_VALUES_BASE || values == ATP_VALUES_LARGE || values == ATP_VALUES_JUMBO;
}

int atp_switch_new(const struct atp_switch_options *options, struct atp_switch **out) {
    struct atp_switch *sw;

    if (options == NULL || out == NULL || options->aggregators == 0 ||
        options->aggregators > ATP_AGGREGATOR_INDEX_MAX + 1 || !atp_is_profile(options->values) ||
        options->stale_ns > INT64_MAX)
        return -EINVAL;
    sw = calloc(1, sizeof(*sw));
    if (sw == NULL)
        return -ENOMEM;
    pthread_mutex_init(&sw->lock, NULL);
    sw->aggregators = options->aggregators;
    sw->values = options->values;
    sw->stale_ns = options->stale_ns ? options->stale_ns : ATP_STALE_NS;
    *out = sw;
    return 0;
}

ATP_EXPORT void atp_switch_close(struct atp_switch *sw) {
    if (sw == NULL)
        return;
    if (sw->native != NULL)
        (void)atp_relay_stop(sw);
    if (sw->backend != NULL)
        sw->backend->close(sw);
    pthread_mutex_destroy(&sw->lock);
    free(sw->hosts);
    free(sw);
}

static void store64(uint64_t *word, uint64_t value) {
    __atomic_store_n(word, value, __ATOMIC_RELEASE);
}

static void store32(uint32_t *word, uint32_t value) {
    __atomic_store_n(word, value, __ATOMIC_RELEASE);
}

static int locked(struct atp_switch *sw) {
    return pthread_mutex_lock(&sw->lock);
}

static int unlocked(struct atp_switch *sw, int result) {
    pthread_mutex_unlock(&sw->lock);
    return result;
}

/* ---- jobs ---- */

static uint32_t job_entry_index(const struct atp_switch *sw, uint32_t job_id) {
    return 2 * job_id + sw->job_half[job_id];
}

static struct atp_job_entry *job_entry(struct atp_switch *sw, uint32_t job_id) {
    return &sw->tables.jobs[job_entry_index(sw, job_id)];
}

/* A job's packets towards the PS fill the phantom queue of its first PS port. */
static void link_queue(struct atp_switch *sw, struct atp_job_entry *entry) {
    uint32_t port = atp_ps_port(entry);
    uint32_t slot = 0;

    for (uint32_t i = 0; i < ATP_QUEUES && port != 0; i++)
        if (sw->tables.queues[i].port == port)
            slot = i + 1;
    store32(&entry->queue, slot);
}

static int check_job(const struct atp_switch *sw, uint8_t job_id, const struct atp_job_config *config) {
    if (job_id == ATP_JOB_ID_FREE || config == NULL || !atp_is_profile(config->values) || config->region_count == 0 ||
        config->region_count > ATP_REGIONS_MAX || config->group >= ATP_GROUPS)
        return -EINVAL;
    if (config->values > sw->values)
        return -EMSGSIZE;
    for (uint32_t i = 0; i < config->region_count; i++) {
        const struct atp_region *region = &config->region[i];
        if (region->size == 0)
            return -EINVAL;
        if (region->start >= sw->aggregators || region->size > sw->aggregators - region->start)
            return -ERANGE;
    }
    return 0;
}

static uint64_t lane_of(uint32_t full) {
    return atp_lane((uint32_t)__builtin_popcount(full));
}

static bool is_as_configured(const struct atp_job_entry *entry, const struct atp_job_config *config) {
    struct atp_region region[ATP_REGIONS_MAX] = {{0}};

    memcpy(region, config->region, config->region_count * sizeof(region[0]));
    return entry->values == config->values && entry->full0 == config->full0 && entry->full1 == config->full1 &&
           entry->group == config->group && memcmp(entry->region, region, sizeof(region)) == 0;
}

/* Jobs that the switch knows but has no host of. */
static void count_unguarded(struct atp_switch *sw) {
    uint32_t jobs = 0;

    if (sw->backend->set_unguarded == NULL)
        return;
    for (uint32_t job_id = 1; job_id < ATP_JOBS; job_id++)
        jobs += sw->tables.job_slots[job_id] != 0 && job_entry(sw, job_id)->hosts == 0;
    sw->backend->set_unguarded(sw, jobs);
}

static int set_job(struct atp_switch *sw, uint8_t job_id, const struct atp_job_config *config) {
    struct atp_tables *t = &sw->tables;
    const struct atp_job_entry *old = job_entry(sw, job_id);
    uint8_t half = sw->job_half[job_id] ^ 1;
    struct atp_job_entry *entry = &t->jobs[2 * job_id + half];
    bool known = t->job_slots[job_id] != 0;
    bool other_sums;
    int freed;

    if (known && is_as_configured(old, config))
        return 0;  /* level-triggered control says the same again and again */
    *entry = *old; /* admission, transit and PS ports are tables of their own */
    entry->values = config->values;
    entry->full0 = config->full0;
    entry->full1 = config->full1;
    entry->group = config->group;
    memset(entry->region, 0, sizeof(entry->region));
    memcpy(entry->region, config->region, config->region_count * sizeof(config->region[0]));
    entry->lane[0] = lane_of(config->full0);
    entry->lane[1] = lane_of(config->full1);
    other_sums = known && (old->values != entry->values || old->full0 != entry->full0 || old->full1 != entry->full1 ||
                           memcmp(old->region, entry->region, sizeof(entry->region)) != 0);
    sw->job_half[job_id] = half;
    store64(&t->job_slots[job_id], 1 + job_entry_index(sw, job_id));
    count_unguarded(sw);
    if (!known)
        return 0; /* the old half had its barrier when the job was deleted */
    sw->backend->barrier(sw);
    if (!other_sums)
        return 0;
    /* What was summed for other workers, or in another region, must not meet the packets to come. */
    freed = sw->backend->scan(sw, ATP_SCAN_FREE, job_id);
    return freed < 0 ? freed : 0;
}

ATP_EXPORT int atp_switch_set_job(struct atp_switch *sw, uint8_t job_id, const struct atp_job_config *config) {
    int result = check_job(sw, job_id, config);

    if (result != 0)
        return result;
    locked(sw);
    return unlocked(sw, set_job(sw, job_id, config));
}

ATP_EXPORT int atp_switch_delete_job(struct atp_switch *sw, uint8_t job_id) {
    int freed;

    if (job_id == ATP_JOB_ID_FREE)
        return -EINVAL;
    locked(sw);
    if (sw->tables.job_slots[job_id] == 0)
        return unlocked(sw, -ENOENT);
    store64(&sw->tables.job_slots[job_id], 0);
    count_unguarded(sw);
    /* A packet that found the job just before may still allocate: only after it has left, nothing does. */
    sw->backend->barrier(sw);
    freed = sw->backend->scan(sw, ATP_SCAN_FREE, job_id);
    return unlocked(sw, freed < 0 ? freed : 0);
}

/* ---- admission, transit, PS ports ---- */

static int set_port(uint32_t *cells, uint32_t count, uint32_t port) {
    for (uint32_t i = 0; i < count; i++)
        if (cells[i] == port)
            return 0;
    for (uint32_t i = 0; i < count; i++) {
        if (cells[i] != 0)
            continue;
        store32(&cells[i], port);
        return 0;
    }
    return -ENOSPC;
}

static int delete_port(uint32_t *cells, uint32_t count, uint32_t port) {
    for (uint32_t i = 0; i < count; i++) {
        if (cells[i] != port)
            continue;
        store32(&cells[i], 0);
        return 0;
    }
    return -ENOENT;
}

static bool admission_is_valid(const struct atp_admission_key *key) {
    return key != NULL && key->job_id != ATP_JOB_ID_FREE && key->port != 0 && key->edge < ATP_LEVELS &&
           atp_is_one_bit(key->bitmap);
}

ATP_EXPORT int atp_switch_set_admission(struct atp_switch *sw, const struct atp_admission_key *key) {
    uint32_t *cells;

    if (!admission_is_valid(key))
        return -EINVAL;
    locked(sw);
    cells = job_entry(sw, key->job_id)->admission[key->edge][atp_bit_slot(key->bitmap)];
    return unlocked(sw, set_port(cells, ATP_PORTS_PER_BIT, key->port));
}

ATP_EXPORT int atp_switch_delete_admission(struct atp_switch *sw, const struct atp_admission_key *key) {
    uint32_t *cells;

    if (!admission_is_valid(key))
        return -EINVAL;
    locked(sw);
    cells = job_entry(sw, key->job_id)->admission[key->edge][atp_bit_slot(key->bitmap)];
    return unlocked(sw, delete_port(cells, ATP_PORTS_PER_BIT, key->port));
}

static bool transit_is_valid(const struct atp_transit_key *key) {
    return key != NULL && key->job_id != ATP_JOB_ID_FREE && key->port != 0 && atp_is_one_bit(key->bitmap1);
}

static int set_transit(struct atp_switch *sw, const struct atp_transit_key *key, uint64_t cell) {
    uint64_t *cells = job_entry(sw, key->job_id)->transit[atp_bit_slot(key->bitmap1)];
    uint64_t *free_cell = NULL;

    for (uint32_t i = 0; i < ATP_PORTS_PER_BIT; i++) {
        if (cells[i] >> 32 == key->port) {
            store64(&cells[i], cell);
            return 0;
        }
        if (cells[i] == 0 && free_cell == NULL)
            free_cell = &cells[i];
    }
    if (cell == 0)
        return -ENOENT;
    if (free_cell == NULL)
        return -ENOSPC;
    store64(free_cell, cell);
    return 0;
}

ATP_EXPORT int atp_switch_set_transit(struct atp_switch *sw, const struct atp_transit_key *key, uint32_t mask0) {
    if (!transit_is_valid(key) || mask0 == 0)
        return -EINVAL;
    locked(sw);
    return unlocked(sw, set_transit(sw, key, (uint64_t)key->port << 32 | mask0));
}

ATP_EXPORT int atp_switch_delete_transit(struct atp_switch *sw, const struct atp_transit_key *key) {
    if (!transit_is_valid(key))
        return -EINVAL;
    locked(sw);
    return unlocked(sw, set_transit(sw, key, 0));
}

static int change_ps_port(struct atp_switch *sw, uint8_t job_id, uint32_t port,
                          int (*change)(uint32_t *cells, uint32_t count, uint32_t port)) {
    struct atp_job_entry *entry;
    int result;

    if (job_id == ATP_JOB_ID_FREE || port == 0)
        return -EINVAL;
    locked(sw);
    entry = job_entry(sw, job_id);
    result = change(entry->ps_port, ATP_PS_PORTS_MAX, port);
    if (result == 0)
        link_queue(sw, entry);
    return unlocked(sw, result);
}

ATP_EXPORT int atp_switch_set_ps_port(struct atp_switch *sw, uint8_t job_id, uint32_t port) {
    return change_ps_port(sw, job_id, port, set_port);
}

ATP_EXPORT int atp_switch_delete_ps_port(struct atp_switch *sw, uint8_t job_id, uint32_t port) {
    return change_ps_port(sw, job_id, port, delete_port);
}

/* ---- hosts ---- */

/* Where the address is, or would be. */
static uint32_t find_host(const struct atp_switch *sw, uint32_t address) {
    uint32_t low = 0;
    uint32_t high = sw->host_count;

    while (low < high) {
        uint32_t middle = low + (high - low) / 2;
        if (sw->hosts[middle].address < address)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

static bool host_is_valid(uint32_t address, const struct atp_host *host) {
    return address != 0 && host != NULL && host->job_id != ATP_JOB_ID_FREE && host->port != 0 && host->mark != 0 &&
           host->edge < ATP_LEVELS && host->zero == 0 &&
           (host->role == ATP_HOST_PS
                ? host->bitmap0 == 0 && host->bitmap1 == 0 && host->edge == 0
                : host->role == ATP_HOST_WORKER && atp_is_one_bit(host->bitmap0) && atp_is_one_bit(host->bitmap1));
}

static void add_hosts(struct atp_switch *sw, uint8_t job_id, int32_t change) {
    struct atp_job_entry *entry = job_entry(sw, job_id);

    store32(&entry->hosts, entry->hosts + (uint32_t)change);
    count_unguarded(sw);
}

static int write_host(struct atp_switch *sw, uint32_t address, const struct atp_host *host) {
    return sw->backend->write_host != NULL ? sw->backend->write_host(sw, address, host) : 0;
}

static int set_host(struct atp_switch *sw, uint32_t address, const struct atp_host *host) {
    uint32_t at = find_host(sw, address);
    struct atp_held_host *more;
    int result;

    if (at < sw->host_count && sw->hosts[at].address == address) {
        struct atp_host *held = &sw->hosts[at].host;
        if (held->mark != host->mark || held->job_id != host->job_id)
            return -EEXIST;
        result = write_host(sw, address, host);
        if (result == 0)
            *held = *host;
        return result;
    }
    if (sw->host_count == ATP_HOSTS)
        return -ENOSPC;
    if (sw->host_count == sw->host_room) {
        more = realloc(sw->hosts, (2 * sw->host_room + 64) * sizeof(*more));
        if (more == NULL)
            return -ENOMEM;
        sw->hosts = more;
        sw->host_room = 2 * sw->host_room + 64;
    }
    result = write_host(sw, address, host);
    if (result != 0)
        return result;
    memmove(&sw->hosts[at + 1], &sw->hosts[at], (sw->host_count - at) * sizeof(*sw->hosts));
    sw->hosts[at] = (struct atp_held_host){.address = address, .host = *host};
    sw->host_count++;
    add_hosts(sw, host->job_id, 1);
    return 0;
}

ATP_EXPORT int atp_switch_set_host(struct atp_switch *sw, uint32_t address, const struct atp_host *host) {
    if (!host_is_valid(address, host))
        return -EINVAL;
    locked(sw);
    return unlocked(sw, set_host(sw, address, host));
}

ATP_EXPORT int atp_switch_delete_host(struct atp_switch *sw, uint32_t address) {
    uint32_t at;
    uint8_t job_id;
    int result;

    locked(sw);
    at = find_host(sw, address);
    if (at == sw->host_count || sw->hosts[at].address != address)
        return unlocked(sw, -ENOENT);
    result = write_host(sw, address, NULL);
    if (result != 0)
        return unlocked(sw, result);
    job_id = sw->hosts[at].host.job_id;
    sw->host_count--;
    memmove(&sw->hosts[at], &sw->hosts[at + 1], (sw->host_count - at) * sizeof(*sw->hosts));
    add_hosts(sw, job_id, -1);
    return unlocked(sw, 0);
}

static int write_sources(struct atp_switch *sw, uint32_t port, const struct atp_sources *sources) {
    int result;

    if (sw->backend->write_sources == NULL)
        return -ENOTSUP;
    locked(sw);
    result = sw->backend->write_sources(sw, port, sources);
    return unlocked(sw, result);
}

ATP_EXPORT int atp_switch_set_sources(struct atp_switch *sw, uint32_t port, const uint32_t *addresses, uint32_t count) {
    struct atp_sources sources = {.count = count};

    if (port == 0 || (count != 0 && addresses == NULL))
        return -EINVAL;
    if (count > ATP_SOURCES_MAX)
        return -E2BIG;
    if (count != 0)
        memcpy(sources.address, addresses, count * sizeof(*addresses));
    return write_sources(sw, port, &sources);
}

ATP_EXPORT int atp_switch_delete_sources(struct atp_switch *sw, uint32_t port) {
    return port == 0 ? -EINVAL : write_sources(sw, port, NULL);
}

ATP_EXPORT int atp_switch_read_drops(struct atp_switch *sw, struct atp_port_drops *out, uint32_t count) {
    if (out == NULL && count != 0)
        return -EINVAL;
    if (sw->backend->read_drops == NULL)
        return 0;
    locked(sw);
    return unlocked(sw, sw->backend->read_drops(sw, out, count));
}

/* ---- multicast groups ---- */

ATP_EXPORT int atp_switch_set_group(struct atp_switch *sw, uint32_t group, const struct atp_replica *replicas,
                                    uint32_t count) {
    struct atp_tables *t = &sw->tables;
    struct atp_group_entry *entry;
    uint8_t half;

    if (group == 0 || group >= ATP_GROUPS || count > ATP_REPLICAS_MAX || (count != 0 && replicas == NULL))
        return -EINVAL;
    for (uint32_t i = 0; i < count; i++)
        if (replicas[i].port == 0)
            return -EINVAL;
    locked(sw);
    if (count == 0 && t->group_slots[group] == 0)
        return unlocked(sw, -ENOENT);
    entry = &t->groups[2 * group + sw->group_half[group]];
    if (t->group_slots[group] != 0 && count == entry->count &&
        memcmp(entry->replica, replicas, count * sizeof(*replicas)) == 0)
        return unlocked(sw, 0);
    if (count == 0) {
        store64(&t->group_slots[group], 0);
    } else {
        half = sw->group_half[group] ^ 1;
        entry = &t->groups[2 * group + half];
        memset(entry, 0, sizeof(*entry));
        memcpy(entry->replica, replicas, count * sizeof(*replicas));
        entry->count = count;
        sw->group_half[group] = half;
        store64(&t->group_slots[group], 1 + 2 * (uint64_t)group + half);
    }
    sw->backend->barrier(sw);
    return unlocked(sw, 0);
}

/* ---- tables that outlive a switch ---- */

static int by_address(const void *a, const void *b) {
    const struct atp_held_host *x = a;
    const struct atp_held_host *y = b;

    return (x->address > y->address) - (x->address < y->address);
}

static int take_over_hosts(struct atp_switch *sw) {
    int count;

    sw->hosts = malloc(ATP_HOSTS * sizeof(*sw->hosts));
    if (sw->hosts == NULL)
        return -ENOMEM;
    sw->host_room = ATP_HOSTS;
    count = sw->backend->read_hosts(sw, sw->hosts, ATP_HOSTS);
    if (count < 0)
        return count;
    sw->host_count = (uint32_t)count;
    qsort(sw->hosts, sw->host_count, sizeof(*sw->hosts), by_address);
    for (uint32_t job_id = 1; job_id < ATP_JOBS; job_id++) {
        uint32_t hosts = 0;

        for (uint32_t i = 0; i < sw->host_count; i++)
            hosts += sw->hosts[i].host.job_id == job_id;
        store32(&job_entry(sw, job_id)->hosts, hosts);
    }
    return 0;
}

int atp_switch_take_over(struct atp_switch *sw) {
    struct atp_tables *t = &sw->tables;
    int result;

    for (uint32_t job_id = 1; job_id < ATP_JOBS; job_id++) {
        uint64_t slot = t->job_slots[job_id];

        /* Which half holds the entries of an unknown job nobody can tell; no packet looks at them. */
        if (slot == 0)
            memset(&t->jobs[2 * job_id], 0, 2 * sizeof(t->jobs[0]));
        else if ((slot - 1) / 2 != job_id)
            return -EUCLEAN;
        sw->job_half[job_id] = slot != 0 && (slot - 1) % 2;
    }
    for (uint32_t group = 1; group < ATP_GROUPS; group++) {
        uint64_t slot = t->group_slots[group];

        if (slot != 0 && (slot - 1) / 2 != group)
            return -EUCLEAN;
        sw->group_half[group] = slot != 0 && (slot - 1) % 2;
    }
    result = take_over_hosts(sw);
    if (result == 0)
        count_unguarded(sw);
    return result;
}

static int reset(struct atp_switch *sw) {
    struct atp_tables *t = &sw->tables;
    int result;

    for (uint32_t job_id = 1; job_id < ATP_JOBS; job_id++)
        store64(&t->job_slots[job_id], 0);
    sw->backend->barrier(sw);
    result = sw->backend->scan(sw, ATP_SCAN_FREE, ATP_JOB_ID_FREE);
    while (result >= 0 && sw->host_count != 0) {
        result = write_host(sw, sw->hosts[sw->host_count - 1].address, NULL);
        sw->host_count -= result == 0;
    }
    memset(t->jobs, 0, 2 * ATP_JOBS * sizeof(t->jobs[0]));
    for (uint32_t group = 1; group < ATP_GROUPS; group++)
        store64(&t->group_slots[group], 0);
    sw->backend->barrier(sw);
    count_unguarded(sw);
    return result < 0 ? result : 0;
}

ATP_EXPORT int atp_switch_reset(struct atp_switch *sw) {
    locked(sw);
    return unlocked(sw, reset(sw));
}

/* ---- phantom queues ---- */

static int set_port_rate(struct atp_switch *sw, uint32_t port, uint64_t bits_per_second, uint32_t threshold_bytes) {
    struct atp_queue *queue = NULL;
    uint64_t ns_per_kib;

    for (uint32_t i = 0; i < ATP_QUEUES && queue == NULL; i++)
        if (sw->tables.queues[i].port == port)
            queue = &sw->tables.queues[i];
    if (bits_per_second == 0) {
        if (queue == NULL)
            return -ENOENT;
        store32(&queue->ns_per_kib, 0);
        store32(&queue->port, 0);
    } else {
        ns_per_kib = 1024ull * 8 * 1000000000 / bits_per_second;
        if (ns_per_kib == 0 || ns_per_kib > UINT32_MAX)
            return -ERANGE;
        for (uint32_t i = 0; i < ATP_QUEUES && queue == NULL; i++)
            if (sw->tables.queues[i].port == 0)
                queue = &sw->tables.queues[i];
        if (queue == NULL)
            return -ENOSPC;
        /* A slot in use again: what waited in it before does not wait for this port. */
        if (queue->port != port)
            store64(&queue->busy_until_ns, 0);
        store64(&queue->threshold_ns, (uint64_t)threshold_bytes * ns_per_kib >> 10);
        store32(&queue->ns_per_kib, (uint32_t)ns_per_kib);
        store32(&queue->port, port);
    }
    for (uint32_t job_id = 1; job_id < ATP_JOBS; job_id++)
        link_queue(sw, job_entry(sw, job_id));
    return 0;
}

ATP_EXPORT int atp_switch_set_port_rate(struct atp_switch *sw, uint32_t port, uint64_t bits_per_second,
                                        uint32_t threshold_bytes) {
    if (port == 0)
        return -EINVAL;
    locked(sw);
    return unlocked(sw, set_port_rate(sw, port, bits_per_second, threshold_bytes));
}

/* ---- reads ---- */

ATP_EXPORT int atp_switch_read_counters(struct atp_switch *sw, uint8_t job_id, uint64_t *out) {
    locked(sw);
    return unlocked(sw, sw->backend->read_counters(sw, job_id, out));
}

static void unpack_values(const struct atp_aggregator_head *head, const uint64_t *pairs, uint32_t count,
                          int32_t *values) {
    for (uint32_t i = 0; i < count; i++) {
        uint64_t pair = (pairs[i] - head->offset + ATP_LOW_SIGN) ^ ATP_LOW_SIGN;
        values[2 * i] = (int32_t)(uint32_t)(pair >> 32);
        values[2 * i + 1] = (int32_t)(uint32_t)pair;
    }
}

ATP_EXPORT int atp_switch_read_aggregator(struct atp_switch *sw, uint32_t index, struct atp_aggregator_state *state,
                                          int32_t *values) {
    struct atp_aggregator_head head;
    uint64_t *pairs;
    uint32_t count = 0;
    int result;

    if (index >= sw->aggregators)
        return -ERANGE;
    if (state == NULL)
        return -EINVAL;
    pairs = calloc(sw->values / 2, sizeof(*pairs));
    if (pairs == NULL)
        return -ENOMEM;
    locked(sw);
    result = sw->backend->read_aggregator(sw, index, &head, pairs);
    if (result == 0) {
        *state = (struct atp_aggregator_state){
            .key = head.key,
            .level = head.level,
            .bitmap = head.bitmap,
            .complete = head.complete,
            .ecn = head.ecn,
            .timestamp_ns = head.timestamp_ns,
        };
        if (head.key != 0)
            count = job_entry(sw, head.key >> ATP_JOB_ID_SHIFT)->values / 2;
        if (values != NULL) {
            memset(values, 0, sw->values * sizeof(*values));
            unpack_values(&head, pairs, count, values);
        }
    }
    unlocked(sw, 0);
    free(pairs);
    return result;
}

ATP_EXPORT int atp_switch_sweep(struct atp_switch *sw) {
    locked(sw);
    return unlocked(sw, sw->backend->scan(sw, ATP_SCAN_SWEEP, 0));
}

ATP_EXPORT int atp_switch_occupancy(struct atp_switch *sw, uint8_t job_id) {
    locked(sw);
    return unlocked(sw, sw->backend->scan(sw, ATP_SCAN_COUNT, job_id));
}
