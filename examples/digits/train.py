# SPDX-License-Identifier: Apache-2.0
"""Handwritten digits with PyTorch DDP: a usual script, and the two lines that make it use ATP.

The data is scikit-learn's copy of the UCI handwritten digits (1,797 images of 8x8). Rank 0 prints one JSON
line an epoch and one at the end. Runs with torch 1.13 and newer.

In the pods of an ATPJob:   python train.py
On one machine, with gloo:  python train.py --backend gloo --spawn 4
"""

import argparse
import json
import math
import os
import socket
import time
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import atp_client  # line 1 of 2: makes the backend "atp" known


def load(seed: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Images (n, 1, 8, 8) in 0..1 and labels (n,): four fifths to train, one to test, the same for a seed."""
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32).unsqueeze(1) / 16
    labels = torch.tensor(digits.target, dtype=torch.int64)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))
    images, labels = images[order], labels[order]
    cut = len(labels) * 4 // 5
    return images[:cut], labels[:cut], images[cut:], labels[cut:]


def network() -> nn.Module:
    """A small convolutional network: 38,282 parameters."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(512, 64),
        nn.ReLU(),
        nn.Linear(64, 10),
    )


class SumCheck:
    """Compares every sum that the backend makes with the exact one.

    As a DDP hook it does what DDP does without one: divide the bucket by the number of workers n, then sum it
    over the ranks. So what is summed is x_r = float32(g_r / n). With `got` the element that came back, in
    float64:

        exact = x_0 + .. + x_(n-1)     bound = n / (2 s) + ulp(exact)     error_over_bound = |got - exact| /
        bound

    n / (2 s): each rank rounds x_r * s to an integer, half a unit of 1/s at most. ulp: the spacing of float32
    at exact, because the result is a float32. (A mean divides the sum by n: its bound is 1 / (2 s) +
    ulp(exact mean).)

    With scale Auto each MiB of a bucket has its own s, the largest power of two with which n values of 31 bits
    and sign cannot overflow: with 2^e above the largest |x_r| of all ranks, n * 2^e * s <= 2^31.

    Args:
        scale: the job's factor s, or "Auto".
        every: checks one of so many steps.
    """

    PART = (1 << 20) // 4  # elements that have a scale of their own

    def __init__(self, scale: Any, every: int) -> None:
        self.scale = scale
        self.every = every
        self.worst = 0.0
        self.elements = 0
        self._step = 0
        self._sums: list[tuple[torch.Tensor, torch.Tensor]] = []

    def unit(self, largest: float, ranks: int) -> float:
        """1 / s of a part whose largest magnitude at any rank is `largest`, for so many ranks."""
        if self.scale != "Auto":
            return 1 / float(self.scale)
        ranks_bits = (ranks - 1).bit_length()
        # Below 2^e a float32 is at most 2^e - 2^(e-24): so n of them need no further bit, up to n = 128.
        bits = 31 - ranks_bits if ranks <= 128 else 30 - ranks_bits
        return 2.0 ** (max(math.frexp(largest)[1], -126) - bits)

    def hook(self, state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        """The DDP hook."""
        buffer = bucket.buffer().div_(dist.get_world_size())
        local = buffer.clone()
        work = dist.all_reduce(buffer, async_op=True)

        def keep(future: Any) -> torch.Tensor:
            result = future.value()[0]
            self._sums.append((local, result.clone()))
            return result

        return work.get_future().then(keep)

    def after_step(self) -> None:
        """Checks what the step has summed; all ranks must call it."""
        sums, self._sums = self._sums, []
        self._step += 1
        if (self._step - 1) % self.every:
            return
        ranks = dist.get_world_size()
        for local, got in sums:
            values = local.double()
            gathered = [torch.empty_like(values) for _ in range(ranks)]
            dist.all_gather(gathered, values)  # float64: over gloo, not over what is being checked
            for parts in zip(*(each.split(self.PART) for each in (got.double(), *gathered)), strict=True):
                self._compare(parts[0], torch.stack(parts[1:]))

    def _compare(self, got: torch.Tensor, parts: torch.Tensor) -> None:
        """got: (elements,), what came back. parts: (ranks, elements), what each rank gave. Both float64."""
        exact = parts.sum(0)
        size = exact.abs().float()
        ulp = (torch.nextafter(size, torch.full_like(size, float("inf"))) - size).double()
        ranks = len(parts)
        ratio = (got - exact).abs() / (ranks / 2 * self.unit(parts.abs().max().item(), ranks) + ulp)
        self.worst = max(self.worst, ratio.max().item() if ratio.isfinite().all() else float("inf"))
        self.elements += exact.numel()

    def error_over_bound(self) -> float:
        """The largest error divided by its bound, over all ranks and checked steps."""
        worst = torch.tensor([self.worst], dtype=torch.float64)
        dist.all_reduce(worst, op=dist.ReduceOp.MAX)
        return float(worst.item())


def transport(backend: str) -> dict[str, Any]:
    """What the sidecar counted: for the lines that are printed."""
    if backend != "atp":
        return {}
    stats = atp_client.stats()
    names = (
        "mode",
        "gradient_packets",
        "aggregated_packets",
        "host_summed_packets",
        "collisions",
        "retransmits",
    )
    return {name: stats.get(name) for name in (*names, "ecn_marks", "raw_float_corrections")}


def train(arguments: argparse.Namespace) -> None:
    """Trains in this process, one rank of several."""
    torch.set_num_threads(1)
    torch.manual_seed(arguments.seed)
    begin = time.monotonic()
    dist.init_process_group(arguments.backend)  # line 2 of 2: "atp" instead of "gloo"
    rank, ranks = dist.get_rank(), dist.get_world_size()

    images, labels, test_images, test_labels = load(arguments.seed)
    model = DistributedDataParallel(network())
    optimizer = torch.optim.SGD(model.parameters(), lr=arguments.lr, momentum=0.9)
    criterion = nn.CrossEntropyLoss()

    check = None
    if arguments.check_sum:
        scale = atp_client.stats()["scale"] if arguments.backend == "atp" else 1e8
        check = SumCheck(scale, arguments.check_every)
        model.register_comm_hook(None, check.hook)

    started = time.monotonic()
    for epoch in range(1, arguments.epochs + 1):
        order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(arguments.seed + epoch))
        # Every rank has the same number of images.
        mine = order[: len(order) // ranks * ranks][rank::ranks]
        losses = []
        for batch in mine.split(arguments.batch):
            optimizer.zero_grad()
            loss = criterion(model(images[batch]), labels[batch])
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
            if check is not None:
                check.after_step()
        mean = torch.tensor(sum(losses) / len(losses) / ranks)
        dist.all_reduce(mean)
        if rank == 0:
            seconds = round(time.monotonic() - started, 2)
            line = {"epoch": epoch, "loss": round(mean.item(), 5), "seconds": seconds}
            print(json.dumps({**line, **transport(arguments.backend)}), flush=True)

    model.eval()
    with torch.no_grad():
        accuracy = (model(test_images).argmax(1) == test_labels).float().mean().item()
    result: dict[str, Any] = {
        "result": "digits",
        "backend": arguments.backend,
        "workers": ranks,
        "epochs": arguments.epochs,
        "seed": arguments.seed,
        "accuracy": round(accuracy, 5),
        "test_images": len(test_labels),
        "torch": torch.__version__,
    }
    if check is not None:
        result["error_over_bound"] = check.error_over_bound()
        result["checked_elements"] = check.elements
    dist.barrier()
    if rank == 0:
        result["train_seconds"] = round(time.monotonic() - started, 2)
        result["seconds"] = round(time.monotonic() - begin, 2)
        print(json.dumps({**result, **transport(arguments.backend)}), flush=True)
    dist.barrier()  # nobody leaves before rank 0 has read the last counters
    dist.destroy_process_group()


def _spawned(rank: int, port: int, arguments: argparse.Namespace) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(arguments.spawn), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    train(arguments)


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description="Handwritten digits with PyTorch DDP over ATP or gloo.")
    parser.add_argument("--backend", choices=("atp", "gloo"), default="atp")
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--batch", type=int, default=32, help="images of one rank in one step")
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--spawn", type=int, default=0, help="start so many ranks on this machine (gloo)")
    parser.add_argument("--check-sum", action="store_true", help="compare every sum with the exact one")
    parser.add_argument("--check-every", type=int, default=1, help="with --check-sum: one of so many steps")
    arguments = parser.parse_args()
    if arguments.spawn and arguments.backend == "atp":
        parser.error("--spawn is for --backend gloo: with atp each rank has a pod, and a sidecar, of its own")
    if min(arguments.epochs, arguments.batch, arguments.check_every) < 1 or arguments.spawn < 0:
        parser.error("--epochs, --batch and --check-every must be at least 1, --spawn at least 0")
    return arguments


def main() -> None:
    """Entry point."""
    arguments = parse()
    if arguments.spawn:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        torch.multiprocessing.spawn(_spawned, (port, arguments), nprocs=arguments.spawn)
    else:
        train(arguments)


if __name__ == "__main__":
    main()
