# SPDX-License-Identifier: Apache-2.0
"""The shared-memory file of one client, in the pod's memory volume."""

import itertools
import mmap
import os
from pathlib import Path

PREFIX = "shm-"
_numbers = itertools.count()


class SegmentError(OSError):
    """The file cannot be made; the text says how much was asked for and what to change."""


class Segment:
    """A shared-memory file of fixed size, mapped here and by the client.

    Args:
        directory: the memory volume.
        size: bytes.

    Raises:
        SegmentError: the volume has no room or cannot be written.
    """

    def __init__(self, directory: Path, size: int) -> None:
        self.path = directory / f"{PREFIX}{os.getpid()}-{next(_numbers)}"
        self.size = size
        try:
            descriptor = os.open(self.path, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
            try:
                # Reserve the pages now: a page without room would kill whoever touches it (SIGBUS).
                os.posix_fallocate(descriptor, 0, size)
                # Trainer and sidecar may be different users; the volume belongs to this pod alone.
                os.fchmod(descriptor, 0o666)
                self._map = mmap.mmap(descriptor, size)
            except BaseException:
                self.path.unlink(missing_ok=True)
                raise
            finally:
                os.close(descriptor)
        except OSError as error:
            raise SegmentError(
                error.errno,
                f"no shared-memory file of {size} bytes in {directory}: {error.strerror}; "
                "raise the sizeLimit of the volume atp-shm or the pod's memory limit",
            ) from error

    def view(self, offset: int, size: int) -> memoryview:
        """The bytes offset .. offset + size - 1, writable.

        Raises:
            ValueError: they are not all inside the file.
        """
        if offset < 0 or size < 0 or offset + size > self.size:
            raise ValueError(f"bytes {offset}..{offset + size} are not inside the shared file of {self.size} bytes")
        return memoryview(self._map)[offset : offset + size]

    def unlink(self) -> None:
        """Removes the file. The mapping lives until its last view is gone."""
        self.path.unlink(missing_ok=True)


def remove_leftovers(directory: Path) -> int:
    """Removes the files of an earlier sidecar that was killed; returns how many there were."""
    leftovers = list(directory.glob(PREFIX + "*"))
    for path in leftovers:
        path.unlink(missing_ok=True)
    return len(leftovers)
