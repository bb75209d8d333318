// SPDX-License-Identifier: Apache-2.0
//! The parameter server: gathers what switches and workers summed, completes it, answers.
//!
//! Sequences and what is known of them are in `entry`; `sums` adds up, `raw` is the correction path, `answers` writes
//! packets, `group` knows whether one ACK for all workers reaches them.

mod answers;
mod entry;
mod group;
mod raw;
mod sums;

use std::collections::VecDeque;
use std::net::SocketAddrV4;

use self::answers::{To, What};
use self::entry::{Ring, State};
use self::group::GroupPath;
use crate::config::{Config, ConfigError, Mode, Role};
use crate::coverage::{Coverage, Topology};
use crate::fixed::RAW_INT32;
use crate::index::IndexTable;
use crate::stats::{Counters, Snapshot};
use crate::wire::{HEADER_BYTES, Header};
use crate::{Endpoint, Event, Nanos, Transmit, admission, seq};

/// A sequence that is open for less gives no notices: each loss makes all workers resend, and as many notices would come
/// back over the links that lost it.
const NOTICE_AFTER: Nanos = 200_000;

/// The parameter server's state machine, for one shard of the sequence space (sequence mod shards).
pub struct ParameterServer {
    config: Config,
    shard: u64,
    topology: Topology,
    table: IndexTable,
    /// Worker addresses with their ranks, sorted.
    addresses: Vec<(SocketAddrV4, u16)>,
    representative: u16,
    ring: Ring,
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
        if config.role != Role::ParameterServer {
            return Err(ConfigError("role is worker, a ParameterServer needs role parameterServer".into()));
        }
        let mut addresses: Vec<_> = config.workers.iter().map(|w| (w.address, w.rank)).collect();
        addresses.sort_unstable();
        Ok(Self {
            shard: u64::from(config.rank),
            topology: Topology::new(&config),
            table: IndexTable::new(&config),
            addresses,
            representative: config.rank % config.workers.len() as u16,
            ring: Ring::new(config.ring_size()),
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

    fn rank_of(&self, from: SocketAddrV4) -> Option<u16> {
        self.addresses.binary_search_by_key(&from, |a| a.0).ok().map(|i| self.addresses[i].1)
    }

    fn is_relay(&self, from: SocketAddrV4) -> bool {
        self.config.switch.is_some_and(|s| s.ip() == from.ip())
    }

    /// What a datagram brings, if it may come from there and speaks for whom it says; others are counted.
    fn admit<'a>(&mut self, from: SocketAddrV4, data: &'a [u8]) -> Option<Contribution<'a>> {
        let relayed = self.is_relay(from);
        let sender = self.rank_of(from);
        let known = relayed || sender.is_some();
        let (header, data) = admission::open(&self.config, &mut self.counters, known, data)?;
        if header.is_ack || (header.raw_float && header.aggregator_index > RAW_INT32) {
            self.counters.rejected_kind += 1;
            return None;
        }
        let Some(coverage) = self.topology.coverage(&header) else {
            self.counters.rejected_coverage += 1;
            return None;
        };
        // A worker speaks for itself; a switch's sum comes in a packet of one of the workers in it.
        if let Some(rank) = sender
            && !relayed
        {
            let w = self.config.workers[usize::from(rank)];
            if coverage.rack(usize::from(w.rack)) >> w.bit & 1 == 0 {
                self.counters.rejected_stranger += 1;
                return None;
            }
        }
        if (self.config.mode == Mode::HostOnly || header.raw_float) && coverage.count() != 1 {
            self.counters.rejected_coverage += 1;
            return None;
        }
        let seq = seq::unwrap(header.sequence, self.highest);
        let ahead = 2 * u64::from(self.config.slots) + self.config.descriptor_packets();
        if seq > self.highest + ahead || seq % self.config.servers.len() as u64 != self.shard {
            self.counters.rejected_sequence += 1;
            return None;
        }
        let from_switch = self.topology.from_switch(&header, &coverage);
        Some(Contribution { header, seq, coverage, from_switch, payload: &data[HEADER_BYTES..] })
    }

    /// Make `seq` the entry of its place in the ring. False when a later one has it.
    fn enter(&mut self, seq: u64, now: Nanos) -> bool {
        let entry = self.ring.at_mut(seq);
        if entry.state != State::Empty && entry.seq >= seq {
            return entry.seq == seq;
        }
        if matches!(entry.state, State::Open | State::Raw) {
            let old = entry.seq;
            self.open -= 1;
            self.raw_open.retain(|s| *s != old);
        }
        entry.open(seq, &mut self.spare);
        entry.opened_at = now;
        self.open += 1;
        self.highest = self.highest.max(seq);
        true
    }

    /// A fixed-point gradient of a sequence that is not answered. False when there is nothing more to do about it.
    fn gather(&mut self, c: &Contribution<'_>, now: Nanos) -> bool {
        let Contribution { header: h, seq, coverage, from_switch, payload } = *c;
        let expected = self.table.get(seq);
        let entry = self.ring.at_mut(seq);
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
            return false;
        }
        if coverage == *self.topology.full() && entry.parts.is_empty() {
            self.take_whole(seq, coverage, from_switch, payload, now);
            return false;
        }
        if self.add(seq, coverage, from_switch, payload) && self.ring.at(seq).coverage == *self.topology.full() {
            self.complete(seq, now);
            return false;
        }
        true
    }
}

/// A gradient, or a sum of gradients, that may be what it says.
struct Contribution<'a> {
    header: Header,
    seq: u64,
    coverage: Coverage,
    from_switch: bool,
    payload: &'a [u8],
}

impl Endpoint for ParameterServer {
    fn handle(&mut self, from: SocketAddrV4, ce: bool, data: &[u8], now: Nanos) {
        self.counters.packets_received += 1;
        self.counters.bytes_received += data.len() as u64;
        let Some(c) = self.admit(from, data) else { return };
        let (h, seq) = (c.header, c.seq);
        self.counters.gradient_packets += 1;
        if h.has_collided() {
            self.counters.collisions += 1;
        }
        if !self.enter(seq, now) {
            self.counters.rejected_sequence += 1;
            return;
        }
        let entry = self.ring.at_mut(seq);
        if matches!(entry.state, State::Answered | State::AnsweredRaw) {
            self.answer_again(seq, &c.coverage, c.from_switch, h.is_repeat(), now);
            return;
        }
        entry.ecn |= h.ecn | ce;
        self.counters.ecn_marks += u64::from(h.ecn | ce);
        if h.raw_float {
            let rank = self.topology.ranks(&c.coverage).next();
            if let Some(rank) = rank {
                self.add_raw(seq, rank, h.aggregator_index, c.payload, now);
            }
        } else if !self.gather(&c, now) {
            return;
        }
        // Resends that repair a loss are quick; who waits for long wants to know for whom.
        let entry = self.ring.at(seq);
        let waits = now >= entry.opened_at + NOTICE_AFTER && matches!(entry.state, State::Open | State::Raw);
        if h.resend && !h.collision && waits {
            // Whose packet this was is only known when it covers one worker; a released partial tells all in it.
            for rank in self.topology.ranks(&c.coverage) {
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
        self.next_request()
    }

    fn handle_timeout(&mut self, now: Nanos) {
        self.repeat_requests(now);
    }

    fn poll_event(&mut self) -> Option<Event> {
        None
    }

    fn snapshot(&self) -> Snapshot {
        Snapshot {
            counters: self.counters,
            open_sequences: self.open,
            in_flight: self.queue.len() as u64,
            group_path_down: u64::from(!self.group.is_up()),
            ..Snapshot::default()
        }
    }
}
