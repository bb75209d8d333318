# SPDX-License-Identifier: Apache-2.0
"""What the controllers have written, in a file that outlives the process as the pinned tables do.

The data path keeps what packets need; what it cannot give back (metadata, keys as they were written, the pipeline's
cookie, offsets of counters) is here. Each batch is written down before it is carried out, and what came of it
afterwards. So a process that is killed in between leaves a batch without an outcome, and the next one knows that the
tables are not to be trusted. The file says of which tables it is (`token`): after a restart of the machine these are
others.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from finsy.proto import p4r
from google.protobuf.message import DecodeError

_HEAD = struct.Struct(">cI")
_TOKEN, _CONFIG, _BATCH, _OUTCOME, _COUNTER, _UNKNOWN = b"T", b"P", b"B", b"E", b"C", b"X"
_COUNTER_CELL = struct.Struct(">IIq")
_COMPACT_BYTES = 8 << 20
"""A file that has grown by so much is written anew, with what is left of it."""

CounterBases = dict[tuple[int, int], int]
"""(counter ID, index) -> what the data path had counted at the controller's zero."""


@dataclass
class Saved:
    """What the file says: a pipeline, the updates that made its state, offsets of counters."""

    config: p4r.ForwardingPipelineConfig
    updates: list[p4r.Update] = field(default_factory=list)
    counter_bases: CounterBases = field(default_factory=dict)


def _records(data: bytes) -> Iterator[tuple[bytes, bytes]]:
    """The records of a file; one that was not written to its end is left out."""
    at = 0
    while at + _HEAD.size <= len(data):
        kind, length = _HEAD.unpack_from(data, at)
        at += _HEAD.size
        if at + length > len(data):
            return
        yield kind, data[at : at + length]
        at += length


def replay(data: bytes, token: int) -> Saved | None:
    """The state that a file describes; None if it is of other tables, or ends in the middle of a change."""
    saved: Saved | None = None
    batch: list[p4r.Update] | None = None
    records = _records(data)
    if next(records, None) != (_TOKEN, token.to_bytes(8, "big")):
        return None
    try:
        for kind, payload in records:
            if kind == _CONFIG:
                saved, batch = Saved(p4r.ForwardingPipelineConfig.FromString(payload)), None
            elif kind == _UNKNOWN or saved is None:
                saved, batch = None, None
            elif kind == _BATCH:
                batch = list(p4r.WriteRequest.FromString(payload).updates)
            elif kind == _OUTCOME:
                done = zip(batch or (), payload, strict=True)
                saved.updates += [update for update, good in done if good]
                batch = None
            elif kind == _COUNTER:
                counter_id, index, base = _COUNTER_CELL.unpack(payload)
                saved.counter_bases[counter_id, index] = base
    except (DecodeError, ValueError, struct.error):
        return None
    return saved if batch is None else None


class Journal:
    """The file, open for writing. OSError when it cannot be written."""

    def __init__(self, path: Path, token: int) -> None:
        self._path = path
        self._token = token
        self._grown = 0
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("ab")

    def load(self) -> Saved | None:
        """What the file says of the tables with this token."""
        return replay(self._path.read_bytes(), self._token)

    @property
    def is_long(self) -> bool:
        """Whether it is time for `rewrite`."""
        return self._grown > _COMPACT_BYTES

    def _append(self, *records: tuple[bytes, bytes]) -> None:
        data = b"".join(_HEAD.pack(kind, len(payload)) + payload for kind, payload in records)
        self._file.write(data)
        self._file.flush()
        self._grown += len(data)

    def begin(self, updates: Sequence[p4r.Update]) -> None:
        """These are about to be carried out."""
        self._append((_BATCH, p4r.WriteRequest(updates=updates).SerializeToString()))

    def end(self, succeeded: Iterable[bool], counter_bases: CounterBases) -> None:
        """What came of the last batch, by update; offsets that it set."""
        outcome = (_OUTCOME, bytes(succeeded))
        self._append(outcome, *self._cells(counter_bases))

    def forget(self) -> None:
        """Everything is about to change: until `rewrite` nothing is known."""
        self._append((_UNKNOWN, b""))

    def rewrite(
        self, config: p4r.ForwardingPipelineConfig, entities: Iterable[p4r.Entity], counter_bases: CounterBases
    ) -> None:
        """Begin a new file with this state."""
        inserts = [p4r.Update(type=p4r.Update.INSERT, entity=entity) for entity in entities]
        new = self._path.with_suffix(".new")
        with new.open("wb") as file:
            self._file.close()
            self._file = file
            self._append((_TOKEN, self._token.to_bytes(8, "big")), (_CONFIG, config.SerializeToString()))
            self.begin(inserts)
            self.end([True] * len(inserts), counter_bases)
        new.replace(self._path)
        self._file = self._path.open("ab")
        self._grown = 0

    @staticmethod
    def _cells(counter_bases: CounterBases) -> list[tuple[bytes, bytes]]:
        return [(_COUNTER, _COUNTER_CELL.pack(*cell, base)) for cell, base in counter_bases.items()]

    def close(self) -> None:
        self._file.close()
