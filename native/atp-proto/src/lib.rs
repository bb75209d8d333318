// SPDX-License-Identifier: Apache-2.0
//! ATP transport (Lao et al., NSDI '21) as sans-IO state machines: no clock, socket or thread inside.
//!
//! An endpoint is driven by `handle` (a datagram came), `poll_transmit` (what to send), `poll_timeout` with
//! `handle_timeout` (when to wake up) and `poll_event` (what ended). Time is an argument, in nanoseconds of any clock
//! that never goes back. The protocol is described in docs/protocol.md.

#![forbid(unsafe_code)]

mod admission;
pub mod config;
pub mod congestion;
pub mod control;
pub mod coordinator;
pub mod counters;
pub mod coverage;
pub mod failure;
pub mod fixed;
mod gradient;
pub mod host;
pub mod index;
pub mod member;
pub mod op;
pub mod rtt;
pub mod seal;
pub mod seq;
pub mod server;
pub mod stats;
#[allow(clippy::useless_conversion)] // generated
pub mod wire;
pub mod worker;

use std::net::SocketAddrV4;

pub use config::{Config, ConfigError, Mode, Role};
pub use failure::{Code, Failure};
pub use host::Host;
pub use member::{Member, Part};
pub use server::ParameterServer;
pub use worker::Worker;

/// Nanoseconds of a monotonic clock.
pub type Nanos = u64;

/// One datagram to send.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Transmit {
    pub to: SocketAddrV4,
    /// Bytes of the caller's buffer that were filled.
    pub length: usize,
}

/// An operation ended.
pub struct Event {
    /// The caller's token of the operation.
    pub token: u64,
    /// `None`: the result is in the target memory.
    pub error: Option<Failure>,
    /// The operation's memory, given back.
    pub memory: Box<dyn op::Memory>,
}

/// What the socket layer and the simulator drive.
pub trait Endpoint: Send {
    /// A datagram came in. `ce`: it carried the IP mark "congestion experienced".
    fn handle(&mut self, from: SocketAddrV4, ce: bool, data: &[u8], now: Nanos);
    /// Write the next datagram into `buffer` (at least `Config::buffer_bytes`); `None` when there is nothing to send now.
    fn poll_transmit(&mut self, now: Nanos, buffer: &mut [u8]) -> Option<Transmit>;
    /// When `handle_timeout` must be called at the latest.
    fn poll_timeout(&self) -> Option<Nanos>;
    /// Do what is due.
    fn handle_timeout(&mut self, now: Nanos);
    /// The next operation that ended.
    fn poll_event(&mut self) -> Option<Event>;
    /// Counters and gauges now.
    fn snapshot(&self) -> stats::Snapshot;
}
