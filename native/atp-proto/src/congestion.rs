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

/// Buckets of the round-trip histogram: below 2^i microseconds.
pub const RTT_BUCKETS: usize = 24;

/// Smoothed round-trip time. It holds the wait for the slowest worker: that is what a resend must outlast.
#[derive(Clone, Debug)]
pub struct Rtt {
    smoothed: Option<f64>,
    variation: f64,
    /// Smallest sample of the epoch: what the path takes. Later ones may all hold a wait for somebody.
    minimum: Option<Nanos>,
    /// The same from answers that may be to an earlier copy.
    rough: Option<Nanos>,
    samples: u32,
    /// Smallest of the current run of samples, and of the `RECENT` samples before it.
    recent: [Nanos; 2],
    recent_count: u32,
    /// The same of all samples, also of those that may hold a wait for a repeat.
    any: [Nanos; 2],
    any_count: u32,
    min_rto: Nanos,
    max_rto: Nanos,
    pub histogram: [u64; RTT_BUCKETS],
    pub sum: f64,
}

/// Largest first timeout, in smallest round trips.
const PATIENCE: Nanos = 16;
/// Shortest wait before a probe: no network is faster, and clocks are not finer.
const PROBE_MIN: Nanos = 5_000;
/// Samples that `Rtt::queue` looks at, at least.
const RECENT: u32 = 16;
/// Differences of round trips up to here are no queue.
const QUEUE_SLACK: Nanos = 30_000;
/// A round trip of so many smallest ones, and this much more, is in a long queue.
const LONG_QUEUE: Nanos = 4;
/// Samples that are too few to know the path by.
const FEW_SAMPLES: u32 = 16;
const LONG_QUEUE_SLACK: Nanos = 1_000_000;

/// What the last round trips say about queues on the path.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Queue {
    None,
    Stands,
    Long,
}

/// Smallest of the current run of samples, and of the `RECENT` samples before it.
fn keep(least: &mut [Nanos; 2], count: &mut u32, sample: Nanos) {
    if *count == RECENT {
        *least = [Nanos::MAX, least[0]];
        *count = 0;
    }
    *count += 1;
    least[0] = least[0].min(sample);
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

impl Rtt {
    #[must_use]
    pub fn new(min_rto: Nanos, max_rto: Nanos) -> Self {
        Self {
            smoothed: None,
            variation: 0.0,
            minimum: None,
            rough: None,
            samples: 0,
            recent: [Nanos::MAX; 2],
            recent_count: 0,
            any: [Nanos::MAX; 2],
            any_count: 0,
            min_rto,
            max_rto,
            histogram: [0; RTT_BUCKETS],
            sum: 0.0,
        }
    }

    /// A round trip. `calm`: ACKs came all the time, so that it tells how long the path takes, queues included.
    pub fn sample(&mut self, rtt: Nanos, calm: bool) {
        let micros = rtt / 1000;
        let bucket = (64 - micros.leading_zeros()) as usize;
        self.histogram[bucket.min(RTT_BUCKETS - 1)] += 1;
        let r = rtt as f64;
        self.sum += r * 1e-9;
        self.bound(rtt);
        self.samples = self.samples.saturating_add(1);
        if calm {
            keep(&mut self.recent, &mut self.recent_count, rtt);
        }
        keep(&mut self.any, &mut self.any_count, rtt);
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

    /// Even the fastest of the last round trips took much longer than the path does: a queue stands somewhere. The wait
    /// for some worker makes single round trips long, not all.
    #[must_use]
    pub fn queue(&self) -> Queue {
        let Some(m) = self.minimum else { return Queue::None };
        let least = |samples: [Nanos; 2]| Some(samples[0].min(samples[1])).filter(|least| *least != Nanos::MAX);
        if least(self.any).is_some_and(|any| any > LONG_QUEUE * m + LONG_QUEUE_SLACK) {
            Queue::Long
        } else if least(self.recent).is_some_and(|recent| recent > m + (m / 2).max(QUEUE_SLACK)) {
            Queue::Stands
        } else {
            Queue::None
        }
    }

    /// The ACK of a packet that was sent more than once came `took` after the last time: which of them it answers is not
    /// known, so short times say nothing. Without this a worker whose packets are all resent would never learn that the
    /// path is faster than its first, perhaps very late, answer. It counts as long as there are few samples: behind a queue
    /// the answer to the first copy often comes just after the second was sent.
    pub fn ambiguous(&mut self, took: Nanos) {
        let bound = took.max(self.min_rto / 4);
        self.rough = Some(self.rough.map_or(bound, |r| r.min(bound)));
    }

    /// Smallest round trip, as far as it is known.
    fn least(&self) -> Option<Nanos> {
        let rough = self.rough.filter(|_| self.samples < FEW_SAMPLES);
        [self.minimum, rough].into_iter().flatten().min()
    }

    /// The path takes at most `rtt`: a notice came so soon after the packet that caused it.
    pub fn bound(&mut self, rtt: Nanos) {
        self.minimum = Some(self.minimum.map_or(rtt, |m| m.min(rtt)));
    }

    /// 0 before the first sample.
    #[must_use]
    pub fn smoothed(&self) -> Nanos {
        self.smoothed.unwrap_or(0.0) as Nanos
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
            Some(s) => ((s + 4.0 * self.variation) as Nanos).min(PATIENCE * self.least().unwrap_or(0)),
        };
        (base.max(self.min_rto) << backoff.min(16)).min(self.max_rto)
    }

    /// How long to wait for any ACK before the oldest packets are repeated, after `probes` such waits in a row; `None`
    /// before the first sample.
    #[must_use]
    pub fn probe(&self, probes: u32) -> Option<Nanos> {
        let minimum = self.least()?;
        let s = self.smoothed.unwrap_or(minimum as f64);
        let usual = (s + 4.0 * self.variation).clamp(1.5 * s, 2.0 * s) as Nanos;
        Some(usual.min(PATIENCE * minimum).max(PROBE_MIN) << probes.min(16))
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
    /// Only what was sent after the last rise may raise the threshold again.
    raised_at: Option<Nanos>,
}

impl Reordering {
    #[must_use]
    pub fn new(max_window: u32) -> Self {
        let floor = u64::from(OUT_OF_ORDER_ACKS);
        Self { threshold: floor, max: (u64::from(max_window) / 2).max(floor), calm: 0, raised_at: None }
    }

    #[must_use]
    pub fn threshold(&self) -> u64 {
        self.threshold
    }

    /// The threshold in force with this window: half a round trip's ACKs at most, so that losses are found by ACKs and
    /// not by time-outs.
    #[must_use]
    pub fn effective(&self, window: u64) -> u64 {
        self.threshold.min((window / 2).max(u64::from(OUT_OF_ORDER_ACKS)))
    }

    /// The ACK of the original came after all; it was resent at `sent_at`. One step per round trip, as RFC 8985 has it.
    pub fn on_needless_resend(&mut self, sent_at: Nanos, now: Nanos) {
        if self.raised_at.is_some_and(|raised| sent_at <= raised) {
            return;
        }
        self.raised_at = Some(now);
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
            r.sample(1_000_000, true);
        }
        assert_eq!(r.rto(0), 4_000_000);
        assert_eq!(r.rto(3), 32_000_000);
        assert_eq!(r.rto(60), 1_000_000_000);
    }

    #[test]
    fn probes_come_after_a_round_trip_and_ever_later() {
        let mut r = Rtt::new(4_000_000, 1_000_000_000);
        assert_eq!(r.probe(0), None, "nothing is known yet");
        r.sample(0, true);
        assert_eq!((r.probe(0), r.probe(3)), (Some(PROBE_MIN), Some(8 * PROBE_MIN)));
        let mut r = Rtt::new(4_000_000, 1_000_000_000);
        (0..50).for_each(|_| r.sample(100_000, true));
        assert_eq!((r.probe(0), r.probe(2)), (Some(150_000), Some(600_000)));
        (0..50).for_each(|_| r.sample(50_000_000, true));
        assert_eq!(r.probe(0), Some(16 * 100_000), "what makes it wait is a slow worker, not the path");
        // All packets were sent more than once: the bound is rough, but there is one.
        let mut r = Rtt::new(4_000_000, 1_000_000_000);
        r.ambiguous(10);
        assert_eq!(r.probe(0), Some(1_500_000));
    }

    #[test]
    fn threshold_adapts_and_returns() {
        let mut r = Reordering::new(1024);
        r.on_needless_resend(10, 20);
        r.on_needless_resend(15, 21);
        assert_eq!(r.threshold(), 6, "sent before the last rise");
        r.on_needless_resend(25, 30);
        assert_eq!(r.threshold(), 12);
        assert_eq!((r.effective(100), r.effective(10), r.effective(2)), (12, 5, 3));
        for _ in 0..3 * 16 * 10 + 3 {
            r.on_ack(10);
        }
        assert_eq!(r.threshold(), 3);
        for t in 40..80 {
            r.on_needless_resend(t, t);
        }
        assert_eq!(r.threshold(), 512);
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

    #[test]
    fn a_standing_queue_shows_in_the_fastest_round_trips() {
        let mut r = Rtt::new(4_000_000, 1_000_000_000);
        for i in 0..100 {
            // A straggler makes most round trips long, not all.
            r.sample(if i % 4 == 0 { 20_000 } else { 5_000_000 }, true);
            assert_ne!(r.queue(), Queue::Stands);
        }
        (0..2 * RECENT).for_each(|_| r.sample(80_000, true));
        assert_eq!(r.queue(), Queue::Stands);
        (0..2 * RECENT).for_each(|_| r.sample(25_000, true));
        assert_ne!(r.queue(), Queue::Stands);
    }
}
