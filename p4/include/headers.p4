/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ATP_HEADERS_P4
#define ATP_HEADERS_P4

#include "wire.p4"
#include "codes.p4"

#define ETHERTYPE_IPV4 0x0800
#define IP_PROTOCOL_UDP 17
#define IP_ECN_CE 3
/* IPv4 length of a packet with ATP header and all values, and of one with the ATP header alone. */
#define ATP_IP_BYTES (20 + 8 + ATP_HEADER_BYTES + ATP_VALUE_BYTES)
/* Version 4 without options. */
#define IP_VERSION_IHL 0x45

/*
 * Level 0 flips this bit of the key word, the sequence's top bit: one 32-bit comparison then tells job, sequence and
 * level. (Level 0, because `admission` alone can then write the key: `transit` waits for no other table.) It takes a sequence at one level for the one 2^23 before it at the other, which needs 2^23 packets of a job
 * within T.
 */
#define LEVEL_BIT 0x00800000

header ethernet_t {
    bit<48> dst_addr;
    bit<48> src_addr;
    bit<16> ether_type;
}

header ipv4_t {
    bit<8>  version_ihl;
    bit<6>  dscp;
    bit<2>  ecn;
    bit<16> total_len;
    bit<16> identification;
    bit<16> flags_fragment;
    bit<8>  ttl;
    bit<8>  protocol;
    bit<16> checksum;
    bit<32> src_addr;
    bit<32> dst_addr;
}

header udp_t {
    bit<16> src_port;
    bit<16> dst_port;
    bit<16> length;
    bit<16> checksum;
}

/* In front of a packet on its second pass (Tofino). */
header second_t {
    bit<8>  kind;  /* K_KEEP or K_FREE */
    bit<8>  zero;
    bit<32> key;   /* with the level bit */
    bit<32> cover; /* bitmap of the aggregator on the first pass */
}

/* From ingress to egress. */
header bridge_t {
    bit<8>  verdict;
    bit<8>  flooded; /* 1: not for the port that it came in on */
    bit<16> group;   /* of an ACK, or 0 */
    bit<7>  zero;
    bit<9>  ingress_port;
}

#endif
