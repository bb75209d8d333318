// SPDX-License-Identifier: Apache-2.0
//! Shared memory: files that a session's client maps too.
//!
//! The client may write anywhere in it at any time. So nothing here, and nobody who reads it, may draw a conclusion from
//! one reading that a second reading could contradict.

use std::fs::{self, OpenOptions, Permissions};
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::ptr::{self, NonNull};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use atp_proto::op::Memory;

use crate::sigbus::Guard;

/// Files of shared memory are named so; whoever starts removes what an earlier sidecar left.
const PREFIX: &str = "shm-";
/// The largest segment.
pub const SEGMENT_BYTES_MAX: u64 = 1 << 30;
const PAGE: u64 = 4096;

static NUMBER: AtomicU64 = AtomicU64::new(0);

/// One mapped file. The file goes by `unlink`, or at the end; the mapping lives until the last reference is gone.
pub struct Segment {
    path: PathBuf,
    size: usize,
    base: NonNull<u8>,
    guard: Option<Guard>,
}

// SAFETY: plain memory that others write at any time anyway; see `Slice`.
unsafe impl Send for Segment {}
// SAFETY: as above.
unsafe impl Sync for Segment {}

impl Segment {
    /// A file in `directory`, of `size` bytes rounded up to whole pages.
    ///
    /// # Errors
    /// When it is too large, or there is no room; the text says what to change.
    pub fn create(directory: &Path, size: u64) -> io::Result<Self> {
        if size > SEGMENT_BYTES_MAX {
            let text = format!("{size} bytes exceed the largest segment of {SEGMENT_BYTES_MAX}");
            return Err(io::Error::new(io::ErrorKind::FileTooLarge, text));
        }
        let size = size.max(1).next_multiple_of(PAGE);
        let number = NUMBER.fetch_add(1, Ordering::Relaxed);
        let path = directory.join(format!("{PREFIX}{}-{number}", std::process::id()));
        Self::make(path, size).map_err(|e| {
            let text = format!(
                "no shared-memory file of {size} bytes in {}: {}; raise the sizeLimit of the volume atp-shm or the pod's \
                 memory limit",
                directory.display(),
                reason(&e)
            );
            io::Error::new(e.kind(), text)
        })
    }

    fn make(path: PathBuf, size: u64) -> io::Result<Self> {
        let file = OpenOptions::new().read(true).write(true).create_new(true).mode(0o600).open(&path)?;
        // From here on the file goes with the value.
        let mut segment = Self { path, size: 0, base: NonNull::dangling(), guard: None };
        // Reserve the pages now: the client dies of one without room (SIGBUS).
        loop {
            // SAFETY: no pointers.
            match unsafe { libc::posix_fallocate(file.as_raw_fd(), 0, size as libc::off_t) } {
                0 => break,
                libc::EINTR => {}
                error => return Err(io::Error::from_raw_os_error(error)),
            }
        }
        // Trainer and sidecar may be different users; the volume belongs to this pod alone.
        file.set_permissions(Permissions::from_mode(0o666))?;
        let size = size as usize;
        let protection = libc::PROT_READ | libc::PROT_WRITE;
        // Populated here, so that the transport's thread does not fault on every page.
        let flags = libc::MAP_SHARED | libc::MAP_POPULATE;
        // SAFETY: a new mapping of an open file, of a length above 0.
        let base = unsafe { libc::mmap(ptr::null_mut(), size, protection, flags, file.as_raw_fd(), 0) };
        if base == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        segment.base = NonNull::new(base.cast()).ok_or_else(|| io::Error::other("mapped at 0"))?;
        segment.size = size;
        segment.guard = Some(Guard::new(base as usize, size)?);
        Ok(segment)
    }

    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Bytes.
    #[must_use]
    pub fn size(&self) -> usize {
        self.size
    }

    /// Remove the file; what is mapped stays.
    pub fn unlink(&self) {
        let _ = fs::remove_file(&self.path);
    }

    /// `length` bytes at `offset`; `None` when they are not all inside.
    #[must_use]
    pub fn slice(self: &Arc<Self>, offset: u64, length: u64) -> Option<Slice> {
        let end = offset.checked_add(length)?;
        (end <= self.size as u64).then(|| Slice {
            segment: Arc::clone(self),
            offset: offset as usize,
            length: length as usize,
        })
    }
}

impl Drop for Segment {
    fn drop(&mut self) {
        self.unlink();
        self.guard = None;
        if self.size > 0 {
            // SAFETY: mapped by `make` with this length; no slice is left, each holds a reference.
            unsafe { libc::munmap(self.base.as_ptr().cast(), self.size) };
        }
    }
}

/// The kernel's words without the number.
fn reason(e: &io::Error) -> String {
    let text = e.to_string();
    text.split(" (os error").next().unwrap_or_default().to_owned()
}

/// A range of a segment that is reduced in place.
pub struct Slice {
    segment: Arc<Segment>,
    offset: usize,
    length: usize,
}

impl Memory for Slice {
    fn source(&self) -> &[u8] {
        // SAFETY: inside the mapping, which lives as long as the reference. The client may change the bytes meanwhile,
        // which changes values that are bytes anyway.
        unsafe { std::slice::from_raw_parts(self.segment.base.as_ptr().add(self.offset), self.length) }
    }

    fn target(&mut self) -> &mut [u8] {
        // SAFETY: as above; the transport is one thread that holds one slice at a time.
        unsafe { std::slice::from_raw_parts_mut(self.segment.base.as_ptr().add(self.offset), self.length) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn directory() -> PathBuf {
        let path = std::env::temp_dir().join(format!("atp-segment-{}", std::process::id()));
        fs::create_dir_all(&path).unwrap();
        path
    }

    #[test]
    fn memory_outlives_the_file_and_the_session() {
        let segment = Arc::new(Segment::create(&directory(), 5000).unwrap());
        assert_eq!(segment.size(), 8192);
        let path = segment.path().to_owned();
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o666);
        fs::write(&path, [7u8; 8192]).unwrap_or_default();
        let mut slice = segment.slice(64, 8).unwrap();
        drop(segment);
        slice.target().fill(9);
        assert_eq!(slice.source(), [9; 8]);
        assert!(path.exists());
        drop(slice);
        assert!(!path.exists());
    }

    #[test]
    fn ranges_end_inside() {
        let segment = Arc::new(Segment::create(&directory(), 4096).unwrap());
        assert!(segment.slice(0, 4096).is_some() && segment.slice(4096, 0).is_some());
        for (offset, length) in [(0, 4097), (4096, 1), (u64::MAX, 1), (1, u64::MAX), (4097, 0)] {
            assert!(segment.slice(offset, length).is_none(), "{offset} {length}");
        }
    }

    #[test]
    fn without_room_nothing_is_left() {
        let e = Segment::create(Path::new("/nowhere"), 1).err().unwrap();
        assert!(e.to_string().contains("no shared-memory file of 4096 bytes in /nowhere: No such file"), "{e}");
        let e = Segment::create(&directory(), SEGMENT_BYTES_MAX + 1).err().unwrap();
        assert!(e.to_string().contains("exceed the largest segment"), "{e}");
    }
}
