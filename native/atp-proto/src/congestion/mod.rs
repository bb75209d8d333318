// SPDX-License-Identifier: Apache-2.0
//! Congestion control of one worker, behind a trait: the worker tells what its ACKs and timers show, and asks how many
//! packets may be on their way. The production implementation is `Aimd`; the simulator compares it with others.

mod aimd;
mod judge;

pub use aimd::Aimd;

use crate::Nanos;
use crate::rtt::Rtt;

/// The window of one worker, in packets.
pub trait Controller: Send {
    /// At the start of an epoch, with a window of `initial` packets that never exceeds `max`.
    fn start(initial: u32, max: u32) -> Self;

    /// Whole packets that may be outstanding.
    fn window(&self) -> u64;

    /// An ACK without a congestion mark. `limited`: the window, not the application, holds the sender back.
    fn on_ack(&mut self, limited: bool);

    /// The ACK of a packet sent at `sent_at` says that its sum met congestion. True when the window was cut.
    fn on_mark(&mut self, sent_at: Nanos, now: Nanos) -> bool;

    /// A packet sent at `sent_at` counts as lost. `path`: what is known of the way. True when the window was cut.
    fn on_loss(&mut self, path: &Rtt, sent_at: Nanos, now: Nanos) -> bool;

    /// The retransmission time-out is over.
    fn on_timeout(&mut self, now: Nanos);

    /// A packet sent long after the last time-out was acknowledged: the cuts of time-outs stand.
    fn on_progress(&mut self);

    /// The time-outs were no congestion: the parameter server has the packet and waits for somebody else, or it answered
    /// both the original and the resend (as a D-SACK tells in RFC 3708).
    fn undo_timeouts(&mut self);

    /// For metrics: the window with its fraction, and the slow-start threshold.
    fn gauges(&self) -> (f64, f64);
}
