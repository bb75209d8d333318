// SPDX-License-Identifier: Apache-2.0
//! The socket layer without the protocol: packets of one size go to a second endpoint and back. The peer of
//! bench/transport.py. Arguments: packet bytes, packets, 1 to let the kernel cut and join runs of packets.
//! Prints Gbit/s by time and by CPU time, of the payload behind a 16-byte header.

use std::net::{Ipv4Addr, SocketAddrV4, UdpSocket};
use std::time::Instant;

use atp_net::{Commanded, Driver};
use atp_proto::op::Memory;
use atp_proto::stats::Snapshot;
use atp_proto::wire::HEADER_BYTES;
use atp_proto::{Config, Endpoint, Event, Nanos, Transmit};

const WINDOW: u64 = 200;

/// Sends `left` packets with `WINDOW` under way, or sends back what comes.
struct Node {
    peer: SocketAddrV4,
    size: usize,
    left: u64,
    ready: u64,
    outstanding: u64,
    echo: bool,
    started: bool,
}

impl Endpoint for Node {
    fn handle(&mut self, _from: SocketAddrV4, _ce: bool, _data: &[u8], _now: Nanos) {
        if self.echo {
            self.ready += 1;
        } else {
            self.outstanding -= 1;
        }
    }
    fn poll_transmit(&mut self, _now: Nanos, buffer: &mut [u8]) -> Option<Transmit> {
        if self.echo {
            self.ready = self.ready.checked_sub(1)?;
        } else {
            if !self.started || self.left == 0 || self.outstanding == WINDOW {
                return None;
            }
            self.left -= 1;
            self.outstanding += 1;
        }
        buffer.fill(1);
        Some(Transmit { to: self.peer, length: self.size })
    }
    fn poll_timeout(&self) -> Option<Nanos> {
        None
    }
    fn handle_timeout(&mut self, _now: Nanos) {}
    fn poll_event(&mut self) -> Option<Event> {
        let done = self.started && self.left == 0 && self.outstanding == 0;
        self.started &= !done;
        let memory: Box<dyn Memory> = Box::new(Vec::new());
        done.then_some(Event { token: 0, error: None, memory })
    }
    fn snapshot(&self) -> Snapshot {
        Snapshot::default()
    }
}

impl Commanded for Node {
    type Command = ();
    fn command(&mut self, (): (), _now: Nanos) {
        self.started = true;
    }
    fn abort(&mut self, _reason: &str) {}
}

fn cpu_seconds() -> f64 {
    let mut t = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: a live timespec.
    unsafe { libc::clock_gettime(libc::CLOCK_PROCESS_CPUTIME_ID, &mut t) };
    t.tv_sec as f64 + t.tv_nsec as f64 * 1e-9
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let args: Vec<u64> = std::env::args().skip(1).map(|a| a.parse()).collect::<Result<_, _>>()?;
    let &[size, packets, segment] = &args[..] else {
        return Err("usage: udp_echo <packet bytes> <packets> <0|1>".into());
    };
    let size = size as usize;
    let port = UdpSocket::bind((Ipv4Addr::UNSPECIFIED, 0))?.local_addr()?.port();
    let values = (size - HEADER_BYTES) / 4;
    let config = Config::from_json(&format!(
        r#"{{"jobId": 1, "mode": "HostOnly", "role": "worker", "valuesPerPacket": {values}, "port": {port},
            "segmentationOffload": {}, "workers": [{{"rank": 0, "address": "127.0.0.2"}}],
            "parameterServers": [{{"address": "127.0.0.3"}}]}}"#,
        segment != 0
    ))?;
    let there = Config { bind: config.servers[0], ..config.clone() };
    let node = |peer, echo| Node { peer, size, left: packets, ready: 0, outstanding: 0, echo, started: false };
    let _echo = Driver::start(node(config.bind, true), &there, "echo")?;
    let source = Driver::start(node(there.bind, false), &config, "source")?;
    let (clock, cpu) = (Instant::now(), cpu_seconds());
    source.send(());
    let mut fd = libc::pollfd { fd: source.ready_fd(), events: libc::POLLIN, revents: 0 };
    // SAFETY: one live pollfd. A lost datagram would stop the window for good, so there is a limit.
    let woken = unsafe { libc::poll(&mut fd, 1, 60_000) };
    if woken != 1 || source.take_events().is_empty() {
        return Err("a datagram was lost on loopback: try again".into());
    }
    let bits = (packets as usize * values * 32) as f64 / 1e9;
    println!("{} {}", bits / clock.elapsed().as_secs_f64(), bits / (cpu_seconds() - cpu));
    Ok(())
}
