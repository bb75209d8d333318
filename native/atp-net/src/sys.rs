// SPDX-License-Identifier: Apache-2.0
//! The system calls: a UDP socket read and written in batches, and eventfds. All unsafe code of the transport's socket
//! layer is here.

use std::io;
use std::mem::{self, MaybeUninit};
use std::net::{Ipv4Addr, SocketAddrV4};
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::ptr;

use atp_proto::Nanos;

/// Receive and send buffers asked for. A default buffer holds 166 datagrams of 264 bytes, less than one window.
const SOCKET_BUFFER: libc::c_int = 16 << 20;
const ECN_MASK: u8 = 0b11;
const ECT_0: libc::c_int = 0b10;
const CE: u8 = 0b11;

fn check(result: libc::c_int) -> io::Result<libc::c_int> {
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(result) }
}

/// An eventfd: readable from `signal` until `clear`.
pub struct EventFd(OwnedFd);

impl EventFd {
    /// # Errors
    /// When no descriptor is left.
    pub fn new() -> io::Result<Self> {
        // SAFETY: no pointers; the result is a new descriptor that nobody else owns.
        let fd = check(unsafe { libc::eventfd(0, libc::EFD_CLOEXEC | libc::EFD_NONBLOCK) })?;
        // SAFETY: as above.
        Ok(Self(unsafe { OwnedFd::from_raw_fd(fd) }))
    }

    #[must_use]
    pub fn raw(&self) -> RawFd {
        self.0.as_raw_fd()
    }

    pub fn signal(&self) {
        let one = 1u64;
        // SAFETY: 8 bytes of a live u64. Failing (counter full) leaves it readable, which is what matters.
        unsafe { libc::write(self.raw(), ptr::from_ref(&one).cast(), 8) };
    }

    pub fn clear(&self) {
        let mut count = 0u64;
        // SAFETY: 8 bytes of a live u64. Failing means that it was clear.
        unsafe { libc::read(self.raw(), ptr::from_mut(&mut count).cast(), 8) };
    }
}

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

/// Room for the control messages of one datagram (IP_TOS), aligned as `cmsghdr` wants it.
const CONTROL_WORDS: usize = 8;

/// Buffers of a batch of datagrams, with the structures that point into them.
pub struct Batch {
    size: usize,
    bytes: Box<[u8]>,
    names: Box<[libc::sockaddr_in]>,
    control: Box<[[u64; CONTROL_WORDS]]>,
    iovecs: Box<[libc::iovec]>,
    headers: Box<[libc::mmsghdr]>,
    /// Outgoing: datagrams `sent..filled` wait for the kernel.
    sent: usize,
    filled: usize,
}

impl Batch {
    pub fn new(count: usize, size: usize) -> Self {
        // SAFETY: all-zero is a valid value of these C structures.
        let zero = unsafe { MaybeUninit::<libc::mmsghdr>::zeroed().assume_init() };
        let mut batch = Self {
            size,
            bytes: vec![0; count * size].into(),
            names: vec![to_sockaddr(SocketAddrV4::new(Ipv4Addr::UNSPECIFIED, 0)); count].into(),
            control: vec![[0; CONTROL_WORDS]; count].into(),
            iovecs: vec![libc::iovec { iov_base: ptr::null_mut(), iov_len: 0 }; count].into(),
            headers: vec![zero; count].into(),
            sent: 0,
            filled: 0,
        };
        // The boxes never move their contents, so these pointers hold as long as the batch.
        for i in 0..count {
            batch.iovecs[i].iov_base = batch.bytes[i * size..].as_mut_ptr().cast();
            batch.iovecs[i].iov_len = size;
            let header = &mut batch.headers[i].msg_hdr;
            header.msg_iov = ptr::from_mut(&mut batch.iovecs[i]);
            header.msg_iovlen = 1;
            header.msg_name = ptr::from_mut(&mut batch.names[i]).cast();
            header.msg_namelen = mem::size_of::<libc::sockaddr_in>() as libc::socklen_t;
        }
        batch
    }

    pub fn has_room(&self) -> bool {
        self.filled < self.headers.len()
    }

    pub fn waiting(&self) -> bool {
        self.sent < self.filled
    }

    pub fn next_buffer(&mut self) -> &mut [u8] {
        let at = self.filled * self.size;
        &mut self.bytes[at..at + self.size]
    }

    pub fn push(&mut self, to: SocketAddrV4, length: usize) {
        self.names[self.filled] = to_sockaddr(to);
        self.iovecs[self.filled].iov_len = length;
        self.filled += 1;
    }

    /// Datagram `i` of the last `Socket::receive`: sender, "congestion experienced", payload.
    pub fn datagram(&self, i: usize) -> Option<(SocketAddrV4, bool, &[u8])> {
        let header = &self.headers[i];
        let address = &self.names[i];
        if libc::c_int::from(address.sin_family) != libc::AF_INET {
            return None;
        }
        let mut tos = 0u8;
        // SAFETY: the kernel filled this control buffer, which lives in `self.control`; the macros stay in its length.
        unsafe {
            let mut message = libc::CMSG_FIRSTHDR(&header.msg_hdr);
            while let Some(m) = message.as_ref() {
                if m.cmsg_level == libc::IPPROTO_IP && m.cmsg_type == libc::IP_TOS {
                    tos = *libc::CMSG_DATA(message);
                }
                message = libc::CMSG_NXTHDR(&header.msg_hdr, message);
            }
        }
        let length = (header.msg_len as usize).min(self.size);
        Some((from_sockaddr(address), tos & ECN_MASK == CE, &self.bytes[i * self.size..i * self.size + length]))
    }
}

// SAFETY: the pointers lead into boxes that the batch owns.
unsafe impl Send for Batch {}

/// A non-blocking UDP socket bound to the endpoint's own address.
pub struct Socket(OwnedFd);

impl Socket {
    pub fn bind(address: SocketAddrV4) -> io::Result<Self> {
        // SAFETY: no pointers; the result is a new descriptor that nobody else owns.
        let fd = check(unsafe {
            libc::socket(libc::AF_INET, libc::SOCK_DGRAM | libc::SOCK_NONBLOCK | libc::SOCK_CLOEXEC, 0)
        })?;
        // SAFETY: as above.
        let socket = Self(unsafe { OwnedFd::from_raw_fd(fd) });
        for (forced, plain) in [(libc::SO_RCVBUFFORCE, libc::SO_RCVBUF), (libc::SO_SNDBUFFORCE, libc::SO_SNDBUF)] {
            // Beyond the system's limit needs a privilege; without it take what the limit gives.
            if socket.option(libc::SOL_SOCKET, forced, SOCKET_BUFFER).is_err() {
                socket.option(libc::SOL_SOCKET, plain, SOCKET_BUFFER)?;
            }
        }
        // A switch that rewrites values cannot keep a checksum (docs/protocol.md).
        socket.option(libc::SOL_SOCKET, libc::SO_NO_CHECK, 1)?;
        socket.option(libc::IPPROTO_IP, libc::IP_TOS, ECT_0)?;
        socket.option(libc::IPPROTO_IP, libc::IP_RECVTOS, 1)?;
        // Where a packet does not fit the path it is better fragmented (no switch sums it then) than never there.
        socket.option(libc::IPPROTO_IP, libc::IP_MTU_DISCOVER, libc::IP_PMTUDISC_DONT)?;
        let name = to_sockaddr(address);
        // SAFETY: a live sockaddr_in of that length.
        check(unsafe {
            libc::bind(
                socket.0.as_raw_fd(),
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
                self.0.as_raw_fd(),
                level,
                name,
                ptr::from_ref(&value).cast(),
                mem::size_of::<libc::c_int>() as libc::socklen_t,
            )
        })?;
        Ok(())
    }

    /// Fill the batch with what has come; the number of datagrams, 0 when none waits.
    pub fn receive(&self, batch: &mut Batch) -> io::Result<usize> {
        for (header, control) in batch.headers.iter_mut().zip(batch.control.iter_mut()) {
            header.msg_hdr.msg_namelen = mem::size_of::<libc::sockaddr_in>() as libc::socklen_t;
            header.msg_hdr.msg_control = ptr::from_mut(control).cast();
            header.msg_hdr.msg_controllen = mem::size_of_val(control);
        }
        loop {
            // SAFETY: every header points to live buffers of the batch, of the lengths given.
            let n = unsafe {
                libc::recvmmsg(
                    self.0.as_raw_fd(),
                    batch.headers.as_mut_ptr(),
                    batch.headers.len() as libc::c_uint,
                    libc::MSG_DONTWAIT,
                    ptr::null_mut(),
                )
            };
            match check(n) {
                Ok(n) => return Ok(n as usize),
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => return Ok(0),
                // An ICMP error of an earlier packet: the peer is not up yet. The protocol sends again.
                Err(e) if is_network(&e) => {}
                Err(e) => return Err(e),
            }
        }
    }

    /// Give waiting datagrams to the kernel; true when some went.
    pub fn send(&self, batch: &mut Batch) -> io::Result<bool> {
        let mut went = false;
        while batch.waiting() {
            let rest = &mut batch.headers[batch.sent..batch.filled];
            // SAFETY: every header points to live buffers of the batch, of the lengths given.
            let n = unsafe {
                libc::sendmmsg(self.0.as_raw_fd(), rest.as_mut_ptr(), rest.len() as libc::c_uint, libc::MSG_DONTWAIT)
            };
            match check(n) {
                Ok(n) => {
                    batch.sent += n as usize;
                    went = true;
                }
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => return Ok(went),
                Err(e) if is_network(&e) => {
                    // This datagram cannot go now (no route, peer gone, queue full): it counts as lost on the way.
                    batch.sent += 1;
                    went = true;
                }
                Err(e) => return Err(e),
            }
        }
        batch.sent = 0;
        batch.filled = 0;
        Ok(went)
    }

    /// Sleep until a datagram comes, `wake` is signalled, the kernel takes datagrams again (`writable`) or time is over.
    pub fn wait(&self, wake: &EventFd, writable: bool, timeout: Option<Nanos>) -> io::Result<()> {
        let out = if writable { libc::POLLOUT } else { 0 };
        let mut fds = [
            libc::pollfd { fd: self.0.as_raw_fd(), events: libc::POLLIN | out, revents: 0 },
            libc::pollfd { fd: wake.raw(), events: libc::POLLIN, revents: 0 },
        ];
        let time = timeout.map(|t| libc::timespec {
            tv_sec: (t / 1_000_000_000) as libc::time_t,
            tv_nsec: (t % 1_000_000_000) as libc::c_long,
        });
        let time = time.as_ref().map_or(ptr::null(), ptr::from_ref);
        // SAFETY: two live pollfds, a live timespec or null, no signal mask.
        match check(unsafe { libc::ppoll(fds.as_mut_ptr(), 2, time, ptr::null()) }) {
            Err(e) if e.kind() != io::ErrorKind::Interrupted => Err(e),
            _ => Ok(()),
        }
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
