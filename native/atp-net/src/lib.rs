// SPDX-License-Identifier: Apache-2.0
//! One thread and one UDP socket around a sans-IO endpoint of `atp-proto`; beside it, for a worker's sidecar, the
//! sessions of the trainers on unix sockets and in shared memory.
//!
//! The thread sleeps in `ppoll` until a datagram, a session, a command or a timeout is due; it never spins. Callers reach
//! the state machine through commands only, so the data path takes no lock.

mod backlog;
mod board;
mod commanded;
mod connection;
mod driver;
pub mod frame;
mod group;
mod segment;
pub mod session;
mod sessions;
mod sigbus;
mod sys;
mod udp;

pub use board::{Board, End, SessionEvent};
pub use commanded::{Commanded, WorkerCommand};
pub use driver::Driver;
pub use segment::{SEGMENT_BYTES_MAX, Segment};
pub use sessions::{Attachment, Groups, SessionCommand, Sessions};
pub use sys::{EventFd, PollSet};
