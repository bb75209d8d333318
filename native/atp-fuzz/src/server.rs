// SPDX-License-Identifier: Apache-2.0
//! The parameter server: whatever comes in whatever order, an answer holds each worker's gradient exactly once.

use std::net::SocketAddrV4;

use atp_proto::coverage::{Coverage, Topology};
use atp_proto::fixed::{self, RAW_FLOAT32, RAW_INT32, RAW_NOTICE, sticky_add};
use atp_proto::wire::{HEADER_BYTES, Header};
use atp_proto::{Config, Endpoint, Nanos, ParameterServer, Role, seq};

use crate::input::Input;
use crate::setup;

const MEMORY_MAX: usize = 1 << 22;

/// The gradient of a rank: small numbers, and in every eighth sequence some whose sum saturates.
fn gradient(rank: u16, sequence: u32, i: usize) -> i32 {
    let rank = i32::from(rank);
    match (sequence % 8, i) {
        (5, 0) => i32::MAX - 100,
        (5, 1) => [i32::MAX - 1, 10, -100, -5][rank as usize & 3],
        (5, 2) => i32::MIN + 100,
        _ => (rank + 1) * (sequence as i32 % 1000 + i as i32 + 1) * if i & 1 == 0 { 1 } else { -1 },
    }
}

struct Harness<'a> {
    input: Input<'a>,
    config: Config,
    topology: Topology,
    server: ParameterServer,
    now: Nanos,
    /// Every gradient was true to `gradient`.
    honest: bool,
}

pub fn run(data: &[u8]) {
    let before = crate::alloc::live();
    let mut input = Input::new(data);
    let config = Config { role: Role::ParameterServer, ..setup::config(&mut input) };
    let mut config = Config { values: 3 + input.below(6), ..config };
    if input.byte() & 1 == 1 && config.mode != atp_proto::Mode::HostOnly {
        config.switch = Some(SocketAddrV4::new(setup::RELAY, 10800));
    }
    let mut h = Harness {
        topology: Topology::new(&config),
        server: ParameterServer::new(config.clone()).expect("a parameter server's configuration"),
        input,
        config,
        now: 1,
        honest: true,
    };
    while !h.input.is_empty() {
        h.step();
        h.drain();
        assert!(crate::alloc::live().saturating_sub(before) < MEMORY_MAX, "memory grows");
    }
}

impl Harness<'_> {
    fn step(&mut self) {
        match self.input.below(8) {
            0 => self.now += 1 << (self.input.byte() % 36),
            1 => self.server.handle_timeout(self.now),
            2 if self.input.byte() & 7 == 0 => self.noise(),
            _ => self.gradient(),
        }
    }

    fn sender(&mut self, coverage: &Coverage) -> SocketAddrV4 {
        let which = self.input.byte();
        match (which & 15, self.config.switch) {
            (0, _) => setup::STRANGER,
            (1..=7, Some(relay)) => relay,
            _ => {
                // A switch's sum comes in a packet of one of the workers in it.
                let ranks: Vec<u16> = self.topology.ranks(coverage).collect();
                self.config.workers[usize::from(ranks[usize::from(which >> 4) % ranks.len()])].address
            }
        }
    }

    /// A worker's packet, a partial sum of its rack, or of whole racks.
    fn gradient(&mut self) {
        let first = self.config.first_sequence;
        let sequence = seq::wrap(first + self.input.below(24) as u64 + 8 * (self.input.byte() as u64 & 0x40));
        let (which, flags) = (self.input.byte(), self.input.byte());
        let w = self.config.workers[usize::from(which) % self.config.workers.len()];
        let raw = flags & 1 == 1 && flags & 2 == 2;
        let full = self.topology.full().rack(usize::from(w.rack));
        let mut header = Header {
            job_id: self.config.job_id,
            sequence,
            bitmap0: if w.edge { 1 } else { 1 << w.bit },
            bitmap1: 1 << w.rack,
            edge_switch_identifier: w.edge,
            resend: flags & 4 != 0,
            collision: flags & 8 != 0,
            ecn: flags & 16 != 0,
            raw_float: raw,
            aggregator_index: if raw { RAW_INT32 } else { u16::from(self.input.byte() & 15) },
            ..Header::default()
        };
        if !raw && flags & 0x20 != 0 {
            // Other workers of its rack too, or whole racks.
            let more = self.input.byte();
            if flags & 0x40 != 0 || w.edge {
                let racks = self.config.workers.iter().fold(0, |m, w| m | 1u32 << w.rack);
                header.edge_switch_identifier = true;
                header.bitmap1 |= u32::from(more) & racks;
            } else {
                header.bitmap0 |= u32::from(more) & full;
            }
        }
        let coverage = self.topology.coverage(&header).expect("workers of the job");
        let ranks: Vec<u16> = self.topology.ranks(&coverage).collect();
        let mut packet = header.pack().to_vec();
        for i in 0..self.config.values {
            let sum = ranks.iter().map(|r| gradient(*r, sequence, i)).reduce(sticky_add).unwrap_or(0);
            packet.extend(sum.to_be_bytes());
        }
        let from = self.sender(&coverage);
        self.server.handle(from, flags & 0x80 != 0, &packet, self.now);
    }

    fn noise(&mut self) {
        let how = self.input.byte();
        let length = if how & 1 == 0 { self.config.packet_bytes() } else { self.input.below(80) };
        let mut packet = self.input.take(length).to_vec();
        packet.resize(length, 0);
        if how & 2 == 0 && length > 0 {
            packet[0] = self.config.job_id;
        }
        let from = match how >> 5 {
            0 => setup::STRANGER,
            which => self.config.workers[usize::from(which) % self.config.workers.len()].address,
        };
        // Only what cannot be a gradient of this job leaves the sums alone.
        let header = Header::unpack(&packet);
        let harmless = from == setup::STRANGER
            || length != self.config.packet_bytes()
            || header.is_none_or(|h| h.job_id != self.config.job_id || h.is_ack);
        self.honest &= harmless;
        self.server.handle(from, how & 4 != 0, &packet, self.now);
    }

    fn drain(&mut self) {
        let mut buffer = [0xaau8; 128];
        let n = self.config.workers.len();
        for _ in 0..200 {
            let Some(t) = self.server.poll_transmit(self.now, &mut buffer) else { return };
            assert_eq!(t.length, self.config.packet_bytes());
            assert!(buffer[t.length..].iter().all(|b| *b == 0xaa), "wrote behind the packet");
            let header = Header::unpack(&buffer).expect("a header");
            let payload = &buffer[HEADER_BYTES..t.length];
            assert!(header.is_ack && header.job_id == self.config.job_id);
            assert!(self.config.switch == Some(t.to) || self.config.workers.iter().any(|w| w.address == t.to));
            assert!(!(header.raw_float && self.config.switch == Some(t.to)), "raw packets are for one worker");
            if header.collision && !header.raw_float {
                let index = header.bitmap1;
                let inside = self.config.regions.iter().any(|r| index >= r.start && index < r.start + r.size);
                assert!(inside, "announced index {index} is not the job's");
            }
            let values = setup::words(payload);
            if header.raw_float && header.aggregator_index == RAW_NOTICE {
                let count = values[0] as usize;
                assert!(count >= 1 && count <= n, "{count} ranks are missing");
                assert!(values[1..].iter().take(count).all(|r| (*r as usize) < n));
            } else if header.resend {
                assert!(values.iter().all(|v| *v == 0));
            } else if self.honest {
                self.check_sum(&header, &values);
            }
            if !header.raw_float && !header.resend {
                assert!(!fixed::is_saturated(payload), "a saturated sum was answered");
            }
        }
        panic!("one packet was answered with more than 200");
    }

    fn check_sum(&self, header: &Header, values: &[i32]) {
        assert!(!header.raw_float || header.aggregator_index == RAW_INT32 || header.aggregator_index == RAW_FLOAT32);
        for (i, v) in values.iter().enumerate() {
            let exact: i64 =
                (0..self.config.workers.len() as u16).map(|r| i64::from(gradient(r, header.sequence, i))).sum();
            if header.raw_float {
                assert_eq!(*v, exact as i32, "sequence {} value {i}, raw", header.sequence);
            } else {
                assert_eq!(i64::from(*v), exact, "sequence {} value {i}", header.sequence);
            }
        }
    }
}
