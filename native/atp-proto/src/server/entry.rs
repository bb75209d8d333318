// SPDX-License-Identifier: Apache-2.0
//! Sequences at the parameter server, from the first gradient to the last time that the answer is asked for.

use crate::Nanos;
use crate::coverage::Coverage;

/// Ranks that others wait for are told at most this often, doubled each time up to `NUDGE_WAIT_MAX`.
const NUDGE_WAIT: Nanos = 1_000_000;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum State {
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
pub(super) struct Part {
    pub coverage: Coverage,
    pub values: Vec<i32>,
    pub from_switch: bool,
}

pub(super) struct RawParts {
    pub kind: u16,
    /// Payload of each rank.
    pub parts: Vec<Option<Box<[u8]>>>,
    pub missing: usize,
    pub ask_at: Nanos,
    pub wait: Nanos,
}

pub(super) struct Entry {
    pub seq: u64,
    pub state: State,
    pub parts: Vec<Part>,
    pub coverage: Coverage,
    pub answer: Vec<u8>,
    pub raw: Option<Box<RawParts>>,
    pub raw_kind: u16,
    pub ecn: bool,
    pub collision: bool,
    /// aggregatorIndex that the sequence used, as the first packet told.
    pub index: Option<u16>,
    /// Announced for the slot, in force from seq + P.
    pub new_index: Option<u16>,
    /// Went to the group, so that others than the representative depend on a switch.
    pub to_group: bool,
    /// Others than the representative that asked again, and when they were half of all.
    pub asked: Vec<u16>,
    pub asked_at: Option<Nanos>,
    pub repeated_at: Option<Nanos>,
    /// Missing ranks are told again from this time on, and the wait after that.
    pub nudge_at: Nanos,
    pub opened_at: Nanos,
    pub nudge_wait: Nanos,
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

    pub fn open(&mut self, seq: u64, spare: &mut Vec<Vec<i32>>) {
        spare.extend(self.parts.drain(..).map(|p| p.values));
        let answer = std::mem::take(&mut self.answer);
        *self = Self { seq, state: State::Open, answer, parts: std::mem::take(&mut self.parts), ..Self::empty() };
    }
}

/// By sequence modulo its length: an entry lives until a later sequence takes its place.
pub(super) struct Ring(Vec<Entry>);

impl Ring {
    /// `size` is a power of two.
    pub fn new(size: usize) -> Self {
        Self((0..size).map(|_| Entry::empty()).collect())
    }

    fn slot(&self, seq: u64) -> usize {
        (seq & (self.0.len() as u64 - 1)) as usize
    }

    pub fn at(&self, seq: u64) -> &Entry {
        &self.0[self.slot(seq)]
    }

    pub fn at_mut(&mut self, seq: u64) -> &mut Entry {
        let slot = self.slot(seq);
        &mut self.0[slot]
    }
}
