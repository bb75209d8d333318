// SPDX-License-Identifier: Apache-2.0
//! The parameter server: gathers what switches and workers summed, completes it, answers.

use std::collections::VecDeque;
use std::net::SocketAddrV4;

use crate::config::{Comparison, Config, ConfigError, Mode, Role};
use crate::coverage::{Coverage, Topology};
use crate::fixed::{self, RAW_FLOAT32, RAW_INT32, RAW_NOTICE};
use crate::index::IndexTable;
use crate::stats::{Counters, Snapshot};
use crate::wire::{HEADER_BYTES, Header};
use crate::{Endpoint, Event, Nanos, Transmit, seq};

/// First wait before a correction request is repeated, doubled each time up to `RAW_WAIT_MAX`.
const RAW_WAIT: Nanos = 5_000_000;
const RAW_WAIT_MAX: Nanos = 500_000_000;
/// Ranks that others wait for are told at most this often, doubled each time up to `NUDGE_WAIT_MAX`.
const NUDGE_WAIT: Nanos = 1_000_000;
const NUDGE_WAIT_MAX: Nanos = 200_000_000;
/// A sequence that is open for less gives no notices: each loss makes all workers resend, and as many notices would come
/// back over the links that lost it.
const NOTICE_AFTER: Nanos = 200_000;
/// One sequence is answered to the group again at most this often.
const GROUP_REPEAT: Nanos = 500_000;
/// Group ACKs in a row that half of the workers, but not the representative, had to ask for again, before the group path
/// counts as broken, and the least time between the first and the last of these questions.
const GROUP_SUSPICION: u32 = 16;
const GROUP_SUSPICION_TIME: Nanos = 1_000_000;
/// How long ACKs go to each worker before the group path is tried again; doubled at each failure.
const GROUP_RETRY: Nanos = 1_000_000_000;
const GROUP_RETRY_MAX: Nanos = 64_000_000_000;
/// Sequences that try the group path, and how long nobody may ask for one of them again.
const GROUP_PROBES: u32 = 8;
const GROUP_PROBE_TIME: Nanos = 200_000_000;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Empty,
    /// Gathering fixed-point gradients.
    Open,
    /// Gathering raw gradients.
    Raw,
    /// `answer` is the fixed-point sum.
    Answered,
    /// `answer` is the raw sum.
    AnsweredRaw,
}

/// A sum that came in one packet, or that was added up here.
struct Part {
    coverage: Coverage,
    values: Vec<i32>,
    from_switch: bool,
}

struct RawParts {
    kind: u16,
    /// Payload of each rank.
    parts: Vec<Option<Box<[u8]>>>,
    missing: usize,
    ask_at: Nanos,
    wait: Nanos,
}

struct Entry {
    seq: u64,
    state: State,
    parts: Vec<Part>,
    coverage: Coverage,
    answer: Vec<u8>,
    raw: Option<Box<RawParts>>,
    raw_kind: u16,
    ecn: bool,
    collision: bool,
    /// aggregatorIndex that the sequence used, as the first packet told.
    index: Option<u16>,
    /// Announced for the slot, in force from seq + P.
    new_index: Option<u16>,
    /// Went to the group, so that others than the representative depend on a switch.
    to_group: bool,
    /// Others than the representative that asked again, and when they were half of all.
    asked: Vec<u16>,
    asked_at: Option<Nanos>,
    repeated_at: Option<Nanos>,
    /// Missing ranks are told again from this time on, and the wait after that.
    nudge_at: Nanos,
    opened_at: Nanos,
    nudge_wait: Nanos,
}

impl Entry {
    fn empty() -> Self {
        Self {
            seq: 0,
            state: State::Empty,
            parts: Vec::new(),
            coverage: Coverage::EMPTY,
            answer: Vec::new(),
            raw: None,
            raw_kind: 0,
            ecn: false,
            collision: false,
            index: None,
            new_index: None,
            to_group: false,
            asked: Vec::new(),
            asked_at: None,
            repeated_at: None,
            opened_at: 0,
            nudge_at: 0,
            nudge_wait: NUDGE_WAIT,
        }
    }

    fn open(&mut self, seq: u64, spare: &mut Vec<Vec<i32>>) {
        spare.extend(self.parts.drain(..).map(|p| p.values));
        let answer = std::mem::take(&mut self.answer);
        *self = Self { seq, state: State::Open, answer, parts: std::mem::take(&mut self.parts), ..Self::empty() };
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum To {
    /// One packet for the job's group.
    Group,
    /// One packet for each worker from rank .0 on.
    Each(u16),
    One(u16),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum What {
    /// The answer, the first time.
    Answer,
    /// The answer to one worker again.
    Repeat,
    /// Correction request.
    Request,
    /// Who is missing.
    Notice,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum GroupPath {
    Up,
    /// ACKs go to each worker until .until.
    Down {
        until: Nanos,
        wait: Nanos,
    },
    /// `left` more sequences go to the group alone; then, until `until`, each worker gets its ACK as in `Down`.
    Probing {
        left: u32,
        /// Probes that somebody asked for again; losses alone do so to some.
        asked: u32,
        until: Nanos,
        wait: Nanos,
    },
}

/// The parameter server's state machine, for one shard of the sequence space (sequence mod shards).
pub struct ParameterServer {
    config: Config,
    shard: u64,
    topology: Topology,
    table: IndexTable,
    /// A collision moves its slot to another index.
    rehash: bool,
    /// Worker addresses with their ranks, sorted.
    addresses: Vec<(SocketAddrV4, u16)>,
    representative: u16,
    ring: Vec<Entry>,
    /// Largest sequence seen.
    highest: u64,
    open: u64,
    raw_open: Vec<u64>,
    queue: VecDeque<(What, To, u64)>,
    spare: Vec<Vec<i32>>,
    group: GroupPath,
    counters: Counters,
}

impl ParameterServer {
    /// A parameter server at the start of an epoch.
    ///
    /// # Errors
    /// When the assignment is that of a worker.
    pub fn new(config: Config) -> Result<Self, ConfigError> {
        Self::compared(config, Comparison::default())
    }

    /// The same with what a comparison changes.
    ///
    /// # Errors
    /// When the assignment is that of a worker.
    pub fn compared(config: Config, comparison: Comparison) -> Result<Self, ConfigError> {
        if config.role != Role::ParameterServer {
            return Err(ConfigError("role is worker, a ParameterServer needs role parameterServer".into()));
        }
        let mut addresses: Vec<_> = config.workers.iter().map(|w| (w.address, w.rank)).collect();
        addresses.sort_unstable();
        Ok(Self {
            shard: u64::from(config.rank),
            topology: Topology::new(&config),
            table: if comparison.linear_index { IndexTable::linear(&config) } else { IndexTable::new(&config) },
            rehash: !comparison.linear_index,
            addresses,
            representative: config.rank % config.workers.len() as u16,
            ring: (0..config.ring_size()).map(|_| Entry::empty()).collect(),
            highest: config.first_sequence,
            open: 0,
            raw_open: Vec::new(),
            queue: VecDeque::new(),
            spare: Vec::new(),
            group: GroupPath::Up,
            counters: Counters::default(),
            config,
        })
    }

    #[must_use]
    pub fn config(&self) -> &Config {
        &self.config
    }

    fn entry(&mut self, seq: u64) -> &mut Entry {
        let mask = self.ring.len() as u64 - 1;
        &mut self.ring[(seq & mask) as usize]
    }

    fn rank_of(&self, from: SocketAddrV4) -> Option<u16> {
        self.addresses.binary_search_by_key(&from, |a| a.0).ok().map(|i| self.addresses[i].1)
    }

    fn is_relay(&self, from: SocketAddrV4) -> bool {
        self.config.switch.is_some_and(|s| s.ip() == from.ip())
    }

    /// A fixed-point gradient or partial sum for an open sequence.
    fn add(&mut self, seq: u64, coverage: Coverage, from_switch: bool, payload: &[u8]) -> bool {
        let host_only = self.config.mode == Mode::HostOnly;
        let mask = self.ring.len() as u64 - 1;
        let entry = &mut self.ring[(seq & mask) as usize];
        if entry.coverage.intersects(&coverage) {
            // Contains everything it overlaps: replaces it. Otherwise nothing of it can be used.
            if entry.parts.iter().any(|p| p.coverage.intersects(&coverage) && !coverage.contains(&p.coverage)) {
                let known = entry.coverage.contains(&coverage);
                self.counters.duplicates += u64::from(known);
                self.counters.overlaps += u64::from(!known);
                return false;
            }
            if entry.parts.iter().any(|p| p.coverage == coverage) {
                self.counters.duplicates += 1;
                return false;
            }
            let mut i = 0;
            while i < entry.parts.len() {
                if entry.parts[i].coverage.intersects(&coverage) {
                    self.spare.push(entry.parts.swap_remove(i).values);
                } else {
                    i += 1;
                }
            }
        }
        entry.coverage = entry.coverage.union(&coverage);
        if host_only {
            // Without switches every packet covers one worker: overlaps are duplicates, the sum needs no parts.
            self.counters.host_summed_packets += u64::from(coverage.count());
            if let Some(part) = entry.parts.first_mut() {
                part.coverage = entry.coverage;
                fixed::accumulate(&mut part.values, payload);
                return true;
            }
        }
        let mut values = self.spare.pop().unwrap_or_default();
        values.clear();
        values.extend(payload.as_chunks::<4>().0.iter().map(|w| i32::from_be_bytes(*w)));
        entry.parts.push(Part { coverage, values, from_switch });
        true
    }

    /// The coverage is whole: sum up and answer, or turn raw when the sum is saturated.
    fn complete(&mut self, seq: u64, now: Nanos) {
        let host_only = self.config.mode == Mode::HostOnly;
        let mask = self.ring.len() as u64 - 1;
        let entry = &mut self.ring[(seq & mask) as usize];
        let mut parts = std::mem::take(&mut entry.parts);
        let Some(mut sum) = parts.pop() else { return };
        let mut switched = if sum.from_switch { sum.coverage.count() } else { 0 };
        let mut summed = if sum.from_switch { 0 } else { sum.coverage.count() };
        for part in parts.drain(..) {
            for (s, v) in sum.values.iter_mut().zip(&part.values) {
                *s = fixed::sticky_add(*s, *v);
            }
            *(if part.from_switch { &mut switched } else { &mut summed }) += part.coverage.count();
            self.spare.push(part.values);
        }
        entry.parts = parts;
        if !host_only {
            self.counters.aggregated_packets += u64::from(switched);
            self.counters.host_summed_packets += u64::from(summed);
        }
        entry.answer.resize(4 * sum.values.len(), 0);
        for (word, v) in entry.answer.as_chunks_mut::<4>().0.iter_mut().zip(&sum.values) {
            *word = v.to_be_bytes();
        }
        self.spare.push(sum.values);
        self.finish(seq, now);
    }

    /// `answer` holds the whole sum: send it, or turn raw when it is saturated.
    fn finish(&mut self, seq: u64, now: Nanos) {
        let entry = self.entry(seq);
        if fixed::is_saturated(&entry.answer) {
            self.counters.saturated += 1;
            self.turn_raw(seq, now);
            return;
        }
        entry.state = State::Answered;
        self.announce(seq);
        self.open -= 1;
        self.send_answer(seq, now);
    }

    /// The first packet of `seq` holds the sum of all workers: nothing is to be added.
    fn take_whole(&mut self, seq: u64, coverage: Coverage, from_switch: bool, payload: &[u8], now: Nanos) {
        let count = u64::from(coverage.count());
        *(if from_switch { &mut self.counters.aggregated_packets } else { &mut self.counters.host_summed_packets }) +=
            count;
        let entry = self.entry(seq);
        entry.coverage = coverage;
        entry.answer.clear();
        entry.answer.extend_from_slice(payload);
        self.finish(seq, now);
    }

    /// After a collision, as a rule: a new aggregatorIndex for the slot, in force from seq + P.
    fn announce(&mut self, seq: u64) {
        if self.config.mode == Mode::HostOnly || !self.rehash {
            return;
        }
        let collided = self.entry(seq).collision;
        self.entry(seq).new_index = self.table.answered(seq, collided);
    }

    fn send_answer(&mut self, seq: u64, now: Nanos) {
        let to = if self.config.mode == Mode::HostOnly || self.entry(seq).state == State::AnsweredRaw {
            To::Each(0)
        } else {
            self.group_target(now)
        };
        if to == To::Group {
            self.entry(seq).to_group = true;
        }
        self.queue.push_back((What::Answer, to, seq));
    }

    /// Where a group ACK goes now.
    fn group_target(&mut self, now: Nanos) -> To {
        if self.config.workers.len() == 1 && self.config.switch.is_none() {
            return To::Group;
        }
        if let GroupPath::Down { until, wait } = self.group
            && now >= until
        {
            self.group = GroupPath::Probing { left: GROUP_PROBES, asked: 0, until: 0, wait };
        }
        match &mut self.group {
            GroupPath::Up => To::Group,
            GroupPath::Down { .. } => To::Each(0),
            GroupPath::Probing { left, until, .. } => {
                if *left > 0 {
                    *left -= 1;
                    *until = now + GROUP_PROBE_TIME;
                    To::Group
                } else if now >= *until {
                    self.group = GroupPath::Up;
                    To::Group
                } else {
                    To::Each(0)
                }
            }
        }
    }

    /// Half of the workers asked again for every one of the last group ACKs up to `seq`, and not all at once. Losses hit some
    /// sequences, or many in a burst; a switch that does not replicate misses all, and repeats tell it a few at a time.
    fn group_seems_broken(&self, seq: u64, now: Nanos) -> bool {
        let mask = self.ring.len() as u64 - 1;
        let mut first = now;
        for i in 0..u64::from(self.config.slots) {
            let Some(s) = seq.checked_sub(i * self.config.servers.len() as u64) else { return false };
            let entry = &self.ring[(s & mask) as usize];
            let Some(at) = entry.asked_at.filter(|_| entry.seq == s) else { return false };
            first = first.min(at);
            if i + 1 >= u64::from(GROUP_SUSPICION) && now >= first + GROUP_SUSPICION_TIME {
                return true;
            }
        }
        false
    }

    /// Somebody asked again for a sequence that went to the group.
    fn suspect_group(&mut self, seq: u64, rank: u16, now: Nanos) {
        // The representative gets even what no switch replicates, unless everything depends on a relay.
        if rank == self.representative && self.config.switch.is_none() {
            return;
        }
        // With many workers somebody misses nearly every ACK by chance, and to answer those costs less than an ACK to each.
        let half = (self.config.workers.len() / 2).max(1);
        let entry = self.entry(seq);
        if !entry.to_group || entry.asked_at.is_some() || entry.asked.contains(&rank) {
            return;
        }
        entry.asked.push(rank);
        if entry.asked.len() < half {
            return;
        }
        entry.asked_at = Some(now);
        let wait = match &mut self.group {
            GroupPath::Up => {
                if !self.group_seems_broken(seq, now) {
                    return;
                }
                GROUP_RETRY
            }
            GroupPath::Probing { asked, wait, .. } => {
                *asked += 1;
                if 2 * *asked <= GROUP_PROBES {
                    return;
                }
                (2 * *wait).min(GROUP_RETRY_MAX)
            }
            GroupPath::Down { .. } => return,
        };
        self.counters.group_fallbacks += 1;
        self.group = GroupPath::Down { until: now + wait, wait };
    }

    /// A packet of an answered sequence: the ACK was lost on the way to somebody.
    fn answer_again(&mut self, seq: u64, coverage: &Coverage, from_switch: bool, repeat: bool, now: Nanos) {
        self.counters.reanswers += 1;
        self.counters.retransmits += 1;
        let rank = self.topology.ranks(coverage).next().unwrap_or(0);
        let entry = self.entry(seq);
        if coverage.count() == 1 && (!from_switch || repeat || entry.state == State::AnsweredRaw) {
            self.queue.push_back((What::Repeat, To::One(rank), seq));
            self.suspect_group(seq, rank, now);
            return;
        }
        // A switch still holds the sequence: the whole group gets the ACK, which releases the aggregator. Of all workers'
        // repeats it lets one through a round trip; of resends it lets all.
        if !repeat && entry.repeated_at.is_some_and(|at| now < at + GROUP_REPEAT) {
            return;
        }
        entry.repeated_at = Some(now);
        let to = if entry.state == State::AnsweredRaw || self.group != GroupPath::Up { To::Each(0) } else { To::Group };
        self.queue.push_back((What::Answer, to, seq));
    }

    /// Collect raw gradients for `seq` from now on.
    fn turn_raw(&mut self, seq: u64, now: Nanos) {
        let n = self.config.workers.len();
        let to =
            if self.config.mode == Mode::HostOnly || self.group != GroupPath::Up { To::Each(0) } else { To::Group };
        self.counters.raw_float_corrections += 1;
        let mask = self.ring.len() as u64 - 1;
        let entry = &mut self.ring[(seq & mask) as usize];
        self.spare.extend(entry.parts.drain(..).map(|p| p.values));
        entry.state = State::Raw;
        entry.raw = Some(Box::new(RawParts {
            kind: RAW_INT32,
            parts: vec![None; n],
            missing: n,
            ask_at: now + RAW_WAIT,
            wait: RAW_WAIT,
        }));
        self.raw_open.push(seq);
        self.queue.push_back((What::Request, to, seq));
    }

    fn add_raw(&mut self, seq: u64, rank: u16, kind: u16, payload: &[u8], now: Nanos) {
        if self.entry(seq).state == State::Open {
            self.turn_raw(seq, now);
        }
        let entry = self.entry(seq);
        let Some(raw) = entry.raw.as_mut() else { return };
        let part = &mut raw.parts[usize::from(rank)];
        if part.is_some() {
            self.counters.duplicates += 1;
            return;
        }
        *part = Some(payload.into());
        raw.missing -= 1;
        // Ranks that disagree on the type fail on the descriptor; here it only must not get stuck.
        if kind == RAW_FLOAT32 {
            raw.kind = RAW_FLOAT32;
        }
        if raw.missing > 0 {
            return;
        }
        let Some(raw) = entry.raw.take() else { return };
        entry.answer.resize(payload.len(), 0);
        let mut answer = std::mem::take(&mut entry.answer);
        fixed::sum_raw(raw.kind, raw.parts.iter().flatten().map(|p| &p[..]), &mut answer);
        let entry = self.entry(seq);
        entry.answer = answer;
        entry.raw_kind = raw.kind;
        self.announce(seq);
        self.entry(seq).state = State::AnsweredRaw;
        self.open -= 1;
        self.raw_open.retain(|s| *s != seq);
        self.send_answer(seq, now);
    }

    /// Ranks whose gradient of an open sequence is not here.
    fn missing(&self, entry: &Entry) -> Vec<u16> {
        match &entry.raw {
            Some(raw) => {
                (0..self.config.workers.len() as u16).filter(|r| raw.parts[usize::from(*r)].is_none()).collect()
            }
            None => {
                let rest = self.topology.full().minus(&entry.coverage);
                let mut ranks: Vec<u16> = self.topology.ranks(&rest).collect();
                ranks.sort_unstable();
                ranks
            }
        }
    }

    /// Somebody waits for `seq`: tell those that it waits for. Their packet, or the ACK that lets them go on, was lost, and
    /// their own timers may be backed off from waiting for others.
    fn nudge(&mut self, seq: u64, now: Nanos) {
        let entry = self.entry(seq);
        if now < entry.nudge_at {
            return;
        }
        entry.nudge_at = now + entry.nudge_wait;
        entry.nudge_wait = (2 * entry.nudge_wait).min(NUDGE_WAIT_MAX);
        let mask = self.ring.len() as u64 - 1;
        for rank in self.missing(&self.ring[(seq & mask) as usize]) {
            self.queue.push_back((What::Notice, To::One(rank), seq));
        }
    }

    /// Write one queued packet; `None` when it is out of date.
    fn write(&mut self, what: What, to: To, seq: u64, buffer: &mut [u8]) -> Option<Transmit> {
        let mask = self.ring.len() as u64 - 1;
        let entry = &self.ring[(seq & mask) as usize];
        if entry.seq != seq {
            return None;
        }
        let rank = match to {
            To::Group => self.representative,
            To::Each(rank) | To::One(rank) => rank,
        };
        let group_down = self.config.mode != Mode::HostOnly && to != To::Group && rank != self.representative;
        let me = self.config.workers[usize::from(rank)];
        let payload = &mut buffer[HEADER_BYTES..HEADER_BYTES + 4 * self.config.values];
        let mut header = Header {
            job_id: self.config.job_id,
            sequence: seq::wrap(seq),
            bitmap0: 1 << me.bit,
            bitmap1: 1 << me.rack,
            is_ack: true,
            ecn: entry.ecn,
            aggregator_index: entry.index.unwrap_or_else(|| self.table.get(seq)),
            ..Header::default()
        };
        if let Some(index) = entry.new_index {
            header.collision = true;
            header.bitmap1 = u32::from(index);
        }
        match what {
            What::Answer | What::Repeat => {
                match entry.state {
                    State::AnsweredRaw => {
                        header.raw_float = true;
                        header.aggregator_index = entry.raw_kind;
                    }
                    State::Answered => {
                        // A plain ACK to one worker would be replicated by a switch on the way.
                        header.edge_switch_identifier =
                            self.config.mode != Mode::HostOnly && (what == What::Repeat || group_down);
                    }
                    _ => return None,
                }
                payload.copy_from_slice(&entry.answer);
                self.counters.ack_packets += 1;
            }
            What::Request => {
                if entry.state != State::Raw {
                    return None;
                }
                header.resend = true;
                header.edge_switch_identifier = to != To::Group && self.config.mode != Mode::HostOnly;
                payload.fill(0);
            }
            What::Notice => {
                if !matches!(entry.state, State::Open | State::Raw) {
                    return None;
                }
                let missing = self.missing(entry);
                payload.fill(0);
                let words = std::iter::once(missing.len() as u32).chain(missing.iter().map(|r| u32::from(*r)));
                for (bytes, word) in payload.as_chunks_mut::<4>().0.iter_mut().zip(words) {
                    *bytes = word.to_be_bytes();
                }
                header.raw_float = true;
                header.collision = false;
                header.aggregator_index = RAW_NOTICE;
                self.counters.notices += 1;
            }
        }
        buffer[..HEADER_BYTES].copy_from_slice(&header.pack());
        let plain = self.config.packet_bytes();
        let length = if header.raw_float { self.config.seal.close(buffer, plain) } else { plain };
        let to = match self.config.switch {
            Some(switch) if to == To::Group => switch,
            _ => me.address,
        };
        Some(Transmit { to, length })
    }
}

impl Endpoint for ParameterServer {
    #[allow(clippy::too_many_lines)]
    fn handle(&mut self, from: SocketAddrV4, ce: bool, data: &[u8], now: Nanos) {
        self.counters.packets_received += 1;
        self.counters.bytes_received += data.len() as u64;
        let Some(h) = Header::unpack(data) else {
            self.counters.rejected_short += 1;
            return;
        };
        let relayed = self.is_relay(from);
        let sender = self.rank_of(from);
        if !relayed && sender.is_none() {
            self.counters.rejected_stranger += 1;
            return;
        }
        if h.job_id != self.config.job_id {
            self.counters.rejected_job += 1;
            return;
        }
        let Some(data) = (if h.raw_float { self.config.seal.open(data) } else { Some(data) }) else {
            self.counters.rejected_tag += 1;
            return;
        };
        if data.len() != self.config.packet_bytes() {
            self.counters.rejected_length += 1;
            return;
        }
        if h.is_ack || (h.raw_float && h.aggregator_index > RAW_INT32) {
            self.counters.rejected_kind += 1;
            return;
        }
        let Some(coverage) = self.topology.coverage(&h) else {
            self.counters.rejected_coverage += 1;
            return;
        };
        // A worker speaks for itself; a switch's sum comes in a packet of one of the workers in it.
        if let Some(rank) = sender
            && !relayed
        {
            let w = self.config.workers[usize::from(rank)];
            if coverage.rack(usize::from(w.rack)) >> w.bit & 1 == 0 {
                self.counters.rejected_stranger += 1;
                return;
            }
        }
        let from_switch = self.topology.from_switch(&h, &coverage);
        if (self.config.mode == Mode::HostOnly || h.raw_float) && coverage.count() != 1 {
            self.counters.rejected_coverage += 1;
            return;
        }
        let seq = seq::unwrap(h.sequence, self.highest);
        let ahead = 2 * u64::from(self.config.slots) + self.config.descriptor_packets();
        if seq > self.highest + ahead || seq % self.config.servers.len() as u64 != self.shard {
            self.counters.rejected_sequence += 1;
            return;
        }
        self.counters.gradient_packets += 1;
        if h.has_collided() {
            self.counters.collisions += 1;
        }
        let mask = self.ring.len() as u64 - 1;
        let entry = &mut self.ring[(seq & mask) as usize];
        if entry.state == State::Empty || entry.seq < seq {
            if matches!(entry.state, State::Open | State::Raw) {
                let old = entry.seq;
                self.open -= 1;
                self.raw_open.retain(|s| *s != old);
            }
            let entry = &mut self.ring[(seq & mask) as usize];
            entry.open(seq, &mut self.spare);
            entry.opened_at = now;
            self.open += 1;
            self.highest = self.highest.max(seq);
        } else if entry.seq != seq {
            self.counters.rejected_sequence += 1;
            return;
        }
        let expected = self.table.get(seq);
        let entry = &mut self.ring[(seq & mask) as usize];
        if matches!(entry.state, State::Answered | State::AnsweredRaw) {
            self.answer_again(seq, &coverage, from_switch, h.is_repeat(), now);
            return;
        }
        entry.ecn |= h.ecn | ce;
        if entry.ecn {
            self.counters.ecn_marks += u64::from(h.ecn | ce);
        }
        if h.raw_float {
            let rank = self.topology.ranks(&coverage).next();
            if let Some(rank) = rank {
                self.add_raw(seq, rank, h.aggregator_index, &data[HEADER_BYTES..], now);
            }
        } else {
            // A worker whose index table went astray is told like after a collision.
            entry.collision |= h.has_collided() || h.aggregator_index != expected;
            entry.index.get_or_insert(h.aggregator_index);
            if entry.state == State::Raw {
                // The request did not reach it.
                if h.resend != h.collision {
                    for rank in self.topology.ranks(&coverage) {
                        self.queue.push_back((What::Request, To::One(rank), seq));
                    }
                }
                return;
            }
            if coverage == *self.topology.full() && entry.parts.is_empty() {
                self.take_whole(seq, coverage, from_switch, &data[HEADER_BYTES..], now);
                return;
            }
            if self.add(seq, coverage, from_switch, &data[HEADER_BYTES..]) {
                let full = *self.topology.full();
                if self.entry(seq).coverage == full {
                    self.complete(seq, now);
                    return;
                }
            }
        }
        // Resends that repair a loss are quick; who waits for long wants to know for whom.
        let waits = now >= self.entry(seq).opened_at + NOTICE_AFTER;
        if h.resend && !h.collision && waits && matches!(self.entry(seq).state, State::Open | State::Raw) {
            // Whose packet this was is only known when it covers one worker; a released partial tells all in it.
            for rank in self.topology.ranks(&coverage) {
                self.queue.push_back((What::Notice, To::One(rank), seq));
            }
            self.nudge(seq, now);
        }
    }

    fn poll_transmit(&mut self, _now: Nanos, buffer: &mut [u8]) -> Option<Transmit> {
        loop {
            let (what, to, seq) = *self.queue.front()?;
            match to {
                To::Each(rank) if usize::from(rank) + 1 < self.config.workers.len() => {
                    self.queue[0].1 = To::Each(rank + 1);
                }
                _ => {
                    self.queue.pop_front();
                }
            }
            if let Some(transmit) = self.write(what, to, seq, buffer) {
                self.counters.packets_sent += 1;
                self.counters.bytes_sent += transmit.length as u64;
                return Some(transmit);
            }
        }
    }

    fn poll_timeout(&self) -> Option<Nanos> {
        let mask = self.ring.len() as u64 - 1;
        self.raw_open.iter().filter_map(|s| self.ring[(s & mask) as usize].raw.as_ref().map(|r| r.ask_at)).min()
    }

    fn handle_timeout(&mut self, now: Nanos) {
        for seq in self.raw_open.clone() {
            let Some(raw) = self.entry(seq).raw.as_mut() else { continue };
            if now < raw.ask_at {
                continue;
            }
            raw.wait = (2 * raw.wait).min(RAW_WAIT_MAX);
            raw.ask_at = now + raw.wait;
            for rank in 0..self.config.workers.len() as u16 {
                let missing = self.entry(seq).raw.as_ref().is_some_and(|raw| raw.parts[usize::from(rank)].is_none());
                if missing {
                    self.counters.retransmits += 1;
                    self.queue.push_back((What::Request, To::One(rank), seq));
                }
            }
        }
    }

    fn poll_event(&mut self) -> Option<Event> {
        None
    }

    fn snapshot(&self) -> Snapshot {
        Snapshot {
            counters: self.counters,
            open_sequences: self.open,
            in_flight: self.queue.len() as u64,
            group_path_down: u64::from(!matches!(self.group, GroupPath::Up)),
            ..Snapshot::default()
        }
    }
}
