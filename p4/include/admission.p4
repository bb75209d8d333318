/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Tables that the control plane writes (p4/p4info.txtpb), in the ingress control. All of them are looked up in the first
 * stage: none reads what another one sets. The includer has `hdr`, `meta`, ATP_INGRESS_PORT and
 * ATP_IN_TCAM, which is for tables whose key is short: a stage hashes the keys of eight tables.
 */
    @id(0x01000001) action set_job(@id(1) bit<16> values, @id(2) bit<32> full0, @id(3) bit<32> full1, @id(4) bit<16> group) {
        meta.known = 1;
        meta.full0 = full0;
        meta.full1 = full1;
        /* Bits that the packet has and the job has not. */
        meta.outside0 = hdr.atp.bitmap0 & ~full0;
        meta.outside1 = hdr.atp.bitmap1 & ~full1;
        meta.group = group;
    }

    @id(0x01000002) action in_region() {
        meta.in_region = 1;
    }

    @id(0x01000003) action admit() {
        meta.admitted = 1;
        /* A packet in transit that meets an aggregator is for level 1, which the key is until here. */
        meta.key = hdr.atp.key ^ meta.level_bit;
    }

    @id(0x01000004) action allow(@id(1) bit<32> mask0) {
        meta.transit = 1;
        /* Bits that the packet has and the rack has not. */
        meta.excess = hdr.atp.bitmap0 & ~mask0;
        meta.own_bit = hdr.atp.bitmap1;
    }

    @id(0x01000005) action from_ps() {
        meta.from_ps = 1;
    }

    ATP_IN_TCAM @id(0x02000001) table job {
        key = { ATP_JOB_ID(hdr.atp.key) : exact @name("job_id") @id(1); }
        actions = { set_job; @defaultonly NoAction; }
        const default_action = NoAction();
        size = 255;
    }

    @id(0x02000002) table region {
        key = {
            ATP_JOB_ID(hdr.atp.key)  : exact @name("job_id") @id(1);
            hdr.atp.aggregator_index : range @name("aggregator_index") @id(2);
        }
        actions = { in_region; @defaultonly NoAction; }
        const default_action = NoAction();
        size = 1020;
    }

    @id(0x02000003) table admission {
        key = {
            ATP_JOB_ID(hdr.atp.key)       : exact @name("job_id") @id(1);
            ATP_INGRESS_PORT              : exact @name("ingress_port") @id(2);
            hdr.atp.edge_switch_identifier : exact @name("edge") @id(3);
            meta.own_bit                      : exact @name("bitmap") @id(4);
        }
        actions = { admit; @defaultonly NoAction; }
        const default_action = NoAction();
        size = ATP_ADMISSION_SIZE;
    }

    @id(0x02000004) table transit {
        key = {
            ATP_JOB_ID(hdr.atp.key) : exact @name("job_id") @id(1);
            ATP_INGRESS_PORT        : exact @name("ingress_port") @id(2);
            hdr.atp.bitmap1         : exact @name("bitmap1") @id(3);
        }
        actions = { allow; @defaultonly NoAction; }
        const default_action = NoAction();
        size = ATP_TRANSIT_SIZE;
    }

    ATP_IN_TCAM @id(0x02000005) table ps_port {
        key = {
            ATP_JOB_ID(hdr.atp.key) : exact @name("job_id") @id(1);
            ATP_INGRESS_PORT        : exact @name("ingress_port") @id(2);
        }
        actions = { from_ps; @defaultonly NoAction; }
        const default_action = NoAction();
        size = ATP_PS_PORT_SIZE;
    }
