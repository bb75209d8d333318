/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Ordinary traffic, so that the switch is a usable ToR: Ethernet destination to port, and a multicast group for broadcast
 * (ARP) and unknown destinations, which egress keeps off the port that the frame came in on. Sums leave by it too: their destination is the parameter server's.
 */
    @id(0x01000010) action forward(@id(1) port_t port) {
        ATP_EGRESS_PORT = port;
    }

    @id(0x01000011) action flood(@id(1) bit<16> group) {
        ATP_MULTICAST_GROUP = group;
        meta.flooded = 1;
    }

    @id(0x01000012) action discard() {
        ATP_DROP;
    }

    @id(0x02000020) table l2_forward {
        key = { hdr.ethernet.dst_addr : exact @name("dst_mac") @id(1); }
        actions = { forward; flood; discard; }
        default_action = discard();
        size = ATP_L2_SIZE;
    }
