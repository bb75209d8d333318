/* SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 */
/*
 * Who may speak to whom: the guard at both ends of a job (docs/security.md). The state machine admits by port and bit;
 * the guard comes first and judges by address. Two hosts of one job may exchange that job's packets, each from its own
 * port; what is neither from nor to a host of a job is none of ATP's business.
 */
#ifndef ATP_CORE_GUARD_H
#define ATP_CORE_GUARD_H

#include "core/job.h"

enum atp_guard_verdict {
    ATP_GUARD_FOREIGN,     /* neither end is a host of a job: ordinary traffic */
    ATP_GUARD_JOB,         /* between a worker and a PS of one job */
    ATP_GUARD_SOURCE,      /* the source is no host of the job that it sends to, or not behind this port */
    ATP_GUARD_DESTINATION, /* a host of a job sends to what is not its PS or worker */
};

/* `from`, `to`: the hosts of the packet's addresses, NULL: none. `port`: where it came in. */
ATP_INLINE enum atp_guard_verdict atp_guard(const struct atp_host *from, const struct atp_host *to, uint32_t port) {
    if (!from)
        return to ? ATP_GUARD_SOURCE : ATP_GUARD_FOREIGN;
    if (from->port != port)
        return ATP_GUARD_SOURCE;
    if (!to || to->mark != from->mark || to->role == from->role)
        return ATP_GUARD_DESTINATION;
    return ATP_GUARD_JOB;
}

/* The addresses that may be the source of what comes in at one port. */
struct atp_sources {
    uint32_t count;
    uint32_t address[ATP_SOURCES_MAX];
};

/* Whether a packet to the ATP port may have this source. `sources` NULL: the port is not checked. */
ATP_INLINE int atp_is_source(const struct atp_sources *sources, uint32_t address) {
    if (!sources)
        return 1;
    for (uint32_t i = 0; i < ATP_SOURCES_MAX; i++)
        if (i < sources->count && sources->address[i] == address)
            return 1;
    return 0;
}

/* Whether a host of this role and place may send such a packet at all; sums of its rack are a switch's to judge. */
ATP_INLINE int atp_may_send(const struct atp_host *from, const struct atp_header *h) {
    const uint32_t ack = h->flags & ATP_F_ACK;

    if (h->key >> ATP_JOB_ID_SHIFT != from->job_id)
        return 0;
    if (from->role == ATP_HOST_PS)
        return ack != 0;
    return !ack && h->bitmap1 == from->bitmap1;
}

/* Whether a packet that no switch has summed is one that this host makes: its own bits, or an ACK of the PS. */
ATP_INLINE int atp_is_own(const struct atp_host *from, const struct atp_header *h) {
    if (!atp_may_send(from, h))
        return 0;
    return from->role == ATP_HOST_PS ||
           (h->bitmap0 == from->bitmap0 && ((h->flags & ATP_F_EDGE) != 0) == (from->edge != 0));
}

#endif
