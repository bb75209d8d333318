// SPDX-License-Identifier: Apache-2.0
//! A network in memory: workers, switches and a parameter server on one event queue, with a seeded random generator that
//! loses, duplicates, delays and marks packets. Everything is a function of the seed.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};
use std::net::{Ipv4Addr, SocketAddrV4};

use atp_proto::config::{Region, WorkerEntry};
use atp_proto::fixed::sticky_add;
use atp_proto::index::mix;
use atp_proto::seal::{KEY_BYTES, Seal};
use atp_proto::wire::{HEADER_BYTES, Header, STALE_NS};
use atp_proto::worker::Submission;
use atp_proto::{Config, Endpoint, Mode, Nanos, ParameterServer, Role, Worker};

pub struct Rng(u64);

impl Rng {
    pub fn new(seed: u64) -> Self {
        Self(mix(seed))
    }
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(1);
        mix(self.0)
    }
    /// Below `n`.
    pub fn below(&mut self, n: u64) -> u64 {
        self.next() % n
    }
    pub fn chance(&mut self, p: f64) -> bool {
        (self.next() >> 11) as f64 / (1u64 << 53) as f64 <= p && p > 0.0
    }
}

/// A job of `racks.len()` racks with so many workers each; racks listed in `edge` (of one worker) hang at the PS's switch.
pub fn config(racks: &[u8], edge: u32, mode: Mode) -> Config {
    let mut workers = Vec::new();
    for (rack, size) in racks.iter().enumerate() {
        for bit in 0..*size {
            workers.push(WorkerEntry {
                rank: workers.len() as u16,
                address: SocketAddrV4::new(Ipv4Addr::new(10, 0, rack as u8, bit + 1), 10800),
                rack: rack as u8,
                bit,
                edge: edge >> rack & 1 == 1,
            });
        }
    }
    let server = SocketAddrV4::new(Ipv4Addr::new(10, 9, 0, 9), 10800);
    Config {
        job: "sim".into(),
        epoch: 1,
        job_id: 3,
        mode,
        role: Role::Worker,
        rank: 0,
        values: 4,
        scale: f64::from(1u32 << 20),
        auto_scale: false,
        addend_limit: atp_proto::fixed::LIMIT,
        bind: server,
        regions: vec![Region { start: 100, size: 40, floor: false }, Region { start: 500, size: 24, floor: false }],
        slots: 32,
        max_window: 32,
        stall_timeout: 60_000_000_000,
        workers,
        servers: vec![server],
        seal: Seal::new(Some([7; KEY_BYTES])),
        switch: None,
        segmentation: false,
        initial_window: 16,
        min_rto: 1_000_000,
        max_rto: 200_000_000,
        first_sequence: 0,
    }
}

#[derive(Clone, Copy, Debug, Default)]
pub struct Faults {
    pub loss: f64,
    pub duplicate: f64,
    /// Share of packets that take up to 3 ms longer.
    pub reorder: f64,
    pub mark: f64,
    /// Chance, per packet at a switch, that it forgets everything.
    pub reset: f64,
    /// Chance, per packet at a switch, that another job takes a random aggregator, none of the floor.
    pub foreign: f64,
}

struct Aggregator {
    /// `None`: another job's.
    key: Option<(u32, bool)>,
    bitmap: u32,
    full: u32,
    values: Vec<i32>,
    ecn: bool,
    at: Nanos,
}

/// Rust model of docs/protocol.md, "What a switch does".
#[derive(Default)]
pub struct Switch {
    pub known: bool,
    /// All workers of its rack; 0 at a switch that is not level 0.
    full0: u32,
    /// All racks; 0 at a switch that is not level 1.
    full1: u32,
    aggregators: HashMap<u16, Aggregator>,
    pub completed: u64,
    pub collisions: u64,
}

fn values(packet: &[u8]) -> Vec<i32> {
    packet[HEADER_BYTES..].as_chunks::<4>().0.iter().map(|w| i32::from_be_bytes(*w)).collect()
}

impl Switch {
    /// A gradient towards the PS; the packet that goes on, if any.
    fn gradient(&mut self, packet: &[u8], now: Nanos) -> Option<Vec<u8>> {
        let mut h = Header::unpack(packet).expect("a header");
        let passed = Some(packet.to_vec());
        if h.raw_float || !self.known {
            return passed;
        }
        let level1 = self.full1 != 0 && (h.edge_switch_identifier || h.resend);
        let level0 = self.full0 != 0 && !h.edge_switch_identifier;
        if !level0 && !level1 {
            return passed;
        }
        let key = (h.sequence, level1);
        let (bits, full) = if level1 { (h.bitmap1, self.full1) } else { (h.bitmap0, self.full0) };
        let index = h.aggregator_index;
        let stale = self.aggregators.get(&index).is_some_and(|a| now.saturating_sub(a.at) > STALE_NS);
        if stale {
            self.aggregators.remove(&index);
        }
        let emit = |a: &Aggregator, mut h: Header| {
            if level1 {
                h.bitmap1 = a.bitmap;
                h.edge_switch_identifier = true;
            } else {
                h.bitmap0 = a.bitmap;
                h.edge_switch_identifier = a.bitmap == a.full;
            }
            h.ecn |= a.ecn;
            let mut out = h.pack().to_vec();
            out.extend(a.values.iter().flat_map(|v| v.to_be_bytes()));
            Some(out)
        };
        let complete = |a: &Aggregator| a.bitmap == a.full;
        if h.resend {
            let Some(a) = self.aggregators.get_mut(&index).filter(|a| a.key == Some(key)) else { return passed };
            if complete(a) {
                return emit(a, h);
            }
            if level1 {
                if a.bitmap & bits == 0 {
                    return passed;
                }
            } else if a.bitmap & bits == 0 {
                a.values.iter_mut().zip(values(packet)).for_each(|(s, v)| *s = sticky_add(*s, v));
                a.bitmap |= bits;
            }
            let out = emit(a, h);
            self.aggregators.remove(&index);
            return out;
        }
        let repeat = h.is_repeat();
        if repeat && self.aggregators.get(&index).is_none_or(|a| a.key != Some(key)) {
            // It never allocates; of a rack of one it is the whole rack all the same.
            h.edge_switch_identifier |= bits == full;
            let mut out = h.pack().to_vec();
            out.extend_from_slice(&packet[HEADER_BYTES..]);
            return Some(out);
        }
        match self.aggregators.get_mut(&index) {
            None => {
                let a = Aggregator { key: Some(key), bitmap: bits, full, values: values(packet), ecn: h.ecn, at: now };
                let out = if complete(&a) { emit(&a, h) } else { None };
                self.completed += u64::from(out.is_some());
                self.aggregators.insert(index, a);
                out
            }
            Some(a) if a.key != Some(key) => {
                self.collisions += 1;
                h.collision = true;
                h.resend = true;
                let mut out = h.pack().to_vec();
                out.extend_from_slice(&packet[HEADER_BYTES..]);
                Some(out)
            }
            Some(a) if a.bitmap & bits != 0 => {
                a.ecn |= h.ecn;
                if complete(a) && (!repeat || bits & 1 == 1) { emit(a, h) } else { None }
            }
            Some(a) => {
                a.values.iter_mut().zip(values(packet)).for_each(|(s, v)| *s = sticky_add(*s, v));
                a.bitmap |= bits;
                a.ecn |= h.ecn;
                if !repeat {
                    a.at = now;
                }
                if complete(a) {
                    self.completed += 1;
                    h.collision = false;
                    emit(a, h)
                } else {
                    None
                }
            }
        }
    }

    /// An ACK: whether it is to be replicated.
    fn ack(&mut self, h: &Header) -> bool {
        if h.raw_float || !self.known {
            return false;
        }
        let held = self.aggregators.get(&h.aggregator_index).and_then(|a| a.key);
        if held.is_some_and(|key| key.0 == h.sequence) {
            self.aggregators.remove(&h.aggregator_index);
        }
        !h.edge_switch_identifier // with it, the ACK is for its addressee alone
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Place {
    Worker(usize),
    /// Level 0 of a rack.
    Rack(usize),
    /// Level 1, at the PS.
    Top,
    Server,
}

#[derive(PartialEq, Eq, PartialOrd, Ord)]
struct Arrival {
    at: Nanos,
    order: u64,
    place: Place,
    from: SocketAddrV4,
    to: SocketAddrV4,
    ce: bool,
    data: Vec<u8>,
}

/// The ends are the bare sequence transport, or the endpoints with groups.
pub struct Network<W = Worker, S = ParameterServer> {
    pub config: Config,
    pub now: Nanos,
    pub rng: Rng,
    pub faults: Faults,
    pub workers: Vec<W>,
    pub server: S,
    pub racks: Vec<Switch>,
    pub top: Switch,
    /// Ranks that neither send nor receive.
    pub dead: Vec<bool>,
    queue: BinaryHeap<Reverse<Arrival>>,
    order: u64,
    pub results: Vec<HashMap<u64, Result<Vec<u8>, String>>>,
    two_levels: bool,
}

#[allow(dead_code)] // not every test drives the bare transport
impl Network {
    pub fn new(config: Config, faults: Faults, seed: u64) -> Self {
        let worker = |rank| Worker::new(of_worker(&config, rank)).expect("a valid configuration");
        let server = ParameterServer::new(of_server(&config)).expect("a valid configuration");
        let workers = (0..config.workers.len() as u16).map(worker).collect();
        Self::of(config, workers, server, faults, seed)
    }

    pub fn submit(&mut self, rank: usize, s: Submission) {
        let now = self.now;
        self.workers[rank].submit(s, now);
    }
}

/// The configuration of one worker.
pub fn of_worker(config: &Config, rank: u16) -> Config {
    Config { role: Role::Worker, rank, ..config.clone() }
}

/// The configuration of the parameter server.
pub fn of_server(config: &Config) -> Config {
    Config { role: Role::ParameterServer, rank: 0, ..config.clone() }
}

impl<W: Endpoint, S: Endpoint> Network<W, S> {
    pub fn of(config: Config, workers: Vec<W>, server: S, faults: Faults, seed: u64) -> Self {
        let mut racks: Vec<Switch> = Vec::new();
        let count = config.workers.iter().map(|w| usize::from(w.rack)).max().unwrap_or(0) + 1;
        for rack in 0..count {
            let of_rack = config.workers.iter().filter(|w| usize::from(w.rack) == rack);
            let full0 = of_rack.clone().fold(0, |m, w| m | 1u32 << w.bit);
            let edge = of_rack.clone().any(|w| w.edge);
            racks.push(Switch { known: true, full0: if edge { 0 } else { full0 }, ..Switch::default() });
        }
        let two_levels = count > 1;
        let full1 = if two_levels { ((1u64 << count) - 1) as u32 } else { 0 };
        let n = config.workers.len();
        let known = config.mode != Mode::HostOnly;
        for rack in &mut racks {
            rack.known = known;
        }
        Self {
            now: 0,
            rng: Rng::new(seed),
            faults,
            workers,
            server,
            racks,
            top: Switch { known, full1, ..Switch::default() },
            dead: vec![false; n],
            queue: BinaryHeap::new(),
            order: 0,
            results: vec![HashMap::new(); n],
            two_levels,
            config,
        }
    }

    fn hop(&mut self, place: Place, from: SocketAddrV4, to: SocketAddrV4, ce: bool, data: Vec<u8>) {
        if self.rng.chance(self.faults.loss) {
            return;
        }
        let copies = 1 + u32::from(self.rng.chance(self.faults.duplicate));
        for _ in 0..copies {
            let mut delay = 5_000;
            if self.faults.reorder > 0.0 {
                let most = if self.rng.chance(self.faults.reorder) { 3_000_000 } else { 1_000 };
                delay += self.rng.below(most);
            }
            let ce = ce | self.rng.chance(self.faults.mark);
            self.order += 1;
            self.queue.push(Reverse(Arrival {
                at: self.now + delay,
                order: self.order,
                place,
                from,
                to,
                ce,
                data: data.clone(),
            }));
        }
    }

    fn rank_at(&self, address: SocketAddrV4) -> Option<usize> {
        self.config.workers.iter().position(|w| w.address == address)
    }

    /// First hop from the PS's side towards a worker: its rack's switch, or itself.
    fn below_top(&self, rank: usize) -> Place {
        let w = &self.config.workers[rank];
        if w.edge { Place::Worker(rank) } else { Place::Rack(usize::from(w.rack)) }
    }

    fn disturb(&mut self, place: Place) {
        let reset = self.rng.chance(self.faults.reset);
        let foreign = self.rng.chance(self.faults.foreign).then(|| {
            let i = self.rng.below(64);
            if i < 40 { 100 + i as u16 } else { 460 + i as u16 }
        });
        // A switch lets no other job into the floor.
        let floor = self.config.regions.iter().filter(|r| r.floor);
        let own = |i: &u16| floor.clone().any(|r| (r.start..r.start + r.size).contains(&u32::from(*i)));
        let foreign = foreign.filter(|i| !own(i));
        let now = self.now;
        let switch = match place {
            Place::Rack(rack) => &mut self.racks[rack],
            _ => &mut self.top,
        };
        if reset {
            switch.aggregators.clear();
        }
        if let Some(index) = foreign {
            switch.aggregators.entry(index).or_insert(Aggregator {
                key: None,
                bitmap: 1,
                full: 3,
                values: Vec::new(),
                ecn: false,
                at: now,
            });
        }
    }

    fn arrive(&mut self, mut a: Arrival) {
        let mut h = Header::unpack(&a.data).expect("a header");
        if a.ce && matches!(a.place, Place::Rack(_) | Place::Top) {
            // The IP mark goes into the header, where it survives the sum.
            h.ecn = true;
            a.data[..HEADER_BYTES].copy_from_slice(&h.pack());
        }
        match a.place {
            Place::Worker(rank) => {
                if !self.dead[rank] {
                    self.workers[rank].handle(a.from, a.ce, &a.data, self.now);
                }
            }
            Place::Server => self.server.handle(a.from, a.ce, &a.data, self.now),
            Place::Rack(rack) if h.is_ack => {
                self.disturb(a.place);
                if self.racks[rack].ack(&h) {
                    for rank in 0..self.workers.len() {
                        let w = self.config.workers[rank];
                        if usize::from(w.rack) == rack && !w.edge {
                            self.hop(Place::Worker(rank), a.from, w.address, a.ce, a.data.clone());
                        }
                    }
                } else if let Some(rank) = self.rank_at(a.to) {
                    self.hop(Place::Worker(rank), a.from, a.to, a.ce, a.data);
                }
            }
            Place::Top if h.is_ack => {
                self.disturb(a.place);
                if self.top.ack(&h) {
                    let mut places: Vec<Place> = (0..self.workers.len()).map(|r| self.below_top(r)).collect();
                    places.sort_unstable();
                    places.dedup();
                    for place in places {
                        // Each copy is for somebody behind that port.
                        let to = (0..self.workers.len()).find(|r| self.below_top(*r) == place);
                        let to = self.config.workers[to.expect("a worker there")].address;
                        self.hop(place, a.from, to, a.ce, a.data.clone());
                    }
                } else if let Some(rank) = self.rank_at(a.to) {
                    self.hop(self.below_top(rank), a.from, a.to, a.ce, a.data);
                }
            }
            Place::Rack(rack) => {
                self.disturb(a.place);
                let now = self.now;
                if let Some(out) = self.racks[rack].gradient(&a.data, now) {
                    let next = if self.two_levels { Place::Top } else { Place::Server };
                    self.hop(next, a.from, a.to, a.ce, out);
                }
            }
            Place::Top => {
                self.disturb(a.place);
                let now = self.now;
                if let Some(out) = self.top.gradient(&a.data, now) {
                    self.hop(Place::Server, a.from, a.to, a.ce, out);
                }
            }
        }
    }

    fn pump(&mut self) {
        let mut buffer = [0u8; 2048];
        for rank in 0..self.workers.len() {
            if self.dead[rank] {
                continue;
            }
            if self.workers[rank].poll_timeout().is_some_and(|t| t <= self.now) {
                self.workers[rank].handle_timeout(self.now);
            }
            while let Some(t) = self.workers[rank].poll_transmit(self.now, &mut buffer) {
                let w = self.config.workers[rank];
                let place = if w.edge { Place::Top } else { Place::Rack(usize::from(w.rack)) };
                self.hop(place, w.address, t.to, false, buffer[..t.length].to_vec());
            }
            while let Some(event) = self.workers[rank].poll_event() {
                let result = match event.error {
                    None => Ok(event.memory.source().to_vec()),
                    Some(failure) => Err(failure.text),
                };
                let old = self.results[rank].insert(event.token, result);
                assert!(old.is_none(), "operation {} ended twice at rank {rank}", event.token);
            }
        }
        if self.server.poll_timeout().is_some_and(|t| t <= self.now) {
            self.server.handle_timeout(self.now);
        }
        while let Some(t) = self.server.poll_transmit(self.now, &mut buffer) {
            let from = self.config.servers[0];
            if self.two_levels {
                self.hop(Place::Top, from, t.to, false, buffer[..t.length].to_vec());
            } else {
                self.hop(Place::Rack(0), from, t.to, false, buffer[..t.length].to_vec());
            }
        }
    }

    /// Run until every live rank has `count` results or the time is over; whether all have.
    pub fn run(&mut self, count: usize, until: Nanos) -> bool {
        loop {
            self.pump();
            if (0..self.workers.len()).all(|r| self.dead[r] || self.results[r].len() >= count) {
                return true;
            }
            let timer = (0..self.workers.len())
                .filter(|r| !self.dead[*r])
                .filter_map(|r| self.workers[r].poll_timeout())
                .chain(self.server.poll_timeout())
                .min();
            let packet = self.queue.peek().map(|a| a.0.at);
            let Some(next) = [timer, packet].into_iter().flatten().min() else { return false };
            if next > until {
                return false;
            }
            self.now = self.now.max(next);
            while self.queue.peek().is_some_and(|a| a.0.at <= self.now) {
                if let Some(Reverse(arrival)) = self.queue.pop() {
                    self.arrive(arrival);
                }
            }
        }
    }
}
