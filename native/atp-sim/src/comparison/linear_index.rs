// SPDX-License-Identifier: Apache-2.0
//! Linear indexes, as SwitchML has them: aggregatorIndex = slot mod region, so that all jobs of a region meet at the same
//! aggregators. An endpoint of the product whose packets are changed on their way out: gradients get the linear index,
//! and ACKs announce no other.

use std::net::SocketAddrV4;

use atp_proto::stats::Snapshot;
use atp_proto::wire::{HEADER_BYTES, Header};
use atp_proto::worker::Submission;
use atp_proto::{Config, Endpoint, Event, Nanos, Transmit, Worker};

use super::Trainee;

pub struct LinearIndex<E> {
    inner: E,
    /// P, which divides the sequence space.
    slots: u32,
    /// First aggregatorIndex and number of them.
    region: (u32, u32),
}

impl<E> LinearIndex<E> {
    pub fn new(config: &Config, inner: E) -> Self {
        let region = &config.regions[0];
        Self { inner, slots: config.slots, region: (region.start, region.size) }
    }

    fn change(&self, packet: &mut [u8]) {
        let Some(mut header) = Header::unpack(packet) else { return };
        if header.is_ack && header.collision {
            // Nothing but an announcement is read from an ACK's bitmaps.
            header.collision = false;
            header.bitmap1 = 0;
        } else if !header.is_ack && !header.raw_float {
            header.aggregator_index = (self.region.0 + header.sequence % self.slots % self.region.1) as u16;
        }
        packet[..HEADER_BYTES].copy_from_slice(&header.pack());
    }
}

impl<E: Endpoint> Endpoint for LinearIndex<E> {
    fn handle(&mut self, from: SocketAddrV4, ce: bool, data: &[u8], now: Nanos) {
        self.inner.handle(from, ce, data, now);
    }
    fn poll_transmit(&mut self, now: Nanos, buffer: &mut [u8]) -> Option<Transmit> {
        let transmit = self.inner.poll_transmit(now, buffer)?;
        self.change(&mut buffer[..transmit.length]);
        Some(transmit)
    }
    fn poll_timeout(&self) -> Option<Nanos> {
        self.inner.poll_timeout()
    }
    fn handle_timeout(&mut self, now: Nanos) {
        self.inner.handle_timeout(now);
    }
    fn poll_event(&mut self) -> Option<Event> {
        self.inner.poll_event()
    }
    fn snapshot(&self) -> Snapshot {
        self.inner.snapshot()
    }
}

impl Trainee for LinearIndex<Worker> {
    fn submit(&mut self, submission: Submission, now: Nanos) {
        self.inner.submit(submission, now);
    }
    fn cancel_all(&mut self, reason: &str) {
        self.inner.cancel_all(reason);
    }
    fn config(&self) -> &Config {
        self.inner.config()
    }
}
