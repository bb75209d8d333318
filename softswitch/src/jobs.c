/* SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 */
/*
 * Jobs, and what belongs to each: admission, transit, PS ports.
 *
 * Packets read the tables while they change: an aligned word is stored at once; whatever is larger is written in the
 * half that no packet uses, then the slot is turned over, and the old half rests until the backend's barrier says that
 * the last reader has left.
 */
#include <errno.h>
#include <string.h>

#include "core/values.h"
#include "switch.h"

static uint32_t job_entry_index(const struct atp_switch *sw, uint32_t job_id) {
    return 2 * job_id + sw->job_half[job_id];
}

struct atp_job_entry *atp_job_entry(struct atp_switch *sw, uint32_t job_id) {
    return &sw->tables.jobs[job_entry_index(sw, job_id)];
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

void atp_count_unguarded(struct atp_switch *sw) {
    uint32_t jobs = 0;

    if (sw->backend->set_unguarded == NULL)
        return;
    for (uint32_t job_id = 1; job_id < ATP_JOBS; job_id++)
        jobs += sw->tables.job_slots[job_id] != 0 && atp_job_entry(sw, job_id)->hosts == 0;
    sw->backend->set_unguarded(sw, jobs);
}

static int set_job(struct atp_switch *sw, uint8_t job_id, const struct atp_job_config *config) {
    struct atp_tables *t = &sw->tables;
    const struct atp_job_entry *old = atp_job_entry(sw, job_id);
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
    atp_count_unguarded(sw);
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
    atp_count_unguarded(sw);
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
    cells = atp_job_entry(sw, key->job_id)->admission[key->edge][atp_bit_slot(key->bitmap)];
    return unlocked(sw, set_port(cells, ATP_PORTS_PER_BIT, key->port));
}

ATP_EXPORT int atp_switch_delete_admission(struct atp_switch *sw, const struct atp_admission_key *key) {
    uint32_t *cells;

    if (!admission_is_valid(key))
        return -EINVAL;
    locked(sw);
    cells = atp_job_entry(sw, key->job_id)->admission[key->edge][atp_bit_slot(key->bitmap)];
    return unlocked(sw, delete_port(cells, ATP_PORTS_PER_BIT, key->port));
}

static bool transit_is_valid(const struct atp_transit_key *key) {
    return key != NULL && key->job_id != ATP_JOB_ID_FREE && key->port != 0 && atp_is_one_bit(key->bitmap1);
}

static int set_transit(struct atp_switch *sw, const struct atp_transit_key *key, uint64_t cell) {
    uint64_t *cells = atp_job_entry(sw, key->job_id)->transit[atp_bit_slot(key->bitmap1)];
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
    entry = atp_job_entry(sw, job_id);
    result = change(entry->ps_port, ATP_PS_PORTS_MAX, port);
    if (result == 0)
        atp_link_queue(sw, entry);
    return unlocked(sw, result);
}

ATP_EXPORT int atp_switch_set_ps_port(struct atp_switch *sw, uint8_t job_id, uint32_t port) {
    return change_ps_port(sw, job_id, port, set_port);
}

ATP_EXPORT int atp_switch_delete_ps_port(struct atp_switch *sw, uint8_t job_id, uint32_t port) {
    return change_ps_port(sw, job_id, port, delete_port);
}
