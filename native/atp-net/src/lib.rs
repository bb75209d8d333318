// SPDX-License-Identifier: Apache-2.0
//! One thread and one UDP socket around a sans-IO endpoint of `atp-proto`.
//!
//! The thread sleeps in `ppoll` until a datagram, a command or a timeout is due; it never spins. Callers reach the state
//! machine through commands only, so the data path takes no lock.

mod sys;

use std::collections::VecDeque;
use std::io;
use std::os::fd::RawFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Instant;

use atp_proto::stats::Snapshot;
use atp_proto::worker::Submission;
use atp_proto::{Config, Endpoint, Event, Nanos, ParameterServer, Worker};
pub use sys::EventFd;
use sys::{Incoming, Outgoing, Socket};

/// A state machine that takes commands from its owner.
pub trait Commanded: Endpoint {
    type Command: Send + 'static;
    fn command(&mut self, command: Self::Command, now: Nanos);
    /// End everything with an error: the thread goes.
    fn abort(&mut self, reason: &str);
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

struct Shared<C> {
    commands: Mutex<Vec<C>>,
    events: Mutex<VecDeque<Event>>,
    snapshot: Mutex<Snapshot>,
    /// Why the thread ended by itself.
    failure: Mutex<Option<String>>,
    stop: AtomicBool,
    wake: EventFd,
    ready: EventFd,
}

/// A panic of another thread while it held the lock leaves plain data behind.
fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A running endpoint. Dropping it stops the thread.
pub struct Driver<E: Commanded> {
    shared: Arc<Shared<E::Command>>,
    thread: Option<JoinHandle<()>>,
}

/// Packets that are taken from or given to the kernel in one system call.
const BATCH: usize = 128;
/// The same where the kernel joins packets: buffers of 64 KB.
const JOINED_BATCH: usize = 8;
/// The snapshot for metrics is renewed at most this often while there is work, and before every sleep.
const SNAPSHOT_EVERY: Nanos = 20_000_000;

impl<E: Commanded + 'static> Driver<E> {
    /// Bind the socket and start the thread.
    ///
    /// # Errors
    /// When the address cannot be bound or a descriptor cannot be made.
    pub fn start(endpoint: E, config: &Config, name: &str) -> io::Result<Self> {
        let mut socket = Socket::bind(config.bind, config.segmentation)?;
        let shared = Arc::new(Shared {
            commands: Mutex::new(Vec::new()),
            events: Mutex::new(VecDeque::new()),
            snapshot: Mutex::new(endpoint.snapshot()),
            failure: Mutex::new(None),
            stop: AtomicBool::new(false),
            wake: EventFd::new()?,
            ready: EventFd::new()?,
        });
        let of_thread = Arc::clone(&shared);
        let bytes = config.packet_bytes();
        let mut endpoint = endpoint;
        let thread = std::thread::Builder::new().name(name.to_owned()).spawn(move || {
            let result = run(&mut endpoint, &mut socket, &of_thread, bytes);
            let reason = match result {
                Ok(()) => "the endpoint was closed".to_owned(),
                Err(error) => format!("the socket failed: {error}"),
            };
            // Nobody may queue a command behind this back: `send` looks at `failure` under the lock of the commands.
            let mut commands = lock(&of_thread.commands);
            *lock(&of_thread.failure) = Some(reason.clone());
            for command in commands.drain(..) {
                endpoint.command(command, 0);
            }
            drop(commands);
            endpoint.abort(&reason);
            let mut events = lock(&of_thread.events);
            while let Some(event) = endpoint.poll_event() {
                events.push_back(event);
            }
            *lock(&of_thread.snapshot) = endpoint.snapshot();
            of_thread.ready.signal();
        })?;
        Ok(Self { shared, thread: Some(thread) })
    }

    /// Hand over a command. False, and the command is dropped, when the endpoint does not run any more.
    pub fn send(&self, command: E::Command) -> bool {
        let mut commands = lock(&self.shared.commands);
        if lock(&self.shared.failure).is_some() {
            return false;
        }
        commands.push(command);
        drop(commands);
        self.shared.wake.signal();
        true
    }

    /// Everything that ended since the last call; clears the descriptor of `ready_fd`.
    #[must_use]
    pub fn take_events(&self) -> Vec<Event> {
        self.shared.ready.clear();
        lock(&self.shared.events).drain(..).collect()
    }

    /// An eventfd that is readable while events wait.
    #[must_use]
    pub fn ready_fd(&self) -> RawFd {
        self.shared.ready.raw()
    }

    #[must_use]
    pub fn snapshot(&self) -> Snapshot {
        lock(&self.shared.snapshot).clone()
    }

    /// Why the thread ended by itself, if it did.
    #[must_use]
    pub fn failure(&self) -> Option<String> {
        lock(&self.shared.failure).clone()
    }

    /// Stop the thread and wait for it. Nothing touches any operation's memory afterwards.
    pub fn stop(&mut self) {
        self.join();
    }
}

impl<E: Commanded> Driver<E> {
    fn join(&mut self) {
        if let Some(thread) = self.thread.take() {
            self.shared.stop.store(true, Ordering::Release);
            self.shared.wake.signal();
            let _ = thread.join();
        }
    }
}

impl<E: Commanded> Drop for Driver<E> {
    fn drop(&mut self) {
        self.join();
    }
}

fn run<E: Commanded>(
    endpoint: &mut E,
    socket: &mut Socket,
    shared: &Shared<E::Command>,
    bytes: usize,
) -> io::Result<()> {
    let origin = Instant::now();
    let clock = || origin.elapsed().as_nanos() as Nanos;
    let buffers = if socket.segments() { JOINED_BATCH } else { BATCH };
    let mut incoming = Incoming::new(buffers, socket.buffer_size(bytes));
    let mut outgoing = Outgoing::new(BATCH, bytes);
    let mut now = clock();
    let mut published = now;
    loop {
        if shared.stop.load(Ordering::Acquire) {
            return Ok(());
        }
        let mut worked = false;
        for command in std::mem::take(&mut *lock(&shared.commands)) {
            endpoint.command(command, now);
            worked = true;
        }
        let received = socket.receive(&mut incoming)?;
        if received > 0 {
            now = clock();
            worked = true;
            for i in 0..received {
                if let Some(datagram) = incoming.get(i) {
                    for packet in datagram.packets() {
                        endpoint.handle(datagram.from, datagram.ce, packet, now);
                    }
                }
            }
        }
        if endpoint.poll_timeout().is_some_and(|at| now >= at) {
            endpoint.handle_timeout(now);
        }
        while outgoing.has_room() {
            let Some(transmit) = endpoint.poll_transmit(now, outgoing.next_buffer()) else { break };
            outgoing.push(transmit.to);
        }
        if outgoing.waiting() {
            worked |= socket.send(&mut outgoing)?;
        }
        let mut ended = false;
        while let Some(event) = endpoint.poll_event() {
            lock(&shared.events).push_back(event);
            ended = true;
        }
        if ended || now >= published + SNAPSHOT_EVERY {
            *lock(&shared.snapshot) = endpoint.snapshot();
            published = now;
        }
        if ended {
            shared.ready.signal();
        }
        if worked {
            continue;
        }
        now = clock();
        let timeout = endpoint.poll_timeout();
        if timeout.is_some_and(|at| now >= at) {
            continue;
        }
        *lock(&shared.snapshot) = endpoint.snapshot();
        published = now;
        socket.wait(&shared.wake, outgoing.waiting(), timeout.map(|at| at - now))?;
        shared.wake.clear();
        now = clock();
    }
}
