// SPDX-License-Identifier: Apache-2.0
//! ATP's congestion control (section 3.4): slow start, then additive increase and multiplicative decrease on ECN marks and
//! on losses that mean congestion, with at most one cut per round trip.

use super::Controller;
use super::judge::LossJudge;
use crate::Nanos;
use crate::rtt::Rtt;

/// Smallest window: two packets, so that an ACK can still be out of order.
const MIN_WINDOW: f64 = 2.0;

#[derive(Clone, Debug)]
pub struct Aimd {
    size: f64,
    ssthresh: f64,
    max: f64,
    /// Only what was sent after the last cut may cut again.
    cut_at: Option<Nanos>,
    /// Window before the time-outs in progress, to return to when they prove needless.
    before_timeout: Option<(f64, f64)>,
    judge: LossJudge,
}

impl Aimd {
    /// Congestion met a packet sent at `sent_at`.
    fn cut(&mut self, sent_at: Nanos, now: Nanos) -> bool {
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
}

impl Controller for Aimd {
    fn start(initial: u32, max: u32) -> Self {
        let max = f64::from(max);
        Self {
            size: f64::from(initial).min(max),
            ssthresh: max,
            max,
            cut_at: None,
            before_timeout: None,
            judge: LossJudge::default(),
        }
    }

    fn window(&self) -> u64 {
        self.size as u64
    }

    fn on_ack(&mut self, limited: bool) {
        self.judge.on_ack(self.window());
        if limited {
            self.size += if self.size < self.ssthresh { 1.0 } else { 1.0 / self.size };
            self.size = self.size.min(self.max);
        }
    }

    fn on_mark(&mut self, sent_at: Nanos, now: Nanos) -> bool {
        self.judge.on_ack(self.window());
        self.judge.on_mark(now);
        self.cut(sent_at, now)
    }

    fn on_loss(&mut self, path: &Rtt, sent_at: Nanos, now: Nanos) -> bool {
        self.judge.on_loss(path.queue(), path.smoothed(), now) && self.cut(sent_at, now)
    }

    fn on_timeout(&mut self, now: Nanos) {
        self.before_timeout.get_or_insert((self.size, self.ssthresh));
        self.cut_at = Some(now);
        self.halve();
    }

    fn on_progress(&mut self) {
        self.before_timeout = None;
    }

    fn undo_timeouts(&mut self) {
        if let Some((size, ssthresh)) = self.before_timeout.take() {
            self.size = self.size.max(size);
            self.ssthresh = self.ssthresh.max(ssthresh);
        }
    }

    fn gauges(&self) -> (f64, f64) {
        (self.size, self.ssthresh)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cuts_once_per_round_trip() {
        let mut w = Aimd::start(200, 1024);
        assert!(w.on_mark(10, 20));
        assert!(!w.on_mark(15, 21), "sent before the cut");
        assert!(w.on_mark(21, 30));
        assert_eq!(w.window(), 50);
    }

    #[test]
    fn grows_by_one_per_ack_then_by_one_per_window() {
        let mut w = Aimd::start(4, 1024);
        w.on_ack(true);
        assert_eq!(w.window(), 5);
        assert!(w.on_mark(1, 2));
        let before = w.gauges().0;
        for _ in 0..2 {
            w.on_ack(true);
        }
        assert!(w.gauges().0 > before && w.gauges().0 < before + 1.0);
        w.on_ack(false);
        assert!(w.gauges().0 < before + 1.0);
    }

    #[test]
    fn needless_timeouts_are_undone() {
        let mut w = Aimd::start(200, 1024);
        w.on_timeout(1);
        w.on_timeout(2);
        assert_eq!(w.window(), 50);
        w.undo_timeouts();
        assert_eq!(w.window(), 200);
        for t in 3..40 {
            w.on_timeout(t);
        }
        assert_eq!(w.window(), 2);
        w.on_progress();
        w.undo_timeouts();
        assert_eq!(w.window(), 2);
    }
}
