// SPDX-License-Identifier: Apache-2.0
//! Groups: workers and the parameter server with its coordinator; the input is the network, the callers, and noise. Whatever
//! comes: no panic, no operation ends twice, no sum of different things, and memory stays bounded.

use std::collections::{HashMap, HashSet};
use std::net::SocketAddrV4;

use atp_proto::fixed::{Dtype, RAW_CONTROL};
use atp_proto::op::Kind;
use atp_proto::wire::{HEADER_BYTES, Header};
use atp_proto::{Code, Config, Endpoint, Host, Member, Mode, Nanos, Part, Role};

use crate::input::Input;
use crate::setup;

const MEMORY_MAX: usize = 1 << 24;
const GROUPS: usize = 3;

struct Datagram {
    from: SocketAddrV4,
    to: SocketAddrV4,
    data: Vec<u8>,
}

/// What a rank asked for under a token.
#[derive(Clone, Copy)]
struct Asked {
    group: u64,
    number: u64,
    count: usize,
}

struct Harness<'a> {
    input: Input<'a>,
    config: Config,
    members: Vec<Member>,
    host: Host,
    network: Vec<Datagram>,
    /// Next number of each group at each rank.
    numbers: HashMap<(usize, u64), u64>,
    /// Groups that a rank will not use any more.
    left: HashSet<(usize, u64)>,
    asked: Vec<HashMap<u64, Asked>>,
    ended: Vec<HashSet<u64>>,
    now: Nanos,
    /// Nobody forged a packet.
    honest: bool,
}

/// What `rank` adds in every element of an operation.
fn value(rank: usize, asked: &Asked) -> f32 {
    (rank + 1) as f32 * (1 + asked.number % 50) as f32 + asked.group as f32 * 1000.0
}

pub fn run(data: &[u8]) {
    let before = crate::alloc::live();
    let mut input = Input::new(data);
    let config = Config { mode: Mode::HostOnly, switch: None, auto_scale: true, ..setup::config(&mut input) };
    let ranks = config.workers.len();
    let member = |rank: usize| {
        let config = Config { role: Role::Worker, rank: rank as u16, ..config.clone() };
        Member::new(config, 10 + rank as u32).expect("a worker's configuration")
    };
    let server = Config { role: Role::ParameterServer, rank: 0, ..config.clone() };
    let mut h = Harness {
        members: (0..ranks).map(member).collect(),
        host: Host::new(server, 5).expect("a parameter server's configuration"),
        network: Vec::new(),
        numbers: HashMap::new(),
        left: HashSet::new(),
        asked: vec![HashMap::new(); ranks],
        ended: vec![HashSet::new(); ranks],
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
    h.settle();
}

impl Harness<'_> {
    fn step(&mut self) {
        let rank = self.input.below(self.members.len());
        let group = self.input.below(GROUPS) as u64;
        match self.input.below(16) {
            0..=5 if !self.left.contains(&(rank, group)) => self.submit(rank, group),
            6 => self.now += 1 << (self.input.byte() % 31),
            7 => self.members[rank].abort(group, Code::Timeout, "fuzz", self.now),
            8 if self.left.insert((rank, group)) => self.members[rank].leave(group, self.now),
            9 => self.members[rank].set_attached(u32::from(self.input.byte() & 1), self.now),
            10 => self.noise(rank),
            11 if !self.network.is_empty() => {
                let lost = self.input.below(self.network.len().min(256));
                self.network.remove(lost);
            }
            12 if !self.network.is_empty() => {
                let again = self.input.below(self.network.len().min(256));
                let Datagram { from, to, data } = &self.network[again];
                let copy = Datagram { from: *from, to: *to, data: data.clone() };
                self.network.push(copy);
            }
            _ => {
                for _ in 0..1 + self.input.below(8) {
                    if !self.network.is_empty() {
                        let next = self.input.below(self.network.len().min(256));
                        let datagram = self.network.remove(next);
                        self.arrive(&datagram);
                    }
                }
            }
        }
    }

    fn submit(&mut self, rank: usize, group: u64) {
        let number = self.numbers.entry((rank, group)).or_default();
        let odd = usize::from(self.input.byte() & 31 == 0);
        let asked = Asked { group, number: *number, count: [1, 5, 64, 65, 200][(*number % 5) as usize] + odd };
        *number += 1;
        let token = self.asked[rank].len() as u64;
        self.asked[rank].insert(token, asked);
        let memory: Vec<u8> = (0..asked.count).flat_map(|_| value(rank, &asked).to_ne_bytes()).collect();
        let part = Part {
            token,
            group,
            number: asked.number,
            total: asked.count as u64,
            begin: 0,
            kind: Kind::Sum,
            dtype: Dtype::Float32,
            count: asked.count as u64,
            memory: Box::new(memory),
        };
        self.members[rank].submit(part, self.now);
    }

    /// A control packet of anybody.
    fn noise(&mut self, rank: usize) {
        let how = self.input.byte();
        let w = self.config.workers[rank];
        let to_host = how & 1 == 0;
        let header = Header {
            job_id: self.config.job_id,
            bitmap0: if w.edge { 1 } else { 1 << w.bit },
            bitmap1: 1 << w.rack,
            edge_switch_identifier: w.edge && to_host,
            is_ack: !to_host,
            raw_float: true,
            aggregator_index: RAW_CONTROL,
            ..Header::default()
        };
        let mut data = header.pack().to_vec();
        let length = self.input.below(128);
        data.extend(self.input.take(length));
        if how & 2 == 0 && data.len() > HEADER_BYTES + 18 {
            // As from the process that the receiver knows, so that the records are looked at.
            let sender = if to_host { 10 + rank as u32 } else { 5 };
            let receiver = if to_host { 5 } else { 10 + rank as u32 };
            data[HEADER_BYTES..HEADER_BYTES + 4].copy_from_slice(&sender.to_be_bytes());
            data[HEADER_BYTES + 4..HEADER_BYTES + 8].copy_from_slice(&receiver.to_be_bytes());
            data[HEADER_BYTES + 16..HEADER_BYTES + 18].copy_from_slice(&1u16.to_be_bytes());
        }
        let stranger = how & 4 != 0;
        let own = if to_host { w.address } else { setup::SERVER };
        let from = if stranger { setup::STRANGER } else { own };
        self.honest &= stranger;
        let to = if to_host { setup::SERVER } else { w.address };
        self.arrive(&Datagram { from, to, data });
    }

    fn arrive(&mut self, datagram: &Datagram) {
        let Datagram { from, to, data } = datagram;
        if *to == setup::SERVER {
            self.host.handle(*from, false, data, self.now);
        } else if let Some(rank) = self.config.workers.iter().position(|w| w.address == *to) {
            self.members[rank].handle(*from, false, data, self.now);
        }
    }

    fn drain(&mut self) {
        let mut buffer = [0u8; 2048];
        for rank in 0..self.members.len() {
            let from = self.config.workers[rank].address;
            let member = &mut self.members[rank];
            if member.poll_timeout().is_some_and(|at| self.now >= at) {
                member.handle_timeout(self.now);
            }
            while let Some(t) = member.poll_transmit(self.now, &mut buffer) {
                self.network.push(Datagram { from, to: t.to, data: buffer[..t.length].to_vec() });
            }
            while let Some(event) = member.poll_event() {
                assert!(self.ended[rank].insert(event.token), "operation {} ended twice", event.token);
                if event.error.is_none() && self.honest {
                    let asked = self.asked[rank][&event.token];
                    let want: f64 = (0..self.config.workers.len()).map(|r| f64::from(value(r, &asked))).sum();
                    for word in event.memory.source().as_chunks::<4>().0 {
                        assert_eq!(f64::from(f32::from_ne_bytes(*word)), want, "rank {rank}");
                    }
                }
            }
        }
        if self.host.poll_timeout().is_some_and(|at| self.now >= at) {
            self.host.handle_timeout(self.now);
        }
        while let Some(t) = self.host.poll_transmit(self.now, &mut buffer) {
            self.network.push(Datagram { from: setup::SERVER, to: t.to, data: buffer[..t.length].to_vec() });
        }
        // The oldest packets are lost when there are too many.
        let more = self.network.len().saturating_sub(4096);
        self.network.drain(..more);
    }

    /// The network is calm, and every rank does in every group what the busiest did: everything ends.
    fn settle(&mut self) {
        if !self.honest {
            return;
        }
        for group in 0..GROUPS as u64 {
            let ranks = self.members.len();
            let most = (0..ranks).map(|r| self.numbers.get(&(r, group)).copied().unwrap_or(0)).max().unwrap_or(0);
            for rank in (0..ranks).filter(|r| !self.left.contains(&(*r, group))).collect::<Vec<_>>() {
                while self.numbers.get(&(rank, group)).copied().unwrap_or(0) < most {
                    self.submit(rank, group);
                }
            }
        }
        for _ in 0..20_000 {
            for datagram in std::mem::take(&mut self.network) {
                self.arrive(&datagram);
            }
            self.drain();
            if (0..self.members.len()).all(|r| self.ended[r].len() == self.asked[r].len()) {
                return;
            }
            self.now += 1_000_000;
        }
        panic!("operations without an end: {:?}", self.members.iter().map(Member::outstanding).collect::<Vec<_>>());
    }
}
