/* SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 */
/* The guard's tables: hosts of jobs, addresses behind ports; and the counts of what it dropped. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "switch.h"

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
    struct atp_job_entry *entry = atp_job_entry(sw, job_id);

    store32(&entry->hosts, entry->hosts + (uint32_t)change);
    atp_count_unguarded(sw);
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

static int by_address(const void *a, const void *b) {
    const struct atp_held_host *x = a;
    const struct atp_held_host *y = b;

    return (x->address > y->address) - (x->address < y->address);
}

int atp_hosts_take_over(struct atp_switch *sw) {
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
        store32(&atp_job_entry(sw, job_id)->hosts, hosts);
    }
    return 0;
}

int atp_hosts_clear(struct atp_switch *sw) {
    int result = 0;

    while (result == 0 && sw->host_count != 0) {
        result = write_host(sw, sw->hosts[sw->host_count - 1].address, NULL);
        sw->host_count -= result == 0;
    }
    return result;
}
