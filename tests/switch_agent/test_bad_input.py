# SPDX-License-Identifier: Apache-2.0
"""What a switch cannot do, or will not: each has a reason of its own, and jobs that it can serve go on.

Against P4Runtime servers in processes of their own: the software switch, and bmv2 where it is installed.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
from finsy.proto import p4i, p4r, p4r_grpc
from google.protobuf import text_format
from switch_agent.switches import Switch

from atp_api.reasons import TRANSIENT
from atp_api.switchagent.v1alpha1 import switchagent_pb2 as api
from atp_api.switchagent.v1alpha1 import switchagent_pb2_grpc as api_grpc
from atp_switch_agent.codec import bmv2_paths, contract_path

PROGRAMMED, PENDING, FAILED = api.JobStatus.PROGRAMMED, api.JobStatus.PENDING, api.JobStatus.FAILED


def job(switch: Switch, job_id: int, workers: int = 2) -> api.Job:
    message = api.Job(job_id=job_id, epoch=1, uid=f"uid-{job_id}", name=f"ns/job-{job_id}", values=62)
    message.multicast_group = job_id
    message.regions.add(start=64 * job_id, size=64)
    message.parameter_servers.append(switch.endpoint(5))
    for rank in range(workers):
        message.members.add(rank=rank, bit=rank, endpoint=switch.endpoint(rank + 1))
    return message


def own_p4info(switch: Switch) -> p4i.P4Info:
    path = bmv2_paths()[0] if switch.kind == "bmv2" else contract_path()
    return text_format.Parse(path.read_text(), p4i.P4Info())


def write(path: Path, p4info: p4i.P4Info) -> Path:
    path.write_text(text_format.MessageToString(p4info))
    return path


def table(p4info: p4i.P4Info, name: str) -> p4i.Table:
    return next(item for item in p4info.tables if item.preamble.alias == name)


class Operator:
    """What the operator does: send desired states, look at what came of them."""

    def __init__(self, process: Any) -> None:
        self.process = process
        self.stub = api_grpc.SwitchAgentStub(grpc.insecure_channel(f"127.0.0.1:{process.started['grpc_port']}"))
        self.generation = 0

    def observed(self) -> api.ObservedState:
        return self.stub.GetObservedState(api.GetObservedStateRequest(), timeout=10)

    def apply(self, *jobs: api.Job) -> api.ObservedState:
        self.generation += 1
        state = api.DesiredState(switch_name="sw", generation=self.generation, writer="op", jobs=jobs)
        return self.stub.ApplyDesiredState(state, timeout=30)

    def until(self, reason: str, seconds: float = 20.0) -> api.ObservedState:
        """The observed state once its reason is this one."""
        deadline = time.monotonic() + seconds
        while (told := self.observed()).reason != reason:
            assert time.monotonic() < deadline, (told, self.process.lines[-3:])
            time.sleep(0.05)
        for each in (told, *told.jobs):
            assert bool(each.advice) == bool(each.reason and each.reason not in TRANSIENT), each
        return told

    def states(self, told: api.ObservedState) -> dict[int, tuple[int, str]]:
        return {status.job_id: (status.state, status.reason) for status in told.jobs}


def test_a_p4info_that_is_no_atp_pipeline(switch: Switch, agent: Any, tmp_path: Path) -> None:
    """The agent is there and says so: an agent that ended would look like one that cannot be reached."""
    p4info = own_p4info(switch)
    admission = table(p4info, "admission")
    del admission.match_fields[2]
    table(p4info, "job").match_fields[0].bitwidth = 16
    switch.start()
    path = write(tmp_path / "other.txtpb", p4info)
    operator = Operator(agent(switch.address, *switch.options(path)))
    told = operator.until("PipelineMismatch")
    assert told.connected and not told.in_sync
    assert "admission.edge is missing" in told.message and "job.job_id has 16 bits, not 8" in told.message
    told = operator.apply(job(switch, 3))
    assert operator.states(told) == {3: (PENDING, "PipelineMismatch")}
    assert operator.stub.GetCapabilities(api.GetCapabilitiesRequest(), timeout=10).pipeline == ""


def test_a_switch_that_runs_another_program(switch: Switch, agent: Any, tmp_path: Path) -> None:
    p4info = own_p4info(switch)
    p4info.pkg_info.name = "fabric"
    if switch.kind == "software":
        table(p4info, "replica").size = 99
        switch.start(write(tmp_path / "server.txtpb", p4info))
        told = Operator(agent(switch.address, *switch.options())).until("PipelineMismatch")
        assert "the switch refuses pipeline atp 0.1.0" in told.message and "replica differs" in told.message
        return
    p4info.tables.remove(table(p4info, "admission"))
    p4info.counters.remove(next(counter for counter in p4info.counters if counter.preamble.alias == "acks"))
    switch.start()
    with grpc.insecure_channel(str(switch.address)) as channel:
        with Rival(channel, 7) as rival:
            rival.push(p4info, bmv2_paths()[1].read_bytes())
        first = agent(switch.address, *switch.options())
        told = Operator(first).until("PipelineMismatch")
        assert "fabric 0.1.0" in told.message and "--replace-pipeline" in told.message
        assert "table admission is missing" in told.message
        first.stop()
        operator = Operator(agent(switch.address, *switch.options(), "--replace-pipeline"))
        operator.until("NoDesiredState")
        assert operator.apply(job(switch, 3)).in_sync


def test_a_switch_without_room(switch: Switch, agent: Any, tmp_path: Path) -> None:
    p4info = own_p4info(switch)
    table(p4info, "admission").size = 5
    path = write(tmp_path / "small.txtpb", p4info)
    switch.start(path)
    operator = Operator(agent(switch.address, *switch.options(path)))
    operator.until("NoDesiredState")
    assert operator.apply(job(switch, 9, 3)).in_sync
    # The job that is there keeps its place, though another has the lower ID.
    told = operator.apply(job(switch, 9, 3), job(switch, 3, 3), job(switch, 4, 2))
    assert operator.states(told) == {9: (PROGRAMMED, ""), 3: (FAILED, "SwitchFull"), 4: (PROGRAMMED, "")}
    assert (told.reason, told.in_sync) == ("SwitchFull", False)
    assert told.message.startswith("ns/job-3: table admission of the switch holds 5 entries, 2 are free")
    told = operator.apply(job(switch, 3, 3), job(switch, 4, 2))
    assert told.in_sync and operator.states(told)[3] == (PROGRAMMED, "")


def test_a_port_that_does_not_exist(switch: Switch, agent: Any) -> None:
    switch.start()
    operator = Operator(agent(switch.address, *switch.options()))
    operator.until("NoDesiredState")
    lost = job(switch, 3)
    lost.members[1].endpoint.CopyFrom(switch.nowhere())
    told = operator.apply(lost, job(switch, 4))
    assert operator.states(told) == {3: (FAILED, "PortNotFound"), 4: (PROGRAMMED, "")}
    assert told.reason == "PortNotFound" and "does not exist" in told.message
    told = operator.apply(job(switch, 3), job(switch, 4))
    assert told.in_sync, told


def test_a_port_that_the_file_does_not_name(switch: Switch, agent: Any, tmp_path: Path) -> None:
    """bmv2 takes any number: which ports there are, only its administrator knows."""
    file = tmp_path / "ports.json"
    numbers = range(1, 6)
    file.write_text(f'{{"ports": {list(numbers)}}}')
    switch.start()
    extra = ("--ports", "static", "--port-file", str(file))
    operator = Operator(agent(switch.address, *switch.options(), *extra))
    operator.until("NoDesiredState")
    here, lost = job(switch, 4), job(switch, 3)
    for number, member in enumerate((*here.members, *lost.members)):
        member.endpoint.port, member.endpoint.mac = number + 1, f"02:00:00:00:00:0{number}"
    for server in (*here.parameter_servers, *lost.parameter_servers):
        server.port, server.mac = 5, "02:00:00:00:00:05"
    lost.members[0].endpoint.port = 77
    told = operator.apply(lost, here)
    assert operator.states(told) == {3: (FAILED, "PortNotFound"), 4: (PROGRAMMED, "")}
    assert f"add it to `ports` in {file}" in told.message


class Rival:
    """Another controller: primary with its election ID while the stream is open."""

    def __init__(self, channel: grpc.Channel, election: int) -> None:
        self.stub = p4r_grpc.P4RuntimeStub(channel)
        self.election = p4r.Uint128(low=election)
        self._leave = threading.Event()

    def __enter__(self) -> Rival:
        def bid() -> Iterator[p4r.StreamMessageRequest]:
            request = p4r.StreamMessageRequest()
            request.arbitration.device_id = 1
            request.arbitration.election_id.CopyFrom(self.election)
            yield request
            self._leave.wait(60)

        answers: Any = self.stub.StreamChannel(bid())
        self._answers = answers
        assert next(answers).arbitration.status.code == 0
        return self

    def __exit__(self, *_: object) -> None:
        self._leave.set()
        self._answers.cancel()

    def push(self, p4info: p4i.P4Info, program: bytes) -> None:
        request = p4r.SetForwardingPipelineConfigRequest(
            device_id=1,
            election_id=self.election,
            action=p4r.SetForwardingPipelineConfigRequest.VERIFY_AND_COMMIT,
            config=p4r.ForwardingPipelineConfig(p4info=p4info, p4_device_config=program),
        )
        request.config.cookie.cookie = 1
        self.stub.SetForwardingPipelineConfig(request, timeout=60)

    def delete_all(self, p4info: p4i.P4Info, *names: str) -> int:
        """Delete every entry of these tables; how many there were."""
        read = p4r.ReadRequest(device_id=1)
        for name in names:
            read.entities.add().table_entry.table_id = table(p4info, name).preamble.id
        found = [entity for reply in self.stub.Read(read, timeout=10) for entity in reply.entities]
        request = p4r.WriteRequest(device_id=1, election_id=self.election)
        for entity in found:
            request.updates.add(type=p4r.Update.DELETE, entity=entity)
        self.stub.Write(request, timeout=10)
        return len(found)


def test_another_controller_with_a_higher_election_id(switch: Switch, agent: Any) -> None:
    """It may do what it likes; when it leaves, the agent finds out what, and repairs it."""
    switch.start()
    operator = Operator(agent(switch.address, *switch.options(), "--election-id", "100"))
    operator.until("NoDesiredState")
    assert operator.apply(job(switch, 3), job(switch, 4)).in_sync
    target = f"127.0.0.1:{switch.address}" if isinstance(switch.address, int) else switch.address
    with grpc.insecure_channel(target) as channel:
        with Rival(channel, 500) as rival:
            told = operator.until("NotMaster")
            assert not told.connected and not told.in_sync
            assert "election ID 500" in told.message and "(100)" in told.message
            assert operator.states(told) == {3: (PENDING, "NotMaster"), 4: (PENDING, "NotMaster")}
            assert rival.delete_all(own_p4info(switch), "admission", "ps_port", "job") == 8
        told = operator.until("")
    assert told.in_sync and operator.states(told) == {3: (PROGRAMMED, ""), 4: (PROGRAMMED, "")}


def test_two_agents_with_one_election_id(switch: Switch, agent: Any) -> None:
    switch.start()
    first = Operator(agent(switch.address, *switch.options(), "--election-id", "100"))
    first.until("NoDesiredState")
    second = Operator(agent(switch.address, *switch.options(), "--election-id", "100"))
    told = second.until("NotMaster")
    assert "another agent of this switch with the same --election-id?" in told.message
    assert first.apply(job(switch, 3)).in_sync


def test_the_wrong_device_id(relay: Any, agent: Any) -> None:
    """The software switch alone: bmv2 lets anybody be primary of any device, and ends when one is programmed."""
    switch = relay("127.77.3.1")
    told = Operator(agent(switch.started["p4runtime_port"], "--device-id", "9")).until("DeviceNotFound")
    assert "give the agent the --device-id of the switch" in told.message
