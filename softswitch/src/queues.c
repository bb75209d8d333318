/* SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 */
/* Phantom queues of ports. */
#include <errno.h>

#include "switch.h"

void atp_link_queue(struct atp_switch *sw, struct atp_job_entry *entry) {
    uint32_t port = atp_ps_port(entry);
    uint32_t slot = 0;

    for (uint32_t i = 0; i < ATP_QUEUES && port != 0; i++)
        if (sw->tables.queues[i].port == port)
            slot = i + 1;
    store32(&entry->queue, slot);
}

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
        atp_link_queue(sw, atp_job_entry(sw, job_id));
    return 0;
}

ATP_EXPORT int atp_switch_set_port_rate(struct atp_switch *sw, uint32_t port, uint64_t bits_per_second,
                                        uint32_t threshold_bytes) {
    if (port == 0)
        return -EINVAL;
    locked(sw);
    return unlocked(sw, set_port_rate(sw, port, bits_per_second, threshold_bytes));
}
