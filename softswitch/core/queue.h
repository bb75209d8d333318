/* SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 */
/* Phantom queues: they mark congestion where a data path cannot see the queue of its port. */
#ifndef ATP_CORE_QUEUE_H
#define ATP_CORE_QUEUE_H

#include "core/header.h"

#define ATP_QUEUES 256u

/* Phantom queue: the time at which a port of this rate would have sent all it was given. */
struct atp_queue {
    uint32_t port;
    uint32_t ns_per_kib;   /* time to send 1,024 bytes; 0: off */
    uint64_t threshold_ns; /* time to send the threshold */
    uint64_t busy_until_ns;
    uint64_t zero;
};

ATP_INLINE int atp_queue_is_over(const struct atp_queue *q, uint64_t now_ns) {
    return q->ns_per_kib != 0 && (int64_t)(q->busy_until_ns - now_ns) > (int64_t)q->threshold_ns;
}

/* Not atomic: cores that add at once may lose a packet's length, which a threshold does not notice. */
ATP_INLINE void atp_queue_add(struct atp_queue *q, uint64_t now_ns, uint32_t bytes) {
    uint64_t busy = q->busy_until_ns;

    if (q->ns_per_kib == 0)
        return;
    if ((int64_t)(busy - now_ns) < 0)
        busy = now_ns;
    q->busy_until_ns = busy + (((uint64_t)bytes * q->ns_per_kib) >> 10);
}

#endif
