/* SPDX-License-Identifier: Apache-2.0 */
/* Counters by job ID, one array for each event; names and IDs are those of p4/p4info.txtpb. In the ingress control. */
    @id(0x12000001) counter(256, CounterType.packets) allocated;
    @id(0x12000002) counter(256, CounterType.packets) aggregated;
    @id(0x12000003) counter(256, CounterType.packets) completed;
    @id(0x12000004) counter(256, CounterType.packets) collisions;
    @id(0x12000005) counter(256, CounterType.packets) duplicates;
    @id(0x12000006) counter(256, CounterType.packets) reemitted;
    @id(0x12000007) counter(256, CounterType.packets) stale_takeovers;
    @id(0x12000008) counter(256, CounterType.packets) resend_partials;
    @id(0x12000009) counter(256, CounterType.packets) resend_passed;
    @id(0x1200000a) counter(256, CounterType.packets) released;
    @id(0x1200000b) counter(256, CounterType.packets) acks;
    @id(0x1200000c) counter(256, CounterType.packets) ecn_marked;
    @id(0x1200000d) counter(256, CounterType.packets) passed_raw_float;
    @id(0x1200000e) counter(256, CounterType.packets) passed_transit;
    @id(0x1200000f) counter(256, CounterType.packets) passed_unknown_job;
    @id(0x12000010) counter(256, CounterType.packets) rejected_short;
    @id(0x12000011) counter(256, CounterType.packets) rejected_length;
    @id(0x12000012) counter(256, CounterType.packets) rejected_bit;
    @id(0x12000013) counter(256, CounterType.packets) rejected_index;
    @id(0x12000014) counter(256, CounterType.packets) rejected_ack_source;
    @id(0x12000015) counter(256, CounterType.bytes) bytes_in;
    /* By reason and port: ../include/guard.p4. */
    @id(0x12000020) counter(4096, CounterType.packets) drops;
