// SPDX-License-Identifier: Apache-2.0
//! The correction path: a sum that saturates, or a gradient without an integer, is asked for again as raw words, which are
//! summed in rank order.

use super::ParameterServer;
use super::answers::{To, What};
use super::entry::{RawParts, State};
use crate::Nanos;
use crate::config::Mode;
use crate::fixed::{self, RAW_FLOAT32, RAW_INT32};

/// First wait before a correction request is repeated, doubled each time up to `RAW_WAIT_MAX`.
const RAW_WAIT: Nanos = 5_000_000;
const RAW_WAIT_MAX: Nanos = 500_000_000;

impl ParameterServer {
    /// Collect raw gradients for `seq` from now on.
    pub(super) fn turn_raw(&mut self, seq: u64, now: Nanos) {
        let n = self.config.workers.len();
        let to = if self.config.mode == Mode::HostOnly || !self.group.is_up() { To::Each(0) } else { To::Group };
        self.counters.raw_float_corrections += 1;
        let entry = self.ring.at_mut(seq);
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

    pub(super) fn add_raw(&mut self, seq: u64, rank: u16, kind: u16, payload: &[u8], now: Nanos) {
        if self.ring.at_mut(seq).state == State::Open {
            self.turn_raw(seq, now);
        }
        let entry = self.ring.at_mut(seq);
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
        let entry = self.ring.at_mut(seq);
        entry.answer = answer;
        entry.raw_kind = raw.kind;
        self.announce(seq);
        self.ring.at_mut(seq).state = State::AnsweredRaw;
        self.open -= 1;
        self.raw_open.retain(|s| *s != seq);
        self.send_answer(seq, now);
    }

    /// When the ranks whose raw gradient is missing are asked again.
    pub(super) fn next_request(&self) -> Option<Nanos> {
        self.raw_open.iter().filter_map(|s| self.ring.at(*s).raw.as_ref().map(|r| r.ask_at)).min()
    }

    /// Ask the ranks whose raw gradient is missing again, each by itself.
    pub(super) fn repeat_requests(&mut self, now: Nanos) {
        for seq in self.raw_open.clone() {
            let Some(raw) = self.ring.at_mut(seq).raw.as_mut().filter(|raw| now >= raw.ask_at) else { continue };
            raw.wait = (2 * raw.wait).min(RAW_WAIT_MAX);
            raw.ask_at = now + raw.wait;
            for rank in (0..raw.parts.len()).filter(|rank| raw.parts[*rank].is_none()) {
                self.counters.retransmits += 1;
                self.queue.push_back((What::Request, To::One(rank as u16), seq));
            }
        }
    }
}
