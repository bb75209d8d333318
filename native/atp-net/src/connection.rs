// SPDX-License-Identifier: Apache-2.0
//! A session on its socket.

use std::io::{self, Read, Write};
use std::net::Shutdown;
use std::os::fd::{AsRawFd, RawFd};
use std::os::unix::net::UnixStream;

use atp_proto::Nanos;

use crate::session::Session;

/// How long a client may take to read the last words.
pub const LINGER: Nanos = 1_000_000_000;

/// Reads of one turn from a client that is to be forgotten.
const DROPS: usize = 16;

/// Where a connection is in its life.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stage {
    Serving,
    /// The last words go out, and what the client still sends is read and dropped: closing with unread bytes would make
    /// its kernel forget the last words. Until the client closes, or this time.
    Ending {
        until: Nanos,
        shut: bool,
    },
    Closed,
}

pub struct Connection {
    pub session: Session,
    stream: UnixStream,
    stage: Stage,
    /// The client will send nothing more.
    ended: bool,
    /// The kernel took less than there was.
    blocked: bool,
    /// Where it is in the poll set.
    pub slot: usize,
}

/// What reading gave.
pub enum Got {
    Bytes(usize),
    Nothing,
    End(String),
}

impl Connection {
    #[must_use]
    pub fn new(stream: UnixStream, session: Session) -> Self {
        Self { session, stream, stage: Stage::Serving, ended: false, blocked: false, slot: usize::MAX }
    }

    #[must_use]
    pub fn raw(&self) -> RawFd {
        self.stream.as_raw_fd()
    }

    #[must_use]
    pub fn stage(&self) -> Stage {
        self.stage
    }

    #[must_use]
    pub fn is_serving(&self) -> bool {
        self.stage == Stage::Serving
    }

    /// Whether to wait for the client's bytes, and for room in the kernel.
    #[must_use]
    pub fn wants(&self) -> (bool, bool) {
        (!self.ended, self.blocked)
    }

    /// Read once.
    pub fn read(&mut self, buffer: &mut [u8]) -> Got {
        match self.stream.read(buffer) {
            Ok(0) => {
                self.ended = true;
                let inside = self.session.inside_frame();
                Got::End(if inside { "the connection ended inside a frame" } else { "connection closed" }.to_owned())
            }
            Ok(n) => Got::Bytes(n),
            Err(e) if matches!(e.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted) => Got::Nothing,
            Err(e) => {
                self.stage = Stage::Closed;
                Got::End(format!("the connection broke: {e}"))
            }
        }
    }

    /// Write what the kernel takes; an error ends the connection.
    pub fn write(&mut self) -> Result<(), String> {
        self.blocked = false;
        loop {
            let bytes = self.session.unsent();
            if bytes.is_empty() {
                return Ok(());
            }
            match self.stream.write(bytes) {
                Ok(n) => self.session.took(n),
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => {
                    self.blocked = true;
                    return Ok(());
                }
                Err(e) => {
                    self.stage = Stage::Closed;
                    return Err(format!("the connection broke: {e}"));
                }
            }
        }
    }

    /// From now on only the last words go out.
    pub fn end(&mut self, now: Nanos) {
        if self.stage == Stage::Serving {
            self.stage = Stage::Ending { until: now + LINGER, shut: false };
        }
    }

    /// Time is counted from `now` again.
    pub fn restart_clock(&mut self, now: Nanos) {
        if let Stage::Ending { shut, .. } = self.stage {
            self.stage = Stage::Ending { until: now + LINGER, shut };
        }
    }

    /// Nothing more goes out.
    pub fn cut(&mut self) {
        self.stage = Stage::Closed;
    }

    /// Time is over. First the client can send nothing more, then what it sent is dropped: see `Stage::Ending`.
    pub fn give_up(&mut self, buffer: &mut [u8]) {
        let _ = self.stream.shutdown(Shutdown::Both);
        while matches!(self.stream.read(buffer), Ok(n) if n > 0) {}
        self.stage = Stage::Closed;
    }

    /// A step of a connection that is ending: write, read and drop, close.
    pub fn wind_up(&mut self, buffer: &mut [u8], now: Nanos) {
        let Stage::Ending { until, shut } = self.stage else { return };
        if now >= until {
            self.give_up(buffer);
            return;
        }
        if self.write().is_err() {
            return;
        }
        if !shut && !self.blocked {
            let _ = self.stream.shutdown(Shutdown::Write);
            self.stage = Stage::Ending { until, shut: true };
        }
        for _ in 0..DROPS {
            if self.ended {
                break;
            }
            match self.read(buffer) {
                Got::Bytes(_) => {}
                Got::Nothing => return,
                Got::End(_) => break,
            }
        }
        if self.ended && !self.blocked {
            self.stage = Stage::Closed;
        }
    }
}
