# SPDX-License-Identifier: Apache-2.0
"""Ranges of the shared file never overlap, and all room comes back."""

import importlib.util
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

# Loaded by path: the package itself needs torch, which this interpreter does not have.
_spec = importlib.util.spec_from_file_location(
    "arena", Path(__file__).resolve().parents[2] / "client" / "atp_client" / "arena.py"
)
assert _spec is not None
assert _spec.loader is not None
arena = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(arena)


@given(st.lists(st.one_of(st.integers(1, 400), st.integers(-8, -1)), max_size=60))
def test_ranges(steps: list[int]) -> None:
    """A positive step allocates so many bytes, a negative one releases one of those in use."""
    memory = arena.Arena(1024)
    used: dict[int, int] = {}
    for step in steps:
        if step > 0:
            offset = memory.allocate(step)
            if offset is None:
                continue
            assert offset % 64 == 0
            assert offset + step <= 1024
            assert all(offset + step <= start or start + size <= offset for start, size in used.items())
            assert memory.begins(offset)
            used[offset] = step
        elif used:
            offset = sorted(used)[step % len(used)]
            del used[offset]
            memory.release(offset)
            assert not memory.begins(offset)
    for offset in used:
        memory.release(offset)
    assert memory.allocate(1024) == 0
