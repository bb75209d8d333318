/* SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 */
/* What the control plane reads and frees of aggregators, and counters. */
#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "core/values.h"
#include "switch.h"

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
            count = atp_job_entry(sw, head.key >> ATP_JOB_ID_SHIFT)->values / 2;
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
