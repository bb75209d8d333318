# SPDX-License-Identifier: Apache-2.0
"""The assignment: what is taken, what is refused and with which words."""

import json
from pathlib import Path
from typing import Any

import pytest
from atp_harness import assignment

from atp_sidecar.assignment import AssignmentError, parse_assignment, read_assignment

ADDRESSES = ["10.0.0.1", "10.0.0.2", "10.0.0.9"]


def text(**changes: Any) -> str:
    return json.dumps(assignment(ADDRESSES, **changes))


def test_valid() -> None:
    parsed = parse_assignment(text(), "worker", "10.0.0.1")
    assert (parsed.world_size, parsed.own_address, parsed.master_address) == (2, "10.0.0.1", "10.0.0.1")
    server = parse_assignment(text(role="parameterServer"), "parameterServer")
    assert server.own_address == "10.0.0.9"


def test_unknown_fields_reach_the_transport() -> None:
    document = {**assignment(ADDRESSES), "newField": 7}
    document["workers"][0]["alsoNew"] = True
    passed = json.loads(parse_assignment(json.dumps(document), "worker").to_json())
    assert passed["newField"] == 7
    assert passed["workers"][0]["alsoNew"] is True


def test_addend_limit_reaches_the_transport_when_there_is_one() -> None:
    bounded = parse_assignment(text(addendLimit=268435455), "worker")
    assert json.loads(bounded.to_json())["addendLimit"] == 268435455
    assert "addendLimit" not in json.loads(parse_assignment(text(), "worker").to_json())
    assert not bounded.same_transport(parse_assignment(text(), "worker")), "within an epoch it stays"


@pytest.mark.parametrize(("scale", "told"), [("Auto", "Auto"), (1e8, 1e8), (100000000, 1e8), (0.5, 0.5)])
def test_scale_reaches_the_transport(scale: float | str, told: float | str) -> None:
    document = parse_assignment(text(scale=scale), "worker")
    assert document.scale == told == json.loads(document.to_json())["scale"]


def test_a_floor_reaches_the_transport() -> None:
    regions = [{"start": 0, "size": 256}, {"start": 900, "size": 64, "floor": True}]
    for mode in ("Shared", "HostOnly"):  # HostOnly: the switch is away
        told = json.loads(parse_assignment(text(mode=mode, regions=regions), "worker").to_json())
        assert [region["floor"] for region in told["regions"]] == [False, True]


FLOOR, BESIDE = {"start": 900, "size": 64, "floor": True}, {"start": 0, "size": 256}


@pytest.mark.parametrize(
    ("mode", "regions", "words"),
    [
        ("Reserved", [FLOOR, BESIDE], "a floor is for mode Shared"),
        ("Shared", [FLOOR], "beside its floor a job of mode Shared needs a region that it shares"),
        ("Shared", [BESIDE, FLOOR, {**FLOOR, "start": 2000}], "two of them are the floor"),
        ("Shared", [{"start": 900, "size": 1}, FLOOR], "the floor"),
        ("Shared", [{"start": 963, "size": 1}, FLOOR], "overlaps another region"),
    ],
)
def test_bad_floors(mode: str, regions: list[dict[str, Any]], words: str) -> None:
    """Sidecar and transport say the same."""
    with pytest.raises(AssignmentError, match=words):
        parse_assignment(text(mode=mode, regions=regions), "worker")
    atp_transport = pytest.importorskip("atp_transport")
    with pytest.raises(ValueError, match=words):
        atp_transport.Worker(text(mode=mode, regions=regions))


def test_absent_scale_is_auto() -> None:
    document = json.loads(text())
    del document["scale"]
    assert parse_assignment(json.dumps(document), "worker").scale == "Auto"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"jobId": 0}, "jobId: Input should be greater than or equal to 1"),
        ({"jobId": 256}, "jobId: Input should be less than or equal to 255"),
        ({"scale": 0}, 'scale: must be "Auto" or a finite number above 0, it is 0'),
        ({"scale": "auto"}, 'scale: must be "Auto" or a finite number above 0'),
        ({"scale": "1e8"}, 'scale: must be "Auto" or a finite number above 0'),
        ({"scale": None}, 'scale: must be "Auto" or a finite number above 0'),
        ({"mode": "Fast"}, "mode: Input should be 'Shared', 'Reserved' or 'HostOnly'"),
        ({"apiVersion": "v9"}, "apiVersion: Input should be 'atp.dev/v1alpha1'"),
        ({"job": "digits"}, "job: String should match pattern"),
        ({"rank": 2}, "rank: 2 is not among the 2 of role worker"),
        ({"workers": []}, "workers: Tuple should have at least 1 item"),
        ({"parameterServers": []}, "parameterServers: Tuple should have at least 1 item"),
        ({"mode": "Shared"}, "regions: mode Shared needs at least one region"),
        ({"indexTableSize": 16, "maxWindow": 32}, "indexTableSize: 16 is less than maxWindow 32"),
        ({"addendLimit": 0}, "addendLimit: Input should be greater than or equal to 1"),
        ({"addendLimit": 2**31}, "addendLimit: Input should be less than or equal to 2147483647"),
        ({"regions": [{"start": 65535, "size": 2}]}, "ends beyond the 16-bit aggregatorIndex"),
        ({"workers": [{"rank": 0, "address": "10.0.0.300"}]}, "workers[0].address: '10.0.0.300' is not an IPv4"),
        (
            {"workers": [{"rank": 0, "address": "10.0.0.1"}, {"rank": 2, "address": "10.0.0.2", "bit": 1}]},
            "ranks must be 0..1, each once; they are [0, 2]",
        ),
        (
            {"workers": [{"rank": 0, "address": "10.0.0.1"}, {"rank": 1, "address": "10.0.0.2"}]},
            "two workers have the same rack and bit",
        ),
        (
            {"workers": [{"rank": 0, "address": "10.0.0.1"}, {"rank": 1, "address": "10.0.0.1", "bit": 1}]},
            "two workers have the same address",
        ),
    ],
)
def test_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(AssignmentError) as error:
        parse_assignment(text(**changes), "worker")
    assert words in str(error.value)


def test_all_errors_at_once() -> None:
    with pytest.raises(AssignmentError) as error:
        parse_assignment(text(jobId=0, port=0, mode="x"), "worker")
    assert all(field in str(error.value) for field in ("jobId:", "port:", "mode:"))


def test_not_json() -> None:
    with pytest.raises(AssignmentError, match="Invalid JSON"):
        parse_assignment("{", "worker")


def test_wrong_role_and_wrong_pod() -> None:
    with pytest.raises(AssignmentError, match="this sidecar runs as parameterServer"):
        parse_assignment(text(), "parameterServer")
    with pytest.raises(AssignmentError, match=r"this pod has 10\.9\.9\.9 \(POD_IP\)"):
        parse_assignment(text(), "worker", "10.9.9.9")


def test_same_transport() -> None:
    first = parse_assignment(text(), "worker")
    assert first.same_transport(parse_assignment(text(revision=2), "worker"))
    assert not first.same_transport(parse_assignment(text(jobId=9), "worker"))


def test_reading(tmp_path: Path) -> None:
    path = tmp_path / "assignment.json"
    assert read_assignment(path) is None
    path.write_text(" \n")
    assert read_assignment(path) is None
    path.write_text("x")
    assert read_assignment(path) == "x"
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(AssignmentError, match="cannot be read"):
        read_assignment(path)
