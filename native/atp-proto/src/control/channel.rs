// SPDX-License-Identifier: Apache-2.0
//! One end of a control channel: records go out in order and come in order, whatever the network does.
//!
//! Go-back-N with a cumulative acknowledgement. A record that waits for others (an announcement waits for the slowest
//! rank) is acknowledged after `ACK_DELAY`, so that waiting costs no resends. Each side draws an incarnation: who restarts
//! has lost the records of the other, which the other must know.

use std::collections::VecDeque;

use super::packet::{HEAD, Head, ROOM, records};
use crate::Nanos;

/// How long an acknowledgement waits for a record to travel with.
const ACK_DELAY: Nanos = 1_000_000;
/// Before the first round trip was measured.
const RTO_INITIAL: Nanos = 20_000_000;
/// A busy machine wakes a process late: sooner would send much twice. A gap is told at once, and needs no time-out.
const RTO_MIN: Nanos = 8_000_000;
const RTO_MAX: Nanos = 500_000_000;
/// Bytes of records on their way: at first, and at most. A time-out begins with one packet, since its answer tells whether
/// the others are lost too.
const FLIGHT_FIRST: usize = 16 * ROOM;
const FLIGHT_MAX: usize = 64 * ROOM;
/// Going back more often than this would answer each gap of one burst.
const GO_BACK_EVERY: Nanos = 200_000;

/// What a packet means besides its records.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Peer {
    /// Of the process that this side talks to.
    Same,
    /// The peer is another process than before.
    Restarted,
    /// For, or from, a process that is gone: nothing of it counts.
    Stale,
}

#[derive(Debug)]
pub struct Channel {
    own: u32,
    /// 0: nothing came yet.
    peer: u32,
    epoch: u16,
    /// Records without acknowledgement; the first has number `first`.
    queue: VecDeque<Vec<u8>>,
    first: u64,
    /// Number of the next record to be sent; goes back to `first` after a loss.
    next: u64,
    /// Bytes of the records from `first` up to `next`.
    flight: usize,
    /// Largest `flight` now.
    limit: usize,
    /// Number of the next record that was never sent.
    fresh: u64,
    /// Number of the next record that the peer has to send.
    expected: u64,
    ack_at: Option<Nanos>,
    gap: bool,
    answer_now: bool,
    ask_now: bool,
    rto_at: Option<Nanos>,
    backoff: u32,
    /// Record whose acknowledgement is timed, and when it was sent.
    timed: Option<(u64, Nanos)>,
    smoothed: Option<(Nanos, Nanos)>,
    went_back_at: Option<Nanos>,
    sent_at: Nanos,
    heard_at: Option<Nanos>,
    /// Packets of records that were sent again.
    pub resent: u64,
}

impl Channel {
    /// `own`: the incarnation of this side, never 0.
    #[must_use]
    pub fn new(own: u32, epoch: u64) -> Self {
        Self {
            own: own.max(1),
            peer: 0,
            epoch: epoch as u16,
            queue: VecDeque::new(),
            first: 1,
            next: 1,
            flight: 0,
            limit: FLIGHT_FIRST,
            fresh: 1,
            expected: 1,
            ack_at: None,
            gap: false,
            answer_now: false,
            ask_now: false,
            rto_at: None,
            backoff: 0,
            timed: None,
            smoothed: None,
            went_back_at: None,
            sent_at: 0,
            heard_at: None,
            resent: 0,
        }
    }

    /// Queue a record of at most `RECORD_MAX` bytes.
    pub fn push(&mut self, record: Vec<u8>) {
        self.queue.push_back(record);
    }

    /// When the peer was heard last.
    #[must_use]
    pub fn heard_at(&self) -> Option<Nanos> {
        self.heard_at
    }

    /// When something was sent last.
    #[must_use]
    pub fn sent_at(&self) -> Nanos {
        self.sent_at
    }

    /// Records that wait for an acknowledgement.
    #[must_use]
    pub fn waiting(&self) -> usize {
        self.queue.len()
    }

    /// Nothing was said in either direction that a new peer would miss.
    #[must_use]
    pub fn is_fresh(&self) -> bool {
        self.fresh == 1 && self.expected == 1
    }

    /// Send a packet soon even without records, and ask for an answer.
    pub fn ask(&mut self) {
        self.ask_now = true;
    }

    /// A packet came: what it says about the peer, and the new records in order.
    pub fn handle<'a>(&mut self, head: &Head, bytes: &'a [u8], now: Nanos) -> (Peer, Vec<&'a [u8]>) {
        let none = Vec::new();
        if head.epoch != self.epoch || (head.receiver != 0 && head.receiver != self.own && self.peer == head.sender) {
            return (Peer::Stale, none);
        }
        if self.peer != 0 && self.peer != head.sender {
            return (Peer::Restarted, none);
        }
        if head.receiver != 0 && head.receiver != self.own {
            // It still talks to an earlier process of this side: the answer tells it.
            self.answer_now = true;
            return (Peer::Stale, none);
        }
        let Some(found) = records(bytes) else { return (Peer::Stale, none) };
        self.peer = head.sender;
        self.heard_at = Some(now);
        self.answer_now |= head.answer_me;
        // Only a packet to this very process acknowledges its records.
        if head.receiver == self.own {
            self.acknowledge(head, now);
        }
        let first = nearest(head.first, self.expected);
        let mut fresh = Vec::new();
        if first > self.expected {
            self.gap = true;
            self.answer_now |= !found.is_empty();
        } else if !found.is_empty() {
            let known = (self.expected - first) as usize;
            let total = found.len();
            fresh = found.into_iter().skip(known).collect();
            self.gap = false;
            if fresh.is_empty() || known > 0 {
                // It sends again what is here: its acknowledgement was lost, or late.
                self.answer_now = true;
            }
            self.expected += total.saturating_sub(known) as u64;
            if self.ack_at.is_none() {
                self.ack_at = Some(now + ACK_DELAY);
            }
        }
        (Peer::Same, fresh)
    }

    fn acknowledge(&mut self, head: &Head, now: Nanos) {
        let expects = nearest(head.expects, self.first);
        if expects > self.first && expects <= self.fresh {
            while self.first < expects {
                let Some(record) = self.queue.pop_front() else { break };
                if self.first < self.next {
                    self.flight -= record.len() + 2;
                }
                self.limit = (self.limit + record.len() + 2).min(FLIGHT_MAX);
                self.first += 1;
            }
            self.next = self.next.max(self.first);
            self.backoff = 0;
            if let Some((number, at)) = self.timed
                && number < self.first
            {
                self.timed = None;
                self.sample(now.saturating_sub(at));
            }
            self.rto_at = (self.first < self.fresh).then(|| now + self.rto());
        }
        let recently = self.went_back_at.is_some_and(|at| now < at + GO_BACK_EVERY.max(self.round_trip()));
        if head.gap && self.first < self.next && !recently {
            self.limit = (self.limit / 2).max(ROOM);
            self.go_back(now);
        }
    }

    fn sample(&mut self, took: Nanos) {
        self.smoothed = Some(match self.smoothed {
            None => (took, took / 2),
            Some((mean, deviation)) => ((7 * mean + took) / 8, (3 * deviation + mean.abs_diff(took)) / 4),
        });
    }

    fn round_trip(&self) -> Nanos {
        self.smoothed.map_or(0, |s| s.0)
    }

    fn rto(&self) -> Nanos {
        let base = self.smoothed.map_or(RTO_INITIAL, |(mean, deviation)| mean + 4 * deviation + ACK_DELAY);
        (base.max(RTO_MIN) << self.backoff.min(10)).min(RTO_MAX)
    }

    fn go_back(&mut self, now: Nanos) {
        self.next = self.first;
        self.flight = 0;
        self.timed = None;
        self.went_back_at = Some(now);
    }

    fn has_records(&self) -> bool {
        self.next < self.first + self.queue.len() as u64 && self.flight < self.limit
    }

    /// Whether `write` has something to send now.
    #[must_use]
    pub fn wants_to_send(&self, now: Nanos) -> bool {
        self.answer_now || self.ask_now || self.ack_at.is_some_and(|at| now >= at) || self.has_records()
    }

    /// Write the head and records of the next packet into `out` (at least `HEAD + ROOM` bytes); the bytes used.
    pub fn write(&mut self, trainers: u8, now: Nanos, out: &mut [u8]) -> usize {
        let head = Head {
            sender: self.own,
            receiver: self.peer,
            first: self.next as u32,
            expects: self.expected as u32,
            epoch: self.epoch,
            answer_me: self.ask_now,
            gap: self.gap,
            trainers,
        };
        head.pack(out);
        let mut at = HEAD;
        let again = self.next < self.fresh;
        while let Some(record) = self.queue.get((self.next - self.first) as usize) {
            let size = record.len() + 2;
            if at + size > HEAD + ROOM || self.flight >= self.limit {
                break;
            }
            out[at..at + 2].copy_from_slice(&(record.len() as u16).to_be_bytes());
            out[at + 2..at + size].copy_from_slice(record);
            at += size;
            self.flight += size;
            self.next += 1;
        }
        if at > HEAD {
            self.resent += u64::from(again);
            if self.timed.is_none() && !again {
                self.timed = Some((self.next - 1, now));
            }
            self.fresh = self.fresh.max(self.next);
            if self.rto_at.is_none() {
                self.rto_at = Some(now + self.rto());
            }
        }
        self.ack_at = None;
        self.answer_now = false;
        self.ask_now = false;
        self.sent_at = now;
        at
    }

    /// When `handle_timeout` must be called at the latest.
    #[must_use]
    pub fn poll_timeout(&self) -> Option<Nanos> {
        [self.ack_at, self.rto_at].into_iter().flatten().min()
    }

    /// Do what is due.
    pub fn handle_timeout(&mut self, now: Nanos) {
        if self.rto_at.is_some_and(|at| now >= at) {
            self.backoff += 1;
            self.limit = ROOM;
            self.go_back(now);
            self.rto_at = (self.first < self.fresh).then(|| now + self.rto());
        }
        if self.ack_at.is_some_and(|at| now >= at) {
            self.answer_now = true;
            self.ack_at = None;
        }
    }
}

/// The number nearest to `near` whose low 32 bits are `wire`.
fn nearest(wire: u32, near: u64) -> u64 {
    near.saturating_add_signed(i64::from(wire.wrapping_sub(near as u32) as i32))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::index::mix;

    struct Net {
        seed: u64,
        loss: u64,
        packets: Vec<(Nanos, usize, Vec<u8>)>,
    }

    impl Net {
        fn draw(&mut self, below: u64) -> u64 {
            self.seed = self.seed.wrapping_add(1);
            mix(self.seed) % below
        }
    }

    /// Both ends say `count` records each over a network that loses, doubles and reorders; the time it took.
    fn converse(seed: u64, loss: u64, count: u32) -> Nanos {
        let mut ends = [Channel::new(5, 1), Channel::new(9, 1)];
        let mut heard: [Vec<Vec<u8>>; 2] = Default::default();
        let mut net = Net { seed: mix(seed), loss, packets: Vec::new() };
        let mut said = 0;
        let mut now: Nanos = 0;
        while heard.iter().any(|h| h.len() < count as usize) {
            assert!(now < 60_000_000_000, "stuck: {ends:?}");
            if said < count && net.draw(3) == 0 {
                for (i, end) in ends.iter_mut().enumerate() {
                    let mut record = said.to_be_bytes().to_vec();
                    record.resize(4 + (said as usize * 37 + i) % 400, i as u8);
                    end.push(record);
                }
                said += 1;
            }
            for (i, end) in ends.iter_mut().enumerate() {
                if end.poll_timeout().is_some_and(|at| now >= at) {
                    end.handle_timeout(now);
                }
                while end.wants_to_send(now) {
                    let mut out = vec![0; HEAD + ROOM];
                    let used = end.write(0, now, &mut out);
                    out.truncate(used);
                    for _ in 0..1 + u32::from(net.draw(50) == 0) {
                        if net.draw(100) >= net.loss {
                            let late = if net.draw(10) == 0 { net.draw(2_000_000) } else { 0 };
                            net.packets.push((now + 30_000 + late, 1 - i, out.clone()));
                        }
                    }
                }
            }
            now += 10_000;
            let (due, rest) = std::mem::take(&mut net.packets).into_iter().partition(|p| p.0 <= now);
            net.packets = rest;
            for (_, to, bytes) in due {
                let (head, records) = Head::unpack(&bytes).expect("a head");
                let (peer, fresh) = ends[to].handle(&head, records, now);
                assert_eq!(peer, Peer::Same);
                heard[to].extend(fresh.iter().map(|r| r.to_vec()));
            }
        }
        for (i, h) in heard.iter().enumerate() {
            for (number, record) in h.iter().enumerate() {
                assert_eq!(record[..4], (number as u32).to_be_bytes());
                assert!(record[4..].iter().all(|b| usize::from(*b) == 1 - i));
            }
            assert_eq!(h.len(), count as usize);
        }
        now
    }

    #[test]
    fn records_come_once_and_in_order() {
        for seed in 0..200 {
            converse(seed, [0, 1, 10, 40][seed as usize % 4], 100);
        }
    }

    #[test]
    fn a_quiet_network_sends_nothing_twice() {
        let (mut a, mut b) = (Channel::new(1, 1), Channel::new(2, 1));
        let mut out = vec![0; HEAD + ROOM];
        a.push(vec![1, 2, 3]);
        let used = a.write(0, 0, &mut out);
        let (head, records) = Head::unpack(&out[..used]).unwrap();
        assert_eq!(b.handle(&head, records, 10_000).1, [[1, 2, 3]]);
        assert!(!b.wants_to_send(20_000));
        b.handle_timeout(10_000 + ACK_DELAY);
        assert!(b.wants_to_send(10_000 + ACK_DELAY));
        let used = b.write(0, 1_010_000, &mut out);
        let (head, records) = Head::unpack(&out[..used]).unwrap();
        a.handle(&head, records, 1_020_000);
        assert_eq!((a.waiting(), a.poll_timeout(), a.resent), (0, None, 0));
    }

    #[test]
    fn a_peer_that_started_again_is_known() {
        let (mut a, mut b) = (Channel::new(1, 1), Channel::new(2, 1));
        let mut out = vec![0; HEAD + ROOM];
        a.push(vec![0]);
        let used = a.write(0, 0, &mut out);
        let (head, records) = Head::unpack(&out[..used]).unwrap();
        b.handle(&head, records, 0);
        b.ask();
        let used = b.write(0, 0, &mut out);
        let (head, records) = Head::unpack(&out[..used]).unwrap();
        assert_eq!(a.handle(&head, records, 0).0, Peer::Same);
        // Another process in b's place: a's next packet is to the old one, and its answer shows a new incarnation.
        let mut c = Channel::new(3, 1);
        a.ask();
        let used = a.write(0, 0, &mut out);
        let (head, records) = Head::unpack(&out[..used]).unwrap();
        assert_eq!(c.handle(&head, records, 0).0, Peer::Stale);
        assert!(c.wants_to_send(0));
        let used = c.write(0, 0, &mut out);
        let (head, records) = Head::unpack(&out[..used]).unwrap();
        assert_eq!(a.handle(&head, records, 0).0, Peer::Restarted);
        // Another epoch's packets count for nothing.
        let mut d = Channel::new(4, 2);
        d.ask();
        let used = d.write(0, 0, &mut out);
        let (head, records) = Head::unpack(&out[..used]).unwrap();
        assert_eq!(a.handle(&head, records, 0).0, Peer::Stale);
    }
}
