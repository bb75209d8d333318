// SPDX-License-Identifier: Apache-2.0
//! Which losses mean congestion.

use crate::Nanos;
use crate::rtt::Queue;

/// Tells a loss by congestion from a loss by chance. One lost packet stops the ACK of its sequence at all workers, so a
/// link that loses 0.1 % of its packets makes about 2 % of the ACKs of eight workers late: halving at each of them would
/// leave a window of ten packets (Mathis et al., CCR '97). Switches mark before they drop, so marks decide.
#[derive(Clone, Debug, Default)]
pub(super) struct LossJudge {
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
