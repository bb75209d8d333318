/* SPDX-License-Identifier: Apache-2.0 */
/* Each copy of an ACK to its worker, in the egress control. The includer has REPLICA_GROUP, REPLICA_PORT, REPLICA_INSTANCE. */
    @id(0x01000006) action rewrite(@id(1) bit<48> dst_mac, @id(2) bit<32> dst_ip, @id(3) bit<16> dst_port) {
        hdr.ethernet.dst_addr = dst_mac;
        hdr.ipv4.dst_addr = dst_ip;
        meta.dst_port = dst_port;
    }

    @id(0x02000006) table replica {
        key = {
            REPLICA_GROUP    : exact @name("multicast_group") @id(1);
            REPLICA_PORT     : exact @name("egress_port") @id(2);
            REPLICA_INSTANCE : exact @name("instance") @id(3);
        }
        actions = { rewrite; @defaultonly NoAction; }
        const default_action = NoAction();
        size = ATP_REPLICA_SIZE;
    }
