// SPDX-License-Identifier: Apache-2.0
//! One worker alone against whatever a network and a parameter server may send: it never panics, never sends a
//! malformed packet, ends each operation once and in bounded time, with a result of the right length.

use std::collections::HashMap;

use atp_proto::fixed::{self, Dtype};
use atp_proto::op::Kind;
use atp_proto::wire::{HEADER_BYTES, Header};
use atp_proto::worker::Submission;
use atp_proto::{Config, Endpoint, Mode, Nanos, Worker};

use crate::input::Input;
use crate::setup;

const DTYPES: [Dtype; 4] = [Dtype::Float32, Dtype::Float16, Dtype::Bfloat16, Dtype::Int32];
/// Beyond the submitted tensors and what their early results may hold.
const MEMORY_MAX: usize = 1 << 21;

struct Pending {
    bytes: usize,
    /// Of a job of one worker whose answers are honest.
    expected: Option<Vec<u8>>,
}

struct Harness<'a> {
    input: Input<'a>,
    config: Config,
    worker: Worker,
    now: Nanos,
    sent: Vec<Vec<u8>>,
    pending: HashMap<u64, Pending>,
    next_token: u64,
    submitted: usize,
    /// All answers so far were what a parameter server of this one worker would send.
    honest: bool,
}

pub fn run(data: &[u8]) {
    let before = crate::alloc::live();
    let mut input = Input::new(data);
    let mut config = setup::config(&mut input);
    config.values = 1 + input.below(8);
    let how = input.byte();
    if how & 1 == 1 {
        config.servers.push("10.9.0.2:10800".parse().expect("an address"));
    }
    if how & 2 == 2 && config.mode != Mode::HostOnly {
        config.switch = Some(std::net::SocketAddrV4::new(setup::RELAY, 10800));
    }
    config.rank = u16::from(how >> 2) % config.workers.len() as u16;
    config.stall_timeout = 1_000_000_000 << (how >> 6);
    let worker = Worker::new(config.clone()).expect("a worker's configuration");
    let mut h = Harness {
        input,
        config,
        worker,
        now: 1,
        sent: Vec::new(),
        pending: HashMap::new(),
        next_token: 0,
        submitted: 0,
        honest: true,
    };
    while !h.input.is_empty() {
        h.step();
        h.collect();
        h.check(before);
    }
    h.silence();
}

impl Harness<'_> {
    fn step(&mut self) {
        match self.input.below(16) {
            0 | 1 => self.submit(),
            2..=4 => {
                let most = self.input.below(40);
                self.transmit(most);
            }
            5 => self.now += 1 << (self.input.byte() % 34),
            6 => self.worker.handle_timeout(self.now),
            7..=10 => self.answer(),
            11 => self.notice(),
            12 | 13 => self.noise(),
            14 if self.input.byte() == 7 => self.worker.cancel_all("the trainer went away"),
            _ => {
                if let Some(at) = self.worker.poll_timeout() {
                    self.now = self.now.max(at);
                    self.worker.handle_timeout(self.now);
                }
            }
        }
    }

    fn submit(&mut self) {
        let shape = self.input.byte();
        let dtype = DTYPES[usize::from(shape & 3)];
        let kind = if shape & 4 == 0 { Kind::Sum } else { Kind::Mean };
        let count = self.input.below(200);
        let pattern = self.input.byte();
        let wrong = usize::from(shape >> 3 == 31);
        let memory: Vec<u8> = (0..count * dtype.size() + wrong)
            .map(|i| pattern.wrapping_mul(i as u8).wrapping_add(pattern >> 3 & (i >> 2) as u8))
            .collect();
        let token = self.next_token;
        self.next_token += 1;
        self.submitted += memory.len();
        let honest = self.honest && self.config.workers.len() == 1;
        let expected = honest.then(|| self.alone(dtype, &memory[..count * dtype.size()]));
        self.pending.insert(token, Pending { bytes: memory.len(), expected });
        self.worker.submit(
            Submission { token, op_id: token, kind, dtype, count: count as u64, scale: None, memory: Box::new(memory) },
            self.now,
        );
    }

    /// What a job of one worker makes of its tensor: each packet through fixed point, or raw.
    fn alone(&self, dtype: Dtype, source: &[u8]) -> Vec<u8> {
        let mut result = vec![0; source.len()];
        let bytes = self.config.values * dtype.size();
        let mut packet = vec![0; 4 * self.config.values];
        for (from, to) in source.chunks(bytes).zip(result.chunks_mut(bytes)) {
            if fixed::encode(dtype, from, self.config.scale, self.config.addend_limit, &mut packet).fits {
                fixed::decode(dtype, &packet, self.config.scale, 1.0, to);
            } else {
                fixed::encode_raw(dtype, from, &mut packet);
                fixed::decode_raw(dtype, &packet, 1.0, to);
            }
        }
        result
    }

    fn transmit(&mut self, most: usize) {
        let mut buffer = [0xaau8; 256];
        for _ in 0..most {
            let Some(t) = self.worker.poll_transmit(self.now, &mut buffer) else { return };
            assert_eq!(t.length, self.config.packet_bytes());
            assert!(buffer[t.length..].iter().all(|b| *b == 0xaa), "wrote behind the packet");
            let header = Header::unpack(&buffer).expect("a header");
            assert_eq!(header.job_id, self.config.job_id);
            assert!(!header.is_ack && !header.ecn && !(header.collision && (header.resend || header.raw_float)));
            assert_eq!(header.bitmap0.count_ones() * header.bitmap1.count_ones(), 1);
            let relay = self.config.switch == Some(t.to);
            assert!(relay || self.config.servers.contains(&t.to));
            assert!(!(relay && header.raw_float), "what no switch sums goes to the parameter server itself");
            if !header.raw_float {
                let index = u32::from(header.aggregator_index);
                let inside = self.config.regions.iter().any(|r| index >= r.start && index < r.start + r.size);
                // The parameter server, which alone announces indexes, is not believed to be wrong.
                assert!(inside || !self.honest, "index {index} is not the job's");
            }
            self.sent.push(buffer[..t.length].to_vec());
        }
    }

    fn source(&mut self) -> std::net::SocketAddrV4 {
        let which = self.input.byte();
        match (which & 7, self.config.switch) {
            (0, _) => setup::STRANGER,
            (1 | 2, Some(relay)) => relay,
            _ => self.config.servers[usize::from(which >> 3) % self.config.servers.len()],
        }
    }

    fn hear(&mut self, from: std::net::SocketAddrV4, ce: bool, packet: &[u8]) {
        self.worker.handle(from, ce, packet, self.now);
    }

    /// An answer to a packet that was sent, true to it or not.
    fn answer(&mut self) {
        let how = self.input.byte();
        let Some(newest) = self.sent.len().checked_sub(1) else { return };
        let back = self.input.below(64).min(newest);
        let mut packet = self.sent[newest - back].clone();
        let mut header = Header::unpack(&packet).expect("a header");
        header.is_ack = true;
        header.resend = how & 0x10 != 0;
        self.honest &= !header.resend;
        header.ecn = how & 0x20 != 0;
        if how & 0x40 != 0 && !header.raw_float {
            header.collision = true;
            header.bitmap1 = if how & 0x80 == 0 { self.config.regions[0].start } else { self.input.word() };
            self.honest &= how & 0x80 == 0;
        }
        match how & 0xf {
            0 => {
                header.raw_float = !header.raw_float;
                header.aggregator_index = 0;
                self.honest = false;
            }
            1 => {
                let at = HEADER_BYTES + self.input.below(packet.len() - HEADER_BYTES);
                packet[at] ^= self.input.byte();
                self.honest = false;
            }
            2 => {
                header.sequence = self.input.word() & 0xff_ffff;
                self.honest = false;
            }
            _ => {}
        }
        // In a job of one the echo is the sum; a saturated one would come raw.
        let saturated = !header.raw_float && fixed::is_saturated(&packet[HEADER_BYTES..]);
        self.honest &= !saturated;
        packet[..HEADER_BYTES].copy_from_slice(&header.pack());
        let from = self.source();
        self.hear(from, how & 0x20 != 0, &packet);
    }

    fn notice(&mut self) {
        let sequence = match self.sent.last() {
            Some(last) => Header::unpack(last).expect("a header").sequence.wrapping_add(self.input.below(3) as u32),
            None => self.input.word(),
        };
        let header = Header {
            job_id: self.config.job_id,
            sequence: sequence & 0xff_ffff,
            is_ack: true,
            raw_float: true,
            aggregator_index: fixed::RAW_NOTICE,
            ..Header::default()
        };
        let mut packet = header.pack().to_vec();
        packet.extend(u32::from(self.input.byte()).to_be_bytes());
        packet.extend((1..self.config.values).flat_map(|_| u32::from(self.input.byte() & 3).to_be_bytes()));
        let from = self.source();
        self.hear(from, false, &packet);
    }

    /// Any bytes, most with a job ID and length that pass the first checks.
    fn noise(&mut self) {
        let how = self.input.byte();
        let length = if how & 1 == 0 { self.config.packet_bytes() } else { self.input.below(80) };
        let mut packet = self.input.take(length).to_vec();
        packet.resize(length, 0);
        if how & 2 == 0 && length > 0 {
            packet[0] = self.config.job_id;
        }
        self.honest = false;
        let from = self.source();
        self.hear(from, how & 4 != 0, &packet);
    }

    fn collect(&mut self) {
        while let Some(event) = self.worker.poll_event() {
            let pending = self.pending.remove(&event.token).expect("each operation ends once");
            if event.error.is_some() {
                continue;
            }
            let result = event.memory.source();
            assert_eq!(result.len(), pending.bytes, "a result of another length");
            if let (true, Some(expected)) = (self.honest, pending.expected) {
                assert!(result == expected, "operation {}: a wrong result", event.token);
            }
        }
    }

    fn check(&self, before: usize) {
        let s = self.worker.snapshot();
        let window = u64::from(self.config.max_window);
        assert!(s.window >= 1.0 && s.window <= window as f64, "window {}", s.window);
        assert!(s.in_flight <= window && s.in_flight <= s.open_sequences, "{} in flight", s.in_flight);
        assert!(self.pending.is_empty() || self.worker.poll_timeout().is_some(), "nothing would ever end it");
        let sent: usize = self.sent.iter().map(|p| p.len() + 32).sum();
        let used = crate::alloc::live().saturating_sub(before);
        let most = MEMORY_MAX + 8 * self.submitted + 2 * sent + 512 * self.pending.len();
        assert!(used < most, "{used} bytes in use");
    }

    /// From now on nobody answers: everything ends by itself, in the time that the assignment says.
    fn silence(&mut self) {
        let began = self.now;
        let mut buffer = [0u8; 256];
        for _ in 0..100_000 {
            self.collect();
            if self.pending.is_empty() {
                return;
            }
            while self.worker.poll_transmit(self.now, &mut buffer).is_some() {}
            let at = self.worker.poll_timeout().expect("a pending operation has a timer");
            self.now = self.now.max(at);
            assert!(self.now <= began + self.config.stall_timeout, "a stall is told later than the assignment says");
            self.worker.handle_timeout(self.now);
        }
        panic!("operations that never end: {:?}", self.worker.snapshot());
    }
}
