// SPDX-License-Identifier: Apache-2.0
//! The worker's timers: the probe that repeats the oldest packets when ACKs stop, and the retransmission time-out.

use crate::Nanos;
use crate::rtt::Rtt;

/// Oldest packets that are repeated when no ACK comes any more; half as many each further time in a row, and in the end none.
const PROBES: usize = 8;

pub(super) struct Timers {
    pub rtt: Rtt,
    rto_at: Option<Nanos>,
    /// Time-outs in a row.
    backoff: u32,
    /// When the oldest packets are repeated, if no ACK comes before, and how often that was since the last ACK.
    probe_at: Option<Nanos>,
    probes: u32,
    probed_at: Nanos,
    /// Sequence of the last time-out.
    timed_out: u64,
}

impl Timers {
    pub fn new(rtt: Rtt) -> Self {
        Self { rtt, rto_at: None, backoff: 0, probe_at: None, probes: 0, probed_at: 0, timed_out: 0 }
    }

    pub fn on_sent(&mut self, now: Nanos) {
        if self.rto_at.is_none() {
            self.rto_at = Some(now + self.rtt.rto(self.backoff));
        }
        if self.probe_at.is_none() {
            self.arm_probe(now);
        }
    }

    /// An ACK came; `idle`: nothing is open any more.
    pub fn on_ack(&mut self, idle: bool, now: Nanos) {
        self.backoff = 0;
        self.probes = 0;
        self.stop();
        if !idle {
            self.rto_at = Some(now + self.rtt.rto(0));
            self.arm_probe(now);
        }
    }

    pub fn stop(&mut self) {
        self.rto_at = None;
        self.probe_at = None;
    }

    /// Set the time of the next probe, if it comes before the time-out.
    fn arm_probe(&mut self, now: Nanos) {
        let wait = if self.probe_packets() == 0 { None } else { self.rtt.probe(self.probes) };
        self.probe_at = wait.map(|wait| now + wait).filter(|at| self.rto_at.is_none_or(|rto| *at < rto));
    }

    pub fn probe_is_due(&self, now: Nanos) -> bool {
        self.probe_at.is_some_and(|at| now >= at)
    }

    /// Packets that the next probe repeats at most.
    pub fn probe_packets(&self) -> usize {
        PROBES >> self.probes
    }

    pub fn on_probe(&mut self, now: Nanos) {
        self.probes += 1;
        self.probed_at = now;
        self.arm_probe(now);
    }

    /// The round trip of a packet sent then holds no wait for a repeat.
    pub fn is_calm(&self, sent_at: Nanos) -> bool {
        sent_at >= self.probed_at
    }

    pub fn rto_is_due(&self, now: Nanos) -> bool {
        self.rto_at.is_some_and(|at| now >= at)
    }

    /// `seq` timed out. `draw`, below 256, differs from worker to worker: those that time out together must not do so
    /// again, since the same queue would drop the same packets each time.
    pub fn on_timeout(&mut self, seq: u64, draw: u64, now: Nanos) {
        self.timed_out = seq;
        self.backoff += 1;
        let rto = self.rto();
        self.rto_at = Some(now + rto + rto / 1024 * draw);
    }

    /// Last sequence that timed out, 0 before the first.
    pub fn timed_out(&self) -> u64 {
        self.timed_out
    }

    /// The time-out after the back-off so far.
    pub fn rto(&self) -> Nanos {
        self.rtt.rto(self.backoff)
    }

    pub fn deadline(&self) -> Option<Nanos> {
        [self.probe_at, self.rto_at].into_iter().flatten().min()
    }
}
