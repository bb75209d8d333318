/* SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 */
/* All tables at once: taken over from an earlier switch, and emptied. */
#include <errno.h>
#include <string.h>

#include "switch.h"

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
    result = atp_hosts_take_over(sw);
    if (result == 0)
        atp_count_unguarded(sw);
    return result;
}

static int reset(struct atp_switch *sw) {
    struct atp_tables *t = &sw->tables;
    int result;

    for (uint32_t job_id = 1; job_id < ATP_JOBS; job_id++)
        store64(&t->job_slots[job_id], 0);
    sw->backend->barrier(sw);
    result = sw->backend->scan(sw, ATP_SCAN_FREE, ATP_JOB_ID_FREE);
    if (result >= 0)
        result = atp_hosts_clear(sw);
    memset(t->jobs, 0, 2 * ATP_JOBS * sizeof(t->jobs[0]));
    for (uint32_t group = 1; group < ATP_GROUPS; group++)
        store64(&t->group_slots[group], 0);
    sw->backend->barrier(sw);
    atp_count_unguarded(sw);
    return result < 0 ? result : 0;
}

ATP_EXPORT int atp_switch_reset(struct atp_switch *sw) {
    locked(sw);
    return unlocked(sw, reset(sw));
}
