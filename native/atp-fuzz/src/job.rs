// SPDX-License-Identifier: Apache-2.0
//! A whole job: workers, the switch core and the parameter server, with the fuzzer as the network. It decides which packet
//! arrives next, twice or not at all, when time passes, when a switch forgets. Then the network becomes calm, and every
//! rank must end with the exact sum.

use std::cell::RefCell;
use std::collections::VecDeque;

use atp_proto::fixed::Dtype;
use atp_proto::op::Kind;
use atp_proto::wire::{HEADER_BYTES, Header};
use atp_proto::worker::Submission;
use atp_proto::{Code, Config, Endpoint, Mode, Nanos, ParameterServer, Role, Worker};

use crate::input::Input;
use crate::setup::{self, JOB_ID, SERVER};
use crate::switch::{Out, Program, Switch};

/// Another job, whose packets take aggregators.
const FOREIGN: u8 = 200;
const FOREIGN_PORT: u32 = 900;
const UP: u32 = 500;
const RACK_PORT: u32 = 100;
const SECOND: Nanos = 1_000_000_000;
/// Time that the fuzzer may let pass; less than the stall timeout of 60 s.
const WILD: Nanos = 20 * SECOND;
const CALM: Nanos = 40 * SECOND;
const HOP: Nanos = 5_000;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    Worker(usize),
    Rack(usize),
    Top,
    Server,
}

#[derive(Clone)]
struct Flying {
    place: Place,
    /// Port at the place.
    port: u32,
    from: u32,
    to: u32,
    ce: bool,
    data: Vec<u8>,
}

thread_local! {
    /// Opening a switch clears megabytes, so they are kept; what one input leaves is taken out before the next.
    static SWITCHES: RefCell<Vec<Switch>> = const { RefCell::new(Vec::new()) };
}

struct Network<'a> {
    config: Config,
    workers: Vec<Worker>,
    server: ParameterServer,
    switches: &'a mut Vec<Switch>,
    programs: Vec<Program>,
    racks: usize,
    two_levels: bool,
    flying: VecDeque<Flying>,
    now: Nanos,
    /// Of each rank: the operations that ended.
    ended: Vec<Vec<u64>>,
    data: Vec<Data>,
}

struct Data {
    dtype: Dtype,
    count: usize,
    seed: u8,
    /// This rank brings one element more than the others.
    odd: Option<usize>,
}

impl Data {
    fn int(&self, rank: usize, i: usize) -> i32 {
        match (self.seed, i) {
            (200.., 3) => i32::MAX - rank as i32,
            (220.., 4) => i32::MIN + 1,
            _ => (rank as i32 + 1) * (i as i32 + 7 * i32::from(self.seed)) * if i & 1 == 0 { 1 } else { -1 },
        }
    }

    /// Multiples of 2^-10 that fixed point and float64 agree on, and some that only raw packets carry.
    fn float(&self, rank: usize, i: usize) -> f32 {
        match (self.seed, i) {
            (180.., 5) => 1500.0, // two of them saturate at a scale of 2^20
            (210.., 6) if rank == 0 => f32::NAN,
            (230.., 7) => f32::INFINITY,
            _ => (self.int(rank, i) % 4096) as f32 / 1024.0,
        }
    }

    fn count(&self, rank: usize) -> usize {
        self.count + usize::from(self.odd == Some(rank))
    }

    fn bytes(&self, rank: usize) -> Vec<u8> {
        (0..self.count(rank))
            .flat_map(|i| match self.dtype {
                Dtype::Int32 => self.int(rank, i).to_ne_bytes(),
                _ => self.float(rank, i).to_ne_bytes(),
            })
            .collect()
    }

    fn check(&self, ranks: usize, got: &[u8]) {
        assert_eq!(got.len(), 4 * self.count);
        for (i, word) in got.as_chunks::<4>().0.iter().enumerate() {
            if self.dtype == Dtype::Int32 {
                let want = (0..ranks).fold(0i32, |a, r| a.wrapping_add(self.int(r, i)));
                assert_eq!(i32::from_ne_bytes(*word), want, "element {i}");
            } else {
                let want = (0..ranks).fold(0.0f64, |a, r| a + f64::from(self.float(r, i))) as f32;
                let got = f32::from_ne_bytes(*word);
                assert!(got == want || (got.is_nan() && want.is_nan()), "element {i}: {got} is not {want}");
            }
        }
    }
}

pub fn run(data: &[u8]) {
    let mut input = Input::new(data);
    let config = setup::config(&mut input);
    SWITCHES.with_borrow_mut(|switches| {
        let mut net = Network::new(config, switches);
        while !input.is_empty() && net.now < WILD {
            net.step(&mut input);
            net.pump();
        }
        net.calm();
    });
}

fn ip(address: std::net::SocketAddrV4) -> u32 {
    u32::from(*address.ip())
}

impl<'a> Network<'a> {
    fn new(config: Config, switches: &'a mut Vec<Switch>) -> Self {
        let racks = config.workers.iter().map(|w| usize::from(w.rack)).max().unwrap_or(0) + 1;
        let two_levels = racks > 1;
        while switches.len() <= racks {
            switches.push(Switch::new());
        }
        let regions: Vec<(u32, u32)> = config.regions.iter().map(|r| (r.start, r.size)).collect();
        let mut programs = Vec::new();
        for place in 0..=racks {
            let top = place == racks;
            let mut p = Program {
                values: config.values as u32,
                full0: 0,
                full1: if top && two_levels { (1 << racks) - 1 } else { 0 },
                regions: regions.clone(),
                admission: Vec::new(),
                transit: Vec::new(),
                ps_ports: vec![UP],
                group: Vec::new(),
            };
            for (rank, w) in config.workers.iter().enumerate() {
                let rack = u32::from(w.rack);
                if top {
                    if w.edge {
                        p.admission.push((1 + rank as u32, true, 1 << rack));
                        p.group.push((1 + rank as u32, ip(w.address)));
                    } else if !p.group.iter().any(|g| g.0 == RACK_PORT + rack) {
                        p.admission.push((RACK_PORT + rack, true, 1 << rack));
                        p.transit.push((RACK_PORT + rack, 1 << rack, u32::MAX));
                        p.group.push((RACK_PORT + rack, ip(w.address)));
                    }
                } else if usize::from(w.rack) == place && !w.edge {
                    p.full0 |= 1 << w.bit;
                    p.admission.push((1 + rank as u32, false, 1 << w.bit));
                    p.group.push((1 + rank as u32, ip(w.address)));
                }
            }
            programs.push(p);
        }
        let worker = |rank| Worker::new(Config { rank, ..config.clone() }).expect("a worker's configuration");
        let n = config.workers.len();
        let mut net = Self {
            workers: (0..n as u16).map(worker).collect(),
            server: ParameterServer::new(Config { role: Role::ParameterServer, ..config.clone() })
                .expect("a parameter server's configuration"),
            switches,
            programs,
            racks,
            two_levels,
            flying: VecDeque::new(),
            now: SECOND,
            ended: vec![Vec::new(); n],
            data: Vec::new(),
            config,
        };
        for place in 0..=racks {
            net.switches[place].forget(JOB_ID);
            net.switches[place].forget(FOREIGN);
            net.know(place);
        }
        net
    }

    /// The control plane writes the job's tables at a switch.
    fn know(&mut self, place: usize) {
        let foreign = Program {
            full0: 3,
            full1: 0,
            admission: vec![(FOREIGN_PORT, false, 1)],
            transit: Vec::new(),
            group: vec![(FOREIGN_PORT, 1)],
            regions: vec![(0, crate::switch::AGGREGATORS)],
            ps_ports: vec![UP],
            values: 62,
        };
        self.switches[place].program(FOREIGN, &foreign);
        if self.config.mode != Mode::HostOnly && (self.programs[place].full0 | self.programs[place].full1) != 0 {
            self.switches[place].program(JOB_ID, &self.programs[place]);
        }
    }

    fn step(&mut self, input: &mut Input<'_>) {
        let op = input.byte();
        let which = usize::from(op >> 3);
        match op & 7 {
            0 if self.data.len() < 6 => self.submit(input),
            1 => {
                // Lost.
                if let Some(i) = which.checked_rem(self.flying.len()) {
                    self.flying.remove(i);
                }
            }
            2 => {
                // Twice, and once more later.
                if let Some(i) = which.checked_rem(self.flying.len())
                    && self.flying.len() < 2000
                {
                    let copy = self.flying[i].clone();
                    self.flying.push_back(copy);
                    self.deliver(i);
                }
            }
            3 => self.now += 1 << (10 + which % 18),
            4 => match which & 7 {
                0 => self.reset(input),
                1..=3 => self.occupy(input),
                _ => {
                    if let Some(i) = which.checked_rem(self.flying.len()) {
                        self.flying[i].ce = true;
                    }
                }
            },
            5 => {
                // Everything that is on its way now, in order.
                for _ in 0..self.flying.len() {
                    self.deliver(0);
                }
                self.now += HOP;
            }
            _ => {
                if let Some(i) = which.checked_rem(self.flying.len()) {
                    self.deliver(i);
                    self.now += 1000;
                }
            }
        }
    }

    fn submit(&mut self, input: &mut Input<'_>) {
        let shape = input.byte();
        let ranks = self.workers.len();
        let data = Data {
            odd: (ranks > 1 && shape >> 4 == 15).then(|| input.below(ranks)),
            dtype: if shape & 1 == 0 { Dtype::Float32 } else { Dtype::Int32 },
            count: [0, 1, 61, 62, 63, 200, 500, 1000][usize::from(shape >> 1 & 7)],
            seed: input.byte(),
        };
        let token = self.data.len() as u64;
        for rank in 0..self.workers.len() {
            let s = Submission {
                token,
                op_id: token,
                kind: Kind::Sum,
                dtype: data.dtype,
                count: data.count(rank) as u64,
                scale: None,
                memory: Box::new(data.bytes(rank)),
            };
            self.workers[rank].submit(s, self.now);
        }
        self.data.push(data);
    }

    /// A switch loses its memory; its tables may stay lost for a while.
    fn reset(&mut self, input: &mut Input<'_>) {
        let how = input.byte();
        let place = usize::from(how >> 1) % (self.racks + 1);
        self.switches[place].forget(JOB_ID);
        if how & 1 == 0 {
            self.know(place);
        }
    }

    /// Another job takes an aggregator.
    fn occupy(&mut self, input: &mut Input<'_>) {
        let how = input.byte();
        let place = usize::from(how >> 6) % (self.racks + 1);
        let header = Header {
            job_id: FOREIGN,
            bitmap0: 1,
            bitmap1: 1,
            fan_in_degree0: 2,
            fan_in_degree1: 1,
            aggregator_index: u16::from(how & 63),
            ..Header::default()
        };
        let mut packet = header.pack().to_vec();
        packet.resize(HEADER_BYTES + 4 * 62, 0x55);
        self.switches[place].process(FOREIGN_PORT, 1, false, packet, self.now);
    }

    /// Where a packet for `to` goes from the rack's switch (`Some`) or the top's (`None`).
    fn route(&self, at: Option<usize>, to: u32) -> Option<(Place, u32)> {
        if to == ip(SERVER) {
            return Some(match at {
                Some(rack) if self.two_levels => (Place::Top, RACK_PORT + rack as u32),
                _ => (Place::Server, 0),
            });
        }
        let rank = self.config.workers.iter().position(|w| ip(w.address) == to)?;
        let w = self.config.workers[rank];
        Some(match at {
            None if self.two_levels && !w.edge => (Place::Rack(usize::from(w.rack)), UP),
            _ => (Place::Worker(rank), 0),
        })
    }

    fn deliver(&mut self, i: usize) {
        let Some(f) = self.flying.remove(i) else { return };
        let (place, at) = match f.place {
            Place::Worker(rank) => {
                let from = std::net::SocketAddrV4::new(f.from.into(), 10800);
                self.workers[rank].handle(from, f.ce, &f.data, self.now);
                return;
            }
            Place::Server => {
                let from = std::net::SocketAddrV4::new(f.from.into(), 10800);
                self.server.handle(from, f.ce, &f.data, self.now);
                return;
            }
            Place::Rack(rack) => (rack, Some(rack)),
            Place::Top => (self.racks, None),
        };
        let gradient = Header::unpack(&f.data).is_some_and(|h| !h.is_ack);
        for Out { port, dst, packet } in self.switches[place].process(f.port, f.to, f.ce, f.data, self.now) {
            let to = if gradient { ip(SERVER) } else { dst };
            let next = match port {
                // A copy: to the port of the group's member.
                p if !gradient && (1..RACK_PORT).contains(&p) => Some((Place::Worker(p as usize - 1), 0)),
                p if !gradient && (RACK_PORT..UP).contains(&p) => Some((Place::Rack((p - RACK_PORT) as usize), UP)),
                _ => self.route(at, to),
            };
            if let Some((place, port)) = next {
                self.flying.push_back(Flying { place, port, from: f.from, to: dst, ce: f.ce, data: packet });
            }
        }
    }

    fn pump(&mut self) {
        let mut buffer = [0u8; 512];
        for rank in 0..self.workers.len() {
            if self.workers[rank].poll_timeout().is_some_and(|t| t <= self.now) {
                self.workers[rank].handle_timeout(self.now);
            }
            let w = self.config.workers[rank];
            let place = if w.edge { Place::Top } else { Place::Rack(usize::from(w.rack)) };
            while let Some(t) = self.workers[rank].poll_transmit(self.now, &mut buffer) {
                self.flying.push_back(Flying {
                    place,
                    port: 1 + rank as u32,
                    from: ip(w.address),
                    to: ip(t.to),
                    ce: false,
                    data: buffer[..t.length].to_vec(),
                });
            }
            while let Some(event) = self.workers[rank].poll_event() {
                let data = &self.data[event.token as usize];
                assert!(!self.ended[rank].contains(&event.token), "operation {} ended twice", event.token);
                match event.error {
                    Some(failure) => {
                        assert!(data.odd.is_some() && failure.code == Code::Mismatch, "rank {rank}: {failure:?}");
                    }
                    None => {
                        assert!(data.odd.is_none(), "ranks with different counts were summed");
                        // Only a failure may overtake.
                        let before = |t: &u64| self.data[*t as usize].odd.is_some() || *t < event.token;
                        assert!(self.ended[rank].iter().all(before), "operations end in order");
                        data.check(self.workers.len(), event.memory.source());
                    }
                }
                self.ended[rank].push(event.token);
            }
        }
        if self.server.poll_timeout().is_some_and(|t| t <= self.now) {
            self.server.handle_timeout(self.now);
        }
        while let Some(t) = self.server.poll_transmit(self.now, &mut buffer) {
            let place = if self.two_levels { Place::Top } else { Place::Rack(0) };
            self.flying.push_back(Flying {
                place,
                port: UP,
                from: ip(SERVER),
                to: ip(t.to),
                ce: false,
                data: buffer[..t.length].to_vec(),
            });
        }
        assert!(self.flying.len() < 20_000, "an amplification: {} packets on their way", self.flying.len());
    }

    /// Nothing is lost any more.
    fn calm(&mut self) {
        let until = self.now + CALM;
        loop {
            self.pump();
            if self.ended.iter().all(|e| e.len() == self.data.len()) && self.flying.is_empty() {
                break;
            }
            if self.flying.is_empty() {
                let timers = self.workers.iter().filter_map(Endpoint::poll_timeout);
                let next = timers.chain(self.server.poll_timeout()).min().expect("somebody waits for something");
                self.now = self.now.max(next);
            } else {
                for _ in 0..self.flying.len() {
                    self.deliver(0);
                }
                self.now += HOP;
            }
            let states: Vec<_> = self.workers.iter().map(Endpoint::snapshot).collect();
            assert!(self.now < until, "still not done: {:?} {:?} {states:?}", self.ended, self.server.snapshot());
        }
        for place in 0..=self.racks {
            let used = self.switches[place].occupancy(JOB_ID);
            assert!(used <= crate::switch::AGGREGATORS);
        }
    }
}
