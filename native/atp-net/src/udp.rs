// SPDX-License-Identifier: Apache-2.0
//! A UDP socket that is read and written in batches.

use std::io;
use std::mem::{self, MaybeUninit};
use std::net::{Ipv4Addr, SocketAddrV4};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::ptr;

use crate::sys::check;

/// Receive and send buffers asked for. A default buffer holds 166 datagrams of 264 bytes, less than one window.
const SOCKET_BUFFER: libc::c_int = 16 << 20;
const ECN_MASK: u8 = 0b11;
const ECT_0: libc::c_int = 0b10;
const CE: u8 = 0b11;

fn to_sockaddr(address: SocketAddrV4) -> libc::sockaddr_in {
    libc::sockaddr_in {
        sin_family: libc::AF_INET as libc::sa_family_t,
        sin_port: address.port().to_be(),
        sin_addr: libc::in_addr { s_addr: u32::from(*address.ip()).to_be() },
        sin_zero: [0; 8],
    }
}

fn from_sockaddr(address: &libc::sockaddr_in) -> SocketAddrV4 {
    SocketAddrV4::new(Ipv4Addr::from(u32::from_be(address.sin_addr.s_addr)), u16::from_be(address.sin_port))
}

/// Room for the control messages of one datagram (IP_TOS and UDP_GRO, or UDP_SEGMENT), aligned as `cmsghdr` wants it.
const CONTROL_WORDS: usize = 8;
/// The kernel's limit of segments in one send was 64 before Linux 6.9.
const SEGMENTS_MAX: usize = 64;
/// Largest UDP payload.
const DATAGRAM_MAX: usize = 65_507;

fn zero_header() -> libc::mmsghdr {
    // SAFETY: all-zero is a valid value of this C structure.
    unsafe { MaybeUninit::<libc::mmsghdr>::zeroed().assume_init() }
}

fn zero_names(count: usize) -> Box<[libc::sockaddr_in]> {
    vec![to_sockaddr(SocketAddrV4::new(Ipv4Addr::UNSPECIFIED, 0)); count].into()
}

/// Buffers that a batch of datagrams is received into, with the structures that point into them.
pub struct Incoming {
    size: usize,
    bytes: Box<[u8]>,
    names: Box<[libc::sockaddr_in]>,
    control: Box<[[u64; CONTROL_WORDS]]>,
    _iovecs: Box<[libc::iovec]>,
    headers: Box<[libc::mmsghdr]>,
    /// Messages whose lengths must be set before the next call.
    used: usize,
}

/// One received buffer: several packets of one sender where the kernel coalesced them.
pub struct Received<'a> {
    pub from: SocketAddrV4,
    /// IP mark "congestion experienced".
    pub ce: bool,
    bytes: &'a [u8],
    segment: usize,
}

impl<'a> Received<'a> {
    /// The packets.
    pub fn packets(&self) -> impl Iterator<Item = &'a [u8]> {
        self.bytes.chunks(self.segment)
    }
}

impl Incoming {
    /// `count` datagrams of up to `size` bytes.
    pub fn new(count: usize, size: usize) -> Self {
        let mut bytes: Box<[u8]> = vec![0; count * size].into();
        let mut names = zero_names(count);
        let mut iovecs: Box<[libc::iovec]> = bytes
            .chunks_exact_mut(size)
            .map(|chunk| libc::iovec { iov_base: chunk.as_mut_ptr().cast(), iov_len: size })
            .collect();
        let mut headers: Box<[libc::mmsghdr]> = vec![zero_header(); count].into();
        // The boxes never move their contents, so these pointers hold as long as the batch.
        for ((header, iovec), name) in headers.iter_mut().zip(&mut iovecs).zip(&mut names) {
            header.msg_hdr.msg_iov = ptr::from_mut(iovec);
            header.msg_hdr.msg_iovlen = 1;
            header.msg_hdr.msg_name = ptr::from_mut(name).cast();
        }
        let control = vec![[0; CONTROL_WORDS]; count].into();
        Self { size, bytes, names, control, _iovecs: iovecs, headers, used: count }
    }

    /// Datagram `i` of the last `Socket::receive`.
    pub fn get(&self, i: usize) -> Option<Received<'_>> {
        let header = &self.headers[i];
        let address = &self.names[i];
        if libc::c_int::from(address.sin_family) != libc::AF_INET {
            return None;
        }
        let length = (header.msg_len as usize).min(self.size);
        let mut tos = 0u8;
        let mut segment = length.max(1);
        // SAFETY: the kernel filled this control buffer, which lives in `self.control`; the macros stay in its length,
        // and the data of both messages are as long as what is read.
        unsafe {
            let mut message = libc::CMSG_FIRSTHDR(&header.msg_hdr);
            while let Some(m) = message.as_ref() {
                if m.cmsg_level == libc::IPPROTO_IP && m.cmsg_type == libc::IP_TOS {
                    tos = *libc::CMSG_DATA(message);
                } else if m.cmsg_level == libc::SOL_UDP && m.cmsg_type == libc::UDP_GRO {
                    let size = libc::CMSG_DATA(message).cast::<libc::c_int>().read_unaligned();
                    segment = usize::try_from(size).unwrap_or(0).max(1);
                }
                message = libc::CMSG_NXTHDR(&header.msg_hdr, message);
            }
        }
        let bytes = &self.bytes[i * self.size..i * self.size + length];
        Some(Received { from: from_sockaddr(address), ce: tos & ECN_MASK == CE, bytes, segment })
    }
}

// SAFETY: the pointers lead into boxes that the batch owns.
unsafe impl Send for Incoming {}

/// Packets that wait for the kernel.
pub struct Outgoing {
    /// Of one packet's buffer.
    size: usize,
    bytes: Box<[u8]>,
    /// Where each packet goes, and its length.
    packets: Vec<(SocketAddrV4, usize)>,
    /// Message `m` has the address `names[m]` and the control block `control[m]`.
    names: Box<[libc::sockaddr_in]>,
    control: Box<[[u64; CONTROL_WORDS]]>,
    iovecs: Vec<libc::iovec>,
    headers: Vec<libc::mmsghdr>,
    /// The packets in the order of the messages.
    order: Vec<usize>,
    /// Messages that the kernel took.
    sent: usize,
}

impl Outgoing {
    /// Up to `count` packets of up to `size` bytes.
    pub fn new(count: usize, size: usize) -> Self {
        Self {
            size,
            bytes: vec![0; count * size].into(),
            packets: Vec::with_capacity(count),
            names: zero_names(count),
            control: vec![[0; CONTROL_WORDS]; count].into(),
            iovecs: Vec::with_capacity(count),
            headers: Vec::with_capacity(count),
            order: Vec::with_capacity(count),
            sent: 0,
        }
    }

    /// Whether a packet can be added: not while messages of the last batch wait.
    pub fn has_room(&self) -> bool {
        self.headers.is_empty() && self.packets.len() < self.names.len()
    }

    pub fn waiting(&self) -> bool {
        !self.packets.is_empty()
    }

    pub fn next_buffer(&mut self) -> &mut [u8] {
        let at = self.packets.len() * self.size;
        &mut self.bytes[at..at + self.size]
    }

    /// The first `length` bytes of `next_buffer` are a packet.
    pub fn push(&mut self, to: SocketAddrV4, length: usize) {
        self.packets.push((to, length.min(self.size)));
    }

    /// Make messages of the packets: one each, or one for up to `SEGMENTS_MAX` packets of one length with the same
    /// destination.
    fn prepare(&mut self, segment: bool) {
        self.headers.clear();
        self.iovecs.clear();
        self.sent = 0;
        self.order.clear();
        self.order.extend(0..self.packets.len());
        if segment && self.order.len() > 1 {
            self.order.sort_by_key(|i| self.packets[*i]);
        }
        for i in &self.order {
            let iov_base = self.bytes[i * self.size..].as_mut_ptr().cast();
            self.iovecs.push(libc::iovec { iov_base, iov_len: self.packets[*i].1 });
        }
        let mut at = 0;
        while at < self.order.len() {
            let (to, length) = self.packets[self.order[at]];
            let limit = if segment { SEGMENTS_MAX.min(DATAGRAM_MAX / length.max(1)).max(1) } else { 1 };
            let alike = |i: &&usize| self.packets[**i] == (to, length);
            let run = self.order[at..].iter().take(limit).take_while(alike).count();
            let m = self.headers.len();
            self.names[m] = to_sockaddr(to);
            let mut header = zero_header();
            let h = &mut header.msg_hdr;
            h.msg_name = ptr::from_mut(&mut self.names[m]).cast();
            h.msg_namelen = mem::size_of::<libc::sockaddr_in>() as libc::socklen_t;
            h.msg_iov = ptr::from_mut(&mut self.iovecs[at]);
            h.msg_iovlen = run;
            if run > 1 {
                h.msg_control = self.control[m].as_mut_ptr().cast();
                // SAFETY: the control block has room for one message of two bytes, and the macros stay in it.
                unsafe {
                    h.msg_controllen = libc::CMSG_SPACE(2) as usize;
                    let message = libc::CMSG_FIRSTHDR(h);
                    (*message).cmsg_level = libc::SOL_UDP;
                    (*message).cmsg_type = libc::UDP_SEGMENT;
                    (*message).cmsg_len = libc::CMSG_LEN(2) as usize;
                    libc::CMSG_DATA(message).cast::<u16>().write_unaligned(length as u16);
                }
            }
            self.headers.push(header);
            at += run;
        }
    }

    fn clear(&mut self) {
        self.packets.clear();
        self.headers.clear();
        self.iovecs.clear();
        self.sent = 0;
    }
}

// SAFETY: the pointers lead into boxes and vectors that the batch owns, and that do not grow while they are in use.
unsafe impl Send for Outgoing {}

/// A non-blocking UDP socket bound to the endpoint's own address.
pub struct Socket {
    fd: OwnedFd,
    /// The kernel cuts and joins runs of packets (UDP_SEGMENT, UDP_GRO).
    segment: bool,
}

impl Socket {
    /// `segment`: let the kernel cut and join runs of packets where it can. Switches must see packets one by one, so this
    /// is for jobs without one.
    pub fn bind(address: SocketAddrV4, segment: bool) -> io::Result<Self> {
        // SAFETY: no pointers; the result is a new descriptor that nobody else owns.
        let fd = check(unsafe {
            libc::socket(libc::AF_INET, libc::SOCK_DGRAM | libc::SOCK_NONBLOCK | libc::SOCK_CLOEXEC, 0)
        })?;
        // SAFETY: as above.
        let mut socket = Self { fd: unsafe { OwnedFd::from_raw_fd(fd) }, segment: false };
        for (forced, plain) in [(libc::SO_RCVBUFFORCE, libc::SO_RCVBUF), (libc::SO_SNDBUFFORCE, libc::SO_SNDBUF)] {
            // Beyond the system's limit needs a privilege; without it take what the limit gives.
            if socket.option(libc::SOL_SOCKET, forced, SOCKET_BUFFER).is_err() {
                socket.option(libc::SOL_SOCKET, plain, SOCKET_BUFFER)?;
            }
        }
        socket.segment = segment
            && socket.option(libc::SOL_UDP, libc::UDP_SEGMENT, 0).is_ok()
            && socket.option(libc::SOL_UDP, libc::UDP_GRO, 1).is_ok();
        if !socket.segment {
            // A switch that rewrites values cannot keep a checksum (docs/protocol.md). Segmentation needs one.
            socket.option(libc::SOL_SOCKET, libc::SO_NO_CHECK, 1)?;
        }
        socket.option(libc::IPPROTO_IP, libc::IP_TOS, ECT_0)?;
        socket.option(libc::IPPROTO_IP, libc::IP_RECVTOS, 1)?;
        // Where a packet does not fit the path it is better fragmented (no switch sums it then) than never there.
        socket.option(libc::IPPROTO_IP, libc::IP_MTU_DISCOVER, libc::IP_PMTUDISC_DONT)?;
        let name = to_sockaddr(address);
        // SAFETY: a live sockaddr_in of that length.
        check(unsafe {
            libc::bind(
                socket.fd.as_raw_fd(),
                ptr::from_ref(&name).cast(),
                mem::size_of::<libc::sockaddr_in>() as libc::socklen_t,
            )
        })?;
        Ok(socket)
    }

    fn option(&self, level: libc::c_int, name: libc::c_int, value: libc::c_int) -> io::Result<()> {
        // SAFETY: a live c_int of that length.
        check(unsafe {
            libc::setsockopt(
                self.fd.as_raw_fd(),
                level,
                name,
                ptr::from_ref(&value).cast(),
                mem::size_of::<libc::c_int>() as libc::socklen_t,
            )
        })?;
        Ok(())
    }

    #[must_use]
    pub fn raw(&self) -> RawFd {
        self.fd.as_raw_fd()
    }

    /// Bytes that a receive buffer needs, for packets of `packet` bytes: one more, so that a longer one is seen to be longer.
    pub fn buffer_size(&self, packet: usize) -> usize {
        if self.segment { DATAGRAM_MAX } else { packet + 1 }
    }

    /// Whether the kernel joins packets, so that one buffer holds many.
    pub fn segments(&self) -> bool {
        self.segment
    }

    /// Fill the batch with what has come; the number of buffers filled, 0 when nothing waits.
    pub fn receive(&self, batch: &mut Incoming) -> io::Result<usize> {
        // The kernel changes these lengths of the messages that it fills.
        for (header, control) in batch.headers.iter_mut().zip(batch.control.iter_mut()).take(batch.used) {
            header.msg_hdr.msg_namelen = mem::size_of::<libc::sockaddr_in>() as libc::socklen_t;
            header.msg_hdr.msg_control = ptr::from_mut(control).cast();
            header.msg_hdr.msg_controllen = mem::size_of_val(control);
        }
        loop {
            // SAFETY: every header points to live buffers of the batch, of the lengths given.
            let n = unsafe {
                libc::recvmmsg(
                    self.fd.as_raw_fd(),
                    batch.headers.as_mut_ptr(),
                    batch.headers.len() as libc::c_uint,
                    libc::MSG_DONTWAIT,
                    ptr::null_mut(),
                )
            };
            match check(n) {
                Ok(n) => {
                    batch.used = n as usize;
                    return Ok(batch.used);
                }
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => {
                    batch.used = 0;
                    return Ok(0);
                }
                // An ICMP error of an earlier packet: the peer is not up yet. The protocol sends again.
                Err(e) if is_network(&e) => {}
                Err(e) => return Err(e),
            }
        }
    }

    /// Give waiting packets to the kernel; true when some went.
    pub fn send(&mut self, batch: &mut Outgoing) -> io::Result<bool> {
        let mut went = false;
        if batch.headers.is_empty() {
            batch.prepare(self.segment);
        }
        while batch.sent < batch.headers.len() {
            let rest = &mut batch.headers[batch.sent..];
            // SAFETY: every header points to live buffers of the batch, of the lengths given.
            let n = unsafe {
                libc::sendmmsg(self.fd.as_raw_fd(), rest.as_mut_ptr(), rest.len() as libc::c_uint, libc::MSG_DONTWAIT)
            };
            match check(n) {
                Ok(n) => {
                    batch.sent += n as usize;
                    went = true;
                }
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => return Ok(went),
                Err(e)
                    if self.segment && matches!(e.raw_os_error(), Some(libc::EINVAL | libc::EIO | libc::EMSGSIZE)) =>
                {
                    // The way out cannot segment (no checksum offload, packets above the MTU): one by one from now on.
                    // Packets of this batch that went already go twice, which the protocol allows.
                    self.segment = false;
                    batch.prepare(false);
                }
                Err(e) if is_network(&e) => {
                    // This one cannot go now (no route, peer gone, queue full): it counts as lost on the way.
                    batch.sent += 1;
                    went = true;
                }
                Err(e) => return Err(e),
            }
        }
        batch.clear();
        Ok(went)
    }
}

/// Errors of the way or the peer, which a datagram protocol outlives.
fn is_network(e: &io::Error) -> bool {
    matches!(
        e.raw_os_error(),
        Some(
            libc::ECONNREFUSED
                | libc::EHOSTUNREACH
                | libc::ENETUNREACH
                | libc::ENETDOWN
                | libc::EHOSTDOWN
                | libc::ENOBUFS
                | libc::EPERM
                | libc::EMSGSIZE
                | libc::ENOMEM
        )
    )
}
