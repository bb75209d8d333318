# SPDX-License-Identifier: Apache-2.0
"""Tables and multicast groups as controllers wrote them, and the data path that follows each change."""

from __future__ import annotations

import errno

from .dataplane import Dataplane, Host, JobConfig, Region, Replica
from .entries import Entry, Group, Key
from .errors import Code, DataplaneError, P4RuntimeError
from .pipeline import Pipeline

INSERT_ORDER = ("replica", "region", "host", "job", "admission", "transit", "ps_port")
"""In which each state in between is safe: a job is never known without its guard."""

_CODE_OF_ERRNO = {
    errno.EINVAL: Code.INVALID_ARGUMENT,
    errno.ERANGE: Code.OUT_OF_RANGE,
    errno.EMSGSIZE: Code.INVALID_ARGUMENT,
    errno.ENOSPC: Code.RESOURCE_EXHAUSTED,
    errno.EEXIST: Code.FAILED_PRECONDITION,
    errno.E2BIG: Code.RESOURCE_EXHAUSTED,
    errno.ENOMEM: Code.RESOURCE_EXHAUSTED,
}


def _refused(error: DataplaneError) -> P4RuntimeError:
    return P4RuntimeError(_CODE_OF_ERRNO.get(error.errno, Code.INTERNAL), f"the data path refused: {error}")


class Tables:
    """Every entry and group of one switch.

    The data path holds no entry that is not here, and a job is known to it exactly while the table `job` has it and the
    table `region` has a range for it.
    """

    def __init__(self, pipeline: Pipeline, dataplane: Dataplane) -> None:
        self._dataplane = dataplane
        self._tables: dict[str, dict[Key, Entry]] = {table.name: {} for table in pipeline.tables.values()}
        self._regions: dict[int, dict[Key, Entry]] = {}
        self._rewrites: dict[int, dict[tuple[int, int], Entry]] = {}
        self._hosts: dict[int, int] = {}  # address -> job ID
        self._groups: dict[int, Group] = {}
        self._known_jobs: set[int] = set()
        self._live_groups: set[int] = set()

    def entries(self, table: str) -> list[Entry]:
        """Every entry of a table, by short name."""
        return list(self._tables[table].values())

    def groups(self) -> list[Group]:
        """Every multicast group."""
        return list(self._groups.values())

    def entry(self, table: str, key: Key) -> Entry | None:
        return self._tables[table].get(key)

    def count(self, table: str) -> int:
        return len(self._tables[table])

    def group(self, group_id: int) -> Group | None:
        return self._groups.get(group_id)

    def regions_of(self, job_id: int) -> set[Key]:
        """Keys of the job's entries in table `region`."""
        return set(self._regions.get(job_id, ()))

    def job_of_host(self, address: int) -> int | None:
        return self._hosts.get(address)

    def is_known(self, job_id: int) -> bool:
        """Whether the data path knows the job."""
        return job_id in self._known_jobs

    def clear(self) -> None:
        """Delete every entry and group, in the order that keeps each state in between safe."""
        for name in ("admission", "transit", "ps_port", "job", "host", "region", "replica"):
            for entry in self.entries(name):
                self.put(name, entry.key, None)
        for group in self.groups():
            self.put(None, group.group_id, None)

    def copy_into(self, other: Tables) -> None:
        """Insert all entries and groups into tables that are empty.

        Their data path may hold some of them already, and forwards by them meanwhile: so it is told of each job and
        group once, when they are whole.
        """
        for group in self.groups():
            other._store(None, group.group_id, group)
        for name in INSERT_ORDER:
            for entry in self.entries(name):
                other._store(name, entry.key, entry)
        try:
            for group_id in other._groups:
                other._realise_group(group_id)
            for name in INSERT_ORDER:
                if name not in ("replica", "region"):
                    for entry in self.entries(name):
                        other._realise(name, entry.key, None, entry)
        except DataplaneError as error:
            raise _refused(error) from error

    # -- one key changes: tables first, then the data path, and back again if that refuses ---------

    def put(self, table: str | None, key: Key | int, value: Entry | Group | None) -> None:
        before = self._store(table, key, value)
        try:
            self._realise(table, key, before, value)
        except DataplaneError as error:
            self._store(table, key, before)
            raise _refused(error) from error

    def _store(self, table: str | None, key: Key | int, value: Entry | Group | None) -> Entry | Group | None:
        if table is None:
            assert isinstance(key, int)
            group_before = self._groups.pop(key, None)
            if isinstance(value, Group):
                self._groups[key] = value
            return group_before
        assert isinstance(key, tuple)
        rows = self._tables[table]
        before = rows.get(key)
        if isinstance(value, Entry):
            rows[key] = value
        else:
            rows.pop(key, None)
        if table == "region":
            self._index(self._regions, key[0][0], key, value)
        elif table == "host":
            if isinstance(value, Entry):
                self._hosts[value.exact(1)] = value.exact(0)
            elif before is not None:
                self._hosts.pop(before.exact(1), None)
        elif table == "replica":
            self._index(self._rewrites, key[0][0], (key[0][1], key[0][2]), value)
        return before

    @staticmethod
    def _index(index: dict, outer: object, inner: object, value: object) -> None:  # type: ignore[type-arg]
        if value is None:
            index.get(outer, {}).pop(inner, None)
            if not index.get(outer):
                index.pop(outer, None)
        else:
            index.setdefault(outer, {})[inner] = value

    def _realise(
        self, table: str | None, key: Key | int, before: Entry | Group | None, after: Entry | Group | None
    ) -> None:
        if table is None:
            assert isinstance(key, int)
            self._realise_group(key)
            return
        entry = after if after is not None else before
        if not isinstance(entry, Entry):
            return
        if table in ("job", "region"):
            self._realise_job(entry.exact(0))
        elif table == "replica":
            self._realise_group(entry.exact(0))
        elif table == "admission":
            numbers = (entry.exact(0), entry.exact(1), entry.exact(2), entry.exact(3))
            if after is None:
                self._dataplane.delete_admission(*numbers)
            elif before is None:
                self._dataplane.set_admission(*numbers)
        elif table == "host":
            address = entry.exact(1)
            old = before if isinstance(before, Entry) else None
            new = after if isinstance(after, Entry) else None
            if old is not None and (new is None or old.params[1] != new.params[1]):
                self._dataplane.delete_host(address)
            if new is not None:
                self._dataplane.set_host(new.exact(0), address, Host(*new.params))
        elif table == "transit":
            if after is None:
                self._dataplane.delete_transit(entry.exact(0), entry.exact(1), entry.exact(2))
            else:
                self._dataplane.set_transit(entry.exact(0), entry.exact(1), entry.exact(2), entry.params[0])
        elif table == "ps_port":
            if after is None:
                self._dataplane.delete_ps_port(entry.exact(0), entry.exact(1))
            elif before is None:
                self._dataplane.set_ps_port(entry.exact(0), entry.exact(1))

    def _realise_job(self, job_id: int) -> None:
        job = self._tables["job"].get(((job_id,), 0))
        regions = self._regions.get(job_id)
        if job is not None and regions:
            values, full0, full1, group = job.params
            ranges = sorted(entry.range(1) for entry in regions.values())
            config = JobConfig(values, full0, full1, group, tuple(Region(low, high - low + 1) for low, high in ranges))
            self._dataplane.set_job(job_id, config)
            self._known_jobs.add(job_id)
        elif job_id in self._known_jobs:
            self._dataplane.delete_job(job_id)
            self._known_jobs.discard(job_id)

    def _realise_group(self, group_id: int) -> None:
        group = self._groups.get(group_id)
        rewrites = self._rewrites.get(group_id, {})
        replicas: list[Replica] = []
        for member in group.replicas if group else ():
            rewrite = rewrites.get((member.port, member.instance))
            if rewrite is not None:
                replicas.append(Replica(member.port, *rewrite.params))
        if replicas:
            self._dataplane.set_group(group_id, replicas)
            self._live_groups.add(group_id)
        elif group_id in self._live_groups:
            self._dataplane.set_group(group_id, ())
            self._live_groups.discard(group_id)
