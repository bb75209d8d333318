// SPDX-License-Identifier: Apache-2.0
//! How many out-of-order ACKs declare a packet lost, under reordering (RFC 8985 is the model).

use crate::Nanos;
use crate::wire::OUT_OF_ORDER_ACKS;

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
}
