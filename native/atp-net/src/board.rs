// SPDX-License-Identifier: Apache-2.0
//! What the thread tells its owner about the sessions: events, counts and gauges.

use std::io;
use std::os::fd::RawFd;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use atp_proto::failure::Code;

use crate::driver::lock;
use crate::sys::EventFd;

/// Events about failures beyond so many that nobody collected are only counted.
const FAILURES_MAX: usize = 1024;

/// How a session ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// The client left, or the sidecar ended it.
    Left,
    /// The client broke the protocol.
    Refused,
    /// The client does not read what is sent to it.
    CutOff,
}

/// Something that the owner logs or does.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum SessionEvent {
    /// The client asks for metrics: `SessionCommand::Reply` answers.
    Stats {
        session: u32,
    },
    Ended {
        session: u32,
        end: End,
        why: String,
        outstanding: u64,
    },
    /// Operations of a group failed; `op` is the first of `count` parts.
    Failed {
        session: u32,
        group: u64,
        op: u64,
        code: Code,
        text: String,
        broken: bool,
        count: u64,
    },
    /// A further segment could not be made.
    GrowRefused {
        session: u32,
        bytes: u64,
        why: String,
    },
    Warning {
        text: String,
    },
    /// The thread ended by itself.
    Stopped {
        why: String,
    },
}

/// Shared by the thread and its owner.
pub struct Board {
    events: Mutex<Vec<SessionEvent>>,
    ready: EventFd,
    ok: AtomicU64,
    failed: [AtomicU64; Code::ALL.len()],
    attached: AtomicU64,
    outstanding: AtomicU64,
}

impl Board {
    /// # Errors
    /// When no descriptor is left.
    pub fn new() -> io::Result<Self> {
        Ok(Self {
            events: Mutex::default(),
            ready: EventFd::new()?,
            ok: AtomicU64::new(0),
            failed: Default::default(),
            attached: AtomicU64::new(0),
            outstanding: AtomicU64::new(0),
        })
    }

    /// An eventfd that is readable while events wait.
    #[must_use]
    pub fn ready_fd(&self) -> RawFd {
        self.ready.raw()
    }

    /// Everything since the last call; clears the descriptor of `ready_fd`.
    #[must_use]
    pub fn take(&self) -> Vec<SessionEvent> {
        self.ready.clear();
        std::mem::take(&mut lock(&self.events))
    }

    pub(crate) fn push(&self, event: SessionEvent) {
        let mut events = lock(&self.events);
        if matches!(event, SessionEvent::Failed { .. }) && events.len() >= FAILURES_MAX {
            return;
        }
        events.push(event);
        drop(events);
        self.ready.signal();
    }

    /// An operation ended: `None` is success.
    pub(crate) fn count(&self, failure: Option<Code>) {
        let counter = failure.map_or(&self.ok, |code| &self.failed[usize::from(code.number())]);
        counter.fetch_add(1, Ordering::Relaxed);
    }

    pub(crate) fn gauge(&self, attached: usize, outstanding: usize) {
        self.attached.store(attached as u64, Ordering::Relaxed);
        self.outstanding.store(outstanding as u64, Ordering::Relaxed);
    }

    /// Operations that ended, by result: "ok" or the name of the code.
    #[must_use]
    pub fn results(&self) -> Vec<(&'static str, u64)> {
        let failed = Code::ALL.iter().map(|code| (code.name(), &self.failed[usize::from(code.number())]));
        std::iter::once(("ok", &self.ok)).chain(failed).map(|(name, n)| (name, n.load(Ordering::Relaxed))).collect()
    }

    /// Sessions that are being served.
    #[must_use]
    pub fn attached(&self) -> u64 {
        self.attached.load(Ordering::Relaxed)
    }

    /// Parts that were submitted and have not ended, of all sessions.
    #[must_use]
    pub fn outstanding(&self) -> u64 {
        self.outstanding.load(Ordering::Relaxed)
    }
}
