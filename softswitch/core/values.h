/* SPDX-License-Identifier: GPL-2.0 OR Apache-2.0 */
/*
 * Sums of 32-bit values.
 *
 * Values are kept in pairs: one 64-bit word P = (first << 32) + second, both signed, so that one 64-bit add sums two
 * lanes. The stored word is P + offset, where `offset` is one number for the whole aggregator: each packet is added as
 * P + lane with lane = 2^k in both halves, which makes the halves of small values non-negative and shows in the high
 * bits of an OR over the packet whether any value left [-2^k, 2^k). k is chosen from the fan-in such that no sum of
 * values in that range can overflow; a packet that leaves it is taken back exactly (64-bit arithmetic wraps) and added
 * again lane by lane with sticky saturation. Thus saturation costs the common packet one OR a pair.
 */
#ifndef ATP_CORE_VALUES_H
#define ATP_CORE_VALUES_H

#include "core/aggregator.h"

#define ATP_LOW_SIGN 0x80000000ull

/* The largest lane whose sums of `fan_in` values cannot leave int32. */
ATP_INLINE uint64_t atp_lane(uint32_t fan_in) {
    uint32_t k = 30;

    for (uint32_t n = 2; n < fan_in && k > 26; n <<= 1)
        k--;
    return (1ull << k) | (1ull << (k + 32));
}

/* The bits of (P + lane) that are 0 while both values are in [-lane, lane). */
ATP_INLINE uint64_t atp_unsafe_bits(uint64_t lane) {
    return ~((lane << 1) - 0x100000001ull);
}

#if defined(__bpf__)
/* The verifier allows unaligned packet access where the machine does. */
#define ATP_LOAD64(p) (*(const uint64_t *)(p))
#define ATP_STORE64(p, v) (*(uint64_t *)(p) = (v))
#else
ATP_INLINE uint64_t atp_load64(const uint8_t *p) {
    uint64_t v;
    __builtin_memcpy(&v, p, 8);
    return v;
}
ATP_INLINE void atp_store64(uint8_t *p, uint64_t v) {
    __builtin_memcpy(p, &v, 8);
}
#define ATP_LOAD64(p) atp_load64(p)
#define ATP_STORE64(p, v) atp_store64((p), (v))
#endif

#if __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
#define ATP_SWAP64(v) __builtin_bswap64(v)
#else
#define ATP_SWAP64(v) (v)
#endif

/* Two values of the wire as P + 2^31, without the carry that a negative second value would take from the first. */
#define ATP_PAIR(p) (ATP_SWAP64(ATP_LOAD64(p)) ^ ATP_LOW_SIGN)

/*
 * Saturating add of both values of a pair, sticky at both ends; INT32_MAX wins over INT32_MIN. Branch-free, both lanes
 * in one register: `..._h` words have a lane's answer in its highest bit. `a` and `b` are two's complement, lane by
 * lane.
 */
ATP_INLINE uint64_t atp_lanes_saturating_add(uint64_t a, uint64_t b) {
    const uint64_t high = 0x8000000080000000ull;
    const uint64_t rest = 0x7fffffff7fffffffull;
    const uint64_t ones = 0x0000000100000001ull;
    uint64_t a_rest = a & rest;
    uint64_t b_rest = b & rest;
    uint64_t sum = (a_rest + b_rest) ^ ((a ^ b) & high);
    uint64_t overflow_h = ~(a ^ b) & (a ^ sum);
    uint64_t max_h = (~a & (a_rest + ones)) | (~b & (b_rest + ones));
    uint64_t min_h = (a & ~(a_rest + rest)) | (b & ~(b_rest + rest));
    uint64_t negative_h = ~max_h & (min_h | a) & high;
    uint64_t saturated = ((overflow_h | max_h | min_h) & high) >> 31;
    uint64_t end = rest + (negative_h >> 31);

    return sum ^ ((sum ^ end) & ((saturated << 32) - saturated));
}

/* Lane-wise saturating add of a packet's pair to P, the stored pair without its offset. */
ATP_INLINE uint64_t atp_pair_saturating_add(uint64_t stored, uint64_t added) {
    uint64_t sum = atp_lanes_saturating_add((stored + ATP_LOW_SIGN) ^ ATP_LOW_SIGN, added ^ ATP_LOW_SIGN);

    return (sum ^ ATP_LOW_SIGN) - ATP_LOW_SIGN;
}

#if defined(__bpf__)
/*
 * Keep a loop of the verifier's liking rolled in a way that suits it: a block of ATP_BLOCK pairs is straight code, the
 * block count is a constant.
 */
#define ATP_UNROLL _Pragma("clang loop unroll(full)")
#define ATP_ROLLED _Pragma("clang loop unroll(disable)")
#define ATP_OPAQUE(v) __asm__ volatile("" : "+r"(v))
#else
#define ATP_UNROLL
#define ATP_ROLLED
#define ATP_OPAQUE(v) ((void)(v))
#endif

/* Pairs of a block of straight code, by pairs of a packet. */
#define ATP_BLOCK_OF(count) ((count) == 31 ? 31u : (count) == 175 ? 25u : 29u)

/* The first packet of a sequence. */
ATP_INLINE void atp_values_store(struct atp_aggregator_head *a, uint64_t *pairs, const uint8_t *values, uint64_t lane,
                                 const uint32_t count, const uint32_t block) {
    uint64_t shift = lane - ATP_LOW_SIGN;
    uint64_t seen = 0;

    ATP_ROLLED
    for (uint32_t i = 0; i < count; i += block) {
        ATP_UNROLL
        for (uint32_t j = 0; j < block; j++) {
            uint64_t pair = ATP_PAIR(values + 8 * (i + j)) + shift;
            seen |= pair;
            pairs[i + j] = pair;
        }
    }
    a->offset = lane;
    a->hot = (seen & atp_unsafe_bits(lane)) != 0;
}

/* Any other packet of a sequence. */
ATP_INLINE void atp_values_add(struct atp_aggregator_head *a, uint64_t *pairs, const uint8_t *values, uint64_t lane,
                               const uint32_t count, const uint32_t block) {
    const uint64_t offset = a->offset;
    uint64_t shift = lane - ATP_LOW_SIGN;
    uint64_t seen = 0;
    uint64_t taken = 0;

    if (!a->hot) {
        ATP_ROLLED
        for (uint32_t i = 0; i < count; i += block) {
            ATP_UNROLL
            for (uint32_t j = 0; j < block; j++) {
                uint64_t pair = ATP_PAIR(values + 8 * (i + j)) + shift;
                seen |= pair;
                pairs[i + j] += pair;
            }
        }
        if (!(seen & atp_unsafe_bits(lane))) {
            a->offset = offset + lane;
            return;
        }
        a->hot = 1;
        taken = ~0ull;
    }
    ATP_ROLLED
    for (uint32_t i = 0; i < count; i++) {
        uint64_t pair = ATP_PAIR(values + 8 * i);
        uint64_t before = pairs[i] - ((pair + shift) & taken) - offset;
        pairs[i] = atp_pair_saturating_add(before, pair) + offset;
    }
}

/* The sum into the packet. */
ATP_INLINE void atp_values_load(const struct atp_aggregator_head *a, const uint64_t *pairs, uint8_t *values,
                                const uint32_t count, const uint32_t block) {
    uint64_t shift = ATP_LOW_SIGN - a->offset;

    ATP_ROLLED
    for (uint32_t i = 0; i < count; i += block) {
        ATP_UNROLL
        for (uint32_t j = 0; j < block; j++)
            ATP_STORE64(values + 8 * (i + j), ATP_SWAP64((pairs[i + j] + shift) ^ ATP_LOW_SIGN));
    }
}

#endif
