// SPDX-License-Identifier: Apache-2.0
//! The worker's sequence space: which sequences are open, which of them have a packet on its way, and which wait to be
//! sent again.

use std::collections::VecDeque;
use std::ops::Range;

use crate::Nanos;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum State {
    Free,
    InFlight,
    Acked,
}

/// One sequence between its first transmission and its ACK.
#[derive(Clone, Copy, Debug)]
pub(super) struct Flight {
    pub seq: u64,
    pub state: State,
    /// Number of the last transmission, counted over all packets.
    pub tx: u64,
    pub sent_at: Nanos,
    pub sends: u32,
    pub index: u16,
    /// Ordinal of its operation.
    pub op: u64,
    pub raw: bool,
    /// Waits in the resend queue; not counted as in flight.
    pub lost: bool,
    /// Resent because newer packets were acknowledged.
    pub fast: bool,
    /// How often that was.
    pub fast_count: u32,
    /// The next transmission must empty the switch of this sequence, not only add to it.
    pub flush: bool,
}

const FREE: Flight = Flight {
    seq: u64::MAX,
    state: State::Free,
    tx: 0,
    sent_at: 0,
    sends: 0,
    index: 0,
    op: 0,
    raw: false,
    lost: false,
    fast: false,
    fast_count: 0,
    flush: false,
};

/// What the window lets go out next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Turn {
    /// This sequence again.
    Again(u64),
    /// A sequence that was never sent.
    New,
    Nothing,
}

pub(super) struct Flights {
    /// By sequence modulo its length, a power of two.
    ring: Vec<Flight>,
    /// Oldest sequence without ACK.
    base: u64,
    /// Next sequence to be sent for the first time.
    next: u64,
    /// Largest distance of `next` from `base`: lost packets hold back the oldest sequence, not the window.
    span: u64,
    /// After a descriptor mismatch: sequences from .0 up to .1 are given up; `base` jumps over them.
    gap: Option<(u64, u64)>,
    in_flight: u64,
    transmissions: u64,
    resend: VecDeque<u64>,
    /// Resends that the window does not hold back.
    forced: u32,
    /// By place in the floor: the last sequence that was sent there.
    floor_users: Vec<u64>,
}

impl Flights {
    pub fn new(first: u64, slots: u32, span: u64, floor: usize) -> Self {
        Self {
            ring: vec![FREE; (slots as usize).next_power_of_two()],
            base: first,
            next: first,
            span,
            gap: None,
            in_flight: 0,
            transmissions: 0,
            resend: VecDeque::new(),
            forced: 0,
            floor_users: vec![u64::MAX; floor],
        }
    }

    pub fn base(&self) -> u64 {
        self.base
    }

    pub fn next(&self) -> u64 {
        self.next
    }

    pub fn span(&self) -> u64 {
        self.span
    }

    pub fn in_flight(&self) -> u64 {
        self.in_flight
    }

    pub fn transmissions(&self) -> u64 {
        self.transmissions
    }

    /// No sequence is open.
    pub fn is_idle(&self) -> bool {
        self.base == self.next
    }

    /// All sequences that may be open, oldest first.
    pub fn range(&self) -> Range<u64> {
        self.base..self.next.min(self.base + self.ring.len() as u64)
    }

    fn slot(&self, seq: u64) -> usize {
        (seq & (self.ring.len() as u64 - 1)) as usize
    }

    fn at_mut(&mut self, seq: u64) -> &mut Flight {
        let slot = self.slot(seq);
        &mut self.ring[slot]
    }

    /// What is remembered of `seq`, as long as no later sequence has its place.
    pub fn known(&self, seq: u64) -> Option<&Flight> {
        Some(&self.ring[self.slot(seq)]).filter(|f| f.seq == seq)
    }

    /// `seq` while it was sent and its ACK is not here.
    pub fn open(&self, seq: u64) -> Option<&Flight> {
        self.known(seq).filter(|f| f.state == State::InFlight)
    }

    pub fn open_mut(&mut self, seq: u64) -> Option<&mut Flight> {
        Some(self.at_mut(seq)).filter(|f| f.seq == seq && f.state == State::InFlight)
    }

    /// `seq` lies in what was given up, so that an answer to it is no duplicate.
    pub fn is_given_up(&self, seq: u64) -> bool {
        self.gap.is_some_and(|(from, to)| (from..to).contains(&seq))
    }

    /// Whether a new sequence may be opened that has `place` in the floor: slots that shelter in the floor have its
    /// aggregators in turn, since the job must not collide with itself there.
    pub fn may_open(&self, place: Option<usize>) -> bool {
        self.next < self.base + self.span && place.is_none_or(|p| self.open(self.floor_users[p]).is_none())
    }

    /// Open the next sequence.
    pub fn open_next(&mut self, index: u16, op: u64, place: Option<usize>) -> u64 {
        let seq = self.next;
        *self.at_mut(seq) = Flight { seq, state: State::InFlight, index, op, ..FREE };
        if let Some(place) = place {
            self.floor_users[place] = seq;
        }
        self.next += 1;
        seq
    }

    /// A packet of `seq` goes out.
    pub fn on_sent(&mut self, seq: u64, now: Nanos) -> &mut Flight {
        self.transmissions += 1;
        self.in_flight += 1;
        let tx = self.transmissions;
        let flight = self.at_mut(seq);
        flight.tx = tx;
        flight.sent_at = now;
        flight.sends += 1;
        flight.lost = false;
        flight
    }

    /// What may go out with a window of so many packets. Of the resend queue it is taken.
    pub fn turn(&mut self, window: u64) -> Turn {
        let free = self.in_flight < window;
        loop {
            if !free && self.forced == 0 {
                return Turn::Nothing;
            }
            let Some(seq) = self.resend.pop_front() else {
                self.forced = 0;
                return if free { Turn::New } else { Turn::Nothing };
            };
            if self.open(seq).is_some_and(|f| f.lost) {
                self.forced = self.forced.saturating_sub(1);
                return Turn::Again(seq);
            }
        }
    }

    /// Put an open sequence into the resend queue; when it was sent, if it was not there already.
    pub fn mark_lost(&mut self, seq: u64, fast: bool) -> Option<Nanos> {
        let flight = self.open_mut(seq).filter(|f| !f.lost)?;
        flight.lost = true;
        flight.fast = fast;
        let sent_at = flight.sent_at;
        self.in_flight -= 1;
        self.resend.push_back(seq);
        Some(sent_at)
    }

    /// One more resend goes out whatever the window says.
    pub fn force(&mut self) {
        self.forced += 1;
    }

    /// The oldest sequence is the next packet, as a resend, whatever the window says.
    pub fn resend_oldest(&mut self) -> u64 {
        let base = self.base;
        if self.mark_lost(base, false).is_some() {
            self.resend.pop_back();
        } else {
            self.resend.retain(|s| *s != base);
        }
        self.resend.push_front(base);
        self.at_mut(base).flush = true;
        self.forced = self.forced.max(1);
        base
    }

    /// The answer to `seq` came: its flight as it was, or nothing for a duplicate.
    pub fn acknowledge(&mut self, seq: u64) -> Option<Flight> {
        let flight = self.open_mut(seq)?;
        flight.state = State::Acked;
        let flight = *flight;
        self.in_flight -= u64::from(!flight.lost);
        Some(flight)
    }

    /// Forget everything open from sequence `from` on and go on at `to`.
    pub fn give_up(&mut self, from: u64, to: u64) {
        for flight in &mut self.ring {
            if flight.state != State::Free && flight.seq >= from {
                self.in_flight -= u64::from(flight.state == State::InFlight && !flight.lost);
                *flight = FREE;
            }
        }
        self.next = to;
        self.gap = Some((from.max(self.base), to));
        self.advance();
    }

    /// Move `base` over what is acknowledged or given up.
    pub fn advance(&mut self) {
        loop {
            if let Some((from, to)) = self.gap
                && self.base == from
            {
                self.base = to;
                self.gap = None;
            }
            if self.base >= self.next {
                break;
            }
            let base = self.base;
            let flight = self.at_mut(base);
            if flight.seq != base || flight.state != State::Acked {
                break;
            }
            flight.state = State::Free;
            self.base += 1;
        }
        if self.is_idle() {
            self.resend.clear();
        }
    }
}
