/* SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 */
/* The ATP header as the data paths hold it. `core/` compiles to BPF and to native code: no library, no global, no
 * clock. */
#ifndef ATP_CORE_HEADER_H
#define ATP_CORE_HEADER_H

#include <stdint.h>

#include "atp_wire.h"

#define ATP_INLINE static inline __attribute__((always_inline, unused))

/* Bits of the header's fourth word. */
#define ATP_F_EDGE (1u << ATP_EDGE_SWITCH_IDENTIFIER_SHIFT)
#define ATP_F_RESEND (1u << ATP_RESEND_SHIFT)
#define ATP_F_COLLISION (1u << ATP_COLLISION_SHIFT)
#define ATP_F_ECN (1u << ATP_ECN_SHIFT)
#define ATP_F_ACK (1u << ATP_IS_ACK_SHIFT)
#define ATP_F_RAW (1u << ATP_RAW_FLOAT_SHIFT)

/* The ATP header as four words in host order. */
struct atp_header {
    uint32_t key; /* job ID and sequence */
    uint32_t bitmap0;
    uint32_t bitmap1;
    uint32_t flags;
};

ATP_INLINE int atp_is_one_bit(uint32_t bits) {
    return bits != 0 && (bits & (bits - 1)) == 0;
}

#endif
