// SPDX-License-Identifier: Apache-2.0
//! No congestion control: the window stands still.

use atp_proto::Nanos;
use atp_proto::congestion::Controller;
use atp_proto::rtt::Rtt;

/// The largest window, whatever happens.
pub struct FixedWindow(u32);

impl Controller for FixedWindow {
    fn start(_initial: u32, max: u32) -> Self {
        Self(max)
    }
    fn window(&self) -> u64 {
        u64::from(self.0)
    }
    fn on_ack(&mut self, _limited: bool) {}
    fn on_mark(&mut self, _sent_at: Nanos, _now: Nanos) -> bool {
        false
    }
    fn on_loss(&mut self, _path: &Rtt, _sent_at: Nanos, _now: Nanos) -> bool {
        false
    }
    fn on_timeout(&mut self, _now: Nanos) {}
    fn on_progress(&mut self) {}
    fn undo_timeouts(&mut self) {}
    fn gauges(&self) -> (f64, f64) {
        (f64::from(self.0), f64::from(self.0))
    }
}
