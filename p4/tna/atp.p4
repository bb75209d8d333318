/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ATP switch for Tofino 1 and 2 (tna, t2na). Stages, tables and decisions are those of ../include, shared with bmv2.
 * docs/p4.md has the picture: stage 0 who may, 1 key, 2 bitmaps, 3 decision, then the values, four pairs a stage on
 * Tofino 1 and two on Tofino 2.
 */
#include <core.p4>
#if __TARGET_TOFINO__ == 2
#include <t2na.p4>
#ifndef ATP_AGGREGATORS
#define ATP_AGGREGATORS 40960
#endif
#define RECIRCULATION_PORT 6
#else
#include <tna.p4>
#ifndef ATP_AGGREGATORS
#define ATP_AGGREGATORS 22528
#endif
#define RECIRCULATION_PORT 68
#endif

#define ATP_ADMISSION_SIZE 16384
#define ATP_TRANSIT_SIZE 4096
#define ATP_PS_PORT_SIZE 2048
#define ATP_REPLICA_SIZE 8192
#define ATP_L2_SIZE 2048
#define ATP_HOST_SIZE 8192
/* T in units of 2^16 ns, not shorter: the stamp is bits 16 to 47 of the clock. */
#define STALE_UNITS ((ATP_STALE_NS + 65535) / 65536)
/* Cells of 80 bytes in the egress queue. */
#define ATP_ECN_THRESHOLD 1250

#define ATP_IN_TCAM @ternary(1)

typedef PortId_t port_t;
/*
 * A stateful ALU of Tofino 2 has four comparisons and a predicate of sixteen bits: with two of them it stays in the low four,
 * which take a quarter of the PHV.
 */
typedef bit<4> predicate_t;

#include "../include/headers.p4"

#define ATP_INGRESS_PORT ig_intr_md.ingress_port
#define ATP_EGRESS_PORT ig_tm_md.ucast_egress_port
#define ATP_MULTICAST_GROUP ig_tm_md.mcast_grp_a
#define ATP_DROP ig_dprsr_md.drop_ctl = 1

struct headers_t {
    bridge_t   bridge;
    second_t   second;
    ethernet_t ethernet;
    ipv4_t     ipv4;
    udp_t      udp;
    atp_t      atp;
    values_t   values;
}

struct meta_t {
    bit<8>      kind;
    bit<8>      verdict;
    bit<8>      op;
    bit<8>      out_;
    bit<8>      flooded;
    bit<1>      known;
    bit<1>      in_region;
    bit<1>      admitted;
    bit<1>      transit;
    bit<1>      from_ps;
    bit<1>      from_host;
    bit<1>      from_server;
    bit<1>      to_host;
    bit<1>      to_server;
    bit<1>      in_place;
    bit<1>      own;
    bit<1>      guarded;
    bit<9>      elsewhere;
    bit<8>      job_id;
    bit<8>      from_other;
    bit<8>      to_other;
    bit<8>      ecn;
    bit<8>      mark;
    predicate_t key_result;
    predicate_t missing_result;
    predicate_t cover_result;
    bit<16>     group;
    bit<32>     full0;
    bit<32>     full1;
    bit<32>     outside0;
    bit<32>     outside1;
    bit<32>     excess;
    bit<32>     own_bit;
    bit<32>     needed;
    bit<32>     level_bit;
    bit<32>     key;
    bit<32>     present;
    bit<32>     cover;
    bit<32>     other;
}

parser AtpParser(packet_in packet, out headers_t hdr, out meta_t meta, out ingress_intrinsic_metadata_t ig_intr_md) {
    state start {
        packet.extract(ig_intr_md);
        packet.advance(PORT_METADATA_SIZE);
        transition select(ig_intr_md.ingress_port) {
            RECIRCULATION_PORT &&& 0x7F : parse_second;
            default : parse_ethernet;
        }
    }

    /* The switch made this packet itself: no checks. */
    state parse_second {
        packet.extract(hdr.second);
        meta.kind = hdr.second.kind;
        meta.key = hdr.second.key;
        meta.own_bit = hdr.second.cover;
        packet.extract(hdr.ethernet);
        packet.extract(hdr.ipv4);
        packet.extract(hdr.udp);
        packet.extract(hdr.atp);
        packet.extract(hdr.values);
        transition accept;
    }

    state parse_ethernet {
        packet.extract(hdr.ethernet);
        transition select(hdr.ethernet.ether_type) {
            ETHERTYPE_IPV4 : parse_ipv4;
            default : accept;
        }
    }

    /* Of a later fragment nothing is known, and its first one is not let through. Behind options the port is not looked for. */
    state parse_ipv4 {
        packet.extract(hdr.ipv4);
        transition select(hdr.ipv4.version_ihl, hdr.ipv4.flags_fragment, hdr.ipv4.protocol) {
            (IP_VERSION_IHL, 0 &&& 0x3FFF, IP_PROTOCOL_UDP) : parse_udp;
            (IP_VERSION_IHL, 0 &&& 0x1FFF, IP_PROTOCOL_UDP) : parse_first_fragment;
            (IP_VERSION_IHL, _, _) : accept;
            (_, 0 &&& 0x1FFF, IP_PROTOCOL_UDP) : parse_odd;
            default : accept;
        }
    }

    state parse_first_fragment {
        transition select(packet.lookahead<bit<32>>()) {
            ATP_UDP_PORT &&& 0xFFFF : parse_odd;
            default : accept;
        }
    }

    state parse_odd {
        meta.kind = K_ODD;
        transition accept;
    }

    state parse_udp {
        packet.extract(hdr.udp);
        transition select(hdr.udp.dst_port, hdr.ipv4.total_len) {
            (ATP_UDP_PORT, ATP_IP_BYTES) : parse_whole;
            (ATP_UDP_PORT, 0 &&& 0xFFE0) : parse_short;  /* 0..31 */
            (ATP_UDP_PORT, 32 &&& 0xFFF8) : parse_short; /* ..39 */
            (ATP_UDP_PORT, 40 &&& 0xFFFC) : parse_short; /* ..43: less than IPv4, UDP and ATP header */
            (ATP_UDP_PORT, _) : parse_other;
            default : accept;
        }
    }

    state parse_short {
        meta.kind = K_SHORT;
        transition accept;
    }

    state parse_other {
        meta.job_id = packet.lookahead<bit<8>>();
        packet.extract(hdr.atp);
        transition accept;
    }

    /* The bitmap of the packet's level is wanted in the first stage, as a key. */
    state parse_whole {
        bit<112> next = packet.lookahead<bit<112>>();
        transition select(next[1:1], next[5:5]) {
            (0, 0) : parse_level0;
            default : parse_level1;
        }
    }

    state parse_level0 {
        meta.job_id = packet.lookahead<bit<8>>();
        packet.extract(hdr.atp);
        meta.key = hdr.atp.key;
        meta.level_bit = LEVEL_BIT;
        meta.own_bit = hdr.atp.bitmap0;
        packet.extract(hdr.values);
        transition accept;
    }

    /* Also an ACK, which is for either level: its key is that of level 1, whatever bits it has. */
    state parse_level1 {
        meta.job_id = packet.lookahead<bit<8>>();
        packet.extract(hdr.atp);
        meta.key = hdr.atp.key;
        meta.own_bit = hdr.atp.bitmap1;
        packet.extract(hdr.values);
        transition accept;
    }
}

#include "values.p4"

struct owner_t {
    bit<32> key;   /* job ID, level, sequence; 0 free */
    bit<32> stamp; /* 0 free: older than T at any time but the first after a wrap, every 78 hours */
}

control AtpIngress(inout headers_t hdr, inout meta_t meta, in ingress_intrinsic_metadata_t ig_intr_md,
                   in ingress_intrinsic_metadata_from_parser_t ig_prsr_md,
                   inout ingress_intrinsic_metadata_for_deparser_t ig_dprsr_md,
                   inout ingress_intrinsic_metadata_for_tm_t ig_tm_md) {
    Register<owner_t, bit<16>>(ATP_AGGREGATORS) owners;
    Register<bit<32>, bit<16>>(ATP_AGGREGATORS) missing;
    Register<bit<32>, bit<16>>(ATP_AGGREGATORS) present;
    Register<bit<32>, bit<16>>(ATP_AGGREGATORS) cover;
    Register<bit<8>, bit<16>>(ATP_AGGREGATORS) mark;
    Hash<bit<32>>(HashAlgorithm_t.IDENTITY) clock_slice;
    Hash<bit<13>>(HashAlgorithm_t.IDENTITY) event_cell;
    /* By event (V_ codes) and job. */
    Counter<bit<32>, bit<13>>(8192, CounterType_t.PACKETS) events;
    Counter<bit<64>, bit<8>>(256, CounterType_t.BYTES) bytes_in;
    Hash<bit<12>>(HashAlgorithm_t.IDENTITY) drop_cell;
    Counter<bit<32>, bit<12>>(4096, CounterType_t.PACKETS) drops;

    action count_drop() {
        drops.count(drop_cell.get({ meta.kind[2:0], ig_intr_md.ingress_port }));
    }

#include "../include/guard.p4"
#include "../include/admission.p4"
#include "../include/forwarding.p4"

    /* The ALU of the key takes two words: the key, and the time or, for an ACK, the key of the other level. */
    action take_time() {
        meta.other = clock_slice.get(ig_intr_md.ingress_mac_tstamp[47:16]);
    }

    action take_other_key() {
        meta.other = hdr.atp.key ^ LEVEL_BIT;
    }

    /* ---- the key ---- */

    /*
     * The predicate comes first: it fixes which comparison is which. Comparisons are of the word as it was. The
     * subtraction is of unsigned numbers without wrap.
     */
    RegisterAction<owner_t, bit<16>, predicate_t>(owners) owner_gradient = {
        void apply(inout owner_t owner, out predicate_t result) {
            result = this.predicate(owner.key == meta.key, meta.other - owner.stamp > STALE_UNITS);
            if (meta.other - owner.stamp > STALE_UNITS) {
                owner.key = meta.key;
                owner.stamp = meta.other;
            } else if (owner.key == meta.key) {
                owner.stamp = meta.other;
            }
        }
    };

    RegisterAction<owner_t, bit<16>, predicate_t>(owners) owner_resend = {
        void apply(inout owner_t owner, out predicate_t result) {
            result = this.predicate(owner.key == meta.key, meta.other - owner.stamp > STALE_UNITS);
            if (owner.key == meta.key && meta.other - owner.stamp > STALE_UNITS) {
                owner.key = 0;
                owner.stamp = 0;
            }
        }
    };

    RegisterAction<owner_t, bit<16>, predicate_t>(owners) owner_ack = {
        void apply(inout owner_t owner, out predicate_t result) {
            result = this.predicate(owner.key == meta.key, owner.key == meta.other);
            if (owner.key == meta.key || owner.key == meta.other) {
                owner.key = 0;
                owner.stamp = 0;
            }
        }
    };

    RegisterAction<owner_t, bit<16>, predicate_t>(owners) owner_release = {
        void apply(inout owner_t owner, out predicate_t result) {
            result = this.predicate(owner.key == meta.key);
            if (owner.key == meta.key) {
                owner.key = 0;
                owner.stamp = 0;
            }
        }
    };

    action set_kind(bit<8> kind) {
        meta.kind = kind;
    }

    action key_gradient(bit<8> kind) {
        meta.kind = kind;
        meta.key_result = owner_gradient.execute(hdr.atp.aggregator_index);
    }

    action key_resend(bit<8> kind) {
        meta.kind = kind;
        meta.key_result = owner_resend.execute(hdr.atp.aggregator_index);
    }

    action key_ack(bit<8> kind) {
        meta.kind = kind;
        meta.key_result = owner_ack.execute(hdr.atp.aggregator_index);
    }

    action key_release(bit<8> kind) {
        meta.kind = kind;
        meta.key_result = owner_release.execute(hdr.atp.aggregator_index);
    }

#include "../include/gate.p4"

    action need0() {
        meta.needed = meta.full0 & ~meta.own_bit;
    }

    action need1() {
        meta.needed = meta.full1 & ~meta.own_bit;
    }

    @hidden table need {
        key = { hdr.atp.edge_switch_identifier : exact; meta.admitted : exact; }
        actions = { need0; need1; }
        const default_action = need1();
        const entries = { (0, 1) : need0(); }
    }

    /* ---- the bitmaps ---- */

    RegisterAction<bit<32>, bit<16>, predicate_t>(missing) missing_taken = {
        void apply(inout bit<32> left, out predicate_t result) {
            result = this.predicate(meta.needed == 0);
            left = meta.needed;
        }
    };

    RegisterAction<bit<32>, bit<16>, predicate_t>(missing) missing_added = {
        void apply(inout bit<32> left, out predicate_t result) {
            result = this.predicate(left == meta.own_bit, left == 0);
            left = left & ~meta.own_bit;
        }
    };

    RegisterAction<bit<32>, bit<16>, predicate_t>(missing) missing_peeked = {
        void apply(inout bit<32> left, out predicate_t result) {
            result = this.predicate(left == meta.own_bit, left == 0);
        }
    };

    RegisterAction<bit<32>, bit<16>, predicate_t>(missing) missing_weighed = {
        void apply(inout bit<32> left, out predicate_t result) {
            result = this.predicate(meta.needed == 0);
        }
    };

    RegisterAction<bit<32>, bit<16>, bit<32>>(present) present_taken = {
        void apply(inout bit<32> bits, out bit<32> result) {
            result = bits;
            bits = meta.own_bit;
        }
    };

    /* What is handed out is neither the old nor the new bitmap: the ALU's other half computes it. */
    RegisterAction<bit<32>, bit<16>, bit<32>>(present) present_added = {
        void apply(inout bit<32> bits, out bit<32> result) {
            result = bits & meta.own_bit;
            bits = bits | meta.own_bit;
        }
    };

    RegisterAction<bit<32>, bit<16>, bit<32>>(present) present_peeked = {
        void apply(inout bit<32> bits, out bit<32> result) {
            result = bits & meta.own_bit;
        }
    };

    RegisterAction<bit<32>, bit<16>, bit<32>>(present) present_cleared = {
        void apply(inout bit<32> bits) {
            bits = 0;
        }
    };

    RegisterAction<bit<32>, bit<16>, bit<32>>(cover) cover_taken = {
        void apply(inout bit<32> bits, out bit<32> result) {
            bits = meta.own_bit;
            result = bits;
        }
    };

    RegisterAction<bit<32>, bit<16>, bit<32>>(cover) cover_added = {
        void apply(inout bit<32> bits, out bit<32> result) {
            bits = bits | meta.own_bit;
            result = bits;
        }
    };

    RegisterAction<bit<32>, bit<16>, bit<32>>(cover) cover_peeked = {
        void apply(inout bit<32> bits, out bit<32> result) {
            result = bits;
        }
    };

    RegisterAction<bit<32>, bit<16>, predicate_t>(cover) cover_compared = {
        void apply(inout bit<32> bits, out predicate_t result) {
            result = this.predicate(bits == meta.own_bit);
        }
    };

    RegisterAction<bit<8>, bit<16>, bit<8>>(mark) mark_taken = {
        void apply(inout bit<8> bits, out bit<8> result) {
            bits = meta.ecn;
            result = bits;
        }
    };

    RegisterAction<bit<8>, bit<16>, bit<8>>(mark) mark_added = {
        void apply(inout bit<8> bits, out bit<8> result) {
            bits = bits | meta.ecn;
            result = bits;
        }
    };

#define ACCESS(name, field, register_action) \
    action name() { \
        meta.field = register_action.execute(hdr.atp.aggregator_index); \
    }
    ACCESS(missing_take, missing_result, missing_taken)
    ACCESS(missing_add, missing_result, missing_added)
    ACCESS(missing_peek, missing_result, missing_peeked)
    ACCESS(missing_weigh, missing_result, missing_weighed)
    ACCESS(present_take, present, present_taken)
    ACCESS(present_add, present, present_added)
    ACCESS(present_peek, present, present_peeked)
    ACCESS(cover_take, cover, cover_taken)
    ACCESS(cover_add, cover, cover_added)
    ACCESS(cover_read, cover, cover_peeked)
    ACCESS(cover_compare, cover_result, cover_compared)
    ACCESS(mark_take, mark, mark_taken)
    ACCESS(mark_add, mark, mark_added)
    action present_clear() {
        present_cleared.execute(hdr.atp.aggregator_index);
    }

#include "../include/state.p4"
#include "../include/decide.p4"
#include "../include/emit.p4"

#define DECLARE(pair, first, second) Pair() pair;
    ATP_PAIRS(DECLARE)

    action count_event() {
        events.count(event_cell.get({ meta.verdict[4:0], ATP_JOB_ID(hdr.atp.key) }));
    }

    /* ---- the way out ---- */

    action drop() {
        ig_dprsr_md.drop_ctl = 1;
        hdr.second.setInvalid();
    }

    action go_on() {
        hdr.second.setInvalid();
        hdr.bridge.setValid();
        hdr.bridge.verdict = meta.verdict;
        hdr.bridge.flooded = meta.flooded;
        hdr.bridge.group = 0;
        hdr.bridge.zero = 0;
        hdr.bridge.ingress_port = ig_intr_md.ingress_port;
    }

    action replicate() {
        ig_tm_md.mcast_grp_a = meta.group;
        ig_dprsr_md.drop_ctl = 0;
        hdr.bridge.setValid();
        hdr.bridge.verdict = meta.verdict;
        hdr.bridge.flooded = 0;
        hdr.bridge.group = meta.group;
        hdr.bridge.zero = 0;
        hdr.bridge.ingress_port = ig_intr_md.ingress_port;
        /* or the unicast copy would leave too */
        invalidate(ig_tm_md.ucast_egress_port);
    }

    /* To the recirculation port of the packet's own pipe, past the egress: its registers are there. */
    action carry(bit<8> kind, port_t port) {
        ig_tm_md.ucast_egress_port = port;
        ig_tm_md.mcast_grp_a = 0;
        ig_tm_md.bypass_egress = 1;
        ig_dprsr_md.drop_ctl = 0;
        hdr.second.setValid();
        hdr.second.kind = kind;
        hdr.second.zero = 0;
        hdr.second.key = meta.key;
        hdr.second.cover = meta.cover;
    }

    @hidden table exit_ {
        key = { meta.out_ : ternary; meta.group : ternary; ig_intr_md.ingress_port : ternary; }
        actions = { drop; go_on; replicate; carry; }
        const default_action = go_on();
        const entries = {
            (OUT_DROP, _, _) : drop();
#define CARRY_IN_PIPE(pipe) \
            (OUT_CARRY_KEEP, _, pipe &&& 0x180) : carry(K_KEEP, RECIRCULATION_PORT | pipe); \
            (OUT_CARRY_FREE, _, pipe &&& 0x180) : carry(K_FREE, RECIRCULATION_PORT | pipe);
            CARRY_IN_PIPE(0x000)
            CARRY_IN_PIPE(0x080)
            CARRY_IN_PIPE(0x100)
            CARRY_IN_PIPE(0x180)
            (OUT_MULTICAST, 0, _) : go_on();
            (OUT_MULTICAST, _, _) : replicate();
        }
    }

    apply {
        if (hdr.atp.isValid() && hdr.atp.is_ack == 1) {
            take_other_key();
        } else {
            take_time();
        }
        source.apply();
        destination.apply();
        place.apply();
        own.apply();
        guarded.apply();
        if (hdr.atp.isValid()) {
            job.apply();
            region.apply();
            ps_port.apply();
            if (!hdr.second.isValid()) {
                if (!admission.apply().hit) {
                    if (hdr.atp.edge_switch_identifier == 0) {
                        transit.apply();
                    }
                }
            }
            if (hdr.ipv4.ecn == IP_ECN_CE || hdr.atp.ecn == 1) {
                meta.ecn = 1;
            }
        }
        /* not a second time in the second pass */
        if (meta.known == 1 && !hdr.second.isValid()) {
            bytes_in.count(ATP_JOB_ID(hdr.atp.key));
        }
        gate.apply();
        need.apply();
        l2_forward.apply();
        refusal.apply();
        missing_access.apply();
        present_access.apply();
        cover_access.apply();
        mark_access.apply();
        decision.apply();
#define APPLY(pair, first, second) pair.apply(hdr.values.first, hdr.values.second, meta.op, hdr.atp.aggregator_index);
        ATP_PAIRS(APPLY)
        emission.apply();
        marking.apply();
        exit_.apply();
        count_event();
    }
}

control AtpIngressDeparser(packet_out packet, inout headers_t hdr, in meta_t meta,
                           in ingress_intrinsic_metadata_for_deparser_t ig_dprsr_md) {
    apply {
        packet.emit(hdr);
    }
}

struct egress_headers_t {
    ethernet_t ethernet;
    ipv4_t     ipv4;
    udp_t      udp;
    atp_t      atp;
}

struct egress_meta_t {
    bridge_t bridge;
    bit<16>  dst_port;
    bit<1>   congested;
    bit<1>   rewritten;
}

parser AtpEgressParser(packet_in packet, out egress_headers_t hdr, out egress_meta_t meta,
                       out egress_intrinsic_metadata_t eg_intr_md) {
    state start {
        packet.extract(eg_intr_md);
        meta.dst_port = 0;
        meta.congested = 0;
        meta.rewritten = 0;
        packet.extract(meta.bridge);
        packet.extract(hdr.ethernet);
        transition select(meta.bridge.verdict) {
            V_NONE : accept;
            V_SHORT : accept;
            default : parse_atp;
        }
    }

    state parse_atp {
        packet.extract(hdr.ipv4);
        packet.extract(hdr.udp);
        packet.extract(hdr.atp);
        transition accept;
    }
}

control AtpEgress(inout egress_headers_t hdr, inout egress_meta_t meta, in egress_intrinsic_metadata_t eg_intr_md,
                  in egress_intrinsic_metadata_from_parser_t eg_prsr_md,
                  inout egress_intrinsic_metadata_for_deparser_t eg_dprsr_md,
                  inout egress_intrinsic_metadata_for_output_port_t eg_oport_md) {
    Counter<bit<64>, bit<8>>(256, CounterType_t.BYTES) bytes_out;

#define REPLICA_GROUP meta.bridge.group
#define REPLICA_PORT eg_intr_md.egress_port
#define REPLICA_INSTANCE eg_intr_md.egress_rid
#include "../include/replication.p4"

    action mark_congestion() {
        hdr.atp.ecn = 1;
    }

    /* Sums, and packets that pass after step 8, leave with ECN set where their own queue is long. */
    table congestion {
        key = { meta.bridge.verdict : exact; eg_intr_md.deq_qdepth : range @name("queue_depth"); }
        actions = { mark_congestion; @defaultonly NoAction; }
        const default_action = NoAction();
        size = 64;
    }

    apply {
        if (meta.bridge.flooded == 1 && meta.bridge.ingress_port == eg_intr_md.egress_port) {
            eg_dprsr_md.drop_ctl = 1;
        }
        if (meta.bridge.group != 0) {
            replica.apply();
            if (meta.dst_port != 0) {
                hdr.udp.dst_port = meta.dst_port;
            }
        } else {
            congestion.apply();
        }
        if (hdr.atp.isValid()) {
            bytes_out.count(ATP_JOB_ID(hdr.atp.key));
        }
    }
}

control AtpEgressDeparser(packet_out packet, inout egress_headers_t hdr, in egress_meta_t meta,
                          in egress_intrinsic_metadata_for_deparser_t eg_dprsr_md) {
    Checksum() ipv4_checksum;

    apply {
        hdr.ipv4.checksum = ipv4_checksum.update({ hdr.ipv4.version_ihl, hdr.ipv4.dscp, hdr.ipv4.ecn, hdr.ipv4.total_len,
            hdr.ipv4.identification, hdr.ipv4.flags_fragment, hdr.ipv4.ttl, hdr.ipv4.protocol, hdr.ipv4.src_addr,
            hdr.ipv4.dst_addr });
        packet.emit(hdr);
    }
}

Pipeline(AtpParser(), AtpIngress(), AtpIngressDeparser(), AtpEgressParser(), AtpEgress(), AtpEgressDeparser()) pipe;

@pkginfo(name="atp", version="0.1.0", organization="atp.dev")
Switch(pipe) main;
