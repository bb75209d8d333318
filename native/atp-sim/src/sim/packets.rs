// SPDX-License-Identifier: Apache-2.0
//! Packets on their way through links, switches and hosts, and the endpoints that they meet.

use std::net::{Ipv4Addr, SocketAddrV4};

use atp_proto::wire::UDP_PORT;
use atp_proto::{Endpoint, Nanos};

use super::{Power, Sim};
use crate::comparison::Machine;
use crate::flow;
use crate::net::{Due, NO_BUFFER, Net, Node, Packet};

/// Bytes that a host's socket and queue hold before the transport is not asked for more.
const HOST_BACKLOG: u64 = 64 * 1024;
/// Packets that wait for a process that does not run.
const SOCKET_PACKETS: usize = 512;

fn address(ip: u32) -> SocketAddrV4 {
    SocketAddrV4::new(Ipv4Addr::from(ip), UDP_PORT as u16)
}

impl Sim {
    pub(super) fn send(&mut self, link: u32, id: u32) {
        // Before the packet is consumed.
        if let Some(t) = &mut self.tracer {
            t.packet(&self.net, link, id);
        }
        self.net.send(link, id);
        if let Some(t) = &mut self.tracer {
            t.fate(self.net.last_fate);
        }
    }

    pub(super) fn arrive(&mut self, link: u32, id: u32) {
        match self.net.links[link as usize].to {
            Node::Host(h) => self.host_receives(h, id),
            Node::Tor(t) => self.switch_receives(t, link, id),
            Node::Core => {
                let dst = self.net.packet(id).dst;
                match self.net.route(Node::Core, dst) {
                    Some(out) => self.send(out, id),
                    None => self.net.drop_packet(id),
                }
            }
        }
    }

    fn switch_receives(&mut self, t: u32, link: u32, id: u32) {
        let p = *self.net.packet(id);
        let tor = &mut self.tors[t as usize];
        if tor.power == Power::Off {
            self.net.drop_packet(id);
            return;
        }
        if p.buffer == NO_BUFFER {
            match self.net.route(Node::Tor(t), p.dst) {
                Some(out) => self.send(out, id),
                None => self.net.drop_packet(id),
            }
            return;
        }
        let now = self.net.now;
        // The core changes gradients in place, ACKs and raw packets never.
        let flags = self.net.data(id)[13];
        let gradient = flags & 3 == 0;
        let mut emits = std::mem::take(&mut self.emits);
        emits.clear();
        let data = if gradient { self.net.data_mut(id) } else { self.net.data_shared(id) };
        emits.extend_from_slice(tor.switch.process(Net::port(link ^ 1), p.dst, p.ce, data, now));
        if let Some(tr) = &mut self.tracer
            && emits.is_empty()
        {
            tr.keeps(now, t, self.net.data(id));
        }
        // An ACK with edge=1 is for one worker.
        let replicated = flags & 0x23 == 2;
        let last = emits.len().wrapping_sub(1);
        for (i, e) in emits.iter().enumerate() {
            let copy = if i == last { id } else { self.net.copy(id) };
            self.net.packet_mut(copy).dst = e.dst_ip;
            let out = if replicated && e.port != 0 { Some(e.port - 1) } else { self.net.route(Node::Tor(t), e.dst_ip) };
            match out {
                Some(out) => self.send(out, copy),
                None => self.net.drop_packet(copy),
            }
        }
        if emits.is_empty() {
            self.net.drop_packet(id);
        }
        self.emits = emits;
    }

    fn host_receives(&mut self, h: u32, id: u32) {
        let p = *self.net.packet(id);
        let host = &mut self.net.hosts[h as usize];
        if p.dst != host.ip {
            self.net.drop_packet(id);
            self.violate("misrouted", format!("host {h} got a packet for address {:#x}", p.dst));
            return;
        }
        if p.buffer == NO_BUFFER {
            self.net.drop_packet(id);
            self.flow_packet(&p);
            return;
        }
        let Some(e) = host.endpoint else {
            self.net.drop_packet(id);
            return;
        };
        if host.paused {
            if host.socket.len() < SOCKET_PACKETS {
                host.socket.push_back(id);
            } else {
                self.net.drop_packet(id);
            }
            return;
        }
        self.deliver(e, id);
        self.pump(e);
    }

    pub(super) fn deliver(&mut self, e: u32, id: u32) {
        let p = *self.net.packet(id);
        let now = self.net.now;
        let running = &mut self.running[e as usize];
        let data = self.net.data(id);
        match &mut running.machine {
            Machine::Worker(w) => w.handle(address(p.src), p.ce, data, now),
            Machine::Server(s) => s.handle(address(p.src), p.ce, data, now),
            other => other.endpoint().handle(address(p.src), p.ce, data, now),
        }
        running.handled += 1;
        if running.handled.is_multiple_of(512) {
            self.check_window(e);
        }
        self.net.drop_packet(id);
    }

    pub(super) fn timer(&mut self, e: u32) {
        let now = self.net.now;
        let running = &mut self.running[e as usize];
        if !running.alive || running.armed != now {
            return;
        }
        running.armed = Nanos::MAX;
        if self.net.hosts[running.host as usize].paused {
            return;
        }
        let endpoint = running.machine.endpoint();
        if endpoint.poll_timeout().is_some_and(|t| t <= now) {
            endpoint.handle_timeout(now);
        }
        self.pump(e);
    }

    /// Let an endpoint send what it wants, take what it has finished, set its timer.
    pub(super) fn pump(&mut self, e: u32) {
        let now = self.net.now;
        let running = &self.running[e as usize];
        let h = running.host;
        let host = &self.net.hosts[h as usize];
        if !running.alive || host.paused {
            return;
        }
        let up = host.up;
        let ip = host.ip;
        let limit = HOST_BACKLOG * 8_000_000_000 / self.net.links[up as usize].spec.rate;
        let mut buffer = None;
        loop {
            let backlog = self.net.links[up as usize].backlog(now);
            if backlog > limit {
                let host = &mut self.net.hosts[h as usize];
                if !host.wake_armed {
                    host.wake_armed = true;
                    self.net.queue.push(now + backlog - limit, Due::Wake(h));
                }
                break;
            }
            let b = match buffer.take() {
                Some(b) => b,
                None => self.net.new_buffer(),
            };
            let running = &mut self.running[e as usize];
            let bytes = self.net.buffer_mut(b);
            let transmit = match &mut running.machine {
                Machine::Worker(w) => w.poll_transmit(now, bytes),
                Machine::Server(s) => s.poll_transmit(now, bytes),
                other => other.endpoint().poll_transmit(now, bytes),
            };
            let Some(t) = transmit else {
                buffer = Some(b);
                break;
            };
            let id = self.net.new_packet(Packet {
                src: ip,
                dst: u32::from(*t.to.ip()),
                length: t.length as u32,
                buffer: b,
                flow: 0,
                number: 0,
                ce: false,
                ack: false,
                echo: false,
                link: 0,
            });
            self.send(up, id);
        }
        if let Some(b) = buffer {
            self.net.release_buffer(b);
        }
        loop {
            let running = &mut self.running[e as usize];
            let Some(event) = running.machine.trainee().and_then(|w| w.poll_event()) else { break };
            let (job, epoch, rank) = (running.job, running.epoch, running.rank);
            self.operation_ended(job, epoch, rank, event);
            if !self.running[e as usize].alive {
                return;
            }
        }
        self.arm(e);
    }

    fn arm(&mut self, e: u32) {
        let now = self.net.now;
        let running = &mut self.running[e as usize];
        if let Some(at) = running.machine.endpoint().poll_timeout() {
            let at = at.max(now + 1);
            if at < running.armed {
                running.armed = at;
                self.net.queue.push(at, Due::Timer(e));
            }
        }
    }

    pub(super) fn pump_flow(&mut self, f: u32) {
        let now = self.net.now;
        loop {
            let flow = &mut self.flows[f as usize];
            let (from, to) = (flow.from as usize, flow.to as usize);
            let Some(number) = flow.poll(now) else { return };
            let (src, dst, up) = (self.net.hosts[from].ip, self.net.hosts[to].ip, self.net.hosts[from].up);
            self.send_background(up, src, dst, f, number, false, false);
        }
    }

    #[allow(clippy::too_many_arguments)]
    fn send_background(&mut self, up: u32, src: u32, dst: u32, flow: u32, number: u32, ack: bool, echo: bool) {
        let length = if ack { flow::ACK } else { flow::DATA };
        let p = Packet { src, dst, length, buffer: NO_BUFFER, flow, number, ce: false, ack, echo, link: 0 };
        let id = self.net.new_packet(p);
        self.send(up, id);
    }

    fn flow_packet(&mut self, p: &Packet) {
        if p.ack {
            let now = self.net.now;
            self.flows[p.flow as usize].on_ack(p.number, p.echo, now);
            self.pump_flow(p.flow);
        } else if let Some(h) = self.net.host_of(p.dst) {
            let up = self.net.hosts[h as usize].up;
            self.send_background(up, p.dst, p.src, p.flow, p.number, true, p.ce);
        }
    }
}
