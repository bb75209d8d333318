// SPDX-License-Identifier: Apache-2.0
//! Eventfds and `ppoll`.

use std::io;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd, RawFd};
use std::ptr;

use atp_proto::Nanos;

pub(crate) fn check(result: libc::c_int) -> io::Result<libc::c_int> {
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

/// Descriptors that one `ppoll` waits for, by the order in which they were added.
#[derive(Default)]
pub struct PollSet(Vec<libc::pollfd>);

impl PollSet {
    pub fn clear(&mut self) {
        self.0.clear();
    }

    /// Wait for `fd` to become readable, or writable, too. The descriptor must stay open until after `wait`.
    pub fn add(&mut self, fd: RawFd, readable: bool, writable: bool) -> usize {
        let events = if readable { libc::POLLIN } else { 0 } | if writable { libc::POLLOUT } else { 0 };
        self.0.push(libc::pollfd { fd, events, revents: 0 });
        self.0.len() - 1
    }

    /// Sleep until one of them is ready or time is over.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn wait(&mut self, timeout: Option<Nanos>) -> io::Result<()> {
        let time = timeout.map(|t| libc::timespec {
            tv_sec: (t / 1_000_000_000) as libc::time_t,
            tv_nsec: (t % 1_000_000_000) as libc::c_long,
        });
        let time = time.as_ref().map_or(ptr::null(), ptr::from_ref);
        // SAFETY: live pollfds, a live timespec or null, no signal mask.
        let result = unsafe { libc::ppoll(self.0.as_mut_ptr(), self.0.len() as libc::nfds_t, time, ptr::null()) };
        match check(result) {
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {
                for fd in &mut self.0 {
                    fd.revents = 0;
                }
                Ok(())
            }
            Err(e) => Err(e),
            Ok(_) => Ok(()),
        }
    }

    /// Whether reading will not block: also when the peer is gone, which reading then tells.
    #[must_use]
    pub fn readable(&self, i: usize) -> bool {
        self.0.get(i).is_some_and(|fd| fd.revents & (libc::POLLIN | libc::POLLHUP | libc::POLLERR) != 0)
    }

    #[must_use]
    pub fn writable(&self, i: usize) -> bool {
        self.0.get(i).is_some_and(|fd| fd.revents & (libc::POLLOUT | libc::POLLHUP | libc::POLLERR) != 0)
    }
}
