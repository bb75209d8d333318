// SPDX-License-Identifier: Apache-2.0
//! What happened, for people: a line per packet and link, and the same as a pcap file.

use std::io::{self, BufWriter, Write};

use atp_proto::Nanos;
use atp_proto::wire::{HEADER_BYTES, Header, UDP_PORT};

use crate::net::{Fate, NO_BUFFER, Net, Node};

pub struct Tracer {
    text: Option<Box<dyn Write>>,
    pcap: Option<Box<dyn Write>>,
    failed: Option<io::Error>,
}

fn node(n: Node) -> String {
    match n {
        Node::Host(h) => format!("h{h}"),
        Node::Tor(t) => format!("tor{t}"),
        Node::Core => "core".to_owned(),
    }
}

fn checksum(header: &[u8]) -> u16 {
    let mut sum: u32 = header.as_chunks::<2>().0.iter().map(|b| u32::from(u16::from_be_bytes(*b))).sum();
    while sum >> 16 != 0 {
        sum = (sum & 0xffff) + (sum >> 16);
    }
    !(sum as u16)
}

impl Tracer {
    /// Lines go to `text`, packets to `pcap`.
    #[must_use]
    pub fn new(text: Option<Box<dyn Write>>, pcap: Option<Box<dyn Write>>) -> Self {
        let mut t = Self { text, pcap, failed: None };
        // Nanosecond pcap, version 2.4, Ethernet.
        let mut head = Vec::new();
        for word in [0xa1b2_3c4d_u32, 0x0004_0002, 0, 0, 65535, 1] {
            head.extend_from_slice(&word.to_le_bytes());
        }
        t.write(false, &head);
        t
    }

    fn write(&mut self, text: bool, bytes: &[u8]) {
        let out = if text { &mut self.text } else { &mut self.pcap };
        if let Some(w) = out
            && let Err(e) = w.write_all(bytes)
        {
            // A reader that went away (head) ends the trace, not the run.
            self.failed.get_or_insert(e);
            *out = None;
        }
    }

    pub fn note(&mut self, now: Nanos, text: &str) {
        self.write(true, format!("\n{:>14.6} ms  # {text}", now as f64 * 1e-6).as_bytes());
    }

    /// A switch lets nothing out: summed, or dropped.
    pub fn keeps(&mut self, now: Nanos, tor: u32, data: &[u8]) {
        if self.text.is_some() {
            let tor = format!("tor{tor}");
            let line = format!("\n{:>14.6} ms  {tor:>6} keeps  {}", now as f64 * 1e-6, describe(data));
            self.write(true, line.as_bytes());
        }
    }

    /// A packet is about to go over a link.
    pub fn packet(&mut self, net: &Net, link: u32, id: u32) {
        let p = net.packet(id);
        let l = &net.links[link as usize];
        if self.text.is_some() {
            let what = if p.buffer == NO_BUFFER {
                format!("flow {} {} {}", p.flow, if p.ack { "ack" } else { "data" }, p.number)
            } else {
                describe(net.data(id))
            };
            let ce = if p.ce { " CE" } else { "" };
            let line =
                format!("\n{:>14.6} ms  {:>6} > {:<6} {what}{ce}", net.now as f64 * 1e-6, node(l.from), node(l.to));
            self.write(true, line.as_bytes());
        }
        if self.pcap.is_some() && p.buffer != NO_BUFFER {
            let data = net.data(id);
            let mut ip = [0u8; 20];
            ip[0] = 0x45;
            ip[1] = if p.ce { 3 } else { 2 };
            ip[2..4].copy_from_slice(&((28 + data.len()) as u16).to_be_bytes());
            ip[8] = 64;
            ip[9] = 17;
            ip[12..16].copy_from_slice(&p.src.to_be_bytes());
            ip[16..20].copy_from_slice(&p.dst.to_be_bytes());
            let sum = checksum(&ip);
            ip[10..12].copy_from_slice(&sum.to_be_bytes());
            let mut frame = Vec::with_capacity(58 + data.len());
            // The Ethernet addresses tell the link: node to node.
            let mac = |n: Node| match n {
                Node::Host(h) => [2, 0, 0, 0, (h >> 8) as u8, h as u8],
                Node::Tor(t) => [2, 0, 0, 1, (t >> 8) as u8, t as u8],
                Node::Core => [2, 0, 0, 2, 0, 0],
            };
            frame.extend_from_slice(&mac(l.to));
            frame.extend_from_slice(&mac(l.from));
            frame.extend_from_slice(&[8, 0]);
            frame.extend_from_slice(&ip);
            let port = (UDP_PORT as u16).to_be_bytes();
            frame.extend_from_slice(&port);
            frame.extend_from_slice(&port);
            frame.extend_from_slice(&((8 + data.len()) as u16).to_be_bytes());
            frame.extend_from_slice(&[0, 0]);
            frame.extend_from_slice(data);
            let mut record = Vec::with_capacity(16 + frame.len());
            let words = [
                (net.now / 1_000_000_000) as u32,
                (net.now % 1_000_000_000) as u32,
                frame.len() as u32,
                frame.len() as u32,
            ];
            for word in words {
                record.extend_from_slice(&word.to_le_bytes());
            }
            record.extend_from_slice(&frame);
            self.write(false, &record);
        }
    }

    /// What became of the packet just announced.
    pub fn fate(&mut self, fate: Fate) {
        self.write(true, fate_text(fate).as_bytes());
    }

    /// Write out everything.
    ///
    /// # Errors
    /// When a file could not be written; a text reader that went away is no error.
    pub fn finish(mut self) -> io::Result<()> {
        self.write(true, b"\n");
        for out in [&mut self.text, &mut self.pcap].into_iter().flatten() {
            out.flush()?;
        }
        match self.failed {
            Some(e) if e.kind() != io::ErrorKind::BrokenPipe => Err(e),
            _ => Ok(()),
        }
    }
}

/// A buffered file.
///
/// # Errors
/// When it cannot be made.
pub fn file(path: &str) -> io::Result<Box<dyn Write>> {
    Ok(Box::new(BufWriter::new(std::fs::File::create(path)?)))
}

/// One line about a packet.
fn describe(data: &[u8]) -> String {
    let Some(h) = Header::unpack(data) else { return format!("{} bytes", data.len()) };
    let kind = match (h.is_ack, h.raw_float, h.resend) {
        (false, false, false) => "gradient",
        (false, false, true) => "resend",
        (true, false, false) => "ack",
        (true, false, true) => "request",
        (false, true, _) => "raw",
        (true, true, _) => match h.aggregator_index {
            2 => "notice",
            _ => "raw-result",
        },
    };
    let first = data.get(HEADER_BYTES..HEADER_BYTES + 4).map_or(0, |b| i32::from_be_bytes([b[0], b[1], b[2], b[3]]));
    format!(
        "{kind:<10} job={} seq={} b0={:#x} b1={:#x} index={}{}{}{} v0={first}",
        h.job_id,
        h.sequence,
        h.bitmap0,
        h.bitmap1,
        h.aggregator_index,
        if h.edge_switch_identifier { " edge" } else { "" },
        if h.collision { " collision" } else { "" },
        if h.ecn { " ecn" } else { "" },
    )
}

/// Words for a fate.
fn fate_text(fate: Fate) -> &'static str {
    match fate {
        Fate::Sent => "",
        Fate::Late => " -- late",
        Fate::Duplicated => " -- twice",
        Fate::Lost => " -- LOST",
        Fate::Overflow => " -- DROPPED (queue full)",
        Fate::LinkDown => " -- DROPPED (link down)",
    }
}
