// SPDX-License-Identifier: Apache-2.0
//! The thread.

use std::collections::VecDeque;
use std::io;
use std::os::fd::RawFd;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::Instant;

use atp_proto::stats::Snapshot;
use atp_proto::{Config, Event, Nanos};

use crate::commanded::Commanded;
use crate::sys::{EventFd, PollSet};
use crate::udp::{Incoming, Outgoing, Socket};

/// Packets that are taken from or given to the kernel in one system call.
const BATCH: usize = 128;
/// The same where the kernel joins packets: buffers of 64 KB.
const JOINED_BATCH: usize = 8;
/// The snapshot for metrics is at most this old.
const SNAPSHOT_EVERY: Nanos = 20_000_000;

struct Shared<C> {
    commands: Mutex<Vec<C>>,
    events: Mutex<VecDeque<Event>>,
    snapshot: Mutex<Snapshot>,
    /// Why the thread does not use its UDP socket any more.
    failure: Mutex<Option<String>>,
    /// The thread has let go of its address and all operations have ended; the snapshot is the last.
    closed: (Mutex<bool>, Condvar),
    stop: AtomicBool,
    wake: EventFd,
    ready: EventFd,
}

/// A panic of another thread while it held the lock leaves plain data behind.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl<C> Shared<C> {
    fn send(&self, command: C) -> bool {
        let mut commands = lock(&self.commands);
        if lock(&self.failure).is_some() {
            return false;
        }
        commands.push(command);
        drop(commands);
        self.wake.signal();
        true
    }
}

/// A running endpoint. Dropping it stops the thread.
pub struct Driver<E: Commanded> {
    shared: Arc<Shared<E::Command>>,
    thread: Option<JoinHandle<()>>,
}

/// Hands commands to an endpoint, from any thread.
pub struct Sender<C>(Arc<Shared<C>>);

impl<C> Clone for Sender<C> {
    fn clone(&self) -> Self {
        Self(Arc::clone(&self.0))
    }
}

impl<C> Sender<C> {
    /// As `Driver::send`.
    pub fn send(&self, command: C) -> bool {
        self.0.send(command)
    }

    /// Figures as they are now, for an endpoint that tells somebody to read them.
    pub fn publish(&self, snapshot: Snapshot) {
        *lock(&self.0.snapshot) = snapshot;
    }
}

impl<E: Commanded + 'static> Driver<E> {
    /// Bind the socket and start the thread.
    ///
    /// # Errors
    /// When the address cannot be bound or a descriptor cannot be made.
    pub fn start(endpoint: E, config: &Config, name: &str) -> io::Result<Self> {
        Self::start_with(config, name, |_| endpoint)
    }

    /// The same for an endpoint that gives commands to itself.
    ///
    /// # Errors
    /// As `start`.
    pub fn start_with(config: &Config, name: &str, make: impl FnOnce(Sender<E::Command>) -> E) -> io::Result<Self> {
        let mut socket = Socket::bind(config.bind, config.segmentation)?;
        let shared = Arc::new(Shared {
            commands: Mutex::new(Vec::new()),
            events: Mutex::new(VecDeque::new()),
            snapshot: Mutex::default(),
            failure: Mutex::new(None),
            closed: (Mutex::new(false), Condvar::new()),
            stop: AtomicBool::new(false),
            wake: EventFd::new()?,
            ready: EventFd::new()?,
        });
        let mut endpoint = make(Sender(Arc::clone(&shared)));
        *lock(&shared.snapshot) = endpoint.snapshot();
        let of_thread = Arc::clone(&shared);
        let bytes = config.buffer_bytes();
        let thread = std::thread::Builder::new().name(name.to_owned()).spawn(move || {
            let result = run(&mut endpoint, &mut socket, &of_thread, bytes);
            // Whoever starts the next epoch binds the same address.
            drop(socket);
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
            drop(events);
            *lock(&of_thread.snapshot) = endpoint.snapshot();
            *lock(&of_thread.closed.0) = true;
            of_thread.closed.1.notify_all();
            of_thread.ready.signal();
            endpoint.linger();
        })?;
        Ok(Self { shared, thread: Some(thread) })
    }

    /// Hand over a command. False, and the command is dropped, when the endpoint does not run any more.
    pub fn send(&self, command: E::Command) -> bool {
        self.shared.send(command)
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

    /// After a command that ends the endpoint: wait until its address is free. The thread may live on for a moment.
    pub fn wait_closed(&self) {
        let (closed, condition) = &self.shared.closed;
        drop(condition.wait_while(lock(closed), |closed| !*closed).unwrap_or_else(PoisonError::into_inner));
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
    let mut poll = PollSet::default();
    // When the snapshot is due, if anything has changed.
    let mut publish: Option<Nanos> = None;
    let mut published = 0;
    // Whether there is more to send than one batch.
    let mut more = false;
    // Whether somebody waits to hear of an operation that ended.
    let mut ended = false;
    loop {
        poll.clear();
        let udp = poll.add(socket.raw(), true, outgoing.waiting());
        let wake = poll.add(shared.wake.raw(), true, false);
        endpoint.watch(&mut poll);
        let due = endpoint.poll_timeout().into_iter().chain(publish).min();
        poll.wait(if more { Some(0) } else { due.map(|at| at.saturating_sub(clock())) })?;
        let now = clock();
        if shared.stop.load(Ordering::Acquire) {
            return Ok(());
        }
        if poll.readable(wake) {
            shared.wake.clear();
            for command in std::mem::take(&mut *lock(&shared.commands)) {
                endpoint.command(command, now);
            }
        }
        if poll.readable(udp) {
            let received = socket.receive(&mut incoming)?;
            for i in 0..received {
                if let Some(datagram) = incoming.get(i) {
                    for packet in datagram.packets() {
                        endpoint.handle(datagram.from, datagram.ce, packet, now);
                    }
                }
            }
        }
        endpoint.serve(&poll, now);
        if endpoint.poll_timeout().is_some_and(|at| now >= at) {
            endpoint.handle_timeout(now);
        }
        if collect(endpoint, shared, now) {
            publish = Some(now);
            ended = true;
        }
        if publish.is_some_and(|at| now >= at) {
            *lock(&shared.snapshot) = endpoint.snapshot();
            published = now;
            publish = None;
        } else {
            publish = publish.or(Some(published + SNAPSHOT_EVERY));
        }
        if std::mem::take(&mut ended) {
            shared.ready.signal();
        }
        if endpoint.closing() {
            return Ok(());
        }
        while outgoing.has_room() {
            let Some(transmit) = endpoint.poll_transmit(now, outgoing.next_buffer()) else { break };
            outgoing.push(transmit.to, transmit.length);
        }
        more = !outgoing.has_room();
        if outgoing.waiting() {
            socket.send(&mut outgoing)?;
            // What the kernel does not take now wakes this thread when it does.
            more &= !outgoing.waiting();
        }
        ended = collect(endpoint, shared, now);
        if ended {
            publish = Some(now);
            more = true;
        }
    }
}

/// Pass on what ended; whether something did.
fn collect<E: Commanded>(endpoint: &mut E, shared: &Shared<E::Command>, now: Nanos) -> bool {
    endpoint.settle(now);
    let mut ended = false;
    while let Some(event) = endpoint.poll_event() {
        lock(&shared.events).push_back(event);
        ended = true;
    }
    ended
}
