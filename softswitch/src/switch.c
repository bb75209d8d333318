/* SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 */
/* A switch, whatever its data path: made, closed, and the names of what it counts. */
#include <errno.h>
#include <stdlib.h>

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
    if (sw->backend != NULL)
        sw->backend->close(sw);
    pthread_mutex_destroy(&sw->lock);
    free(sw->hosts);
    free(sw);
}
