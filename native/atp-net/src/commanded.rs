// SPDX-License-Identifier: Apache-2.0
//! State machines that a `Driver` can run.

use atp_proto::host::Host;
use atp_proto::worker::Submission;
use atp_proto::{Endpoint, Nanos, ParameterServer, Worker};

use crate::sys::PollSet;

/// A state machine that takes commands from its owner, and may serve descriptors of its own beside the UDP socket.
pub trait Commanded: Endpoint {
    type Command: Send + 'static;
    fn command(&mut self, command: Self::Command, now: Nanos);
    /// End everything with an error: the thread goes.
    fn abort(&mut self, reason: &str);
    /// Add descriptors of its own.
    fn watch(&mut self, _poll: &mut PollSet) {}
    /// Serve those that `watch` added and that are ready now.
    fn serve(&mut self, _poll: &PollSet, _now: Nanos) {}
    /// Pass on what ended in this turn.
    fn settle(&mut self, _now: Nanos) {}
    /// Whether it has ended by itself: the UDP socket is closed, then `linger` called.
    fn closing(&self) -> bool {
        false
    }
    /// Its last words, without the UDP socket. May take a second.
    fn linger(&mut self) {}
}

/// What a worker can be told.
pub enum WorkerCommand {
    Submit(Submission),
    CancelAll(String),
}

impl Commanded for Worker {
    type Command = WorkerCommand;
    fn command(&mut self, command: WorkerCommand, now: Nanos) {
        match command {
            WorkerCommand::Submit(s) => self.submit(s, now),
            WorkerCommand::CancelAll(reason) => self.cancel_all(&reason),
        }
    }
    fn abort(&mut self, reason: &str) {
        self.cancel_all(reason);
    }
}

impl Commanded for ParameterServer {
    type Command = std::convert::Infallible;
    fn command(&mut self, command: Self::Command, _now: Nanos) {
        match command {}
    }
    fn abort(&mut self, _reason: &str) {}
}

impl Commanded for Host {
    type Command = std::convert::Infallible;
    fn command(&mut self, command: Self::Command, _now: Nanos) {
        match command {}
    }
    fn abort(&mut self, _reason: &str) {}
}
