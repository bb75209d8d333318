// SPDX-License-Identifier: Apache-2.0
//! Adding up what switches and workers sent of an open sequence. Contributions of disjoint coverage add up, one that
//! contains all it overlaps replaces them, any other overlap is dropped: dropping always would lose liveness, adding
//! always the sum.

use super::ParameterServer;
use super::entry::{Part, State};
use crate::Nanos;
use crate::config::Mode;
use crate::coverage::Coverage;
use crate::fixed;

impl ParameterServer {
    /// A fixed-point gradient or partial sum for an open sequence.
    pub(super) fn add(&mut self, seq: u64, coverage: Coverage, from_switch: bool, payload: &[u8]) -> bool {
        let host_only = self.config.mode == Mode::HostOnly;
        let entry = self.ring.at_mut(seq);
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
    pub(super) fn complete(&mut self, seq: u64, now: Nanos) {
        let host_only = self.config.mode == Mode::HostOnly;
        let entry = self.ring.at_mut(seq);
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
    pub(super) fn finish(&mut self, seq: u64, now: Nanos) {
        let entry = self.ring.at_mut(seq);
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
    pub(super) fn take_whole(&mut self, seq: u64, coverage: Coverage, from_switch: bool, payload: &[u8], now: Nanos) {
        let count = u64::from(coverage.count());
        *(if from_switch { &mut self.counters.aggregated_packets } else { &mut self.counters.host_summed_packets }) +=
            count;
        let entry = self.ring.at_mut(seq);
        entry.coverage = coverage;
        entry.answer.clear();
        entry.answer.extend_from_slice(payload);
        self.finish(seq, now);
    }

    /// After a collision, as a rule: a new aggregatorIndex for the slot, in force from seq + P.
    pub(super) fn announce(&mut self, seq: u64) {
        if self.config.mode == Mode::HostOnly {
            return;
        }
        let collided = self.ring.at_mut(seq).collision;
        self.ring.at_mut(seq).new_index = self.table.answered(seq, collided);
    }
}
