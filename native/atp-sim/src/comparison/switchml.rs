// SPDX-License-Identifier: Apache-2.0
//! SwitchML's worker (Sapio et al., NSDI '21, algorithm 4): the stream of all tensors is cut into chunks, chunk i goes
//! through slot i mod S, and the slots are independent and clock themselves. A slot sends its next chunk when the sum of
//! the one before it is here; what is lost is found by the slot's time-out alone, and stops that slot alone.
//!
//! It runs over ATP's switch and parameter server. The server takes the place of SwitchML's second pool of slots: it
//! keeps the last sums for workers that missed them, for as many chunks as its ring has. A packet that is sent again is
//! ATP's repeat, which does what SwitchML's switch does: it adds what is missing, and has a complete sum sent again. The
//! ranks submit the same tensors, so there are no descriptors.

use std::collections::VecDeque;
use std::net::SocketAddrV4;
use std::ops::Range;

use atp_proto::failure::{Code, Failure};
use atp_proto::op::Kind;
use atp_proto::stats::{Counters, Snapshot};
use atp_proto::wire::{HEADER_BYTES, Header};
use atp_proto::worker::Submission;
use atp_proto::{Config, Endpoint, Event, Nanos, Transmit, fixed, seq};

use super::Trainee;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// Its next chunk is not there yet.
    Idle,
    /// Its packet waits to be sent.
    Ready,
    /// Its sum is waited for.
    Sent,
}

#[derive(Clone, Copy, Debug)]
struct Slot {
    /// The chunk that it is at, or the next one when idle.
    chunk: u64,
    state: State,
    sends: u32,
    sent_at: Nanos,
}

struct Tensor {
    submission: Submission,
    first: u64,
    /// Chunks, and those of them without a sum.
    chunks: u64,
    remaining: u64,
}

pub struct Worker {
    config: Config,
    header: Header,
    /// First aggregatorIndex; slot i has the i-th behind it.
    region: u32,
    slots: Vec<Slot>,
    ready: VecDeque<usize>,
    /// Slots in the order in which they sent, with the time: all have the same time-out.
    sent: VecDeque<(usize, Nanos)>,
    waiting: u64,
    tensors: VecDeque<Tensor>,
    /// First chunk behind all tensors.
    tail: u64,
    events: VecDeque<Event>,
    counters: Counters,
}

impl Worker {
    #[must_use]
    pub fn new(config: Config) -> Self {
        let header = Header::of_worker(&config);
        let region = config.regions[0];
        let slot = |i| Slot { chunk: u64::from(i), state: State::Idle, sends: 0, sent_at: 0 };
        Self {
            header,
            region: region.start,
            slots: (0..region.size).map(slot).collect(),
            ready: VecDeque::new(),
            sent: VecDeque::new(),
            waiting: 0,
            tensors: VecDeque::new(),
            tail: 0,
            events: VecDeque::new(),
            counters: Counters::default(),
            config,
        }
    }

    /// Let a slot send its chunk, if that is there.
    fn start(&mut self, slot: usize) {
        let s = &mut self.slots[slot];
        if s.state == State::Idle && s.chunk < self.tail {
            s.state = State::Ready;
            s.sends = 0;
            self.ready.push_back(slot);
        }
    }

    fn tensor(&self, chunk: u64) -> usize {
        self.tensors.partition_point(|t| t.first + t.chunks <= chunk)
    }

    fn bytes(&self, tensor: &Tensor, chunk: u64) -> Range<usize> {
        let first = (chunk - tensor.first) as usize * self.config.values;
        let end = (first + self.config.values).min(tensor.submission.count as usize);
        let size = tensor.submission.dtype.size();
        first * size..end * size
    }

    /// The front of `sent`, when it still waits.
    fn oldest(&self) -> Option<Option<(usize, Nanos)>> {
        let (slot, at) = *self.sent.front()?;
        let s = &self.slots[slot];
        Some((s.state == State::Sent && s.sent_at == at).then_some((slot, at)))
    }

    /// Drop what is answered from the front of `sent`.
    fn forget_answered(&mut self) {
        while self.oldest() == Some(None) {
            self.sent.pop_front();
        }
    }

    fn take_sum(&mut self, chunk: u64, payload: &[u8]) {
        let i = self.tensor(chunk);
        let bytes = self.bytes(&self.tensors[i], chunk);
        let tensor = &mut self.tensors[i];
        let s = &mut tensor.submission;
        let divisor = if s.kind == Kind::Mean { self.config.workers.len() as f64 } else { 1.0 };
        let scale = s.scale.unwrap_or(self.config.scale);
        fixed::decode(s.dtype, payload, scale, divisor, &mut s.memory.target()[bytes]);
        tensor.remaining -= 1;
        while let Some(t) = self.tensors.pop_front_if(|t| t.remaining == 0) {
            self.counters.ops_completed += 1;
            let Submission { token, memory, .. } = t.submission;
            self.events.push_back(Event { token, error: None, memory });
        }
    }
}

impl Endpoint for Worker {
    fn handle(&mut self, _from: SocketAddrV4, _ce: bool, data: &[u8], _now: Nanos) {
        self.counters.packets_received += 1;
        self.counters.bytes_received += data.len() as u64;
        let Some(h) = Header::unpack(data) else { return };
        if !h.is_ack || h.raw_float || h.job_id != self.config.job_id || data.len() != self.config.packet_bytes() {
            self.counters.rejected_kind += 1;
            return;
        }
        self.counters.ack_packets += 1;
        // S divides the sequence space.
        let count = self.slots.len();
        let i = h.sequence as usize % count;
        let slot = &mut self.slots[i];
        let chunk = slot.chunk;
        if slot.state == State::Idle || slot.sends == 0 || seq::wrap(chunk) != h.sequence {
            self.counters.duplicates += 1;
            return;
        }
        if slot.state == State::Sent {
            self.waiting -= 1;
        } else {
            self.ready.retain(|r| *r != i);
        }
        slot.state = State::Idle;
        slot.chunk += count as u64;
        self.forget_answered();
        self.take_sum(chunk, &data[HEADER_BYTES..]);
        self.start(i);
    }

    fn poll_transmit(&mut self, now: Nanos, buffer: &mut [u8]) -> Option<Transmit> {
        let i = self.ready.pop_front()?;
        let slot = &mut self.slots[i];
        slot.state = State::Sent;
        slot.sends += 1;
        slot.sent_at = now;
        let (chunk, again) = (slot.chunk, slot.sends > 1);
        self.sent.push_back((i, now));
        self.waiting += 1;
        let length = self.config.packet_bytes();
        let header = Header {
            sequence: seq::wrap(chunk),
            collision: again,
            aggregator_index: (self.region + i as u32) as u16,
            ..self.header
        };
        buffer[..HEADER_BYTES].copy_from_slice(&header.pack());
        let tensor = &self.tensors[self.tensor(chunk)];
        let s = &tensor.submission;
        let source = &s.memory.source()[self.bytes(tensor, chunk)];
        let scale = s.scale.unwrap_or(self.config.scale);
        let encoded =
            fixed::encode(s.dtype, source, scale, self.config.addend_limit, &mut buffer[HEADER_BYTES..length]);
        assert!(encoded.fits, "SwitchML has no other path for values without an integer");
        self.counters.packets_sent += 1;
        self.counters.bytes_sent += length as u64;
        self.counters.gradient_packets += 1;
        self.counters.retransmits += u64::from(again);
        Some(Transmit { to: self.config.servers[0], length })
    }

    fn poll_timeout(&self) -> Option<Nanos> {
        self.oldest().flatten().map(|(_, at)| at + self.config.min_rto)
    }

    fn handle_timeout(&mut self, now: Nanos) {
        while let Some((slot, at)) = self.oldest().flatten()
            && now >= at + self.config.min_rto
        {
            self.counters.timeouts += 1;
            self.sent.pop_front();
            self.waiting -= 1;
            self.slots[slot].state = State::Ready;
            self.ready.push_back(slot);
            self.forget_answered();
        }
    }

    fn poll_event(&mut self) -> Option<Event> {
        self.events.pop_front()
    }

    fn snapshot(&self) -> Snapshot {
        let window = self.slots.len() as f64;
        let open = self.waiting + self.ready.len() as u64;
        Snapshot {
            counters: self.counters,
            window,
            ssthresh: window,
            in_flight: self.waiting,
            open_sequences: open,
            ..Snapshot::default()
        }
    }
}

impl Trainee for Worker {
    fn submit(&mut self, submission: Submission, _now: Nanos) {
        let chunks = submission.count.div_ceil(self.config.values as u64);
        self.tensors.push_back(Tensor { submission, first: self.tail, chunks, remaining: chunks });
        self.tail += chunks;
        for slot in 0..self.slots.len() {
            self.start(slot);
        }
    }

    fn cancel_all(&mut self, reason: &str) {
        for t in std::mem::take(&mut self.tensors) {
            self.counters.ops_failed += 1;
            let Submission { token, memory, .. } = t.submission;
            let error = Some(Failure::breaking(Code::Cancelled, format!("cancelled: {reason}")));
            self.events.push_back(Event { token, error, memory });
        }
        self.ready.clear();
        self.sent.clear();
        self.waiting = 0;
        for slot in &mut self.slots {
            slot.state = State::Idle;
        }
    }

    fn config(&self) -> &Config {
        &self.config
    }
}
