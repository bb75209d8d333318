/* SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 */
/* Multicast groups: written in the half that no packet uses, as jobs are (jobs.c). */
#include <errno.h>
#include <string.h>

#include "switch.h"

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
