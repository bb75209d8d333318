/* SPDX-License-Identifier: Apache-2.0 */
/* What the fuzz targets of the switch core share. */
#ifndef ATP_FUZZ_H
#define ATP_FUZZ_H

#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "atp_control.h"
#include "core/job.h"

/* Ingress ports. */
enum { PORT_WORKER0 = 1, PORT_WORKER1, PORT_EDGE, PORT_TRANSIT, PORT_PS, PORT_STRANGER };

/* A broken rule ends the process, so that the fuzzer keeps the input. */
#define MUST(condition)                                                                                                \
    do {                                                                                                               \
        if (!(condition)) {                                                                                            \
            fprintf(stderr, "%s:%d: not true: %s\n", __FILE__, __LINE__, #condition);                                  \
            abort();                                                                                                   \
        }                                                                                                              \
    } while (0)

static inline uint32_t be32(const uint8_t *p) {
    return (uint32_t)p[0] << 24 | (uint32_t)p[1] << 16 | (uint32_t)p[2] << 8 | p[3];
}

static inline void put32(uint8_t *p, uint32_t v) {
    p[0] = (uint8_t)(v >> 24);
    p[1] = (uint8_t)(v >> 16);
    p[2] = (uint8_t)(v >> 8);
    p[3] = (uint8_t)v;
}

#endif
