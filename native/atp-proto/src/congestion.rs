// SPDX-License-Identifier: Apache-2.0
//! Window, round-trip time and reordering of one worker (ATP section 3.4; RFC 6298; RFC 8985 as the model).

use crate::Nanos;
use crate::wire::OUT_OF_ORDER_ACKS;

/// Slow start and AIMD in packets, with at most one cut per round trip.
#[derive(Clone, Debug)]
pub struct Window {
    size: f64,
    ssthresh: f64,
    max: f64,
    /// Only what was sent after the last cut may cut again.
    cut_at: Option<Nanos>,
    /// Window before the timeouts in progress, to return to when they prove needless.
    before_timeout: Option<(f64, f64)>,
}

/// Smallest window: two packets, so that an ACK can still be out of order.
const MIN_WINDOW: f64 = 2.0;

impl Window {
    #[must_use]
    pub fn new(initial: u32, max: u32) -> Self {
        let max = f64::from(max);
        Self { size: f64::from(initial).min(max), ssthresh: max, max, cut_at: None, before_timeout: None }
    }

    /// Whole packets that may be outstanding.
    #[must_use]
    pub fn packets(&self) -> u64 {
        self.size as u64
    }

    #[must_use]
    pub fn size(&self) -> f64 {
        self.size
    }

    #[must_use]
    pub fn ssthresh(&self) -> f64 {
        self.ssthresh
    }

    /// One new ACK without a congestion mark. `limited`: the window, not the application, holds the sender back.
    pub fn on_ack(&mut self, limited: bool) {
        if limited {
            self.size += if self.size < self.ssthresh { 1.0 } else { 1.0 / self.size };
            self.size = self.size.min(self.max);
        }
    }

    /// ECN or a loss of a packet sent at `sent_at`. True when the window was cut.
    pub fn on_congestion(&mut self, sent_at: Nanos, now: Nanos) -> bool {
        if self.cut_at.is_some_and(|cut| sent_at <= cut) {
            return false;
        }
        self.cut_at = Some(now);
        self.halve();
        true
    }

    fn halve(&mut self) {
        self.size = (self.size / 2.0).max(MIN_WINDOW.min(self.max));
        self.ssthresh = self.size;
    }

    pub fn on_timeout(&mut self, now: Nanos) {
        self.before_timeout.get_or_insert((self.size, self.ssthresh));
        self.cut_at = Some(now);
        self.halve();
    }

    /// A packet without timeout was acknowledged: the cuts stand.
    pub fn on_progress(&mut self) {
        self.before_timeout = None;
    }

    /// The timeouts were no congestion: the parameter server has the packet and waits for somebody else, or it answered
    /// both the original and the resend (as a D-SACK tells in RFC 3708).
    pub fn undo_timeouts(&mut self) {
        if let Some((size, ssthresh)) = self.before_timeout.take() {
            self.size = self.size.max(size);
            self.ssthresh = self.ssthresh.max(ssthresh);
        }
    }
}

/// Buckets of the round-trip histogram: below 2^i microseconds.
pub const RTT_BUCKETS: usize = 24;

/// Smoothed round-trip time. It holds the wait for the slowest worker: that is what a resend must outlast.
#[derive(Clone, Debug)]
pub struct Rtt {
    smoothed: Option<f64>,
    variation: f64,
    /// Smallest sample of the epoch: what the path takes. Later ones may all hold a wait for somebody.
    minimum: Option<Nanos>,
    min_rto: Nanos,
    max_rto: Nanos,
    pub histogram: [u64; RTT_BUCKETS],
    pub sum: f64,
}

/// Largest first timeout, in smallest round trips.
const PATIENCE: Nanos = 16;

impl Rtt {
    #[must_use]
    pub fn new(min_rto: Nanos, max_rto: Nanos) -> Self {
        Self { smoothed: None, variation: 0.0, minimum: None, min_rto, max_rto, histogram: [0; RTT_BUCKETS], sum: 0.0 }
    }

    pub fn sample(&mut self, rtt: Nanos) {
        let micros = rtt / 1000;
        let bucket = (64 - micros.leading_zeros()) as usize;
        self.histogram[bucket.min(RTT_BUCKETS - 1)] += 1;
        let r = rtt as f64;
        self.sum += r * 1e-9;
        self.bound(rtt);
        match self.smoothed {
            None => {
                self.smoothed = Some(r);
                self.variation = r / 2.0;
            }
            Some(s) => {
                self.variation += ((s - r).abs() - self.variation) / 4.0;
                self.smoothed = Some(s + (r - s) / 8.0);
            }
        }
    }

    /// The path takes at most `rtt`: a notice came so soon after the packet that caused it.
    pub fn bound(&mut self, rtt: Nanos) {
        self.minimum = Some(self.minimum.map_or(rtt, |m| m.min(rtt)));
    }

    /// Seconds, 0 before the first sample.
    #[must_use]
    pub fn smoothed_seconds(&self) -> f64 {
        self.smoothed.unwrap_or(0.0) * 1e-9
    }

    /// Smallest sample, 0 before the first.
    #[must_use]
    pub fn minimum_or_zero(&self) -> Nanos {
        self.minimum.unwrap_or(0)
    }

    /// Retransmission timeout after `backoff` timeouts in a row.
    #[must_use]
    pub fn rto(&self, backoff: u32) -> Nanos {
        let base = match self.smoothed {
            None => 5 * self.min_rto,
            // The round trip holds other workers' timeouts too, which must not feed this one: bounded by what the path
            // itself takes. An early resend costs one packet, and the parameter server tells whom it waits for.
            Some(s) => ((s + 4.0 * self.variation) as Nanos).min(PATIENCE * self.minimum_or_zero()),
        };
        (base.max(self.min_rto) << backoff.min(16)).min(self.max_rto)
    }

    /// How long ACKs of older packets may lag behind a newer one before they count as lost.
    #[must_use]
    pub fn reordering_window(&self) -> Nanos {
        (self.smoothed.unwrap_or(1e6) as Nanos / 2).clamp(500_000, 20_000_000)
    }
}

/// Out-of-order ACKs that declare a packet lost: three, more while resends prove needless.
#[derive(Clone, Debug)]
pub struct Reordering {
    threshold: u64,
    max: u64,
    calm: u64,
}

impl Reordering {
    #[must_use]
    pub fn new(max_window: u32) -> Self {
        let floor = u64::from(OUT_OF_ORDER_ACKS);
        Self { threshold: floor, max: (u64::from(max_window) / 2).max(floor), calm: 0 }
    }

    #[must_use]
    pub fn threshold(&self) -> u64 {
        self.threshold
    }

    /// The ACK of the original came after all.
    pub fn on_needless_resend(&mut self) {
        self.threshold = (self.threshold * 2).min(self.max);
        self.calm = 0;
    }

    /// A new ACK. After 16 windows without a needless resend the threshold goes half the way back.
    pub fn on_ack(&mut self, window: u64) {
        self.calm += 1;
        if self.calm > 16 * window.max(1) {
            self.calm = 0;
            self.threshold = (self.threshold / 2).max(u64::from(OUT_OF_ORDER_ACKS));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cuts_once_per_round_trip() {
        let mut w = Window::new(200, 1024);
        assert!(w.on_congestion(10, 20));
        assert!(!w.on_congestion(15, 21), "sent before the cut");
        assert!(w.on_congestion(21, 30));
        assert_eq!(w.packets(), 50);
    }

    #[test]
    fn grows_by_one_per_ack_then_by_one_per_window() {
        let mut w = Window::new(4, 1024);
        w.on_ack(true);
        assert_eq!(w.packets(), 5);
        assert!(w.on_congestion(1, 2));
        let before = w.size();
        for _ in 0..2 {
            w.on_ack(true);
        }
        assert!(w.size() > before && w.size() < before + 1.0);
        w.on_ack(false);
        assert!(w.size() < before + 1.0);
    }

    #[test]
    fn needless_timeouts_are_undone() {
        let mut w = Window::new(200, 1024);
        w.on_timeout(1);
        w.on_timeout(2);
        assert_eq!(w.packets(), 50);
        w.undo_timeouts();
        assert_eq!(w.packets(), 200);
        for t in 3..40 {
            w.on_timeout(t);
        }
        assert_eq!(w.packets(), 2);
        w.on_progress();
        w.undo_timeouts();
        assert_eq!(w.packets(), 2);
    }

    #[test]
    fn rto_backs_off_and_is_bounded() {
        let mut r = Rtt::new(4_000_000, 1_000_000_000);
        assert_eq!(r.rto(0), 20_000_000);
        for _ in 0..50 {
            r.sample(1_000_000);
        }
        assert_eq!(r.rto(0), 4_000_000);
        assert_eq!(r.rto(3), 32_000_000);
        assert_eq!(r.rto(60), 1_000_000_000);
    }

    #[test]
    fn threshold_adapts_and_returns() {
        let mut r = Reordering::new(1024);
        r.on_needless_resend();
        r.on_needless_resend();
        assert_eq!(r.threshold(), 12);
        for _ in 0..3 * 16 * 10 + 3 {
            r.on_ack(10);
        }
        assert_eq!(r.threshold(), 3);
        for _ in 0..40 {
            r.on_needless_resend();
        }
        assert_eq!(r.threshold(), 512);
    }
}
