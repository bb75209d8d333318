// SPDX-License-Identifier: Apache-2.0
//! Clients can shorten the files that this process maps. Touching a page that is gone raises SIGBUS, which would end the
//! sidecar and with it the job. So such a page, of a range that is registered here, becomes an empty one of this process
//! alone; the client spoils its own values and nothing else.

use std::io;
use std::mem::MaybeUninit;
use std::ptr;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Ranges at a time.
const RANGES: usize = 8192;

/// Begin (0: free) and end of the ranges. A signal handler may read atomics, and take no lock.
static TABLE: [[AtomicUsize; 2]; RANGES] = [const { [AtomicUsize::new(0), AtomicUsize::new(0)] }; RANGES];
static PAGE: AtomicUsize = AtomicUsize::new(4096);
static PREVIOUS: OnceLock<libc::sigaction> = OnceLock::new();

/// A range of mapped memory that may lose its file. To be dropped before the memory is unmapped.
pub struct Guard(usize);

impl Guard {
    /// # Errors
    /// When there are too many, or the handler cannot be installed.
    pub fn new(begin: usize, length: usize) -> io::Result<Self> {
        install()?;
        let end = begin + length;
        for (i, slot) in TABLE.iter().enumerate() {
            // The end of a free slot is 0, so that a half-written one holds nothing.
            if slot[0].compare_exchange(0, begin, Ordering::AcqRel, Ordering::Relaxed).is_ok() {
                slot[1].store(end, Ordering::Release);
                return Ok(Self(i));
            }
        }
        Err(io::Error::other(format!("there are {RANGES} segments already")))
    }
}

impl Drop for Guard {
    fn drop(&mut self) {
        let slot = &TABLE[self.0];
        slot[1].store(0, Ordering::Release);
        slot[0].store(0, Ordering::Release);
    }
}

fn install() -> io::Result<()> {
    static DONE: OnceLock<Result<(), i32>> = OnceLock::new();
    let done = DONE.get_or_init(|| {
        // SAFETY: no pointers.
        let page = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
        PAGE.store(usize::try_from(page).unwrap_or(4096), Ordering::Relaxed);
        let handler: extern "C" fn(libc::c_int, *mut libc::siginfo_t, *mut libc::c_void) = handle;
        // SAFETY: zeroed is a valid value of this C structure; both point to live ones. The handler does only what is
        // allowed in one: it reads atomics and makes system calls.
        unsafe {
            let mut action: libc::sigaction = MaybeUninit::zeroed().assume_init();
            let mut previous: libc::sigaction = MaybeUninit::zeroed().assume_init();
            action.sa_sigaction = handler as usize;
            action.sa_flags = libc::SA_SIGINFO | libc::SA_ONSTACK;
            if libc::sigaction(libc::SIGBUS, ptr::null(), &mut previous) != 0 {
                return Err(io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO));
            }
            let _ = PREVIOUS.set(previous);
            if libc::sigaction(libc::SIGBUS, &action, ptr::null_mut()) != 0 {
                return Err(io::Error::last_os_error().raw_os_error().unwrap_or(libc::EIO));
            }
        }
        Ok(())
    });
    done.map_err(io::Error::from_raw_os_error)
}

extern "C" fn handle(signal: libc::c_int, info: *mut libc::siginfo_t, _context: *mut libc::c_void) {
    // SAFETY: the kernel passes a valid structure, and SIGBUS has an address.
    let at = unsafe { (*info).si_addr() } as usize;
    let page = PAGE.load(Ordering::Relaxed);
    let inside = TABLE.iter().any(|slot| {
        let begin = slot[0].load(Ordering::Acquire);
        begin != 0 && begin <= at && at < slot[1].load(Ordering::Acquire)
    });
    let begin = at - at % page;
    let protection = libc::PROT_READ | libc::PROT_WRITE;
    let flags = libc::MAP_FIXED | libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
    // SAFETY: the page belongs to a registered range of this process, in which nobody relies on what the bytes are.
    let mapped = inside && unsafe { libc::mmap(begin as *mut _, page, protection, flags, -1, 0) } != libc::MAP_FAILED;
    if !mapped {
        // Somebody else's fault: the instruction runs again, and meets what was there before.
        let previous = PREVIOUS.get().map_or(ptr::null(), ptr::from_ref);
        // SAFETY: a live structure, or null, which changes nothing.
        unsafe {
            if previous.is_null() || libc::sigaction(signal, previous, ptr::null_mut()) != 0 {
                libc::abort();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs::OpenOptions;
    use std::sync::Arc;

    use atp_proto::op::Memory;

    use crate::segment::Segment;

    #[test]
    fn a_file_that_is_shortened_ends_nothing() {
        let segment = Arc::new(Segment::create(&std::env::temp_dir(), 3 * 4096).unwrap());
        let mut slice = segment.slice(0, 3 * 4096).unwrap();
        slice.target().fill(7);
        OpenOptions::new().write(true).open(segment.path()).unwrap().set_len(4096).unwrap();
        assert_eq!(slice.source()[4095], 7);
        assert_eq!(slice.source()[4096], 0);
        slice.target()[2 * 4096] = 9;
        assert_eq!(slice.source()[2 * 4096], 9);
    }
}
