// SPDX-License-Identifier: Apache-2.0
//! The worker: cuts tensors into packets, sends them within the window, takes results.

use std::collections::VecDeque;
use std::net::SocketAddrV4;

use crate::config::{Comparison, Config, ConfigError, Mode, Role, WorkerEntry};
use crate::congestion::{LossJudge, Reordering, Rtt, Window};
use crate::coverage::Topology;
use crate::failure::{Code, Failure};
use crate::fixed::{self, Dtype, RAW_INT32, RAW_NOTICE};
use crate::index::{IndexTable, mix};
use crate::op::{COUNT_MAX, Descriptor, Kind, Memory, Refusal, WORDS_PER_RANK, check_descriptors};
use crate::stats::{Counters, Snapshot};
use crate::wire::{HEADER_BYTES, Header};
use crate::{Endpoint, Event, Nanos, Transmit, seq};

/// Operations that may wait or run at once; results that nobody collects are bounded by it.
pub const OPS_MAX: usize = 1 << 16;

/// Timeouts in a row after which a relay counts as broken, and how long it is left out; doubled at each failure.
const RELAY_MISSES: u32 = 3;
const RELAY_RETRY: Nanos = 1_000_000_000;
const RELAY_RETRY_MAX: Nanos = 64_000_000_000;
/// Resent sequences that are remembered, to recognise needless resends.
const RESENT_KEPT: usize = 64;
/// Oldest packets that are repeated when no ACK comes any more; half as many each further time in a row, and in the end none.
const PROBES: usize = 8;
/// Packets found lost by newer ACKs so many times are resent, not repeated: what a repeat cannot mend, a resend does.
const REPEATS: u32 = 3;

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

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Free,
    InFlight,
    Acked,
}

/// One sequence between its first transmission and its ACK.
#[derive(Clone, Copy, Debug)]
struct Flight {
    seq: u64,
    state: State,
    /// Number of the last transmission, counted over all packets.
    tx: u64,
    sent_at: Nanos,
    sends: u32,
    index: u16,
    op: u64,
    raw: bool,
    /// Waits in the resend queue; not counted as in flight.
    lost: bool,
    /// Resent because newer packets were acknowledged.
    fast: bool,
    /// How often that was.
    fast_count: u32,
    /// The next transmission must empty the switch of this sequence, not only add to it.
    flush: bool,
}

const FREE: Flight = Flight {
    seq: u64::MAX,
    state: State::Free,
    tx: 0,
    sent_at: 0,
    sends: 0,
    index: 0,
    op: 0,
    raw: false,
    lost: false,
    fast: false,
    fast_count: 0,
    flush: false,
};

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

/// Who the parameter server last said to wait for.
struct Notice {
    seq: u64,
    at: Nanos,
    count: u32,
    ranks: Vec<u16>,
}

/// The worker's state machine.
pub struct Worker {
    config: Config,
    me: WorkerEntry,
    fan_in: (u8, u8),
    table: IndexTable,
    ops: VecDeque<Op>,
    /// Ordinal of `ops[0]`.
    front: u64,
    /// Ordinal of the operation that `next_seq` belongs to.
    sending: u64,
    /// Operations below this ordinal have a checked descriptor.
    checked: u64,
    /// First sequence of the next operation to be submitted.
    tail: u64,
    /// Oldest sequence without ACK.
    base: u64,
    /// Next sequence to be sent for the first time.
    next_seq: u64,
    /// After a descriptor mismatch: sequences from .0 up to .1 are given up; `base` jumps over them.
    gap: Option<(u64, u64)>,
    ring: Vec<Flight>,
    /// Largest distance of `next_seq` from `base`.
    span: u64,
    /// By place in the floor: the last sequence that was sent there.
    floor_users: Vec<u64>,
    in_flight: u64,
    transmissions: u64,
    /// Transmissions in order, for the loss detection.
    sent: VecDeque<(u64, u64)>,
    /// ACKs of packets sent after the front of `sent`: out-of-order ACKs.
    passed: u64,
    /// What was sent before transmission .0 counts as lost at time .1.
    lag: Option<(u64, Nanos)>,
    resend: VecDeque<u64>,
    /// Resends that the window does not hold back.
    forced: u32,
    window: Window,
    /// For comparisons: a time-out per packet finds losses, nothing else does.
    timeouts_only: bool,
    rtt: Rtt,
    reordering: Reordering,
    judge: LossJudge,
    /// Acknowledged sequences that were sent more than once, and whether newer ACKs were the cause.
    resent: VecDeque<(u64, bool)>,
    /// Sequence of the last timeout.
    timed_out: u64,
    /// Timeouts since the last sign that packets sent to the relay reach the parameter server.
    relay_misses: u32,
    /// Until then gradients go to the parameter server itself, because the relay seems to swallow them.
    direct_until: Nanos,
    direct_wait: Nanos,
    rto_at: Option<Nanos>,
    backoff: u32,
    /// When the oldest packets are repeated, if no ACK comes before, and how often that was since the last ACK.
    probe_at: Option<Nanos>,
    probes: u32,
    probed_at: Nanos,
    progress_at: Nanos,
    notice: Option<Notice>,
    /// Tells this start of the worker from others under the same identity.
    incarnation: u32,
    /// Why no further operation can run.
    poisoned: Option<Failure>,
    events: VecDeque<Event>,
    counters: Counters,
}

impl Worker {
    /// A worker at the start of an epoch.
    ///
    /// # Errors
    /// When the assignment is that of a parameter server.
    pub fn new(config: Config) -> Result<Self, ConfigError> {
        Self::compared(config, Comparison::default())
    }

    /// The same with what a comparison changes.
    ///
    /// # Errors
    /// When the assignment is that of a parameter server.
    pub fn compared(config: Config, comparison: Comparison) -> Result<Self, ConfigError> {
        if config.role != Role::Worker {
            return Err(ConfigError("role is parameterServer, a Worker needs role worker".into()));
        }
        let me = config.workers[usize::from(config.rank)];
        let fan_in = if me.edge {
            (1, Topology::new(&config).fan_in(me.rack).1)
        } else {
            Topology::new(&config).fan_in(me.rack)
        };
        let table = if comparison.linear_index { IndexTable::linear(&config) } else { IndexTable::new(&config) };
        // A reserved region is never shared: with more packets in flight than aggregators the job would collide with itself.
        let max_window = if config.mode == Mode::Reserved {
            config.max_window.min(u32::try_from(table.aggregators()).unwrap_or(u32::MAX))
        } else {
            config.max_window
        };
        let first = config.first_sequence;
        // Lost packets hold back the oldest sequence, not the window: up to P may be open. More than the job has aggregators
        // would collide with its own.
        let aggregators = table.aggregators() as u64;
        let span = match config.mode {
            Mode::Reserved => u64::from(config.slots).min(aggregators),
            Mode::Shared => u64::from(config.slots).min(aggregators.max(u64::from(max_window))),
            Mode::HostOnly => u64::from(config.slots),
        };
        Ok(Self {
            me,
            fan_in,
            floor_users: vec![u64::MAX; table.floor_size()],
            table,
            ops: VecDeque::new(),
            front: 0,
            sending: 0,
            checked: 0,
            tail: first,
            base: first,
            next_seq: first,
            gap: None,
            ring: vec![FREE; (config.slots as usize).next_power_of_two()],
            span,
            in_flight: 0,
            transmissions: 0,
            sent: VecDeque::new(),
            passed: 0,
            lag: None,
            resend: VecDeque::new(),
            forced: 0,
            window: if comparison.no_congestion_control {
                Window::fixed(max_window)
            } else {
                Window::new(config.initial_window.min(max_window), max_window)
            },
            timeouts_only: comparison.timeouts_only,
            rtt: Rtt::new(config.min_rto, config.max_rto),
            reordering: Reordering::new(max_window),
            judge: LossJudge::default(),
            resent: VecDeque::new(),
            timed_out: 0,
            relay_misses: 0,
            direct_until: 0,
            direct_wait: RELAY_RETRY,
            rto_at: None,
            backoff: 0,
            probe_at: None,
            probes: 0,
            probed_at: 0,
            progress_at: 0,
            notice: None,
            incarnation: 0,
            poisoned: None,
            events: VecDeque::new(),
            counters: Counters::default(),
            config,
        })
    }

    /// Set, before the first operation, a number that differs from start to start: see `op`.
    #[must_use]
    pub fn of_incarnation(self, incarnation: u32) -> Self {
        Self { incarnation, ..self }
    }

    #[must_use]
    pub fn config(&self) -> &Config {
        &self.config
    }

    #[must_use]
    pub fn counters(&self) -> &Counters {
        &self.counters
    }

    /// Why no further operation can run, if so.
    #[must_use]
    pub fn poisoned(&self) -> Option<&Failure> {
        self.poisoned.as_ref()
    }

    /// Queue an all-reduce. Errors come as an event, like any other failure.
    pub fn submit(&mut self, s: Submission, now: Nanos) {
        let bytes = usize::try_from(s.count).ok().and_then(|c| c.checked_mul(s.dtype.size()));
        let problem = if s.kind == Kind::Mean && s.dtype == Dtype::Int32 {
            Some("mean of int32 is not defined: use sum, or a float dtype".to_owned())
        } else if s.count > COUNT_MAX {
            Some(format!("{} elements are too many for one operation (at most {COUNT_MAX})", s.count))
        } else if bytes != Some(s.memory.source().len()) {
            Some(format!(
                "{} {} elements do not match a buffer of {} bytes",
                s.count,
                s.dtype.name(),
                s.memory.source().len()
            ))
        } else if self.ops.len() + self.events.len() >= OPS_MAX {
            Some(format!("{OPS_MAX} operations are queued already: collect results before submitting more"))
        } else {
            None
        };
        let failure = self.poisoned.clone().or_else(|| problem.map(|text| Failure::new(Code::Protocol, text)));
        if failure.is_some() {
            self.counters.ops_failed += 1;
            self.events.push_back(Event { token: s.token, error: failure, memory: s.memory });
            return;
        }
        if self.ops.is_empty() {
            self.progress_at = now;
        }
        let packets = s.count.div_ceil(self.config.values as u64);
        let head = self.config.descriptor_packets();
        self.ops.push_back(Op {
            token: s.token,
            descriptor: Descriptor::new(s.op_id, s.kind, s.dtype, s.count).of_incarnation(self.incarnation),
            ordinal: self.front + self.ops.len() as u64,
            start: self.tail,
            packets,
            scale: s.scale.unwrap_or(self.config.scale),
            memory: s.memory,
            remaining: head + packets,
            descriptor_missing: head,
            words: vec![0; self.config.workers.len() * WORDS_PER_RANK],
            early: Vec::new(),
            failed: false,
        });
        self.tail += head + packets;
    }

    /// End every operation with `reason`. When any was pending the ranks no longer agree on the sequence, so later
    /// operations fail too: the job needs a new epoch.
    pub fn cancel_all(&mut self, reason: &str) {
        if !self.ops.is_empty() {
            self.fail_all(Code::Cancelled, &format!("cancelled: {reason}"));
        }
    }

    fn fail_all(&mut self, code: Code, reason: &str) {
        let next = self.front + self.ops.len() as u64;
        for op in std::mem::take(&mut self.ops).into_iter().filter(|op| !op.failed) {
            self.counters.ops_failed += 1;
            self.events.push_back(Event {
                token: op.token,
                error: Some(Failure::breaking(code, reason)),
                memory: op.memory,
            });
        }
        let text = format!("{reason} (an earlier operation; restart the job to start a new epoch)");
        self.poisoned = Some(Failure::breaking(code, text));
        (self.front, self.sending, self.checked) = (next, next, next);
        self.drop_flights(self.base, self.tail);
    }

    /// Forget everything in flight from sequence `from` on and go on at `to`.
    fn drop_flights(&mut self, from: u64, to: u64) {
        for flight in &mut self.ring {
            if flight.state != State::Free && flight.seq >= from {
                if flight.state == State::InFlight && !flight.lost {
                    self.in_flight -= 1;
                }
                *flight = FREE;
            }
        }
        self.next_seq = to;
        self.gap = Some((from.max(self.base), to));
        self.advance();
    }

    /// Move `base` over what is acknowledged or given up.
    fn advance(&mut self) {
        loop {
            if let Some((from, to)) = self.gap
                && self.base == from
            {
                self.base = to;
                self.gap = None;
            }
            if self.base >= self.next_seq {
                break;
            }
            let base = self.base;
            let flight = self.flight(base);
            if flight.seq != base || flight.state != State::Acked {
                break;
            }
            flight.state = State::Free;
            self.base += 1;
        }
        if self.base == self.next_seq {
            self.lag = None;
            self.rto_at = None;
            self.probe_at = None;
            self.sent.clear();
            self.resend.clear();
            self.passed = 0;
        }
    }

    fn flight(&mut self, seq: u64) -> &mut Flight {
        let mask = self.ring.len() as u64 - 1;
        &mut self.ring[(seq & mask) as usize]
    }

    /// True while the ACK of `seq`, which was sent, is not here.
    fn is_open(&self, seq: u64) -> bool {
        let flight = &self.ring[(seq & (self.ring.len() as u64 - 1)) as usize];
        flight.seq == seq && flight.state == State::InFlight
    }

    fn op_index(&self, ordinal: u64) -> usize {
        (ordinal - self.front) as usize
    }

    fn server(&self, seq: u64) -> SocketAddrV4 {
        self.config.servers[(seq % self.config.servers.len() as u64) as usize]
    }

    /// Write the packet of `seq` and count it.
    fn transmit(&mut self, seq: u64, now: Nanos, buffer: &mut [u8]) -> Transmit {
        let mut flight = *self.flight(seq);
        let resent = flight.sends > 0;
        let i = self.op_index(flight.op);
        let op = &self.ops[i];
        let values = self.config.values;
        let length = self.config.packet_bytes();
        let payload = &mut buffer[HEADER_BYTES..length];
        let head = self.config.descriptor_packets();
        let chunk = seq - op.start;
        let raw_type;
        if chunk < head {
            // This rank's three words, as far as they fall into this packet.
            payload.fill(0);
            let first = chunk as usize * values;
            let own = usize::from(self.me.rank) * WORDS_PER_RANK;
            for (j, word) in op.descriptor.words().iter().enumerate() {
                if let Some(at) = (own + j).checked_sub(first).filter(|at| *at < values) {
                    payload[4 * at..4 * at + 4].copy_from_slice(&word.to_be_bytes());
                }
            }
            raw_type = RAW_INT32;
        } else {
            let dtype = op.descriptor.dtype;
            let first = (chunk - head) as usize * values;
            let end = (first + values).min(op.descriptor.count as usize);
            let source = &op.memory.source()[first * dtype.size()..end * dtype.size()];
            if !flight.raw {
                let limit = self.config.addend_limit;
                let encoded = fixed::encode(dtype, source, op.scale, limit, payload);
                flight.raw = !encoded.fits;
                if flight.raw {
                    let (not_finite, out_of_range) = fixed::misfits(dtype, source, op.scale, limit);
                    self.counters.values_not_finite += not_finite;
                    self.counters.values_out_of_range += out_of_range;
                } else if !resent {
                    self.counters.values_rounded_to_zero += u64::from(encoded.zeroed);
                }
            }
            if flight.raw {
                fixed::encode_raw(dtype, source, payload);
            }
            raw_type = dtype.raw_type();
        }
        self.transmissions += 1;
        flight.tx = self.transmissions;
        flight.sent_at = now;
        flight.sends += 1;
        flight.lost = false;
        let flush = resent && (flight.flush || flight.raw);
        flight.flush = false;
        let header = Header {
            job_id: self.config.job_id,
            sequence: seq::wrap(seq),
            bitmap0: if self.me.edge { 1 } else { 1 << self.me.bit },
            bitmap1: 1 << self.me.rack,
            fan_in_degree0: self.fan_in.0,
            fan_in_degree1: self.fan_in.1,
            edge_switch_identifier: self.me.edge,
            resend: flush,
            collision: resent && !flush,
            raw_float: flight.raw,
            aggregator_index: if flight.raw { raw_type } else { flight.index },
            ..Header::default()
        };
        buffer[..HEADER_BYTES].copy_from_slice(&header.pack());
        let length = if flight.raw { self.config.seal.close(buffer, length) } else { length };
        *self.flight(seq) = flight;
        self.sent.push_back((flight.tx, seq));
        self.in_flight += 1;
        self.counters.packets_sent += 1;
        self.counters.bytes_sent += length as u64;
        self.counters.gradient_packets += 1;
        self.counters.retransmits += u64::from(resent);
        if self.rto_at.is_none() {
            self.rto_at = Some(now + self.rtt.rto(self.backoff));
        }
        if self.probe_at.is_none() {
            self.arm_probe(now);
        }
        let to = match self.config.switch {
            Some(switch) if !flight.raw && now >= self.direct_until => switch,
            _ => self.server(seq),
        };
        Transmit { to, length }
    }

    /// Put an unacknowledged sequence into the resend queue.
    fn mark_lost(&mut self, seq: u64, fast: bool) -> Option<Nanos> {
        let flight = self.flight(seq);
        if flight.seq != seq || flight.state != State::InFlight || flight.lost {
            return None;
        }
        flight.lost = true;
        flight.fast = fast;
        let sent_at = flight.sent_at;
        self.in_flight -= 1;
        self.resend.push_back(seq);
        Some(sent_at)
    }

    fn mark_fast(&mut self, seq: u64, now: Nanos) {
        if let Some(sent_at) = self.mark_lost(seq, true) {
            self.counters.fast_retransmits += 1;
            let flight = self.flight(seq);
            flight.fast_count += 1;
            flight.flush = flight.fast_count > REPEATS;
            let congested = self.judge.on_loss(self.rtt.queue(), self.rtt.smoothed(), now);
            if congested && self.window.on_congestion(sent_at, now) {
                self.counters.window_cuts += 1;
            }
        }
    }

    /// Drop entries at the front of `sent` that no longer wait for an ACK, and declare lost what enough newer packets
    /// were acknowledged before.
    fn detect_losses(&mut self, now: Nanos) {
        while let Some(&(tx, seq)) = self.sent.front() {
            let flight = *self.flight(seq);
            if flight.seq == seq && flight.tx == tx && flight.state == State::InFlight && !flight.lost {
                if self.timeouts_only || self.passed < self.reordering.effective(self.window.packets()) {
                    break;
                }
                self.mark_fast(seq, now);
            } else if flight.seq == seq && flight.tx == tx && flight.state == State::Acked && flight.sends == 1 {
                // It was counted when its ACK overtook the then front.
                self.passed = self.passed.saturating_sub(1);
            }
            self.sent.pop_front();
        }
        if self.sent.is_empty() {
            self.passed = 0;
        }
    }

    /// Set the time of the next repeat, if it comes before the time-out.
    fn arm_probe(&mut self, now: Nanos) {
        let at = if self.timeouts_only || PROBES >> self.probes == 0 {
            None
        } else {
            self.rtt.probe(self.probes).map(|wait| now + wait)
        };
        self.probe_at = at.filter(|at| self.rto_at.is_none_or(|rto| *at < rto));
    }

    /// No ACK for longer than a round trip takes: newer ACKs cannot show what was lost, because nothing newer is on its way
    /// or all of it was lost. Repeat the oldest packets (as the tail loss probe of RFC 8985 does). A repeat breaks no
    /// aggregation, so it costs little when the wait is for a slow worker.
    fn probe(&mut self, now: Nanos) {
        let mut left = PROBES >> self.probes;
        for seq in self.base..self.next_seq {
            if left == 0 {
                break;
            }
            if self.mark_lost(seq, false).is_some() {
                left -= 1;
                self.forced += 1;
            }
        }
        self.counters.probes += 1;
        self.probes += 1;
        self.probed_at = now;
        self.arm_probe(now);
    }

    /// `timeouts_only`: the packet that has waited longest, and when its time is over.
    fn oldest_timeout(&self) -> Option<(u64, Nanos)> {
        let mask = self.ring.len() as u64 - 1;
        let waiting = |(tx, seq): (u64, u64)| {
            let flight = &self.ring[(seq & mask) as usize];
            let open = flight.seq == seq && flight.tx == tx && flight.state == State::InFlight && !flight.lost;
            open.then(|| (seq, flight.sent_at + self.config.min_rto))
        };
        self.sent.iter().copied().find_map(waiting)
    }

    /// A result for `seq`: window, timers, loss detection. False for a duplicate.
    fn acknowledge(&mut self, seq: u64, ecn: bool, now: Nanos) -> Option<u64> {
        let limited = self.in_flight + 1 >= self.window.packets();
        let flight = self.flight(seq);
        if flight.seq != seq || flight.state != State::InFlight {
            return None;
        }
        flight.state = State::Acked;
        let flight = *flight;
        if !flight.lost {
            self.in_flight -= 1;
        }
        let took = now.saturating_sub(flight.sent_at);
        let needless = flight.fast
            && if flight.lost {
                flight.sends == 1
            } else {
                // Sooner than any answer to the repeat itself: that of the first copy, behind a queue or out of order.
                flight.sends == 2 && took < self.rtt.minimum_or_zero()
            };
        if flight.sends > 1 {
            self.rtt.ambiguous(took);
        } else if !flight.lost {
            self.rtt.sample(took, flight.sent_at >= self.probed_at);
        }
        if needless {
            self.counters.needless_retransmits += u64::from(!flight.lost);
            self.reordering.on_needless_resend(flight.sent_at, now);
        } else {
            self.reordering.on_ack(self.window.packets());
        }
        if flight.sends > 1 {
            if self.resent.len() == RESENT_KEPT {
                self.resent.pop_front();
            }
            self.resent.push_back((seq, flight.fast));
        } else if seq > self.timed_out + self.span {
            self.window.on_progress();
        }
        self.judge.on_ack(self.window.packets());
        if ecn {
            self.judge.on_mark(now);
            self.counters.ecn_marks += 1;
            if self.window.on_congestion(flight.sent_at, now) {
                self.counters.window_cuts += 1;
            }
        } else {
            self.window.on_ack(limited);
        }
        // Of a packet sent twice nobody knows which copy was answered: its ACK may not overtake others at once (a
        // straggler's release would look like the loss of a whole window), only when they stay away.
        let front = self.sent.front().copied();
        let overtakes = front.is_some_and(|(tx, other)| tx < flight.tx && other != seq);
        let mut patience = self.rtt.reordering_window();
        if flight.sends == 1 {
            match front {
                Some((tx, _)) if tx < flight.tx => self.passed += 1,
                Some((tx, _)) if tx == flight.tx => {
                    self.sent.pop_front();
                }
                _ => {}
            }
            patience *= 2;
        }
        self.detect_losses(now);
        self.advance();
        if self.base == self.next_seq {
            // Nothing is outstanding.
        } else if let Some((limit, _)) = self.lag {
            self.lag = Some((limit.max(flight.tx), now + patience));
        } else if overtakes {
            self.lag = Some((flight.tx, now + patience));
        }
        self.backoff = 0;
        self.progress_at = now;
        self.trust_relay(now);
        self.probes = 0;
        self.probe_at = None;
        self.rto_at = None;
        if self.base < self.next_seq {
            self.rto_at = Some(now + self.rtt.rto(0));
            self.arm_probe(now);
        }
        Some(flight.op)
    }

    /// Put a result where it belongs.
    fn deliver(&mut self, ordinal: u64, seq: u64, raw: bool, payload: &[u8], now: Nanos) {
        let i = self.op_index(ordinal);
        let head = self.config.descriptor_packets();
        let values = self.config.values;
        let ready = ordinal < self.checked;
        let op = &mut self.ops[i];
        op.remaining -= 1;
        let chunk = seq - op.start;
        if chunk < head {
            let first = chunk as usize * values;
            for (word, bytes) in op.words[first..].iter_mut().zip(payload.as_chunks::<4>().0) {
                *word = i32::from_be_bytes(*bytes);
            }
            op.descriptor_missing -= 1;
            if op.descriptor_missing == 0 && ordinal == self.checked {
                self.check_descriptor(now);
            }
        } else if ready {
            Self::write(&self.config, op, seq, raw, payload);
        } else {
            op.early.push(Early { seq, raw, payload: payload.to_vec() });
        }
        self.collect();
    }

    fn write(config: &Config, op: &mut Op, seq: u64, raw: bool, payload: &[u8]) {
        let dtype = op.descriptor.dtype;
        let first = (seq - op.start - config.descriptor_packets()) as usize * config.values;
        let end = (first + config.values).min(op.descriptor.count as usize);
        let target = &mut op.memory.target()[first * dtype.size()..end * dtype.size()];
        let divisor = if op.descriptor.kind == Kind::Mean { config.workers.len() as f64 } else { 1.0 };
        if raw {
            fixed::decode_raw(dtype, payload, divisor, target);
        } else {
            fixed::decode(dtype, payload, op.scale, divisor, target);
        }
    }

    /// All descriptors up to `checked` came: compare them, in order.
    fn check_descriptor(&mut self, now: Nanos) {
        while self.checked < self.front + self.ops.len() as u64 {
            let i = self.op_index(self.checked);
            let op = &mut self.ops[i];
            if op.descriptor_missing > 0 {
                return;
            }
            match check_descriptors(&op.descriptor, self.me.rank, &op.words) {
                Ok(()) => {
                    self.checked += 1;
                    for early in std::mem::take(&mut op.early) {
                        Self::write(&self.config, op, early.seq, early.raw, &early.payload);
                    }
                }
                Err(Refusal::Mismatch(text)) => {
                    self.skip_failed(i, text, now);
                    return;
                }
                Err(Refusal::NotOurs(text)) => {
                    self.fail_all(Code::PeerGone, &text);
                    return;
                }
            }
        }
    }

    /// Operation `i` failed on its descriptor, at every rank. All ranks go on at the same later sequence with the
    /// operations behind it, whose memory is still untouched. Operations before it end as usual.
    fn skip_failed(&mut self, i: usize, text: String, now: Nanos) {
        let head = self.config.descriptor_packets();
        let start = self.ops[i].start;
        let mut at = self.config.resume_after_mismatch(start);
        self.drop_flights(start, at);
        for op in self.ops.range_mut(i + 1..) {
            op.start = at;
            op.remaining = head + op.packets;
            op.descriptor_missing = head;
            op.words.fill(0);
            op.early.clear();
            at += head + op.packets;
        }
        self.tail = at;
        let op = &mut self.ops[i];
        op.remaining = 0;
        op.early.clear();
        let memory = std::mem::replace(&mut op.memory, Box::new(Vec::new()));
        self.events.push_back(Event { token: op.token, error: Some(Failure::new(Code::Mismatch, text)), memory });
        op.failed = true;
        self.checked = op.ordinal + 1;
        self.sending = op.ordinal + 1;
        self.counters.ops_failed += 1;
        self.progress_at = now;
    }

    /// Report what is complete, in order of submission.
    fn collect(&mut self) {
        while self.ops.front().is_some_and(|op| op.remaining == 0 && op.ordinal < self.checked) {
            if let Some(op) = self.ops.pop_front() {
                self.front += 1;
                if !op.failed {
                    self.counters.ops_completed += 1;
                    self.events.push_back(Event { token: op.token, error: None, memory: op.memory });
                }
            }
        }
    }
}

impl Endpoint for Worker {
    fn handle(&mut self, from: SocketAddrV4, ce: bool, data: &[u8], now: Nanos) {
        self.counters.packets_received += 1;
        self.counters.bytes_received += data.len() as u64;
        let Some(h) = Header::unpack(data) else {
            self.counters.rejected_short += 1;
            return;
        };
        let relayed = self.config.switch.is_some_and(|s| s.ip() == from.ip());
        if !relayed && !self.config.servers.contains(&from) {
            self.counters.rejected_stranger += 1;
            return;
        }
        if h.job_id != self.config.job_id {
            self.counters.rejected_job += 1;
            return;
        }
        let Some(data) = (if h.raw_float { self.config.seal.open(data) } else { Some(data) }) else {
            self.counters.rejected_tag += 1;
            return;
        };
        if data.len() != self.config.packet_bytes() {
            self.counters.rejected_length += 1;
            return;
        }
        if !h.is_ack {
            self.counters.rejected_kind += 1;
            return;
        }
        let seq = seq::unwrap(h.sequence, self.next_seq);
        let payload = &data[HEADER_BYTES..];
        let right_server = relayed || from == self.server(seq);
        if right_server && h.raw_float && h.aggregator_index == RAW_NOTICE {
            self.take_notice(seq, payload, now);
            return;
        }
        if seq >= self.next_seq || !right_server {
            self.counters.rejected_sequence += 1;
            return;
        }
        if h.collision && u32::from(h.bitmap1 as u16) == h.bitmap1 {
            self.counters.collisions += u64::from(self.table.announce(seq, h.bitmap1 as u16));
        }
        if h.resend {
            self.send_raw(seq, now);
            return;
        }
        self.counters.ack_packets += 1;
        if self.gap.is_some_and(|(start, end)| (start..end).contains(&seq)) {
            return;
        }
        match self.acknowledge(seq, h.ecn | ce, now) {
            Some(op) => {
                self.deliver(op, seq, h.raw_float, payload, now);
            }
            None => {
                self.counters.duplicates += 1;
                self.on_second_answer(seq);
            }
        }
    }

    fn poll_transmit(&mut self, now: Nanos, buffer: &mut [u8]) -> Option<Transmit> {
        loop {
            let free = self.in_flight < self.window.packets();
            if !free && self.forced == 0 {
                return None;
            }
            let Some(seq) = self.resend.pop_front() else {
                self.forced = 0;
                if !free {
                    return None;
                }
                break;
            };
            let flight = self.flight(seq);
            if flight.seq == seq && flight.state == State::InFlight && flight.lost {
                self.forced = self.forced.saturating_sub(1);
                return Some(self.transmit(seq, now, buffer));
            }
        }
        if self.next_seq >= self.base + self.span {
            return None;
        }
        // Slots that shelter in the floor have its aggregators in turn: the job must not collide with itself there.
        let place = self.table.in_floor(self.next_seq);
        if place.is_some_and(|p| self.is_open(self.floor_users[p])) {
            return None;
        }
        let op = self.ops.get(self.op_index(self.sending))?;
        let seq = self.next_seq;
        let end = op.start + self.config.descriptor_packets() + op.packets;
        *self.flight(seq) =
            Flight { seq, state: State::InFlight, index: self.table.get(seq), op: self.sending, ..FREE };
        if let Some(place) = place {
            self.floor_users[place] = seq;
        }
        self.next_seq += 1;
        let transmit = self.transmit(seq, now, buffer);
        if self.next_seq == end {
            self.sending += 1;
        }
        Some(transmit)
    }

    fn poll_timeout(&self) -> Option<Nanos> {
        let stall = (!self.ops.is_empty()).then(|| self.progress_at + self.config.stall_timeout);
        if self.timeouts_only {
            return [self.oldest_timeout().map(|t| t.1), stall].into_iter().flatten().min();
        }
        [self.probe_at, self.rto_at, self.lag.map(|l| l.1), stall].into_iter().flatten().min()
    }

    fn handle_timeout(&mut self, now: Nanos) {
        if !self.ops.is_empty() && now >= self.progress_at + self.config.stall_timeout {
            let text = self.stall_text(now);
            self.fail_all(Code::Stalled, &text);
            return;
        }
        if self.timeouts_only {
            while let Some((seq, at)) = self.oldest_timeout()
                && now >= at
            {
                self.counters.timeouts += 1;
                self.sent.pop_front();
                self.mark_lost(seq, false);
                let flight = self.flight(seq);
                flight.flush = flight.sends > 1;
            }
            return;
        }
        if let Some((limit, at)) = self.lag
            && now >= at
        {
            self.lag = None;
            for seq in self.base..self.next_seq.min(self.base + self.ring.len() as u64) {
                let flight = self.flight(seq);
                if flight.seq == seq && flight.tx < limit {
                    self.mark_fast(seq, now);
                }
            }
        }
        if self.probe_at.is_some_and(|at| now >= at) {
            self.probe(now);
        }
        if self.rto_at.is_some_and(|at| now >= at) {
            self.counters.timeouts += 1;
            self.window.on_timeout(now);
            // One packet only, the oldest: its answer tells whether the others are lost too, and each needless resend
            // breaks the aggregation of its sequence.
            let base = self.base;
            self.timed_out = base;
            if self.mark_lost(base, false).is_some() {
                self.resend.pop_back();
            } else {
                self.resend.retain(|s| *s != base);
            }
            self.resend.push_front(base);
            self.flight(base).flush = true;
            self.forced = self.forced.max(1);
            self.backoff += 1;
            self.suspect_relay(now);
            // Workers that time out together must not do so again: the same queue would drop the same packets each time.
            let rto = self.rtt.rto(self.backoff);
            let draw = mix(u64::from(self.me.rank) << 32 ^ self.transmissions) % 256;
            self.rto_at = Some(now + rto + rto / 1024 * draw);
        }
    }

    fn poll_event(&mut self) -> Option<Event> {
        self.events.pop_front()
    }

    fn snapshot(&self) -> Snapshot {
        Snapshot {
            counters: self.counters,
            window: self.window.size(),
            ssthresh: self.window.ssthresh(),
            rtt_seconds: self.rtt.smoothed_seconds(),
            rto_seconds: self.rtt.rto(self.backoff) as f64 * 1e-9,
            in_flight: self.in_flight,
            open_sequences: self.next_seq - self.base,
            reorder_threshold: self.reordering.threshold(),
            group_path_down: 0,
            rtt_histogram: self.rtt.histogram.to_vec(),
            rtt_sum_seconds: self.rtt.sum,
        }
    }
}

impl Worker {
    /// The parameter server wants the gradient of `seq` as raw words.
    fn send_raw(&mut self, seq: u64, now: Nanos) {
        let recent = self.rtt.reordering_window();
        let flight = self.flight(seq);
        if flight.seq != seq || flight.state != State::InFlight {
            self.counters.duplicates += 1;
            return;
        }
        if flight.raw && (flight.lost || now < flight.sent_at + recent) {
            // On its way already.
            return;
        }
        flight.raw = true;
        self.counters.raw_float_corrections += 1;
        self.mark_lost(seq, false);
    }

    fn suspect_relay(&mut self, now: Nanos) {
        if self.config.switch.is_none() || now < self.direct_until {
            return;
        }
        self.relay_misses += 1;
        if self.relay_misses >= RELAY_MISSES {
            self.relay_misses = 0;
            self.direct_until = now + self.direct_wait;
            self.direct_wait = (2 * self.direct_wait).min(RELAY_RETRY_MAX);
            self.counters.relay_fallbacks += 1;
        }
    }

    /// A packet that went to the relay was answered.
    fn trust_relay(&mut self, now: Nanos) {
        if now >= self.direct_until {
            self.relay_misses = 0;
            self.direct_wait = RELAY_RETRY;
        }
    }

    /// A result came twice: if the packet was sent twice, the resend was needless. That says nothing about reordering: one
    /// lost packet makes all workers resend the sequence, and all but one needlessly.
    fn on_second_answer(&mut self, seq: u64) {
        let Some(i) = self.resent.iter().position(|r| r.0 == seq) else { return };
        if let Some((_, fast)) = self.resent.remove(i) {
            self.counters.needless_retransmits += 1;
            if !fast {
                self.window.undo_timeouts();
            }
        }
    }

    /// The parameter server holds this rank's gradient of `seq` and waits for others.
    fn take_notice(&mut self, seq: u64, payload: &[u8], now: Nanos) {
        self.counters.notices += 1;
        let mut words = payload.as_chunks::<4>().0.iter().map(|w| u32::from_be_bytes(*w));
        let count = words.next().unwrap_or(0);
        let n = self.config.workers.len();
        let ranks: Vec<u16> =
            words.take(count as usize).filter_map(|r| u16::try_from(r).ok()).filter(|r| usize::from(*r) < n).collect();
        if ranks.contains(&self.me.rank) {
            // Others wait for this rank: its packet was lost, or the ACK of an older one that holds it back.
            for seq in [self.base, seq] {
                let patience = (2 * self.rtt.minimum_or_zero()).max(500_000);
                let flight = *self.flight(seq);
                if flight.seq == seq && flight.state == State::InFlight && now >= flight.sent_at + patience {
                    self.mark_lost(seq, false);
                    self.forced += 1;
                }
            }
        } else if seq < self.next_seq {
            self.window.undo_timeouts();
            self.trust_relay(now);
            let flight = *self.flight(seq);
            if flight.seq == seq && flight.state == State::InFlight && flight.sends == 2 && !flight.lost {
                // Only resends are answered so, and this was the only one.
                self.rtt.bound(now.saturating_sub(flight.sent_at));
            }
        }
        self.notice = Some(Notice { seq, at: now, count, ranks });
    }

    /// Why nothing moves, as far as this rank knows.
    fn stall_text(&self, now: Nanos) -> String {
        let op = self.ops.iter().find(|op| op.remaining > 0).map_or(0, |op| op.descriptor.op);
        let seconds = self.config.stall_timeout as f64 * 1e-9;
        let server = self.server(self.base);
        let known = self.notice.as_ref().filter(|n| {
            n.seq >= self.base && n.seq < self.next_seq && now.saturating_sub(n.at) <= self.config.stall_timeout
        });
        let why = match known {
            None => format!("the parameter server {server} does not answer"),
            Some(n) => {
                let mut names: Vec<String> = n
                    .ranks
                    .iter()
                    .take(16)
                    .map(|r| {
                        let you = if *r == self.me.rank { ", this rank" } else { "" };
                        format!("rank {r} ({}{you})", self.config.workers[usize::from(*r)].address.ip())
                    })
                    .collect();
                if n.count as usize > names.len() {
                    names.push(format!("{} more", n.count as usize - names.len()));
                }
                let names = names.join(", ");
                let age = now.saturating_sub(n.at);
                // Resends ask at least every `max_rto`, or after half of the time so far: a server that said nothing for
                // most of the time may have died since, or the answers were lost.
                if age <= self.config.stall_timeout / 5 * 3 {
                    format!("the parameter server still waits for the gradient of {names}")
                } else {
                    let age = age as f64 * 1e-9;
                    format!(
                        "the parameter server {server} does not answer; {age:.1} s ago it waited for the gradient of {names}"
                    )
                }
            }
        };
        format!(
            "all_reduce #{op}: no progress for {seconds} s: {why}; see whether those processes and the network between \
             them are alive"
        )
    }
}
