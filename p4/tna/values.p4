/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Two values of every aggregator: one register, one stateful ALU, one access for each pass. The ALU adds both halves at once but can
 * hand out one word, so the sum's second halves need a second pass, and only of packets that carry values out.
 */
struct pair_t {
    int<32> first;
    int<32> second;
}

control Pair(inout bit<32> first, inout bit<32> second, in bit<8> op, in bit<16> index) {
    Register<pair_t, bit<16>>(ATP_AGGREGATORS) sums;

    RegisterAction<pair_t, bit<16>, int<32>>(sums) write = {
        void apply(inout pair_t sum) {
            sum.first = (int<32>)first;
            sum.second = (int<32>)second;
        }
    };

    RegisterAction<pair_t, bit<16>, int<32>>(sums) add = {
        void apply(inout pair_t sum, out int<32> result) {
            sum.first = sum.first |+| (int<32>)first;
            sum.second = sum.second |+| (int<32>)second;
            result = sum.first;
        }
    };

    RegisterAction<pair_t, bit<16>, int<32>>(sums) read_first = {
        void apply(inout pair_t sum, out int<32> result) {
            result = sum.first;
        }
    };

    RegisterAction<pair_t, bit<16>, int<32>>(sums) read_second = {
        void apply(inout pair_t sum, out int<32> result) {
            result = sum.second;
        }
    };

    action run_write() {
        write.execute(index);
    }

    action run_add() {
        first = (bit<32>)add.execute(index);
    }

    action run_read() {
        first = (bit<32>)read_first.execute(index);
    }

    action run_read_second() {
        second = (bit<32>)read_second.execute(index);
    }

    @hidden table access {
        key = { op : ternary; }
        actions = { run_write; run_add; run_read; run_read_second; @defaultonly NoAction; }
        const default_action = NoAction();
        const entries = {
            OP_WRITE : run_write();
            OP_ADD : run_add();
            OP_READ : run_read();
            OP_READ_SECOND : run_read_second();
        }
    }

    apply {
        access.apply();
    }
}
