/* SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 */
/* A switch, whatever its data path: made, closed, and the names of what it counts. */
#include <errno.h>
#include <stdlib.h>

#include "switch.h"

static const char *const counter_names[ATP_COUNTERS + 1] = {ATP_COUNTER_NAMES};
static const char *const drop_names[ATP_DROPS + 1] = {ATP_DROP_NAMES};

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
