// SPDX-License-Identifier: Apache-2.0
//! Round-trip time of one worker, and what it says about queues on the path (RFC 6298).

use crate::Nanos;

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

#[cfg(test)]
mod tests {
    use super::*;

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
