// SPDX-License-Identifier: Apache-2.0
//! Loss detection by ACKs: a packet counts as lost when enough packets sent after it were acknowledged, or when it lags
//! behind them for too long (RFC 8985 is the model). Resends that prove needless are recognised here too.

use std::collections::VecDeque;

use super::flights::{Flight, Flights, State};
use super::reordering::Reordering;
use crate::Nanos;

/// Resent sequences that are remembered, to recognise needless resends.
const RESENT_KEPT: usize = 64;

pub(super) struct LossDetection {
    /// Transmissions in order: number and sequence.
    sent: VecDeque<(u64, u64)>,
    /// ACKs of packets sent after the front of `sent`: out-of-order ACKs.
    passed: u64,
    /// What was sent before transmission .0 counts as lost at time .1.
    lag: Option<(u64, Nanos)>,
    pub reordering: Reordering,
    /// Acknowledged sequences that were sent more than once, and whether newer ACKs were the cause.
    resent: VecDeque<(u64, bool)>,
}

impl LossDetection {
    pub fn new(max_window: u32) -> Self {
        Self {
            sent: VecDeque::new(),
            passed: 0,
            lag: None,
            reordering: Reordering::new(max_window),
            resent: VecDeque::new(),
        }
    }

    pub fn on_sent(&mut self, flight: &Flight) {
        self.sent.push_back((flight.tx, flight.seq));
    }

    /// Nothing is open any more.
    pub fn on_idle(&mut self) {
        self.lag = None;
        self.sent.clear();
        self.passed = 0;
    }

    /// Count the ACK of `flight`. True when it overtook an older packet.
    ///
    /// Of a packet sent twice nobody knows which copy was answered: its ACK may not overtake others at once (a straggler's
    /// release would look like the loss of a whole window), only when they stay away.
    pub fn on_ack(&mut self, flight: &Flight) -> bool {
        let Some(&(tx, seq)) = self.sent.front() else { return false };
        if flight.sends == 1 {
            if tx < flight.tx {
                self.passed += 1;
            } else if tx == flight.tx {
                self.sent.pop_front();
            }
        }
        tx < flight.tx && seq != flight.seq
    }

    /// Drop transmissions that no longer wait for an ACK. The next sequence before which `threshold` newer packets were
    /// acknowledged, if there is one.
    pub fn next_overtaken(&mut self, flights: &Flights, threshold: u64) -> Option<u64> {
        while let Some(&(tx, seq)) = self.sent.front() {
            let flight = flights.known(seq).filter(|f| f.tx == tx);
            if flight.is_some_and(|f| f.state == State::InFlight && !f.lost) {
                if self.passed < threshold {
                    return None;
                }
                self.sent.pop_front();
                return Some(seq);
            }
            if flight.is_some_and(|f| f.state == State::Acked && f.sends == 1) {
                // It was counted when its ACK overtook the then front.
                self.passed = self.passed.saturating_sub(1);
            }
            self.sent.pop_front();
        }
        self.passed = 0;
        None
    }

    /// The ACK of `flight` has moved everything on: what is older may lag behind it for so long.
    pub fn expect_older(&mut self, flight: &Flight, overtook: bool, reordering_window: Nanos, now: Nanos) {
        let until = now + if flight.sends == 1 { 2 * reordering_window } else { reordering_window };
        if let Some((limit, _)) = self.lag {
            self.lag = Some((limit.max(flight.tx), until));
        } else if overtook {
            self.lag = Some((flight.tx, until));
        }
    }

    pub fn deadline(&self) -> Option<Nanos> {
        self.lag.map(|l| l.1)
    }

    /// What was sent before this transmission is lost now.
    pub fn take_lagging(&mut self, now: Nanos) -> Option<u64> {
        self.lag.take_if(|(_, at)| now >= *at).map(|(limit, _)| limit)
    }

    /// The answer to a sequence that was sent more than once.
    pub fn on_resent_ack(&mut self, flight: &Flight) {
        if self.resent.len() == RESENT_KEPT {
            self.resent.pop_front();
        }
        self.resent.push_back((flight.seq, flight.fast));
    }

    /// The answer to `seq` came again: whether newer ACKs had been the cause of its resend, if that was needless.
    pub fn take_needless(&mut self, seq: u64) -> Option<bool> {
        let i = self.resent.iter().position(|r| r.0 == seq)?;
        self.resent.remove(i).map(|(_, fast)| fast)
    }
}
