// SPDX-License-Identifier: Apache-2.0
//! Hosts, switches and links on one event queue. A link has rate, delay, queue, ECN threshold, loss, duplication and
//! reordering; packets on it stay in order unless they are drawn to be late. Only the head of each link is in the event
//! queue, so its size is that of the topology, not of the traffic.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, VecDeque};

use atp_proto::Nanos;

use crate::rng::Rng;

/// Ethernet, IPv4 and UDP before the UDP payload.
pub const OVERHEAD: usize = 42;
/// `Packet::buffer` of packets without bytes (background flows).
pub const NO_BUFFER: u32 = u32::MAX;

#[derive(Clone, Copy, Debug)]
pub struct LinkSpec {
    /// bit/s
    pub rate: u64,
    pub delay: Nanos,
    /// Bytes that may wait; more are dropped.
    pub queue: u32,
    /// Packets that find more bytes waiting are marked; 0: never.
    pub ecn: u32,
    pub loss: f64,
    pub duplicate: f64,
    pub reorder: f64,
    /// Largest additional delay of a reordered packet.
    pub late: Nanos,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Node {
    Host(u32),
    Tor(u32),
    Core,
}

#[derive(Clone, Copy, Debug, Default)]
pub struct LinkStats {
    pub packets: u64,
    pub bytes: u64,
    pub lost: u64,
    pub overflowed: u64,
    pub duplicated: u64,
    pub late: u64,
    pub marked: u64,
    pub cut: u64,
}

pub struct Link {
    pub spec: LinkSpec,
    pub from: Node,
    pub to: Node,
    pub up: bool,
    pub stats: LinkStats,
    busy_until: Nanos,
    /// Picoseconds a byte.
    ps_per_byte: u64,
    queue_ns: Nanos,
    ecn_ns: Nanos,
    fifo: VecDeque<(Nanos, u32)>,
}

impl Link {
    fn new(spec: LinkSpec, from: Node, to: Node) -> Self {
        let mut link = Self {
            spec,
            from,
            to,
            up: true,
            stats: LinkStats::default(),
            busy_until: 0,
            ps_per_byte: 0,
            queue_ns: 0,
            ecn_ns: 0,
            fifo: VecDeque::new(),
        };
        link.set_spec(spec);
        link
    }

    pub fn set_spec(&mut self, spec: LinkSpec) {
        self.spec = spec;
        self.ps_per_byte = (8_000_000_000_000 / spec.rate).max(1);
        self.queue_ns = u64::from(spec.queue) * self.ps_per_byte / 1000;
        self.ecn_ns = if spec.ecn == 0 { Nanos::MAX } else { u64::from(spec.ecn) * self.ps_per_byte / 1000 };
    }

    /// Time until all that waits has been sent.
    #[must_use]
    pub fn backlog(&self, now: Nanos) -> Nanos {
        self.busy_until.saturating_sub(now)
    }
}

/// A packet on the way.
#[derive(Clone, Copy, Debug, Default)]
pub struct Packet {
    pub src: u32,
    pub dst: u32,
    /// Bytes of the UDP payload.
    pub length: u32,
    pub buffer: u32,
    /// Flow of a background packet.
    pub flow: u32,
    /// Number of a background packet.
    pub number: u32,
    pub ce: bool,
    /// Background: an acknowledgement.
    pub ack: bool,
    /// Background acknowledgement: the packet was marked.
    pub echo: bool,
    /// The link that a late packet is on.
    pub link: u32,
}

/// What the event queue says is due.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Due {
    /// The head of a link arrives.
    Link(u32),
    /// A late or duplicate packet arrives.
    Late(u32),
    /// An endpoint's timer.
    Timer(u32),
    /// A host's uplink has room again.
    Wake(u32),
    Control(u32),
    Flow(u32),
}

/// Why a packet did not arrive, for traces.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fate {
    Sent,
    Late,
    Duplicated,
    Lost,
    Overflow,
    LinkDown,
}

const KINDS: u32 = 28;

#[derive(Default)]
pub struct Queue {
    heap: BinaryHeap<Reverse<u128>>,
    order: u32,
}

impl Queue {
    pub fn push(&mut self, at: Nanos, due: Due) {
        let (kind, id) = match due {
            Due::Link(i) => (0, i),
            Due::Late(i) => (1, i),
            Due::Timer(i) => (2, i),
            Due::Wake(i) => (3, i),
            Due::Control(i) => (4, i),
            Due::Flow(i) => (5, i),
        };
        self.order = self.order.wrapping_add(1);
        let key = u128::from(at) << 64 | u128::from(self.order) << 32 | u128::from(kind << KINDS | id);
        self.heap.push(Reverse(key));
    }

    pub fn pop(&mut self) -> Option<(Nanos, Due)> {
        let Reverse(key) = self.heap.pop()?;
        let low = key as u32;
        let id = low & ((1 << KINDS) - 1);
        let due = match low >> KINDS {
            0 => Due::Link(id),
            1 => Due::Late(id),
            2 => Due::Timer(id),
            3 => Due::Wake(id),
            4 => Due::Control(id),
            _ => Due::Flow(id),
        };
        Some(((key >> 64) as Nanos, due))
    }
}

pub struct Host {
    pub ip: u32,
    pub tor: u32,
    /// Link to the switch.
    pub up: u32,
    /// Link from the switch.
    pub down: u32,
    pub endpoint: Option<u32>,
    pub wake_armed: bool,
    /// The process does not run (SIGSTOP, a busy machine); packets wait in the socket's buffer.
    pub paused: bool,
    pub socket: VecDeque<u32>,
}

pub struct Tor {
    pub up: u32,
    pub down: u32,
}

/// The network without what runs on it.
pub struct Net {
    pub now: Nanos,
    pub rng: Rng,
    pub queue: Queue,
    pub links: Vec<Link>,
    pub hosts: Vec<Host>,
    pub tors: Vec<Tor>,
    packets: Vec<Packet>,
    free: Vec<u32>,
    bytes: Vec<u8>,
    stride: usize,
    references: Vec<u32>,
    free_buffers: Vec<u32>,
    /// Packets that went over a link.
    pub hops: u64,
    /// Share of ATP packets in which a value is changed on the way: the properties must notice.
    pub damage: f64,
    /// Fate of the last `send`, for traces.
    pub last_fate: Fate,
}

/// Address of host `i`.
#[must_use]
pub fn ip_of(host: usize) -> u32 {
    0x0a00_0001 + host as u32
}

impl Net {
    /// `racks` switches with the given hosts each, joined by a core if there are several. `payload`: the largest UDP payload.
    #[must_use]
    pub fn new(racks: &[usize], host: LinkSpec, fabric: LinkSpec, payload: usize, seed: u64) -> Self {
        let mut net = Self {
            now: 0,
            rng: Rng::new(seed),
            queue: Queue::default(),
            links: Vec::new(),
            hosts: Vec::new(),
            tors: Vec::new(),
            packets: Vec::new(),
            free: Vec::new(),
            bytes: Vec::new(),
            stride: payload.next_multiple_of(8),
            references: Vec::new(),
            free_buffers: Vec::new(),
            hops: 0,
            damage: 0.0,
            last_fate: Fate::Sent,
        };
        // A host's own queue does not mark, and the sockets' back-pressure keeps it from overflowing.
        let uplink = LinkSpec { ecn: 0, queue: u32::MAX, ..host };
        for (tor, count) in racks.iter().enumerate() {
            let tor = tor as u32;
            let up = net.add_link(fabric, Node::Tor(tor), Node::Core);
            let down = net.add_link(fabric, Node::Core, Node::Tor(tor));
            net.tors.push(Tor { up, down });
            for _ in 0..*count {
                let id = net.hosts.len() as u32;
                let up = net.add_link(uplink, Node::Host(id), Node::Tor(tor));
                let down = net.add_link(host, Node::Tor(tor), Node::Host(id));
                net.hosts.push(Host {
                    ip: ip_of(id as usize),
                    tor,
                    up,
                    down,
                    endpoint: None,
                    wake_armed: false,
                    paused: false,
                    socket: VecDeque::new(),
                });
            }
        }
        net
    }

    /// Links are made in pairs: `id ^ 1` is the other direction.
    fn add_link(&mut self, spec: LinkSpec, from: Node, to: Node) -> u32 {
        self.links.push(Link::new(spec, from, to));
        self.links.len() as u32 - 1
    }

    /// Number of the port that `link` leaves by; a packet that came over `link` came in at `port(link ^ 1)`.
    #[must_use]
    pub fn port(link: u32) -> u32 {
        link + 1
    }

    #[must_use]
    pub fn host_of(&self, ip: u32) -> Option<u32> {
        let i = ip.wrapping_sub(ip_of(0));
        ((i as usize) < self.hosts.len()).then_some(i)
    }

    /// The link by which `node` forwards to `ip`.
    #[must_use]
    pub fn route(&self, node: Node, ip: u32) -> Option<u32> {
        let host = &self.hosts[self.host_of(ip)? as usize];
        Some(match node {
            Node::Tor(t) if t == host.tor => host.down,
            Node::Tor(t) => self.tors[t as usize].up,
            Node::Core => self.tors[host.tor as usize].down,
            Node::Host(h) => self.hosts[h as usize].up,
        })
    }

    pub fn new_packet(&mut self, packet: Packet) -> u32 {
        if let Some(id) = self.free.pop() {
            self.packets[id as usize] = packet;
            id
        } else {
            self.packets.push(packet);
            self.packets.len() as u32 - 1
        }
    }

    pub fn new_buffer(&mut self) -> u32 {
        if let Some(b) = self.free_buffers.pop() {
            self.references[b as usize] = 1;
            b
        } else {
            self.references.push(1);
            self.bytes.resize(self.bytes.len() + self.stride, 0);
            self.references.len() as u32 - 1
        }
    }

    pub fn release_buffer(&mut self, buffer: u32) {
        let count = &mut self.references[buffer as usize];
        *count -= 1;
        if *count == 0 {
            self.free_buffers.push(buffer);
        }
    }

    pub fn buffer_mut(&mut self, buffer: u32) -> &mut [u8] {
        let at = buffer as usize * self.stride;
        &mut self.bytes[at..at + self.stride]
    }

    #[must_use]
    pub fn packet(&self, id: u32) -> &Packet {
        &self.packets[id as usize]
    }

    pub fn packet_mut(&mut self, id: u32) -> &mut Packet {
        &mut self.packets[id as usize]
    }

    #[must_use]
    pub fn data(&self, id: u32) -> &[u8] {
        let p = &self.packets[id as usize];
        if p.buffer == NO_BUFFER {
            return &[];
        }
        let at = p.buffer as usize * self.stride;
        &self.bytes[at..at + p.length as usize]
    }

    /// The packet's bytes, to be changed: copied first if another packet shares them.
    pub fn data_mut(&mut self, id: u32) -> &mut [u8] {
        let p = self.packets[id as usize];
        let mut buffer = p.buffer;
        if self.references[buffer as usize] > 1 {
            self.references[buffer as usize] -= 1;
            buffer = self.new_buffer();
            self.packets[id as usize].buffer = buffer;
            let from = p.buffer as usize * self.stride;
            self.bytes.copy_within(from..from + p.length as usize, buffer as usize * self.stride);
        }
        let at = buffer as usize * self.stride;
        &mut self.bytes[at..at + p.length as usize]
    }

    /// The packet's bytes for somebody who is known not to change them, but asks for mutable ones.
    pub fn data_shared(&mut self, id: u32) -> &mut [u8] {
        let p = &self.packets[id as usize];
        let at = p.buffer as usize * self.stride;
        &mut self.bytes[at..at + p.length as usize]
    }

    /// Another packet with the same bytes.
    pub fn copy(&mut self, id: u32) -> u32 {
        let p = self.packets[id as usize];
        if p.buffer != NO_BUFFER {
            self.references[p.buffer as usize] += 1;
        }
        self.new_packet(p)
    }

    pub fn drop_packet(&mut self, id: u32) {
        let buffer = self.packets[id as usize].buffer;
        if buffer != NO_BUFFER {
            self.release_buffer(buffer);
        }
        self.free.push(id);
    }

    /// Packets that exist.
    #[must_use]
    pub fn packets_alive(&self) -> usize {
        self.packets.len() - self.free.len()
    }

    /// Send a packet over a link; consumed whatever happens.
    pub fn send(&mut self, link_id: u32, id: u32) {
        self.hops += 1;
        let now = self.now;
        let wire = u64::from(self.packets[id as usize].length) + OVERHEAD as u64;
        let link = &mut self.links[link_id as usize];
        if !link.up {
            link.stats.cut += 1;
            self.last_fate = Fate::LinkDown;
            self.drop_packet(id);
            return;
        }
        let start = link.busy_until.max(now);
        let waiting = start - now;
        if waiting > link.queue_ns {
            link.stats.overflowed += 1;
            self.last_fate = Fate::Overflow;
            self.drop_packet(id);
            return;
        }
        if waiting > link.ecn_ns {
            self.packets[id as usize].ce = true;
            link.stats.marked += 1;
        }
        let sent = start + (wire * link.ps_per_byte).div_ceil(1000);
        link.busy_until = sent;
        link.stats.packets += 1;
        link.stats.bytes += wire;
        let at = sent + link.spec.delay;
        if link.spec.loss > 0.0 && self.rng.chance(link.spec.loss) {
            link.stats.lost += 1;
            self.last_fate = Fate::Lost;
            self.drop_packet(id);
            return;
        }
        if self.damage > 0.0 && self.packets[id as usize].buffer != NO_BUFFER && self.rng.chance(self.damage) {
            let data = self.data_mut(id);
            let last = data.len() - 1;
            data[last] ^= 1;
        }
        let link = &mut self.links[link_id as usize];
        self.last_fate = Fate::Sent;
        if link.spec.duplicate > 0.0 && self.rng.chance(link.spec.duplicate) {
            self.links[link_id as usize].stats.duplicated += 1;
            let late = self.rng.below(self.links[link_id as usize].spec.late.max(1));
            let other = self.copy(id);
            self.packets[other as usize].link = link_id;
            self.queue.push(at + late, Due::Late(other));
            self.last_fate = Fate::Duplicated;
        }
        let link = &mut self.links[link_id as usize];
        if link.spec.reorder > 0.0 && self.rng.chance(link.spec.reorder) {
            link.stats.late += 1;
            let late = self.rng.below(link.spec.late.max(1));
            self.packets[id as usize].link = link_id;
            self.queue.push(at + late, Due::Late(id));
            self.last_fate = Fate::Late;
            return;
        }
        if link.fifo.is_empty() {
            self.queue.push(at, Due::Link(link_id));
        }
        link.fifo.push_back((at, id));
    }

    /// The head of a link has arrived.
    pub fn take_head(&mut self, link_id: u32) -> u32 {
        let link = &mut self.links[link_id as usize];
        let (_, id) = link.fifo.pop_front().expect("an event per waiting link");
        if let Some((at, _)) = link.fifo.front() {
            self.queue.push(*at, Due::Link(link_id));
        }
        id
    }
}
