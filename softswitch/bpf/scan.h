/* SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 */
/* Visits to aggregators for the control plane, each under its lock; see struct atp_control_area. */
#ifndef ATP_BPF_SCAN_H
#define ATP_BPF_SCAN_H

#include "bpf/clock.h"
#include "bpf/lock.h"
#include "bpf/maps.h"
#include "core/values.h"

static __always_inline void atp_copy_out(const struct atp_aggregator *agg) {
    const uint64_t *from = (const uint64_t *)agg;

    ATP_ROLLED
    for (uint32_t i = 0; i < sizeof(*agg) / sizeof(*from); i++)
        atp_control_area.copy[i] = from[i];
}

static long atp_scan_one(uint32_t i, uint64_t *now_ns) {
    const uint32_t op = atp_control_area.op;
    const uint32_t job_id = atp_control_area.job_id;
    uint32_t index = atp_control_area.start + i;
    struct atp_aggregator *agg = bpf_map_lookup_elem(&atp_aggregators, &index);

    if (!agg)
        return 1;
    if (agg->head.key == 0 && op != ATP_SCAN_READ)
        return 0;
    if (!atp_lock(&agg->head)) {
        atp_control_area.busy++;
        return 0;
    }
    if (op == ATP_SCAN_READ) {
        atp_copy_out(agg);
    } else if (atp_scan_matches(&agg->head, op, job_id, *now_ns, atp_settings.stale_ns)) {
        atp_control_area.found++;
        if (op != ATP_SCAN_COUNT)
            atp_release(&agg->head);
    }
    atp_unlock(&agg->head);
    return 0;
}

#endif
