/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ATP switch for bmv2 (v1model). Stages, tables and decisions are those of the Tofino program (../include); what differs is how a
 * register is reached, that both halves of a pair leave in the first pass, and that counters are one array each.
 */
#include <core.p4>
#include <v1model.p4>

#ifndef ATP_AGGREGATORS
#define ATP_AGGREGATORS 65536
#endif
#define ATP_ADMISSION_SIZE 16384
#define ATP_TRANSIT_SIZE 8192
#define ATP_PS_PORT_SIZE 4096
#define ATP_REPLICA_SIZE 16384
#define ATP_L2_SIZE 4096
#define ATP_HOST_SIZE 16384
#define ATP_ECN_THRESHOLD 40
/* T in microseconds, the unit of bmv2's clock. */
#define STALE_TIME (ATP_STALE_NS / 1000)

#define ATP_IN_TCAM

typedef bit<9> port_t;

#include "../include/headers.p4"

#define ATP_INGRESS_PORT standard.ingress_port
#define ATP_EGRESS_PORT standard.egress_spec
#define ATP_MULTICAST_GROUP standard.mcast_grp
#define ATP_DROP mark_to_drop(standard)

struct headers_t {
    second_t   second; /* never valid here: bmv2 needs one pass */
    ethernet_t ethernet;
    ipv4_t     ipv4;
    udp_t      udp;
    atp_t      atp;
    values_t   values;
}

struct meta_t {
    bit<8>  kind;
    bit<8>  verdict;
    bit<8>  op;
    bit<8>  out_;
    bit<1>  known;
    bit<1>  in_region;
    bit<1>  admitted;
    bit<1>  transit;
    bit<1>  from_ps;
    bit<8>  ecn;
    bit<8>  mark;
    bit<8>  job_id;
    bit<1>  from_host;
    bit<1>  from_server;
    bit<1>  to_host;
    bit<1>  to_server;
    bit<1>  in_place;
    bit<1>  own;
    bit<1>  guarded;
    bit<9>  elsewhere;
    bit<8>  from_other;
    bit<8>  to_other;
    bit<8>  key_result;
    bit<8>  missing_result;
    bit<8>  cover_result;
    bit<16> group;
    bit<16> dst_port;
    bit<8>  congested;
    bit<8>  flooded;
    bit<32> full0;
    bit<32> full1;
    bit<32> outside0;
    bit<32> outside1;
    bit<32> excess;
    bit<32> own_bit;
    bit<32> needed;
    bit<32> level_bit;
    bit<32> key;
    bit<32> present;
    bit<32> cover;
    bit<32> whole;      /* all workers or racks of the job at the packet's level */
    bit<48> now;
    bit<48> stale_time;
}

parser AtpParser(packet_in packet, out headers_t hdr, inout meta_t meta, inout standard_metadata_t standard) {
    state start {
        meta.now = standard.ingress_global_timestamp;
        packet.extract(hdr.ethernet);
        transition select(hdr.ethernet.ether_type) {
            ETHERTYPE_IPV4 : parse_ipv4;
            default : accept;
        }
    }

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
        transition select(packet.lookahead<bit<32>>()[15:0]) {
            ATP_UDP_PORT : parse_odd;
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
        packet.extract(hdr.atp);
        transition accept;
    }

    state parse_whole {
        packet.extract(hdr.atp);
        packet.extract(hdr.values);
        transition accept;
    }
}

/* Sticky at both ends, INT32_MAX wins over INT32_MIN. */
bit<32> saturating_add(in bit<32> a, in bit<32> b) {
    bit<32> sum = a + b;
    bit<1> overflow = (a[31:31] ^ sum[31:31]) & (b[31:31] ^ sum[31:31]);
    if (a == 0x7FFFFFFF || b == 0x7FFFFFFF) {
        sum = 0x7FFFFFFF;
    } else if (a == 0x80000000 || b == 0x80000000) {
        sum = 0x80000000;
    } else if (overflow == 1) {
        sum = 0x7FFFFFFF + (bit<32>)a[31:31];
    }
    return sum;
}

/* Two values of every aggregator. */
control Pair(inout bit<32> first, inout bit<32> second, in bit<8> op, in bit<32> index) {
    register<bit<64>>(ATP_AGGREGATORS) sums;
    bit<64> sum;

    apply {
        if (op == OP_WRITE) {
            sums.write(index, first ++ second);
        } else if (op == OP_ADD) {
            sums.read(sum, index);
            first = saturating_add(sum[63:32], first);
            second = saturating_add(sum[31:0], second);
            sums.write(index, first ++ second);
        } else if (op == OP_READ) {
            sums.read(sum, index);
            first = sum[63:32];
            second = sum[31:0];
        }
    }
}

control AtpIngress(inout headers_t hdr, inout meta_t meta, inout standard_metadata_t standard) {
    register<bit<32>>(ATP_AGGREGATORS) keys;
    register<bit<48>>(ATP_AGGREGATORS) times;
    register<bit<32>>(ATP_AGGREGATORS) missing;
    register<bit<32>>(ATP_AGGREGATORS) present;
    register<bit<32>>(ATP_AGGREGATORS) cover;
    register<bit<8>>(ATP_AGGREGATORS) mark;
    bit<32> index = (bit<32>)hdr.atp.aggregator_index;
    bit<32> old;
    bit<32> still;
    bit<32> seen;
    bit<32> here;
    bit<48> stamp;
    bit<8> old_mark;

#include "counters.p4"
    /* By reason and port: ../include/guard.p4. */
    @id(0x12000020) counter(4096, CounterType.packets) drops;

    action count_drop() {
        drops.count((bit<32>)meta.kind << 9 & 0xE00 | (bit<32>)standard.ingress_port);
    }

#include "../include/guard.p4"
#include "../include/admission.p4"
#include "../include/forwarding.p4"

    @id(0x01000021) action set_stale_time(@id(1) bit<48> microseconds) {
        meta.stale_time = microseconds;
    }

    /* T. A bmv2 whose hosts share its processors may need a longer one: ranks are further apart there. */
    @id(0x02000022) table stale_time {
        actions = { set_stale_time; }
        default_action = set_stale_time(STALE_TIME);
    }

    action set_kind(bit<8> kind) {
        meta.kind = kind;
    }

    /*
     * An aggregator of the job as it was before its workers changed is a leftover: its workers and those still missing are not the job's
     * now. It counts as free, for its own job; others wait for T.
     */
    action key_gradient(bit<8> kind) {
        meta.kind = kind;
        keys.read(old, index);
        times.read(stamp, index);
        missing.read(still, index);
        cover.read(seen, index);
        present.read(here, index);
        bool mine = old == meta.key;
        bool leftover = mine && (still | seen) != meta.whole;
        bool vacant = old == 0 || leftover || meta.now - stamp > meta.stale_time;
        meta.key_result = mine && !leftover ? (vacant ? 8w8 : 8w2) : (vacant ? 8w4 : 8w1);
        keys.write(index, vacant ? meta.key : old);
        present.write(index, leftover ? 32w0 : here);
    }

    action key_resend(bit<8> kind) {
        meta.kind = kind;
        keys.read(old, index);
        times.read(stamp, index);
        missing.read(still, index);
        cover.read(seen, index);
        present.read(here, index);
        bool mine = old == meta.key;
        bool leftover = mine && (still | seen) != meta.whole;
        bool vacant = old == 0 || leftover || meta.now - stamp > meta.stale_time;
        meta.key_result = mine && !leftover ? (vacant ? 8w8 : 8w2) : (vacant ? 8w4 : 8w1);
        keys.write(index, mine && vacant ? 32w0 : old);
        present.write(index, leftover ? 32w0 : here);
    }

    action key_ack(bit<8> kind) {
        meta.kind = kind;
        keys.read(old, index);
        missing.read(still, index);
        cover.read(seen, index);
        present.read(here, index);
        bool own0 = old == hdr.atp.key ^ LEVEL_BIT;
        bool own1 = old == hdr.atp.key;
        bool leftover = own0 && (still | seen) != meta.full0 || own1 && (still | seen) != meta.full1;
        meta.key_result = leftover ? 8w1 : (own0 ? 8w2 : (own1 ? 8w4 : 8w1));
        keys.write(index, own0 || own1 ? 32w0 : old);
        present.write(index, leftover ? 32w0 : here);
    }

    /* Tofino's second pass; here an aggregator is released in the first one, see below. */
    action key_release(bit<8> kind) {
        meta.kind = kind;
    }

#include "../include/gate.p4"

    action missing_take() {
        missing.write(index, meta.needed);
        meta.missing_result = (meta.needed == 0 ? 8w2 : 8w1);
    }

    action missing_add() {
        missing.read(old, index);
        meta.missing_result = old == 0 ? 8w4 : (old == meta.own_bit ? 8w2 : 8w1);
        missing.write(index, old & ~meta.own_bit);
    }

    action missing_peek() {
        missing.read(old, index);
        meta.missing_result = old == 0 ? 8w4 : (old == meta.own_bit ? 8w2 : 8w1);
    }

    action missing_weigh() {
        meta.missing_result = (meta.needed == 0 ? 8w2 : 8w1);
    }

    action present_take() {
        present.read(meta.present, index);
        present.write(index, meta.own_bit);
    }

    action present_add() {
        present.read(old, index);
        meta.present = old & meta.own_bit;
        present.write(index, old | meta.own_bit);
    }

    action present_peek() {
        present.read(old, index);
        meta.present = old & meta.own_bit;
    }

    action present_clear() {
        present.write(index, 0);
    }

    action cover_take() {
        meta.cover = meta.own_bit;
        cover.write(index, meta.own_bit);
    }

    action cover_add() {
        cover.read(old, index);
        meta.cover = old | meta.own_bit;
        cover.write(index, meta.cover);
    }

    action cover_read() {
        cover.read(meta.cover, index);
    }

    action cover_compare() {}

    action mark_take() {
        meta.mark = meta.ecn;
        mark.write(index, meta.mark);
    }

    action mark_add() {
        mark.read(old_mark, index);
        /* A resend at level 1 whose rack is not in the sum leaves the state alone. */
        bool join = meta.kind != K_RESEND1 || meta.present != 0 || meta.missing_result == MISSING_NONE;
        meta.mark = join ? old_mark | meta.ecn : old_mark;
        mark.write(index, meta.mark);
    }

#include "../include/state.p4"
#include "../include/decide.p4"
#include "../include/emit.p4"

#define DECLARE(pair, first, second) Pair() pair;
    ATP_PAIRS(DECLARE)

    apply {
        @atomic {
            l2_forward.apply();
            if (hdr.atp.isValid()) {
                meta.job_id = ATP_JOB_ID(hdr.atp.key);
                place.apply();
                own.apply();
                guarded.apply();
                meta.key = hdr.atp.key;
                if (hdr.atp.edge_switch_identifier == 1) {
                    meta.own_bit = hdr.atp.bitmap1;
                } else {
                    meta.own_bit = hdr.atp.bitmap0;
                    meta.level_bit = hdr.atp.is_ack == 1 ? 32w0 : LEVEL_BIT;
                }
                job.apply();
                region.apply();
                ps_port.apply();
                if (!admission.apply().hit && hdr.atp.edge_switch_identifier == 0) {
                    transit.apply();
                }
                if (hdr.atp.ecn == 1 || hdr.ipv4.ecn == IP_ECN_CE) {
                    meta.ecn = 1;
                }
            }
            source.apply();
            destination.apply();
            if (meta.key == hdr.atp.key) {
                /* level 1 */
                meta.whole = meta.full1;
            } else {
                meta.whole = meta.full0;
            }
            meta.needed = meta.whole & ~meta.own_bit;
            stale_time.apply();
            gate.apply();
            refusal.apply();
            /* Packets of no job are counted as job 0. */
            bit<32> job_index = meta.known == 1 ? (bit<32>)meta.job_id : 0;
            missing_access.apply();
            present_access.apply();
            cover_access.apply();
            mark_access.apply();
            decision.apply();
            if (meta.op != OP_NONE) {
#define APPLY(pair, first, second) pair.apply(hdr.values.first, hdr.values.second, meta.op, index);
                ATP_PAIRS(APPLY)
            }
            if (meta.op == OP_WRITE || meta.op == OP_ADD && (meta.kind & 0xFE == K_GRAD0)) {
                times.write(index, meta.now);
            }
            if (meta.ecn == 1 && hdr.atp.ecn == 0 && (meta.kind & 0xFE == K_GRAD0 || meta.kind & 0xFE == K_RESEND0 || meta.kind & 0xFE == K_REPEAT0)) {
                ecn_marked.count(job_index);
            }
            emission.apply();
            marking.apply();
            if (meta.out_ == OUT_CARRY_FREE) {
                keys.write(index, 0);
                present.write(index, 0);
            }
#include "count.p4"
            if (meta.verdict != V_NONE) {
                bytes_in.count(job_index);
            }
            if (meta.out_ == OUT_DROP) {
                mark_to_drop(standard);
            } else if (meta.out_ == OUT_MULTICAST && meta.group != 0) {
                standard.egress_spec = 0;
                standard.mcast_grp = meta.group;
                meta.flooded = 0;
            }
        }
    }
}

control AtpEgress(inout headers_t hdr, inout meta_t meta, inout standard_metadata_t standard) {
    @id(0x12000016) @name(".AtpIngress.bytes_out") counter(256, CounterType.bytes) bytes_out;

#define REPLICA_GROUP meta.group
#define REPLICA_PORT standard.egress_port
#define REPLICA_INSTANCE standard.egress_rid
#include "../include/replication.p4"

    @id(0x01000020) action set_ecn_threshold(@id(1) bit<19> packets) {
        meta.congested = standard.deq_qdepth > packets ? 8w1 : 8w0;
    }

    /* Packets in the egress queue from which on sums leave with ECN set. */
    @id(0x02000021) table ecn_threshold {
        actions = { set_ecn_threshold; }
        default_action = set_ecn_threshold(ATP_ECN_THRESHOLD);
    }

    apply {
        if (meta.flooded == 1 && standard.egress_port == standard.ingress_port) {
            mark_to_drop(standard);
        } else if (meta.verdict != V_NONE) {
            bytes_out.count(meta.known == 1 ? (bit<32>)meta.job_id : 0);
        }
        if (meta.out_ == OUT_MULTICAST) {
            if (replica.apply().hit && meta.dst_port != 0) {
                hdr.udp.dst_port = meta.dst_port;
            }
        } else if (meta.verdict != V_NONE && meta.verdict <= V_PARTIAL_DONE) {
            ecn_threshold.apply();
            if (meta.congested == 1) {
                hdr.atp.ecn = 1;
            }
        }
    }
}

control AtpVerifyChecksum(inout headers_t hdr, inout meta_t meta) {
    apply {}
}

control AtpComputeChecksum(inout headers_t hdr, inout meta_t meta) {
    apply {
        update_checksum(hdr.ipv4.isValid() && meta.out_ == OUT_MULTICAST,
            { hdr.ipv4.version_ihl, hdr.ipv4.dscp, hdr.ipv4.ecn, hdr.ipv4.total_len, hdr.ipv4.identification,
              hdr.ipv4.flags_fragment, hdr.ipv4.ttl, hdr.ipv4.protocol, hdr.ipv4.src_addr, hdr.ipv4.dst_addr },
            hdr.ipv4.checksum, HashAlgorithm.csum16);
    }
}

control AtpDeparser(packet_out packet, in headers_t hdr) {
    apply {
        packet.emit(hdr.ethernet);
        packet.emit(hdr.ipv4);
        packet.emit(hdr.udp);
        packet.emit(hdr.atp);
        packet.emit(hdr.values);
    }
}

@pkginfo(name="atp", version="0.1.0", organization="atp.dev")
V1Switch(AtpParser(), AtpVerifyChecksum(), AtpIngress(), AtpEgress(), AtpComputeChecksum(), AtpDeparser()) main;
