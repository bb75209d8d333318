// SPDX-License-Identifier: Apache-2.0
//! The worker endpoint: operations of many groups over one sequence transport.
//!
//! A part that the caller submits is announced to the coordinator; when it is granted it becomes an operation of the
//! transport (`worker`), in the order of the grants, which all ranks see alike. Small parts come back summed at once.
//! Memory of an announced part is kept until the coordinator has decided: until then it may be granted, and then this rank
//! must take part, even if its caller has lost interest.

use std::collections::{HashMap, VecDeque};
use std::net::SocketAddrV4;

use crate::config::{Config, ConfigError};
use crate::control::channel::{Channel, Peer};
use crate::control::packet::{HEAD, Head, ROOM};
use crate::control::record::{Announce, Request, Shape, Verdict};
use crate::failure::{Code, Failure};
use crate::fixed::{self, Dtype, RAW_CONTROL};
use crate::op::{Kind, Memory};
use crate::stats::Snapshot;
use crate::wire::{HEADER_BYTES, Header, INLINE_BYTES};
use crate::worker::{Submission, Worker};
use crate::{Endpoint, Event, Nanos, Transmit};

/// A part of an operation: elements `begin .. begin + count` of a tensor of `total` elements.
pub struct Part {
    /// Comes back in the event.
    pub token: u64,
    pub group: u64,
    /// Of the operation in its group; parts come in order of (number, begin).
    pub number: u64,
    pub total: u64,
    pub begin: u64,
    pub kind: Kind,
    pub dtype: Dtype,
    pub count: u64,
    pub memory: Box<dyn Memory>,
}

/// An announced part.
struct Waiting {
    token: u64,
    number: u64,
    shape: Shape,
    count: u64,
    since: Nanos,
    memory: Box<dyn Memory>,
}

#[derive(Default)]
struct Group {
    waiting: VecDeque<Waiting>,
    /// Parts that the transport has.
    running: usize,
    /// Nothing more of this group can go well.
    broken: Option<Failure>,
    /// The last operation that failed alone.
    failed: Option<(u64, Failure)>,
    left: bool,
}

/// A part that the transport has.
struct Running {
    token: u64,
    group: u64,
}

/// Share of float values that may become 0 at a fixed scale before a warning, as 1 / this.
const WARN_SHARE: u64 = 100;
/// Keepalives go out this many times within the stall time-out.
const KEEPALIVES: u64 = 8;
const KEEPALIVE_MIN: Nanos = 20_000_000;
const KEEPALIVE_MAX: Nanos = 2_000_000_000;

/// How often an endpoint lets its peer hear from it.
#[must_use]
pub fn keepalive(config: &Config) -> Nanos {
    (config.stall_timeout / KEEPALIVES).clamp(KEEPALIVE_MIN, KEEPALIVE_MAX)
}

/// The worker's endpoint.
pub struct Member {
    config: Config,
    worker: Worker,
    channel: Channel,
    header: Header,
    groups: HashMap<u64, Group>,
    running: HashMap<u64, Running>,
    /// Parts that were granted, of all groups.
    granted: u64,
    trainers: u8,
    lost: Option<Failure>,
    events: VecDeque<Event>,
    /// Float values that were granted.
    floats: u64,
    warned: bool,
    warning: Option<String>,
    control_packets: u64,
    rejected_tag: u64,
    failed: u64,
    inline: u64,
}

impl Member {
    /// A worker at the start of an epoch. `incarnation` differs from start to start.
    ///
    /// # Errors
    /// When the assignment is that of a parameter server.
    pub fn new(config: Config, incarnation: u32) -> Result<Self, ConfigError> {
        let worker = Worker::new(config.clone())?.of_incarnation(incarnation);
        let mut channel = Channel::new(incarnation, config.epoch);
        channel.ask();
        let header = Header { raw_float: true, aggregator_index: RAW_CONTROL, ..Header::of_worker(&config) };
        Ok(Self {
            config,
            worker,
            channel,
            header,
            groups: HashMap::new(),
            running: HashMap::new(),
            granted: 0,
            trainers: 0,
            lost: None,
            events: VecDeque::new(),
            floats: 0,
            warned: false,
            warning: None,
            control_packets: 0,
            rejected_tag: 0,
            failed: 0,
            inline: 0,
        })
    }

    #[must_use]
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// Why nothing goes on in this epoch, if so.
    #[must_use]
    pub fn lost(&self) -> Option<&Failure> {
        self.lost.as_ref()
    }

    /// Parts without an event, of all groups.
    #[must_use]
    pub fn outstanding(&self) -> usize {
        self.running.len() + self.groups.values().map(|g| g.waiting.len()).sum::<usize>()
    }

    fn end(&mut self, token: u64, error: Option<Failure>, memory: Box<dyn Memory>) {
        self.failed += u64::from(error.is_some());
        self.events.push_back(Event { token, error, memory });
    }

    /// Start a part. Its end comes as an event, also when it cannot be.
    pub fn submit(&mut self, part: Part, now: Nanos) {
        if let Some(failure) = self.refusal(&part) {
            self.end(part.token, Some(failure), part.memory);
            return;
        }
        let shape = Shape { kind: part.kind, dtype: part.dtype, total: part.total };
        let source = part.memory.source();
        let small = source.len() <= INLINE_BYTES;
        let mut inline = Vec::new();
        if small {
            inline.extend_from_slice(source);
            fixed::swap_inline(part.dtype, &mut inline);
        }
        let exponent = if small || !self.config.auto_scale { 0 } else { fixed::largest_exponent(part.dtype, source) };
        let announce = Announce {
            group: part.group,
            number: part.number,
            shape,
            begin: part.begin,
            count: part.count as u32,
            exponent,
            inline: &inline,
        };
        self.channel.push(Request::Announce(announce).pack());
        let Part { token, number, count, memory, .. } = part;
        let group = self.groups.entry(part.group).or_default();
        group.waiting.push_back(Waiting { token, number, shape, count, since: now, memory });
    }

    /// Why this part cannot start, if so.
    fn refusal(&self, part: &Part) -> Option<Failure> {
        let protocol = |text: String| Some(Failure::new(Code::Protocol, text));
        if let Some(failure) = &self.lost {
            return Some(failure.clone());
        }
        if let Some(group) = self.groups.get(&part.group) {
            if let Some(failure) = &group.broken {
                return Some(failure.clone());
            }
            if let Some((number, failure)) = &group.failed
                && *number == part.number
            {
                return Some(failure.clone());
            }
            if group.left {
                return protocol(format!("this rank has left group {:#x}", part.group));
            }
        }
        if part.kind == Kind::Mean && part.dtype == Dtype::Int32 {
            return protocol("mean of int32 is not defined: use sum, or a float dtype".to_owned());
        }
        let bytes = usize::try_from(part.count).ok().and_then(|c| c.checked_mul(part.dtype.size()));
        let none = part.count == 0 && part.total > 0;
        if none || part.count > u64::from(u32::MAX) || bytes != Some(part.memory.source().len()) {
            return protocol(format!(
                "{} {} elements do not match a buffer of {} bytes",
                part.count,
                part.dtype.name(),
                part.memory.source().len()
            ));
        }
        if part.begin.checked_add(part.count).is_none_or(|end| end > part.total) {
            return protocol(format!(
                "elements {}+{} are beyond the {} of the tensor",
                part.begin, part.count, part.total
            ));
        }
        None
    }

    /// This rank gives the group up: its outstanding and later operations fail at all ranks.
    pub fn abort(&mut self, group: u64, code: Code, reason: &str, _now: Nanos) {
        if self.lost.is_some() {
            return;
        }
        let entry = self.groups.entry(group).or_default();
        if entry.broken.is_none() {
            entry.broken = Some(Failure::breaking(code, format!("rank {}: {reason}", self.config.rank)));
            self.channel.push(Request::Abort { group, code, text: reason }.pack());
        }
    }

    /// This rank will not use the group any more.
    pub fn leave(&mut self, group: u64, now: Nanos) {
        if self.lost.is_some() {
            self.groups.remove(&group);
            return;
        }
        let waits = self.groups.get(&group).is_some_and(|g| !g.waiting.is_empty());
        if waits {
            self.abort(group, Code::PeerGone, "it left the process group with operations outstanding", now);
        }
        self.channel.push(Request::Leave { group }.pack());
        let entry = self.groups.entry(group).or_default();
        entry.left = true;
        self.forget_if_done(group);
    }

    fn forget_if_done(&mut self, number: u64) {
        if self.groups.get(&number).is_some_and(|g| g.left && g.running == 0 && g.waiting.is_empty()) {
            self.groups.remove(&number);
        }
    }

    /// How many trainers are connected to this sidecar.
    pub fn set_attached(&mut self, trainers: u32, _now: Nanos) {
        let trainers = u8::try_from(trainers).unwrap_or(u8::MAX);
        if trainers != self.trainers {
            self.trainers = trainers;
            self.channel.ask();
        }
    }

    /// Something that the user should hear once.
    pub fn poll_warning(&mut self) -> Option<String> {
        self.warning.take()
    }

    /// End everything: what is outstanding and what comes later fails with `failure`.
    pub fn fail_all(&mut self, failure: Failure) {
        if self.lost.is_some() {
            return;
        }
        let reason = failure.text.clone();
        self.lost = Some(Failure { broken: true, ..failure });
        for (_, group) in std::mem::take(&mut self.groups) {
            for part in group.waiting {
                let failure = self.lost.clone();
                self.end(part.token, failure, part.memory);
            }
        }
        self.worker.cancel_all(&reason);
        self.collect();
    }

    fn handle_control(&mut self, data: &[u8], now: Nanos) {
        let Some((head, bytes)) = Head::unpack(&data[HEADER_BYTES..]) else { return };
        let (peer, records) = self.channel.handle(&head, bytes, now);
        match peer {
            Peer::Stale => {}
            Peer::Restarted => self.fail_all(Failure::breaking(
                Code::PeerGone,
                format!(
                    "the parameter server {} has started again within epoch {}: what it had summed is lost; the job has to \
                     be restarted (it gets a new epoch)",
                    self.config.servers[0], self.config.epoch
                ),
            )),
            Peer::Same => {
                for record in records {
                    let known = Verdict::unpack(record).is_some_and(|verdict| self.obey(&verdict, now));
                    if !known {
                        self.fail_all(Failure::breaking(
                            Code::Internal,
                            "the parameter server's verdict does not fit what this worker announced",
                        ));
                    }
                }
            }
        }
    }

    /// False when the verdict does not fit.
    fn obey(&mut self, verdict: &Verdict<'_>, now: Nanos) -> bool {
        if self.lost.is_some() {
            return true;
        }
        match verdict {
            Verdict::Grant { group, number, exponent } => self.run(*group, *number, *exponent, now),
            Verdict::Sum { group, number, values } => self.take_sum(*group, *number, values),
            Verdict::Mismatch { group, number, known } => {
                self.take_mismatch(*group, *number, known);
                true
            }
            Verdict::Broken { group, code, text } => {
                self.break_group(*group, Failure::breaking(*code, *text));
                true
            }
            Verdict::Lost { code, text } => {
                self.fail_all(Failure::breaking(*code, *text));
                true
            }
        }
    }

    fn next_part(&mut self, group: u64, number: u32) -> Option<Waiting> {
        self.groups.get_mut(&group)?.waiting.pop_front_if(|p| p.number as u32 == number)
    }

    fn run(&mut self, group: u64, number: u32, exponent: u8, now: Nanos) -> bool {
        let Some(part) = self.next_part(group, number) else { return false };
        let auto = self.config.auto_scale && part.shape.dtype != Dtype::Int32;
        let scale = auto.then(|| fixed::scale_of(exponent, self.config.workers.len(), self.config.addend_limit));
        if part.shape.dtype != Dtype::Int32 {
            self.floats += part.count;
        }
        let token = self.granted;
        self.granted += 1;
        self.running.insert(token, Running { token: part.token, group });
        if let Some(entry) = self.groups.get_mut(&group) {
            entry.running += 1;
        }
        let Shape { kind, dtype, .. } = part.shape;
        let submission = Submission { token, op_id: token, kind, dtype, count: part.count, scale, memory: part.memory };
        self.worker.submit(submission, now);
        self.collect();
        true
    }

    fn take_sum(&mut self, group: u64, number: u32, values: &[u8]) -> bool {
        let Some(mut part) = self.next_part(group, number) else { return false };
        if part.memory.target().len() != values.len() {
            return false;
        }
        part.memory.target().copy_from_slice(values);
        fixed::swap_inline(part.shape.dtype, part.memory.target());
        self.inline += 1;
        let failure = self.groups.get(&group).and_then(|g| g.broken.clone());
        self.end(part.token, failure, part.memory);
        self.forget_if_done(group);
        true
    }

    fn take_mismatch(&mut self, number: u64, operation: u64, known: &[(u16, Shape)]) {
        let rank = self.config.rank;
        let Some(group) = self.groups.get_mut(&number) else { return };
        let own = group.waiting.iter().find(|p| p.number == operation).map(|p| p.shape);
        let own = own.or_else(|| known.iter().find(|k| k.0 == rank).map(|k| k.1));
        let others: Vec<String> = known
            .iter()
            .filter(|k| k.0 != rank && Some(k.1) != own)
            .map(|(r, shape)| format!("rank {r} has {}", shape.text()))
            .collect();
        let text = format!(
            "all_reduce #{operation}: {}, this rank ({rank}) has {}: all ranks must call the same operations in the same \
             order, with the same number of elements, dtype and reduction",
            others.join(", "),
            own.map_or_else(|| "another".to_owned(), |s| s.text())
        );
        let failure = Failure::new(Code::Mismatch, text);
        group.failed = Some((operation, failure.clone()));
        let (gone, stay): (Vec<Waiting>, Vec<Waiting>) =
            std::mem::take(&mut group.waiting).into_iter().partition(|p| p.number == operation);
        group.waiting = stay.into();
        for part in gone {
            self.end(part.token, Some(failure.clone()), part.memory);
        }
        self.forget_if_done(number);
    }

    fn break_group(&mut self, number: u64, failure: Failure) {
        let Some(group) = self.groups.get_mut(&number) else { return };
        let failure = group.broken.get_or_insert(failure).clone();
        for part in std::mem::take(&mut group.waiting) {
            self.end(part.token, Some(failure.clone()), part.memory);
        }
        self.forget_if_done(number);
    }

    /// Take what ended in the transport.
    fn collect(&mut self) {
        while let Some(event) = self.worker.poll_event() {
            let Some(running) = self.running.remove(&event.token) else { continue };
            let group = self.groups.get_mut(&running.group);
            let broken = group.and_then(|g| {
                g.running -= 1;
                g.broken.clone()
            });
            let error = self.lost.clone().or(event.error).or(broken);
            self.end(running.token, error, event.memory);
            self.forget_if_done(running.group);
        }
        if self.lost.is_none()
            && let Some(failure) = self.worker.poisoned()
        {
            let failure = failure.clone();
            self.fail_all(failure);
        }
        self.look_at_scale();
    }

    /// Warn once when a fixed scale is too small for the gradients.
    fn look_at_scale(&mut self) {
        if self.warned || self.config.auto_scale || !self.running.is_empty() {
            return;
        }
        let zeroed = self.worker.counters().values_rounded_to_zero;
        if zeroed * WARN_SHARE > self.floats {
            self.warned = true;
            let share = zeroed as f64 * 100.0 / self.floats.max(1) as f64;
            let scale = self.config.scale;
            self.warning = Some(format!(
                "{share:.1} % of the gradient values are smaller than {:.1e} and became 0 at scale {scale:e}: set spec.scale \
                 to Auto, or to a larger number",
                0.5 / scale
            ));
        }
    }

    fn silence(&self) -> Option<Nanos> {
        let oldest = self.groups.values().filter_map(|g| g.waiting.front()).map(|p| p.since).min()?;
        Some(oldest.max(self.channel.heard_at().unwrap_or(0)) + self.config.stall_timeout)
    }
}

impl Endpoint for Member {
    fn handle(&mut self, from: SocketAddrV4, ce: bool, data: &[u8], now: Nanos) {
        let control = Header::unpack(data).filter(|h| h.raw_float && h.aggregator_index == RAW_CONTROL);
        match control {
            Some(h) if h.is_ack && h.job_id == self.config.job_id && from == self.config.servers[0] => {
                match self.config.seal.open(data) {
                    Some(data) => self.handle_control(data, now),
                    None => self.rejected_tag += 1,
                }
            }
            _ => {
                self.worker.handle(from, ce, data, now);
                self.collect();
            }
        }
    }

    fn poll_transmit(&mut self, now: Nanos, buffer: &mut [u8]) -> Option<Transmit> {
        if self.channel.wants_to_send(now) {
            buffer[..HEADER_BYTES].copy_from_slice(&self.header.pack());
            let room = &mut buffer[HEADER_BYTES..HEADER_BYTES + HEAD + ROOM];
            let length = HEADER_BYTES + self.channel.write(self.trainers, now, room);
            let length = self.config.seal.close(buffer, length);
            self.control_packets += 1;
            return Some(Transmit { to: self.config.servers[0], length });
        }
        self.worker.poll_transmit(now, buffer)
    }

    fn poll_timeout(&self) -> Option<Nanos> {
        let alive = Some(self.channel.sent_at() + keepalive(&self.config));
        [alive, self.channel.poll_timeout(), self.worker.poll_timeout(), self.silence()].into_iter().flatten().min()
    }

    fn handle_timeout(&mut self, now: Nanos) {
        self.channel.handle_timeout(now);
        if now >= self.channel.sent_at() + keepalive(&self.config) {
            self.channel.ask();
        }
        if self.worker.poll_timeout().is_some_and(|at| now >= at) {
            self.worker.handle_timeout(now);
            self.collect();
        }
        if self.silence().is_some_and(|at| now >= at) {
            self.fail_all(Failure::breaking(
                Code::Stalled,
                format!(
                    "no progress for {} s: the parameter server {} does not answer; see whether its pod and the network \
                     to it are alive",
                    self.config.stall_timeout as f64 * 1e-9,
                    self.config.servers[0]
                ),
            ));
        }
    }

    fn poll_event(&mut self) -> Option<Event> {
        self.events.pop_front()
    }

    fn snapshot(&self) -> Snapshot {
        let mut snapshot = self.worker.snapshot();
        let c = &mut snapshot.counters;
        c.control_packets = self.control_packets;
        c.rejected_tag += self.rejected_tag;
        c.control_retransmits = self.channel.resent;
        c.parts_granted = self.granted;
        c.inline_operations = self.inline;
        c.ops_completed += self.inline;
        c.ops_failed = self.failed;
        snapshot
    }
}
