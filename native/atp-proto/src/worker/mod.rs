// SPDX-License-Identifier: Apache-2.0
//! The worker: cuts tensors into packets, sends them within the window, takes results.
//!
//! The parts know nothing of each other, this file joins them: the sequence space (`flights`), loss detection by ACKs
//! (`loss`, `reordering`), timers (`timers`), the window (`crate::congestion`), operations (`ops`), failover from a relay
//! (`relay`), and what is said when nothing moves (`progress`).

mod flights;
mod loss;
mod ops;
mod progress;
mod relay;
mod reordering;
mod timers;

use std::net::SocketAddrV4;

use self::flights::{Flight, Flights, Turn};
use self::loss::LossDetection;
pub use self::ops::{OPS_MAX, Submission};
use self::ops::{Operations, Outcome};
use self::progress::{Notice, Progress};
use self::relay::Relay;
use self::timers::Timers;
use crate::config::{Config, ConfigError, Mode, Role};
use crate::congestion::{Aimd, Controller};
use crate::failure::{Code, Failure};
use crate::fixed::RAW_NOTICE;
use crate::index::{IndexTable, mix};
use crate::rtt::Rtt;
use crate::stats::{Counters, Snapshot};
use crate::wire::{HEADER_BYTES, Header};
use crate::{Endpoint, Event, Nanos, Transmit, admission, seq};

/// Packets found lost by newer ACKs so many times are resent, not repeated: what a repeat cannot mend, a resend does.
const REPEATS: u32 = 3;
/// A missing rank that was told so repeats a packet at the earliest after this time.
const NOTICE_PATIENCE: Nanos = 500_000;

/// The worker's state machine, with its congestion control.
pub struct Worker<C = Aimd> {
    config: Config,
    /// What every gradient of this worker has in its header.
    header: Header,
    table: IndexTable,
    ops: Operations,
    flights: Flights,
    loss: LossDetection,
    timers: Timers,
    congestion: C,
    relay: Relay,
    progress: Progress,
    counters: Counters,
}

/// Largest window, and how many sequences may be open.
fn limits(config: &Config, aggregators: usize) -> (u32, u64) {
    // A reserved region is never shared: with more packets in flight than aggregators the job would collide with itself.
    let window = if config.mode == Mode::Reserved {
        config.max_window.min(u32::try_from(aggregators).unwrap_or(u32::MAX))
    } else {
        config.max_window
    };
    // Lost packets hold back the oldest sequence, not the window: up to P may be open. More than the job has aggregators
    // would collide with its own.
    let (slots, aggregators) = (u64::from(config.slots), aggregators as u64);
    let span = match config.mode {
        Mode::Reserved => slots.min(aggregators),
        Mode::Shared => slots.min(aggregators.max(u64::from(window))),
        Mode::HostOnly => slots,
    };
    (window, span)
}

impl Worker {
    /// A worker at the start of an epoch.
    ///
    /// # Errors
    /// When the assignment is that of a parameter server.
    pub fn new(config: Config) -> Result<Self, ConfigError> {
        Self::controlled(config)
    }
}

impl<C: Controller> Worker<C> {
    /// A worker at the start of an epoch, with congestion control of any kind.
    ///
    /// # Errors
    /// When the assignment is that of a parameter server.
    pub fn controlled(config: Config) -> Result<Self, ConfigError> {
        if config.role != Role::Worker {
            return Err(ConfigError("role is parameterServer, a Worker needs role worker".into()));
        }
        let table = IndexTable::new(&config);
        let (max_window, span) = limits(&config, table.aggregators());
        let header = Header::of_worker(&config);
        Ok(Self {
            header,
            ops: Operations::new(config.first_sequence),
            flights: Flights::new(config.first_sequence, config.slots, span, table.floor_size()),
            table,
            loss: LossDetection::new(max_window),
            timers: Timers::new(Rtt::new(config.min_rto, config.max_rto)),
            congestion: C::start(config.initial_window.min(max_window), max_window),
            relay: Relay::new(config.switch),
            progress: Progress::default(),
            counters: Counters::default(),
            config,
        })
    }

    /// Set, before the first operation, a number that differs from start to start: see `op`.
    #[must_use]
    pub fn of_incarnation(mut self, incarnation: u32) -> Self {
        self.ops.incarnation = incarnation;
        self
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
        self.ops.poisoned.as_ref()
    }

    /// Queue an all-reduce. Errors come as an event, like any other failure.
    pub fn submit(&mut self, submission: Submission, now: Nanos) {
        let first = self.ops.is_empty();
        if self.ops.submit(&self.config, submission, &mut self.counters) && first {
            self.progress.at = now;
        }
    }

    /// End every operation with `reason`. When any was pending the ranks no longer agree on the sequence, so later
    /// operations fail too: the job needs a new epoch.
    pub fn cancel_all(&mut self, reason: &str) {
        if !self.ops.is_empty() {
            self.fail_all(Code::Cancelled, &format!("cancelled: {reason}"));
        }
    }

    fn fail_all(&mut self, code: Code, reason: &str) {
        self.ops.fail_all(code, reason, &mut self.counters);
        self.give_up(self.flights.base(), self.ops.tail());
    }

    /// Forget the sequences from `from` on and go on at `to`.
    fn give_up(&mut self, from: u64, to: u64) {
        self.flights.give_up(from, to);
        if self.flights.is_idle() {
            self.loss.on_idle();
            self.timers.stop();
        }
    }

    /// Write the packet of `seq` and count it.
    fn transmit(&mut self, seq: u64, now: Nanos, buffer: &mut [u8]) -> Transmit {
        let plain = self.config.packet_bytes();
        let flight = self.flights.on_sent(seq, now);
        let resent = flight.sends > 1;
        let raw_type = self.ops.fill(&self.config, flight, &mut buffer[HEADER_BYTES..plain], &mut self.counters);
        let raw = flight.raw;
        let flush = resent && (flight.flush || raw);
        flight.flush = false;
        let header = Header {
            sequence: seq::wrap(seq),
            resend: flush,
            collision: resent && !flush,
            raw_float: raw,
            aggregator_index: if raw { raw_type } else { flight.index },
            ..self.header
        };
        self.loss.on_sent(flight);
        self.timers.on_sent(now);
        buffer[..HEADER_BYTES].copy_from_slice(&header.pack());
        let length = if raw { self.config.seal.close(buffer, plain) } else { plain };
        self.counters.packets_sent += 1;
        self.counters.bytes_sent += length as u64;
        self.counters.gradient_packets += 1;
        self.counters.retransmits += u64::from(resent);
        let relay = self.relay.target(now).filter(|_| !raw);
        Transmit { to: relay.unwrap_or_else(|| self.config.server(seq)), length }
    }

    /// Newer ACKs show that `seq` is lost.
    fn mark_overtaken(&mut self, seq: u64, now: Nanos) {
        let Some(sent_at) = self.flights.mark_lost(seq, true) else { return };
        self.counters.fast_retransmits += 1;
        if let Some(flight) = self.flights.open_mut(seq) {
            flight.fast_count += 1;
            flight.flush = flight.fast_count > REPEATS;
        }
        if self.congestion.on_loss(&self.timers.rtt, sent_at, now) {
            self.counters.window_cuts += 1;
        }
    }

    fn detect_losses(&mut self, now: Nanos) {
        while let Some(seq) =
            self.loss.next_overtaken(&self.flights, self.loss.reordering.effective(self.congestion.window()))
        {
            self.mark_overtaken(seq, now);
        }
    }

    /// No ACK for longer than a round trip takes: newer ACKs cannot show what was lost, because nothing newer is on its way
    /// or all of it was lost. Repeat the oldest packets (as the tail loss probe of RFC 8985 does). A repeat breaks no
    /// aggregation, so it costs little when the wait is for a slow worker.
    fn probe(&mut self, now: Nanos) {
        let mut left = self.timers.probe_packets();
        for seq in self.flights.range() {
            if left == 0 {
                break;
            }
            if self.flights.mark_lost(seq, false).is_some() {
                left -= 1;
                self.flights.force();
            }
        }
        self.counters.probes += 1;
        self.timers.on_probe(now);
    }

    /// The retransmission time-out is over. One packet only is resent, the oldest: its answer tells whether the others are
    /// lost too, and each needless resend breaks the aggregation of its sequence.
    fn time_out(&mut self, now: Nanos) {
        self.counters.timeouts += 1;
        self.congestion.on_timeout(now);
        let seq = self.flights.resend_oldest();
        self.counters.relay_fallbacks += u64::from(self.relay.suspect(now));
        let draw = mix(u64::from(self.config.rank) << 32 ^ self.flights.transmissions()) % 256;
        self.timers.on_timeout(seq, draw, now);
    }

    /// A result for `seq`: window, timers, loss detection. `None` for a duplicate.
    fn acknowledge(&mut self, seq: u64, ecn: bool, now: Nanos) -> Option<Flight> {
        let limited = self.flights.in_flight() + 1 >= self.congestion.window();
        let flight = self.flights.acknowledge(seq)?;
        self.measure(&flight, now);
        if flight.sends > 1 {
            self.loss.on_resent_ack(&flight);
        } else if seq > self.timers.timed_out() + self.flights.span() {
            self.congestion.on_progress();
        }
        if ecn {
            self.counters.ecn_marks += 1;
            self.counters.window_cuts += u64::from(self.congestion.on_mark(flight.sent_at, now));
        } else {
            self.congestion.on_ack(limited);
        }
        let overtook = self.loss.on_ack(&flight);
        self.detect_losses(now);
        self.flights.advance();
        let idle = self.flights.is_idle();
        if idle {
            self.loss.on_idle();
        } else {
            self.loss.expect_older(&flight, overtook, self.timers.rtt.reordering_window(), now);
        }
        self.timers.on_ack(idle, now);
        self.progress.at = now;
        self.relay.trust(now);
        Some(flight)
    }

    /// What an ACK says about round-trip time and reordering.
    fn measure(&mut self, flight: &Flight, now: Nanos) {
        let took = now.saturating_sub(flight.sent_at);
        let needless = flight.fast
            && if flight.lost {
                flight.sends == 1
            } else {
                // Sooner than any answer to the repeat itself: that of the first copy, behind a queue or out of order.
                flight.sends == 2 && took < self.timers.rtt.minimum_or_zero()
            };
        if flight.sends > 1 {
            self.timers.rtt.ambiguous(took);
        } else if !flight.lost {
            self.timers.rtt.sample(took, self.timers.is_calm(flight.sent_at));
        }
        if needless {
            self.counters.needless_retransmits += u64::from(!flight.lost);
            self.loss.reordering.on_needless_resend(flight.sent_at, now);
        } else {
            self.loss.reordering.on_ack(self.congestion.window());
        }
    }

    /// A result came twice: if the packet was sent twice, the resend was needless. That says nothing about reordering: one
    /// lost packet makes all workers resend the sequence, and all but one needlessly.
    fn on_second_answer(&mut self, seq: u64) {
        self.counters.duplicates += 1;
        let Some(fast) = self.loss.take_needless(seq) else { return };
        self.counters.needless_retransmits += 1;
        if !fast {
            self.congestion.undo_timeouts();
        }
    }

    /// The parameter server wants the gradient of `seq` as raw words.
    fn send_raw(&mut self, seq: u64, now: Nanos) {
        let recent = self.timers.rtt.reordering_window();
        let Some(flight) = self.flights.open_mut(seq) else {
            self.counters.duplicates += 1;
            return;
        };
        if flight.raw && (flight.lost || now < flight.sent_at + recent) {
            // On its way already.
            return;
        }
        flight.raw = true;
        self.counters.raw_float_corrections += 1;
        self.flights.mark_lost(seq, false);
    }

    /// The parameter server says for whose gradient of `seq` it waits.
    fn take_notice(&mut self, seq: u64, payload: &[u8], now: Nanos) {
        self.counters.notices += 1;
        let notice = Notice::parse(seq, payload, self.config.workers.len(), now);
        if notice.ranks.contains(&self.config.rank) {
            // Others wait for this rank: its packet was lost, or the ACK of an older one that holds it back.
            let patience = (2 * self.timers.rtt.minimum_or_zero()).max(NOTICE_PATIENCE);
            for seq in [self.flights.base(), seq] {
                if self.flights.open(seq).is_some_and(|f| now >= f.sent_at + patience) {
                    self.flights.mark_lost(seq, false);
                    self.flights.force();
                }
            }
        } else if seq < self.flights.next() {
            self.congestion.undo_timeouts();
            self.relay.trust(now);
            if let Some(flight) = self.flights.open(seq).filter(|f| f.sends == 2 && !f.lost) {
                // Only resends are answered so, and this was the only one.
                self.timers.rtt.bound(now.saturating_sub(flight.sent_at));
            }
        }
        self.progress.notice = Some(notice);
    }

    /// The payload of a datagram that may be an answer to this worker; others are counted.
    fn admit<'a>(&mut self, from: SocketAddrV4, relayed: bool, data: &'a [u8]) -> Option<(Header, &'a [u8])> {
        let known = relayed || self.config.servers.contains(&from);
        let (header, data) = admission::open(&self.config, &mut self.counters, known, data)?;
        if !header.is_ack {
            self.counters.rejected_kind += 1;
            return None;
        }
        Some((header, &data[HEADER_BYTES..]))
    }
}

impl<C: Controller> Endpoint for Worker<C> {
    fn handle(&mut self, from: SocketAddrV4, ce: bool, data: &[u8], now: Nanos) {
        self.counters.packets_received += 1;
        self.counters.bytes_received += data.len() as u64;
        let relayed = self.relay.is(from);
        let Some((h, payload)) = self.admit(from, relayed, data) else { return };
        let seq = seq::unwrap(h.sequence, self.flights.next());
        let right_server = relayed || from == self.config.server(seq);
        if right_server && h.raw_float && h.aggregator_index == RAW_NOTICE {
            self.take_notice(seq, payload, now);
            return;
        }
        if seq >= self.flights.next() || !right_server {
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
        if self.flights.is_given_up(seq) {
            return;
        }
        let Some(flight) = self.acknowledge(seq, h.ecn | ce, now) else {
            self.on_second_answer(seq);
            return;
        };
        match self.ops.deliver(&self.config, &flight, h.raw_float, payload, &mut self.counters) {
            Outcome::Fine => {}
            Outcome::Skip(from, to) => {
                self.give_up(from, to);
                self.progress.at = now;
            }
            Outcome::NotOurs(text) => self.fail_all(Code::PeerGone, &text),
        }
    }

    fn poll_transmit(&mut self, now: Nanos, buffer: &mut [u8]) -> Option<Transmit> {
        match self.flights.turn(self.congestion.window()) {
            Turn::Nothing => None,
            Turn::Again(seq) => Some(self.transmit(seq, now, buffer)),
            Turn::New => {
                let next = self.flights.next();
                let place = self.table.in_floor(next);
                if !self.flights.may_open(place) {
                    return None;
                }
                let op = self.ops.sending()?;
                let seq = self.flights.open_next(self.table.get(next), op, place);
                let transmit = self.transmit(seq, now, buffer);
                self.ops.on_first_sent(&self.config, seq);
                Some(transmit)
            }
        }
    }

    fn poll_timeout(&self) -> Option<Nanos> {
        let stall = (!self.ops.is_empty()).then(|| self.progress.at + self.config.stall_timeout);
        [self.timers.deadline(), self.loss.deadline(), stall].into_iter().flatten().min()
    }

    fn handle_timeout(&mut self, now: Nanos) {
        if !self.ops.is_empty() && now >= self.progress.at + self.config.stall_timeout {
            let open = self.flights.base()..self.flights.next();
            let text = self.progress.stall_text(&self.config, self.ops.oldest(), open, now);
            self.fail_all(Code::Stalled, &text);
            return;
        }
        if let Some(limit) = self.loss.take_lagging(now) {
            for seq in self.flights.range() {
                if self.flights.open(seq).is_some_and(|f| f.tx < limit) {
                    self.mark_overtaken(seq, now);
                }
            }
        }
        if self.timers.probe_is_due(now) {
            self.probe(now);
        }
        if self.timers.rto_is_due(now) {
            self.time_out(now);
        }
    }

    fn poll_event(&mut self) -> Option<Event> {
        self.ops.events.pop_front()
    }

    fn snapshot(&self) -> Snapshot {
        let rtt = &self.timers.rtt;
        let (window, ssthresh) = self.congestion.gauges();
        Snapshot {
            counters: self.counters,
            window,
            ssthresh,
            rtt_seconds: rtt.smoothed_seconds(),
            rto_seconds: self.timers.rto() as f64 * 1e-9,
            in_flight: self.flights.in_flight(),
            open_sequences: self.flights.next() - self.flights.base(),
            reorder_threshold: self.loss.reordering.threshold(),
            group_path_down: 0,
            rtt_histogram: rtt.histogram.to_vec(),
            rtt_sum_seconds: rtt.sum,
        }
    }
}
