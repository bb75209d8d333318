# SPDX-License-Identifier: Apache-2.0
"""The journal of what controllers wrote: whatever a killed process leaves, nobody believes half of a batch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from finsy.proto import p4r
from hypothesis import given
from hypothesis import strategies as st

from atp_softswitch.journal import Journal, Saved, replay

TOKEN = 0x1122334455667788
CONFIG = p4r.ForwardingPipelineConfig()
CONFIG.cookie.cookie = 77


def update(number: int, kind: p4r.Update.Type.ValueType = p4r.Update.INSERT) -> p4r.Update:
    made = p4r.Update(type=kind)
    made.entity.packet_replication_engine_entry.multicast_group_entry.multicast_group_id = number
    return made


batches = st.lists(
    st.tuples(st.lists(st.tuples(st.integers(1, 1000), st.booleans()), max_size=5), st.integers(-5, 5)), max_size=8
)


def write(journal: Journal, batch: Any) -> None:
    updates, base = batch
    journal.begin([update(number) for number, _ in updates])
    journal.end([good for _, good in updates], {(3, 4): base} if base else {})


def expected(done: list[Any]) -> Saved:
    updates = [update(number) for batch, _ in done for number, good in batch if good]
    bases = [base for _, base in done if base]
    return Saved(CONFIG, updates, {(3, 4): bases[-1]} if bases else {})


@given(batches, st.data())
def test_a_file_cut_anywhere_is_a_state_between_batches_or_nothing(
    tmp_path_factory: Any, written: list[Any], data: Any
) -> None:
    path: Path = tmp_path_factory.mktemp("journal") / "entries"
    journal = Journal(path, TOKEN)
    assert journal.load() is None
    journal.rewrite(CONFIG, [], {})
    for batch in written:
        write(journal, batch)
    journal.close()
    whole = path.read_bytes()
    assert replay(whole, TOKEN) == expected(written)
    cut = replay(whole[: data.draw(st.integers(0, len(whole)))], TOKEN)
    # A batch's offsets of counters come after its outcome: the last ones may be missing.
    states = [expected(written[:n]).updates for n in range(len(written) + 1)]
    assert cut is None or (cut.config == CONFIG and cut.updates in states)
    assert replay(whole, TOKEN + 1) is None, "tables of another start of the machine"


@given(st.binary(max_size=200))
def test_anything_else_is_nothing(data: bytes) -> None:
    assert replay(data, TOKEN) is None


def test_rewriting_keeps_what_is_left(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "deeper" / "entries", TOKEN)
    journal.rewrite(CONFIG, [update(1).entity, update(2).entity], {(1, 2): 3})
    write(journal, ([(3, True)], 0))
    assert journal.load() == Saved(CONFIG, [update(1), update(2), update(3)], {(1, 2): 3})
    journal.forget()
    assert journal.load() is None
    journal.rewrite(CONFIG, [update(9).entity], {})
    assert Journal(tmp_path / "deeper" / "entries", TOKEN).load() == Saved(CONFIG, [update(9)], {})
