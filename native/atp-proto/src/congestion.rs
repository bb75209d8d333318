// SPDX-License-Identifier: Apache-2.0
//! Congestion control of one worker: the window (ATP section 3.4), and which losses mean congestion.

use crate::Nanos;
use crate::rtt::Queue;

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
    /// For comparisons: the window stands still.
    fixed: bool,
}

/// Smallest window: two packets, so that an ACK can still be out of order.
const MIN_WINDOW: f64 = 2.0;

impl Window {
    #[must_use]
    pub fn new(initial: u32, max: u32) -> Self {
        let max = f64::from(max);
        Self { size: f64::from(initial).min(max), ssthresh: max, max, cut_at: None, before_timeout: None, fixed: false }
    }

    /// For comparisons: always `packets`, whatever happens.
    #[must_use]
    pub fn fixed(packets: u32) -> Self {
        Self { fixed: true, ..Self::new(packets, packets) }
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
        if self.fixed || self.cut_at.is_some_and(|cut| sent_at <= cut) {
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
        if self.fixed {
            return;
        }
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

/// Tells a loss by congestion from a loss by chance. One lost packet stops the ACK of its sequence at all workers, so a
/// link that loses 0.1 % of its packets makes about 2 % of the ACKs of eight workers late: halving at each of them would
/// leave a window of ten packets (Mathis et al., CCR '97). Switches mark before they drop, so marks decide.
#[derive(Clone, Debug, Default)]
pub struct LossJudge {
    marked_at: Option<Nanos>,
    acks: u64,
    losses: u64,
}

/// Losses that say nothing by their share.
const FEW_LOSSES: u64 = 8;

impl LossJudge {
    pub fn on_mark(&mut self, now: Nanos) {
        self.marked_at = Some(now);
    }

    pub fn on_ack(&mut self, window: u64) {
        self.acks += 1;
        if self.acks + self.losses > window {
            self.acks /= 2;
            self.losses /= 2;
        }
    }

    /// A packet counts as lost: is that congestion? Yes when a mark came within `recent`; where no mark was ever seen,
    /// perhaps because nobody marks, when a queue stands; where marks are known, when a queue stands that is longer than
    /// any that marks would allow, so at somebody who does not mark; and when more packets are lost than arrive.
    #[must_use]
    pub fn on_loss(&mut self, queue: Queue, recent: Nanos, now: Nanos) -> bool {
        self.losses += 1;
        let marked = self.marked_at.map_or(queue >= Queue::Stands, |at| now <= at + recent);
        marked || queue == Queue::Long || self.losses > FEW_LOSSES + self.acks
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
    fn a_loss_by_chance_is_no_congestion() {
        let mut j = LossJudge::default();
        for _ in 0..100 {
            (0..20).for_each(|_| j.on_ack(200));
            assert!(!j.on_loss(Queue::None, 1000, 5));
        }
        assert!(j.on_loss(Queue::Stands, 1000, 5), "nobody marks, and a queue stands");
        j.on_mark(10_000);
        assert!(j.on_loss(Queue::None, 1000, 10_500), "a mark came just before");
        assert!(!j.on_loss(Queue::Stands, 1000, 12_000), "marks are known to come when it is congestion");
        let lost = (0..300).filter(|_| j.on_loss(Queue::None, 1000, 12_000)).count();
        assert!(lost > 0, "more is lost than arrives");
    }
}
