# SPDX-License-Identifier: Apache-2.0
"""Real sockets on loopback: one parameter server and its workers without a switch."""

from __future__ import annotations

import json
import socket
import time

import numpy as np
import pytest
from transport.rig import JOB_ID, SERVER, Array, Job, assignment, fixed_point_sum, free_port

from atp_transport import ParameterServer, Worker


def random_tensors(workers: int, count: int, dtype: type, seed: int = 1) -> list[Array]:
    rng = np.random.default_rng(seed)
    return [rng.normal(0, 0.5, count).astype(dtype) for _ in range(workers)]


@pytest.mark.parametrize("workers", [1, 2, 4])
@pytest.mark.parametrize("count", [1, 61, 62, 63, 1000, 100_000])
def test_float32_sum_is_the_fixed_point_sum(workers: int, count: int) -> None:
    tensors = random_tensors(workers, count, np.float32)
    expected = fixed_point_sum(tensors).astype(np.float32)
    with Job(workers) as job:
        for out in job.all_reduce(tensors, "float32"):
            np.testing.assert_array_equal(out, expected)


def test_mean_divides_in_float64() -> None:
    tensors = random_tensors(3, 5000, np.float32)
    with Job(3) as job:
        for out in job.all_reduce(tensors, "float32", kind="mean"):
            np.testing.assert_array_equal(out, fixed_point_sum(tensors, divisor=3).astype(np.float32))


def test_float16_sum_and_mean() -> None:
    tensors = random_tensors(2, 777, np.float16)
    with Job(2) as job:
        np.testing.assert_array_equal(
            job.all_reduce(tensors, "float16")[1], fixed_point_sum(tensors).astype(np.float16)
        )
        np.testing.assert_array_equal(
            job.all_reduce(tensors, "float16", kind="mean")[0],
            fixed_point_sum(tensors, divisor=2).astype(np.float16),
        )


def test_bfloat16_sum() -> None:
    # numpy has no bfloat16: these values are exact in it, and so are their sums.
    values: list[Array] = [np.arange(-64, 64, dtype=np.float32) / 8, np.full(128, 0.5, np.float32)]
    words = [(v.view(np.uint32) >> 16).astype(np.uint16) for v in values]
    with Job(2) as job:
        out = job.all_reduce(words, "bfloat16")[0]
    np.testing.assert_array_equal((out.astype(np.uint32) << 16).view(np.float32), values[0] + values[1])


def test_int32_sum_wraps_like_torch() -> None:
    rng = np.random.default_rng(5)
    tensors = [rng.integers(-(2**31), 2**31, 3000, dtype=np.int32) for _ in range(3)]
    expected = np.add(np.add(tensors[0], tensors[1], dtype=np.int32), tensors[2], dtype=np.int32)
    with Job(3) as job:
        for out in job.all_reduce(tensors, "int32"):
            np.testing.assert_array_equal(out, expected)
        assert job.settled(job.servers[0])["raw_float_corrections"] > 0


def test_values_without_fixed_point_take_the_raw_path() -> None:
    tensors = random_tensors(3, 1000, np.float32)
    tensors[0][5] = np.nan
    tensors[1][100] = np.inf
    tensors[2][200] = 1e30
    tensors[0][300], tensors[1][300] = 20.0, 20.0  # each has a fixed-point value, the sum saturates
    with Job(3) as job:
        outs = job.all_reduce(tensors, "float32")
        expected = fixed_point_sum(tensors)
        raw = (tensors[0].astype(np.float64) + tensors[1] + tensors[2]).astype(np.float32)
        for out in outs:
            for spot in (5, 100, 200, 300):
                chunk = slice(spot // 62 * 62, min((spot // 62 + 1) * 62, 1000))
                np.testing.assert_array_equal(out[chunk], raw[chunk])
            np.testing.assert_array_equal(out[930:992], expected[930:992].astype(np.float32))
        metrics = job.settled(job.servers[0])
        assert metrics["raw_float_corrections"] == 4
        assert metrics["saturated"] >= 1


def test_empty_in_place_and_many_in_a_row() -> None:
    with Job(2) as job:
        empty = np.zeros(0, np.float32)
        job.all_reduce([empty, empty.copy()], "float32")
        tensors = random_tensors(2, 500, np.float32)
        expected = fixed_point_sum(tensors).astype(np.float32)
        for out in job.all_reduce(tensors, "float32", in_place=True):
            np.testing.assert_array_equal(out, expected)
        inputs = [[np.full(100 + i, i * (rank + 1), np.float32) for i in range(200)] for rank in range(2)]
        scaled = [[t / 100 for t in row] for row in inputs]
        outs = [[np.zeros_like(t) for t in row] for row in scaled]
        for i in range(200):
            for rank in range(2):
                job.workers[rank].submit(i, "sum", "float32", scaled[rank][i].data, outs[rank][i].data, 100 + i)
        for rank in range(2):
            assert job.collect(rank, 200) == [(i, None) for i in range(200)]
            for i in range(200):
                np.testing.assert_array_equal(
                    outs[rank][i], fixed_point_sum([scaled[0][i], scaled[1][i]]).astype(np.float32)
                )


def test_two_shards_and_large_packets() -> None:
    shards = [{"shard": 0, "address": SERVER}, {"shard": 1, "address": "127.0.0.101"}]
    tensors = random_tensors(2, 50_000, np.float32)
    with Job(2, parameterServers=shards, valuesPerPacket=350) as job:
        for out in job.all_reduce(tensors, "float32"):
            np.testing.assert_array_equal(out, fixed_point_sum(tensors).astype(np.float32))
        assert all(job.settled(server)["host_summed_packets"] > 100 for server in job.servers)


def test_mismatch_names_the_ranks_and_the_job_goes_on() -> None:
    with Job(3) as job:
        counts = [1024, 1024, 1000]
        tensors = [np.ones(n, np.float32) for n in counts]
        later = [np.full(300, rank + 1, np.float32) for rank in range(3)]
        for rank in range(3):
            job.workers[rank].submit(
                12, "sum", "float32", tensors[rank].data, np.zeros_like(tensors[rank]).data, counts[rank]
            )
            job.workers[rank].submit(13, "sum", "float32", later[rank].data, later[rank].data, 300)
        for rank in range(3):
            got = dict(job.collect(rank, 2))
            text = got[12]
            assert text is not None
            if rank == 0:
                assert text.startswith(
                    "all_reduce #12: rank 2 has 1000 float32 elements, this rank (0) has 1024 float32 elements"
                )
            if rank == 2:
                assert "rank 0 has 1024" in text
                assert "rank 1 has 1024" in text
            assert got[13] is None
            np.testing.assert_array_equal(later[rank], np.full(300, 6, np.float32))


@pytest.mark.parametrize(
    ("first", "second", "words"),
    [
        ((1, "sum", "float32"), (1, "mean", "float32"), ["(mean)", "(sum)"]),
        ((1, "sum", "float32"), (1, "sum", "int32"), ["int32", "float32"]),
        ((1, "sum", "float32"), (2, "sum", "float32"), ["operation #2"]),
    ],
)
def test_other_mismatches(first: tuple[int, str, str], second: tuple[int, str, str], words: list[str]) -> None:
    with Job(2) as job:
        for rank, (op_id, kind, dtype) in enumerate([first, second]):
            data = np.zeros(10, np.float32 if dtype == "float32" else np.int32)
            job.workers[rank].submit(op_id, kind, dtype, data.data, data.data, 10)
        text = job.collect(0)[0][1]
        assert text is not None
        assert all(word in text for word in words), text
        assert job.collect(1)[0][1] is not None


def test_stall_names_the_silent_rank() -> None:
    with Job(3, stallTimeoutSeconds=1.5) as job:
        started = time.monotonic()
        data = [np.ones(2000, np.float32) for _ in range(3)]
        for rank in (0, 2):
            job.workers[rank].submit(5, "sum", "float32", data[rank].data, data[rank].data, 2000)
        for rank in (0, 2):
            text = job.collect(rank, timeout=5)[0][1]
            assert text is not None
            assert text.startswith("all_reduce #5: no progress for 1.5 s: "), text
            assert "rank 1 (127.0.0.2)" in text
            assert "rank 0 (" not in text
        assert 1.4 < time.monotonic() - started < 4
        sent = job.settled(job.workers[0])["retransmits"]
        assert 1 <= sent < 40, "back-off bounds the resends"
        job.workers[0].submit(6, "sum", "float32", data[0].data, data[0].data, 2000)
        later = job.collect(0)[0][1]
        assert later is not None
        assert "new epoch" in later


def test_stall_without_parameter_server() -> None:
    with Job(1, stallTimeoutSeconds=0.5) as job:
        job.servers[0].close()
        data = np.ones(10, np.float32)
        job.workers[0].submit(1, "sum", "float32", data.data, data.data, 10)
        text = job.collect(0, timeout=5)[0][1]
        assert text is not None
        assert f"{SERVER}:{job.port} does not answer" in text


def test_a_straggler_costs_no_resend_storm() -> None:
    tensors = random_tensors(2, 60_000, np.float32)
    with Job(2) as job:
        out = [np.zeros_like(t) for t in tensors]
        job.workers[0].submit(1, "sum", "float32", tensors[0].data, out[0].data, 60_000)
        time.sleep(0.5)
        job.workers[1].submit(1, "sum", "float32", tensors[1].data, out[1].data, 60_000)
        for rank in range(2):
            assert job.collect(rank) == [(1, None)]
            np.testing.assert_array_equal(out[rank], fixed_point_sum(tensors).astype(np.float32))
        metrics = job.settled(job.workers[0])
        assert metrics["retransmits"] < 100


def test_strangers_are_dropped_and_counted() -> None:
    with Job(2) as job:
        data = bytes([JOB_ID]) + bytes(15) + bytes(248)
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as stranger:
            stranger.bind(("127.0.0.77", job.port))
            for _ in range(5):
                stranger.sendto(data, (SERVER, job.port))
                stranger.sendto(data, ("127.0.0.1", job.port))
            stranger.sendto(b"short", (SERVER, job.port))
        tensors = random_tensors(2, 1000, np.float32)
        np.testing.assert_array_equal(
            job.all_reduce(tensors, "float32")[0], fixed_point_sum(tensors).astype(np.float32)
        )
        assert job.settled(job.servers[0])["rejected_stranger"] == 5
        assert job.settled(job.servers[0])["rejected_short"] == 1
        assert job.settled(job.workers[0])["rejected_stranger"] == 5


def test_raw_values_travel_with_the_tag_of_the_epoch() -> None:
    tensors = random_tensors(2, 1000, np.float32)
    tensors[0][7], tensors[1][500] = np.nan, np.inf
    with Job(2, key="00112233445566778899aabbccddeeff") as job:
        expected = fixed_point_sum([np.nan_to_num(tensor, nan=0.0, posinf=0.0) for tensor in tensors])
        first, last = 7 // 62 * 62, 500 // 62 * 62
        for packet in (slice(first, first + 62), slice(last, last + 62)):
            expected[packet] = tensors[0][packet].astype(np.float64) + tensors[1][packet]
        np.testing.assert_array_equal(job.all_reduce(tensors, "float32")[0], expected.astype(np.float32))
        assert job.settled(job.servers[0])["raw_float_corrections"] > 0
        assert job.settled(job.servers[0])["rejected_tag"] == 0


def test_raw_values_of_another_key_are_dropped_and_counted() -> None:
    """Whoever sends under a worker's address, but does not know the key."""
    data = [np.full(100, 1.5, np.float32) for _ in range(2)]
    with Job(2, key="00" * 16) as job:
        job.workers[1].close()
        forger = Worker(json.dumps(assignment("worker", 1, 2, job.port, key="11" * 16)))
        job.workers[1] = forger
        for result in job.all_reduce(data, "float32"):
            np.testing.assert_array_equal(result, 3.0)
        data[1][3] = np.nan
        for rank in range(2):
            job.workers[rank].submit(9, "sum", "float32", data[rank].data, data[rank].data, 100)
        deadline = time.monotonic() + 20
        while not job.servers[0].metrics()["rejected_tag"] and time.monotonic() < deadline:
            time.sleep(0.05)
        assert job.servers[0].metrics()["rejected_tag"] > 0
        assert not job.workers[0].completions()


@pytest.mark.parametrize("key", ["", "00", "g" * 32, "00" * 17, 7])
def test_a_key_that_is_none_is_refused(key: object) -> None:
    with pytest.raises(ValueError, match=r"key|assignment"):
        Worker(json.dumps(assignment("worker", 0, 1, 12345, key=key)))


def test_close_and_cancel_end_operations() -> None:
    with Job(2) as job:
        data = np.ones(10, np.float32)
        job.workers[0].submit(1, "sum", "float32", data.data, data.data, 10)
        job.workers[0].cancel_all("the trainer went away")
        assert job.collect(0) == [(1, "cancelled: the trainer went away")]
        job.workers[1].cancel_all("nothing is pending, nothing happens")
        job.workers[1].submit(1, "sum", "float32", data.data, data.data, 10)
        job.workers[1].close()
        job.workers[1].close()
        assert job.workers[1].completions() == [(1, "cancelled: the endpoint was closed")]
        with pytest.raises(OSError, match="does not run"):
            job.workers[1].submit(2, "sum", "float32", data.data, data.data, 10)


def test_bad_arguments() -> None:
    with Job(1) as job:
        worker = job.workers[0]
        data = np.ones(10, np.float32)
        with pytest.raises(ValueError, match="mean of int32"):
            worker.submit(1, "mean", "int32", data.data, data.data, 10)
        with pytest.raises(ValueError, match="dtype"):
            worker.submit(1, "sum", "float64", data.data, data.data, 5)
        with pytest.raises(ValueError, match="kind"):
            worker.submit(1, "max", "float32", data.data, data.data, 5)
        with pytest.raises(ValueError, match="need 44 bytes"):
            worker.submit(1, "sum", "float32", data.data, data.data, 11)
        with pytest.raises(BufferError):
            worker.submit(1, "sum", "float32", data.data, bytes(40), 10)
        busy = assignment("worker", 0, 1, job.port)
        with pytest.raises(OSError, match=f"127.0.0.1:{job.port}") as caught:
            Worker(json.dumps(busy))
        assert caught.value.errno == 98


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"jobId": 0}, "jobId"),
        ({"valuesPerPacket": 0}, "valuesPerPacket"),
        ({"scale": -1}, "scale"),
        ({"mode": "Sharde"}, "Sharde"),
        ({"mode": "Shared", "regions": []}, "regions"),
        ({"maxWindow": 2048}, "maxWindow"),
        ({"workers": []}, "workers"),
        ({"rank": 9}, "rank 9"),
        ({"parameterServers": []}, "parameterServers"),
        ({"workers": [{"rank": 0, "address": "example.org", "rack": 0, "bit": 0}]}, "address"),
    ],
)
def test_bad_assignments(changes: dict[str, object], words: str) -> None:
    config = assignment("worker", 0, 2, free_port()) | changes
    with pytest.raises(ValueError, match=words):
        Worker(json.dumps(config))


def test_wrong_role() -> None:
    with pytest.raises(ValueError, match="role"):
        ParameterServer(json.dumps(assignment("worker", 0, 2, free_port())))
    with pytest.raises(ValueError, match="assignment"):
        Worker("{")


def test_an_idle_endpoint_uses_no_processor_time() -> None:
    with Job(2) as job:
        job.all_reduce(random_tensors(2, 1000, np.float32), "float32")
        before = time.process_time()
        time.sleep(0.5)
        assert time.process_time() - before < 0.05


def test_uncollected_results_are_bounded() -> None:
    with Job(1) as job:
        empty = np.zeros(0, np.float32).data
        out = bytearray()
        with pytest.raises(OSError, match="call completions"):
            for op_id in range(70_000):
                job.workers[0].submit(op_id, "sum", "float32", empty, out, 0)
        assert len(job.collect(0, 1 << 16)) == 1 << 16
        job.workers[0].submit(1, "sum", "float32", empty, out, 0)
        assert job.collect(0) == [(1, None)]
