/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Who may speak to whom: table `host` of the software switch in pieces that fit the first stage, where no table reads what
 * another one sets. `gate` draws the conclusions. The includer has `hdr`, `meta`, ATP_INGRESS_PORT, ATP_HOST_SIZE and ATP_IN_TCAM.
 */
    @id(0x01000008) action set_source(@id(1) bit<1> server, @id(2) port_t port, @id(3) bit<8> job_id) {
        meta.from_host = 1;
        meta.from_server = server;
        /* 0: behind this port; the packet's job is the host's. */
        meta.elsewhere = ATP_INGRESS_PORT ^ port;
        meta.from_other = meta.job_id ^ job_id;
    }

    @id(0x01000009) action set_destination(@id(1) bit<1> server, @id(2) bit<8> job_id) {
        meta.to_host = 1;
        meta.to_server = server;
        meta.to_other = meta.job_id ^ job_id;
    }

    @id(0x0100000a) action in_place() {
        meta.in_place = 1;
    }

    @id(0x0100000b) action own_bits() {
        meta.own = 1;
    }

    @id(0x0100000c) action guard() {
        meta.guarded = 1;
    }

    /* Hosts by address: one job for an address. */
    @id(0x02000008) table source {
        key = { hdr.ipv4.src_addr : exact @name("address") @id(1); }
        actions = { set_source; @defaultonly NoAction; }
        const default_action = NoAction();
        size = ATP_HOST_SIZE;
    }

    @id(0x02000009) table destination {
        key = { hdr.ipv4.dst_addr : exact @name("address") @id(1); }
        actions = { set_destination; @defaultonly NoAction; }
        const default_action = NoAction();
        size = ATP_HOST_SIZE;
    }

    /* Of a worker: its rack's bit, which all its packets have and the sums of its rack. */
    @id(0x0200000a) table place {
        key = {
            hdr.ipv4.src_addr : exact @name("address") @id(1);
            hdr.atp.bitmap1   : exact @name("bitmap1") @id(2);
        }
        actions = { in_place; @defaultonly NoAction; }
        const default_action = NoAction();
        size = ATP_HOST_SIZE;
    }

    /* Of a worker: the rest of what its own packets say. */
    @id(0x0200000b) table own {
        key = {
            hdr.ipv4.src_addr              : exact @name("address") @id(1);
            hdr.atp.bitmap0                : exact @name("bitmap0") @id(2);
            hdr.atp.edge_switch_identifier : exact @name("edge") @id(3);
        }
        actions = { own_bits; @defaultonly NoAction; }
        const default_action = NoAction();
        size = ATP_HOST_SIZE;
    }

    /* Jobs with hosts: what nobody's host sends is none of theirs. */
    ATP_IN_TCAM @id(0x0200000c) table guarded {
        key = { meta.job_id : exact @name("job_id") @id(1); }
        actions = { guard; @defaultonly NoAction; }
        const default_action = NoAction();
        size = 255;
    }

    /*
     * What the guard drops, and what is refused of hosts that it let through, by port and reason: a cell is the kind's low
     * three bits, then the port. That names who sent it. The includer has the action count_drop.
     */
    @hidden table refusal {
        key = { meta.kind : ternary @name("kind"); meta.from_host : ternary @name("from_host"); }
        actions = { count_drop; NoAction; }
        const default_action = NoAction();
        const entries = {
            (K_GUARDED, ANY) : count_drop();
            (K_REFUSED, 1) : count_drop();
        }
    }
