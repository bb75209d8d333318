// SPDX-License-Identifier: Apache-2.0
//! Packets of the parameter server: which go out, to whom, and what they look like.

use super::ParameterServer;
use super::entry::{Entry, State};
use crate::config::Mode;
use crate::coverage::Coverage;
use crate::fixed::RAW_NOTICE;
use crate::wire::{HEADER_BYTES, Header};
use crate::{Nanos, Transmit, seq};

const NUDGE_WAIT_MAX: Nanos = 200_000_000;
/// One sequence is answered to the group again at most this often.
const GROUP_REPEAT: Nanos = 500_000;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum To {
    /// One packet for the job's group.
    Group,
    /// One packet for each worker from rank .0 on.
    Each(u16),
    One(u16),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum What {
    /// The answer, the first time.
    Answer,
    /// The answer to one worker again.
    Repeat,
    /// Correction request.
    Request,
    /// Who is missing.
    Notice,
}

impl ParameterServer {
    pub(super) fn send_answer(&mut self, seq: u64, now: Nanos) {
        let to = if self.config.mode == Mode::HostOnly || self.ring.at_mut(seq).state == State::AnsweredRaw {
            To::Each(0)
        } else {
            self.group_target(now)
        };
        if to == To::Group {
            self.ring.at_mut(seq).to_group = true;
        }
        self.queue.push_back((What::Answer, to, seq));
    }

    /// A packet of an answered sequence: the ACK was lost on the way to somebody.
    pub(super) fn answer_again(&mut self, seq: u64, coverage: &Coverage, from_switch: bool, repeat: bool, now: Nanos) {
        self.counters.reanswers += 1;
        self.counters.retransmits += 1;
        let rank = self.topology.ranks(coverage).next().unwrap_or(0);
        let entry = self.ring.at_mut(seq);
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
        let to = if entry.state == State::AnsweredRaw || !self.group.is_up() { To::Each(0) } else { To::Group };
        self.queue.push_back((What::Answer, to, seq));
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
    pub(super) fn nudge(&mut self, seq: u64, now: Nanos) {
        let entry = self.ring.at_mut(seq);
        if now < entry.nudge_at {
            return;
        }
        entry.nudge_at = now + entry.nudge_wait;
        entry.nudge_wait = (2 * entry.nudge_wait).min(NUDGE_WAIT_MAX);
        for rank in self.missing(self.ring.at(seq)) {
            self.queue.push_back((What::Notice, To::One(rank), seq));
        }
    }

    /// Write one queued packet; `None` when it is out of date.
    pub(super) fn write(&mut self, what: What, to: To, seq: u64, buffer: &mut [u8]) -> Option<Transmit> {
        let entry = self.ring.at(seq);
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
