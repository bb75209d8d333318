// SPDX-License-Identifier: Apache-2.0
//! The worker's operations: each is a run of sequences, its descriptor packets first; they start, are checked and end in
//! the order in which they were submitted.

use std::collections::VecDeque;

use super::flights::Flight;
use crate::Event;
use crate::config::Config;
use crate::failure::{Code, Failure};
use crate::fixed::{self, Dtype, RAW_INT32};
use crate::op::{COUNT_MAX, Descriptor, Kind, Memory, Refusal, WORDS_PER_RANK, check_descriptors};
use crate::stats::Counters;

/// Operations that may wait or run at once; results that nobody collects are bounded by it.
pub const OPS_MAX: usize = 1 << 16;

/// An all-reduce to run.
pub struct Submission {
    /// Comes back in the event.
    pub token: u64,
    /// The caller's operation number; all ranks must agree on it.
    pub op_id: u64,
    pub kind: Kind,
    pub dtype: Dtype,
    /// Elements.
    pub count: u64,
    /// Fixed-point factor, the same at all ranks; `None`: that of the assignment.
    pub scale: Option<f64>,
    pub memory: Box<dyn Memory>,
}

/// A result that may not be written yet.
struct Early {
    seq: u64,
    raw: bool,
    payload: Vec<u8>,
}

struct Op {
    token: u64,
    descriptor: Descriptor,
    ordinal: u64,
    start: u64,
    /// Data packets.
    packets: u64,
    scale: f64,
    memory: Box<dyn Memory>,
    /// Sequences without ACK.
    remaining: u64,
    descriptor_missing: u64,
    /// Sum of the descriptors, as far as it came.
    words: Vec<i32>,
    /// Results that came before all descriptors up to this operation's were checked. They must not touch the target
    /// yet: after a mismatch of an earlier operation this one starts again from its source, perhaps the same memory.
    early: Vec<Early>,
    /// Its descriptors did not match; the event is out.
    failed: bool,
}

impl Op {
    /// Bytes of its memory that data packet `chunk` has.
    fn bytes(&self, config: &Config, chunk: u64) -> std::ops::Range<usize> {
        let first = chunk as usize * config.values;
        let end = (first + config.values).min(self.descriptor.count as usize);
        let size = self.descriptor.dtype.size();
        first * size..end * size
    }

    /// Put a result where it belongs.
    fn write(&mut self, config: &Config, seq: u64, raw: bool, payload: &[u8]) {
        let dtype = self.descriptor.dtype;
        let bytes = self.bytes(config, seq - self.start - config.descriptor_packets());
        let target = &mut self.memory.target()[bytes];
        let divisor = if self.descriptor.kind == Kind::Mean { config.workers.len() as f64 } else { 1.0 };
        if raw {
            fixed::decode_raw(dtype, payload, divisor, target);
        } else {
            fixed::decode(dtype, payload, self.scale, divisor, target);
        }
    }

    /// This rank's three words, as far as they fall into descriptor packet `chunk`; the rest is zero.
    fn describe(&self, config: &Config, chunk: u64, payload: &mut [u8]) {
        payload.fill(0);
        let first = chunk as usize * config.values;
        let own = usize::from(config.rank) * WORDS_PER_RANK;
        for (j, word) in self.descriptor.words().iter().enumerate() {
            if let Some(at) = (own + j).checked_sub(first).filter(|at| *at < config.values) {
                payload[4 * at..4 * at + 4].copy_from_slice(&word.to_be_bytes());
            }
        }
    }

    /// Fill data packet `chunk`. Values that have no integer make the flight raw.
    fn fill(&self, config: &Config, chunk: u64, flight: &mut Flight, payload: &mut [u8], counters: &mut Counters) {
        let dtype = self.descriptor.dtype;
        let source = &self.memory.source()[self.bytes(config, chunk)];
        if !flight.raw {
            let limit = config.addend_limit;
            let encoded = fixed::encode(dtype, source, self.scale, limit, payload);
            flight.raw = !encoded.fits;
            if flight.raw {
                let (not_finite, out_of_range) = fixed::misfits(dtype, source, self.scale, limit);
                counters.values_not_finite += not_finite;
                counters.values_out_of_range += out_of_range;
            } else if flight.sends == 1 {
                counters.values_rounded_to_zero += u64::from(encoded.zeroed);
            }
        }
        if flight.raw {
            fixed::encode_raw(dtype, source, payload);
        }
    }
}

/// What follows from a result, beyond its operation.
pub(super) enum Outcome {
    Fine,
    /// An operation failed at every rank: the sequences from .0 up to .1 are given up.
    Skip(u64, u64),
    /// The answer is not to this process.
    NotOurs(String),
}

#[derive(Default)]
pub(super) struct Operations {
    queue: VecDeque<Op>,
    /// Ordinal of `queue[0]`.
    front: u64,
    /// Ordinal of the operation that the next new sequence belongs to.
    sending: u64,
    /// Operations below this ordinal have a checked descriptor.
    checked: u64,
    /// First sequence of the next operation to be submitted.
    tail: u64,
    /// Tells this start of the worker from others under the same identity.
    pub incarnation: u32,
    /// Why no further operation can run.
    pub poisoned: Option<Failure>,
    pub events: VecDeque<Event>,
}

impl Operations {
    pub fn new(first_sequence: u64) -> Self {
        Self { tail: first_sequence, ..Self::default() }
    }

    pub fn is_empty(&self) -> bool {
        self.queue.is_empty()
    }

    /// First sequence behind all operations.
    pub fn tail(&self) -> u64 {
        self.tail
    }

    /// The caller's number of the oldest operation that is not complete, 0 if there is none.
    pub fn oldest(&self) -> u32 {
        self.queue.iter().find(|op| op.remaining > 0).map_or(0, |op| op.descriptor.op)
    }

    fn position(&self, ordinal: u64) -> usize {
        (ordinal - self.front) as usize
    }

    fn refusal(&self, s: &Submission) -> Option<Failure> {
        if self.poisoned.is_some() {
            return self.poisoned.clone();
        }
        let bytes = usize::try_from(s.count).ok().and_then(|c| c.checked_mul(s.dtype.size()));
        let text = if s.kind == Kind::Mean && s.dtype == Dtype::Int32 {
            "mean of int32 is not defined: use sum, or a float dtype".to_owned()
        } else if s.count > COUNT_MAX {
            format!("{} elements are too many for one operation (at most {COUNT_MAX})", s.count)
        } else if bytes != Some(s.memory.source().len()) {
            let length = s.memory.source().len();
            format!("{} {} elements do not match a buffer of {length} bytes", s.count, s.dtype.name())
        } else if self.queue.len() + self.events.len() >= OPS_MAX {
            format!("{OPS_MAX} operations are queued already: collect results before submitting more")
        } else {
            return None;
        };
        Some(Failure::new(Code::Protocol, text))
    }

    /// Queue an all-reduce; false when it ended at once, with an error.
    pub fn submit(&mut self, config: &Config, s: Submission, counters: &mut Counters) -> bool {
        let failure = self.refusal(&s);
        if failure.is_some() {
            counters.ops_failed += 1;
            self.events.push_back(Event { token: s.token, error: failure, memory: s.memory });
            return false;
        }
        let packets = s.count.div_ceil(config.values as u64);
        let head = config.descriptor_packets();
        self.queue.push_back(Op {
            token: s.token,
            descriptor: Descriptor::new(s.op_id, s.kind, s.dtype, s.count).of_incarnation(self.incarnation),
            ordinal: self.front + self.queue.len() as u64,
            start: self.tail,
            packets,
            scale: s.scale.unwrap_or(config.scale),
            memory: s.memory,
            remaining: head + packets,
            descriptor_missing: head,
            words: vec![0; config.workers.len() * WORDS_PER_RANK],
            early: Vec::new(),
            failed: false,
        });
        self.tail += head + packets;
        true
    }

    /// End every operation with `reason`; later ones fail too.
    pub fn fail_all(&mut self, code: Code, reason: &str, counters: &mut Counters) {
        let next = self.front + self.queue.len() as u64;
        for op in std::mem::take(&mut self.queue).into_iter().filter(|op| !op.failed) {
            counters.ops_failed += 1;
            let error = Some(Failure::breaking(code, reason));
            self.events.push_back(Event { token: op.token, error, memory: op.memory });
        }
        let text = format!("{reason} (an earlier operation; restart the job to start a new epoch)");
        self.poisoned = Some(Failure::breaking(code, text));
        (self.front, self.sending, self.checked) = (next, next, next);
    }

    /// Ordinal of the operation whose next sequence may be sent for the first time.
    pub fn sending(&self) -> Option<u64> {
        self.queue.get(self.position(self.sending)).map(|op| op.ordinal)
    }

    /// Sequence `seq` of the operation that is being sent is out.
    pub fn on_first_sent(&mut self, config: &Config, seq: u64) {
        let op = &self.queue[self.position(self.sending)];
        if seq + 1 == op.start + config.descriptor_packets() + op.packets {
            self.sending += 1;
        }
    }

    /// Write the payload of a flight, and tell the data type of its raw words.
    pub fn fill(&self, config: &Config, flight: &mut Flight, payload: &mut [u8], counters: &mut Counters) -> u16 {
        let op = &self.queue[self.position(flight.op)];
        let chunk = flight.seq - op.start;
        match chunk.checked_sub(config.descriptor_packets()) {
            None => {
                op.describe(config, chunk, payload);
                RAW_INT32
            }
            Some(chunk) => {
                op.fill(config, chunk, flight, payload, counters);
                op.descriptor.dtype.raw_type()
            }
        }
    }

    /// The first result for a flight.
    pub fn deliver(
        &mut self,
        config: &Config,
        flight: &Flight,
        raw: bool,
        payload: &[u8],
        counters: &mut Counters,
    ) -> Outcome {
        let (ordinal, seq) = (flight.op, flight.seq);
        let i = self.position(ordinal);
        let op = &mut self.queue[i];
        op.remaining -= 1;
        let chunk = seq - op.start;
        let mut outcome = Outcome::Fine;
        if chunk < config.descriptor_packets() {
            let first = chunk as usize * config.values;
            for (word, bytes) in op.words[first..].iter_mut().zip(payload.as_chunks::<4>().0) {
                *word = i32::from_be_bytes(*bytes);
            }
            op.descriptor_missing -= 1;
            if op.descriptor_missing == 0 && ordinal == self.checked {
                outcome = self.check(config, counters);
            }
        } else if ordinal < self.checked {
            op.write(config, seq, raw, payload);
        } else {
            op.early.push(Early { seq, raw, payload: payload.to_vec() });
        }
        // An answer to another process ends everything, also what its descriptors seem to complete.
        if !matches!(outcome, Outcome::NotOurs(_)) {
            self.collect(counters);
        }
        outcome
    }

    /// All descriptors up to `checked` came: compare them, in order.
    fn check(&mut self, config: &Config, counters: &mut Counters) -> Outcome {
        loop {
            let i = self.position(self.checked);
            let Some(op) = self.queue.get_mut(i).filter(|op| op.descriptor_missing == 0) else { return Outcome::Fine };
            match check_descriptors(&op.descriptor, config.rank, &op.words) {
                Ok(()) => {
                    self.checked += 1;
                    for early in std::mem::take(&mut op.early) {
                        op.write(config, early.seq, early.raw, &early.payload);
                    }
                }
                Err(Refusal::Mismatch(text)) => return self.skip(config, i, text, counters),
                Err(Refusal::NotOurs(text)) => return Outcome::NotOurs(text),
            }
        }
    }

    /// Operation `i` failed on its descriptor, at every rank. All ranks go on at the same later sequence with the
    /// operations behind it, whose memory is still untouched. Operations before it end as usual.
    fn skip(&mut self, config: &Config, i: usize, text: String, counters: &mut Counters) -> Outcome {
        let head = config.descriptor_packets();
        let from = self.queue[i].start;
        let to = config.resume_after_mismatch(from);
        self.tail = to;
        for op in self.queue.range_mut(i + 1..) {
            op.start = self.tail;
            op.remaining = head + op.packets;
            op.descriptor_missing = head;
            op.words.fill(0);
            op.early.clear();
            self.tail += head + op.packets;
        }
        let op = &mut self.queue[i];
        op.remaining = 0;
        op.early.clear();
        let memory = std::mem::replace(&mut op.memory, Box::new(Vec::new()));
        self.events.push_back(Event { token: op.token, error: Some(Failure::new(Code::Mismatch, text)), memory });
        op.failed = true;
        self.checked = op.ordinal + 1;
        self.sending = op.ordinal + 1;
        counters.ops_failed += 1;
        Outcome::Skip(from, to)
    }

    /// Report what is complete, in order of submission.
    fn collect(&mut self, counters: &mut Counters) {
        while let Some(op) = self.queue.pop_front_if(|op| op.remaining == 0 && op.ordinal < self.checked) {
            self.front += 1;
            if !op.failed {
                counters.ops_completed += 1;
                self.events.push_back(Event { token: op.token, error: None, memory: op.memory });
            }
        }
    }
}
