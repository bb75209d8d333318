// SPDX-License-Identifier: Apache-2.0
//! Background traffic: flows that share links with jobs and react to congestion as TCP with ECN does (slow start, additive
//! increase, one halving a round trip on a mark or three overtaking acknowledgements). Lost bytes are counted as not
//! delivered and not sent again: what matters is the load.

use std::collections::VecDeque;

use atp_proto::Nanos;

/// UDP payload bytes of a data packet, so that the frame has 1,514 bytes.
pub const DATA: u32 = 1472;
/// Of an acknowledgement.
pub const ACK: u32 = 24;
const RTO: Nanos = 10_000_000;

pub struct Flow {
    pub from: u32,
    pub to: u32,
    pub start: Nanos,
    pub stop: Nanos,
    window: f64,
    ssthresh: f64,
    next: u32,
    /// Number, sent at, acknowledged.
    outstanding: VecDeque<(u32, Nanos, bool)>,
    cut_at: Nanos,
    progress_at: Nanos,
    /// Payload bytes that arrived.
    pub delivered: u64,
    pub losses: u64,
}

impl Flow {
    #[must_use]
    pub fn new(from: u32, to: u32, start: Nanos, stop: Nanos) -> Self {
        Self {
            from,
            to,
            start,
            stop,
            window: 10.0,
            ssthresh: 512.0,
            next: 0,
            outstanding: VecDeque::new(),
            cut_at: 0,
            progress_at: start,
            delivered: 0,
            losses: 0,
        }
    }

    /// Number of the next packet to send, if the window lets one go.
    pub fn poll(&mut self, now: Nanos) -> Option<u32> {
        if now < self.start || now >= self.stop || self.outstanding.len() as f64 >= self.window {
            return None;
        }
        let number = self.next;
        self.next = self.next.wrapping_add(1);
        self.outstanding.push_back((number, now, false));
        Some(number)
    }

    fn cut(&mut self, sent_at: Nanos, now: Nanos) {
        if sent_at >= self.cut_at {
            self.cut_at = now;
            self.window = (self.window / 2.0).max(2.0);
            self.ssthresh = self.window;
        }
    }

    pub fn on_ack(&mut self, number: u32, echo: bool, now: Nanos) {
        self.progress_at = now;
        let Some(i) = self.outstanding.iter().position(|o| o.0 == number) else { return };
        if self.outstanding[i].2 {
            return;
        }
        self.outstanding[i].2 = true;
        self.delivered += u64::from(DATA);
        if echo {
            self.cut(self.outstanding[i].1, now);
        } else {
            self.window += if self.window < self.ssthresh { 1.0 } else { 1.0 / self.window };
            self.window = self.window.min(1024.0);
        }
        while self.outstanding.front().is_some_and(|o| o.2) {
            self.outstanding.pop_front();
        }
        while self.outstanding.len() > 3
            && !self.outstanding[0].2
            && self.outstanding.iter().filter(|o| o.2).take(3).count() == 3
        {
            if let Some((_, sent_at, _)) = self.outstanding.pop_front() {
                self.losses += 1;
                self.cut(sent_at, now);
            }
            while self.outstanding.front().is_some_and(|o| o.2) {
                self.outstanding.pop_front();
            }
        }
    }

    /// Timer; when to be called again, `None` when the flow has ended.
    pub fn on_timer(&mut self, now: Nanos) -> Option<Nanos> {
        if now >= self.stop {
            return None;
        }
        if !self.outstanding.is_empty() && now >= self.progress_at + RTO {
            self.losses += self.outstanding.len() as u64;
            self.outstanding.clear();
            self.window = 2.0;
            self.progress_at = now;
        }
        Some(now + RTO)
    }
}
