// SPDX-License-Identifier: Apache-2.0
//! The parameter server's endpoint: the sums of one shard, and on shard 0 the coordinator with a channel to each worker.

use std::collections::VecDeque;
use std::net::SocketAddrV4;

use crate::config::{Config, ConfigError};
use crate::control::channel::{Channel, Peer};
use crate::control::packet::{HEAD, Head, ROOM};
use crate::control::record::Request;
use crate::coordinator::{Coordinator, To};
use crate::coverage::{Coverage, Topology};
use crate::failure::{Code, Failure};
use crate::fixed::RAW_CONTROL;
use crate::member::keepalive;
use crate::server::ParameterServer;
use crate::stats::Snapshot;
use crate::wire::{HEADER_BYTES, Header};
use crate::{Endpoint, Event, Nanos, Transmit};

/// What the coordinator knows of a worker.
struct Line {
    channel: Channel,
    address: SocketAddrV4,
    header: Header,
    coverage: Coverage,
    trainers: u8,
    /// Since when no trainer is connected.
    idle_since: Option<Nanos>,
    /// Is in `ready`.
    queued: bool,
}

/// The coordinator and its channels.
struct Desk {
    coordinator: Coordinator,
    lines: Vec<Line>,
    /// Ranks that may have something to be sent.
    ready: VecDeque<u16>,
    /// Not later than the next timer of any channel.
    timer: Option<Nanos>,
    look_at: Nanos,
    started_at: Option<Nanos>,
    control_packets: u64,
}

/// The parameter server's endpoint.
pub struct Host {
    config: Config,
    incarnation: u32,
    topology: Topology,
    server: ParameterServer,
    desk: Option<Desk>,
    /// Control packets without the tag of this epoch.
    rejected_tag: u64,
}

impl Host {
    /// A parameter server at the start of an epoch. `incarnation` differs from start to start.
    ///
    /// # Errors
    /// When the assignment is that of a worker.
    pub fn new(config: Config, incarnation: u32) -> Result<Self, ConfigError> {
        let server = ParameterServer::new(config.clone())?;
        let topology = Topology::new(&config);
        let line = |w: &crate::config::WorkerEntry| Line {
            channel: Channel::new(incarnation, config.epoch),
            address: w.address,
            header: Header {
                job_id: config.job_id,
                bitmap0: 1 << w.bit,
                bitmap1: 1 << w.rack,
                is_ack: true,
                raw_float: true,
                aggregator_index: RAW_CONTROL,
                ..Header::default()
            },
            coverage: Coverage::single(w.rack, w.bit),
            trainers: 0,
            idle_since: Some(0),
            queued: false,
        };
        let desk = (config.rank == 0).then(|| Desk {
            coordinator: Coordinator::new(config.workers.len() as u16),
            lines: config.workers.iter().map(line).collect(),
            ready: VecDeque::new(),
            timer: None,
            look_at: 0,
            started_at: None,
            control_packets: 0,
        });
        Ok(Self { config, incarnation, topology, server, desk, rejected_tag: 0 })
    }

    #[must_use]
    pub fn config(&self) -> &Config {
        &self.config
    }

    /// The coordinator; `None` on other shards than 0.
    #[must_use]
    pub fn coordinator(&self) -> Option<&Coordinator> {
        self.desk.as_ref().map(|d| &d.coordinator)
    }

    fn handle_control(&mut self, from: SocketAddrV4, h: &Header, data: &[u8], now: Nanos) {
        let coverage = self.topology.coverage(h);
        let Some(desk) = self.desk.as_mut() else { return };
        let found = desk.lines.iter().position(|l| l.address == from && Some(l.coverage) == coverage);
        let (Some(rank), Some((head, bytes))) = (found, Head::unpack(&data[HEADER_BYTES..])) else { return };
        desk.started_at.get_or_insert(now);
        let line = &mut desk.lines[rank];
        let (mut peer, mut records) = line.channel.handle(&head, bytes, now);
        if peer == Peer::Restarted && head.epoch == self.config.epoch as u16 {
            let fresh = line.channel.is_fresh();
            line.channel = Channel::new(self.incarnation, self.config.epoch);
            (peer, records) = line.channel.handle(&head, bytes, now);
            if !fresh {
                records.clear();
                desk.coordinator.lose(Failure::breaking(
                    Code::PeerGone,
                    format!(
                        "the sidecar of rank {rank} ({}) has started again within epoch {}; the job has to be restarted \
                         (it gets a new epoch)",
                        from.ip(),
                        self.config.epoch
                    ),
                ));
            }
        }
        let line = &mut desk.lines[rank];
        if peer == Peer::Same {
            if head.trainers == 0 && line.trainers != 0 {
                line.idle_since = Some(now);
            } else if head.trainers != 0 {
                line.idle_since = None;
            }
            line.trainers = head.trainers;
        }
        for record in records {
            let fine = Request::unpack(record).is_some_and(|r| desk.coordinator.handle(rank as u16, &r, now));
            if !fine {
                desk.coordinator.lose(Failure::breaking(
                    Code::Protocol,
                    format!("the sidecar of rank {rank} ({}) broke the protocol of the control channel", from.ip()),
                ));
            }
        }
        desk.touch(rank as u16);
        desk.deliver();
    }
}

impl Desk {
    /// Something of this rank's channel may have changed.
    fn touch(&mut self, rank: u16) {
        let line = &mut self.lines[usize::from(rank)];
        if let Some(at) = line.channel.poll_timeout() {
            self.timer = Some(self.timer.map_or(at, |t| t.min(at)));
        }
        if !line.queued {
            line.queued = true;
            self.ready.push_back(rank);
        }
    }

    /// Hand the coordinator's verdicts to the channels.
    fn deliver(&mut self) {
        while let Some((to, record)) = self.coordinator.poll_verdict() {
            match to {
                To::One(rank) => {
                    self.lines[usize::from(rank)].channel.push(record);
                    self.touch(rank);
                }
                To::All => {
                    for rank in 0..self.lines.len() as u16 {
                        self.lines[usize::from(rank)].channel.push(record.clone());
                        self.touch(rank);
                    }
                }
            }
        }
    }

    fn poll_transmit(&mut self, now: Nanos, buffer: &mut [u8]) -> Option<Transmit> {
        while let Some(&rank) = self.ready.front() {
            let line = &mut self.lines[usize::from(rank)];
            if !line.channel.wants_to_send(now) {
                line.queued = false;
                self.ready.pop_front();
                continue;
            }
            buffer[..HEADER_BYTES].copy_from_slice(&line.header.pack());
            let length =
                HEADER_BYTES + line.channel.write(0, now, &mut buffer[HEADER_BYTES..HEADER_BYTES + HEAD + ROOM]);
            let to = line.address;
            self.control_packets += 1;
            // The next rank comes first: one that has much to hear does not hold the others up.
            self.ready.rotate_left(1);
            if let Some(at) = self.lines[usize::from(rank)].channel.poll_timeout() {
                self.timer = Some(self.timer.map_or(at, |t| t.min(at)));
            }
            return Some(Transmit { to, length });
        }
        None
    }

    fn handle_timeout(&mut self, config: &Config, now: Nanos) {
        if self.timer.is_some_and(|at| now >= at) {
            self.timer = None;
            for rank in 0..self.lines.len() as u16 {
                let channel = &mut self.lines[usize::from(rank)].channel;
                if channel.poll_timeout().is_some_and(|at| now >= at) {
                    channel.handle_timeout(now);
                }
                if channel.poll_timeout().is_some() || channel.wants_to_send(now) {
                    self.touch(rank);
                }
            }
        }
        if self.coordinator.waits() && now >= self.look_at {
            self.look_at = now + keepalive(config);
            self.look_for_the_silent(config, now);
            self.deliver();
        }
    }

    /// Whom others wait for, and who is not there.
    fn look_for_the_silent(&mut self, config: &Config, now: Nanos) {
        let limit = config.stall_timeout;
        let seconds = limit as f64 * 1e-9;
        let begin = self.started_at.unwrap_or(now);
        let mut gone = Vec::new();
        let mut idle = Vec::new();
        for (rank, since, group) in self.coordinator.awaited() {
            let line = &self.lines[usize::from(rank)];
            let heard = line.channel.heard_at().unwrap_or(begin);
            if now >= heard.max(since) + limit {
                gone.push(rank);
            } else if line.idle_since.is_some_and(|at| now >= at.max(since) + limit) {
                idle.push((rank, group));
            }
        }
        gone.sort_unstable();
        gone.dedup();
        if !gone.is_empty() {
            let names: Vec<String> = gone
                .iter()
                .take(8)
                .map(|r| format!("rank {r} ({})", self.lines[usize::from(*r)].address.ip()))
                .collect();
            let more = gone.len().saturating_sub(8);
            let more = if more > 0 { format!(" and {more} more") } else { String::new() };
            let verb = if gone.len() == 1 { "is" } else { "are" };
            let names = names.join(", ");
            self.coordinator.lose(Failure::breaking(
                Code::Stalled,
                format!(
                    "no progress for {seconds} s: the sidecar of {names}{more} {verb} silent; see whether those pods and the \
                     network between them are alive"
                ),
            ));
            return;
        }
        for (rank, group) in idle {
            let address = self.lines[usize::from(rank)].address.ip();
            self.coordinator.break_group(
                group,
                Failure::breaking(
                    Code::PeerGone,
                    format!("rank {rank} ({address}) has no trainer for {seconds} s, and the others wait for it"),
                ),
            );
        }
    }
}

impl Endpoint for Host {
    fn handle(&mut self, from: SocketAddrV4, ce: bool, data: &[u8], now: Nanos) {
        let control = Header::unpack(data).filter(|h| h.raw_float && h.aggregator_index == RAW_CONTROL);
        match control {
            Some(h) if !h.is_ack && h.job_id == self.config.job_id && self.desk.is_some() => {
                match self.config.seal.open(data) {
                    Some(data) => self.handle_control(from, &h, data, now),
                    None => self.rejected_tag += 1,
                }
            }
            _ => self.server.handle(from, ce, data, now),
        }
    }

    fn poll_transmit(&mut self, now: Nanos, buffer: &mut [u8]) -> Option<Transmit> {
        if let Some(control) = self.desk.as_mut().and_then(|d| d.poll_transmit(now, buffer)) {
            return Some(Transmit { length: self.config.seal.close(buffer, control.length), ..control });
        }
        self.server.poll_transmit(now, buffer)
    }

    fn poll_timeout(&self) -> Option<Nanos> {
        let desk = self.desk.as_ref();
        let look = desk.filter(|d| d.coordinator.waits()).map(|d| d.look_at);
        [self.server.poll_timeout(), desk.and_then(|d| d.timer), look].into_iter().flatten().min()
    }

    fn handle_timeout(&mut self, now: Nanos) {
        if self.server.poll_timeout().is_some_and(|at| now >= at) {
            self.server.handle_timeout(now);
        }
        if let Some(desk) = self.desk.as_mut() {
            desk.handle_timeout(&self.config, now);
        }
    }

    fn poll_event(&mut self) -> Option<Event> {
        None
    }

    fn snapshot(&self) -> Snapshot {
        let mut snapshot = self.server.snapshot();
        snapshot.counters.rejected_tag += self.rejected_tag;
        if let Some(desk) = &self.desk {
            let c = &mut snapshot.counters;
            c.parts_granted = desk.coordinator.tally.parts_granted;
            c.inline_operations = desk.coordinator.tally.inline_operations;
            c.control_packets = desk.control_packets;
            c.control_retransmits = desk.lines.iter().map(|l| l.channel.resent).sum();
        }
        snapshot
    }
}
