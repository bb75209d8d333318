# SPDX-License-Identifier: Apache-2.0
"""One rank of bench/accuracy.py. Runs in an interpreter with torch 2; rank 0 prints JSON lines.

    python accuracy_rank.py gloo|atp PART...     with RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT; ATP_SOCKET for atp

PART is sums, digits or transformer. The trainings run once for each loss scale L, with the loss times L and the
learning rate divided by L: in exact arithmetic SGD with momentum makes the same steps at every L, so what differs is
rounding.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples" / "digits"))

LOSS_SCALES = (1.0, 1e-2, 1e-4, 1e-6, 1e-8)
SIGMAS = (1e-3, 1e-4, 1e-5, 1e-6, 1e-7, 1e-8, 1e-9)
ELEMENTS = 1 << 18  # one part of 1 MiB
CHECK_EVERY = 10


@dataclass
class Errors:
    """What the sums of float32 tensors differ by from float64."""

    squared_error: float = 0.0
    squared_sum: float = 0.0
    to_zero: int = 0
    nonzero: int = 0

    def add(self, got: torch.Tensor, parts: list[torch.Tensor]) -> None:
        """got: the sum that came back; parts: what each rank has given, float64. All of one shape."""
        exact = torch.stack(parts).sum(0)
        self.squared_error += float((got.double() - exact).square().sum())
        self.squared_sum += float(exact.square().sum())
        self.to_zero += int(((got == 0) & (exact != 0)).sum())
        self.nonzero += int((exact != 0).sum())

    def result(self) -> dict[str, float]:
        """relative_error: norm of the error by that of the sum. to_zero: share of nonzero sums that came as 0."""
        return {
            "relative_error": (self.squared_error / self.squared_sum) ** 0.5 if self.squared_sum else 0.0,
            "to_zero": self.to_zero / max(self.nonzero, 1),
        }


def report(part: str, **values: Any) -> None:
    """A line of rank 0."""
    if dist.get_rank() == 0:
        print(json.dumps({"part": part, **values}), flush=True)


def counters() -> dict[str, int]:
    """The sidecar's counts of what rounding did to the values of this rank; empty over gloo."""
    if dist.get_backend() != "atp":
        return {}
    import atp_client

    names = ("values_rounded_to_zero", "values_out_of_range", "values_not_finite", "raw_float_corrections")
    stats = atp_client.stats()
    return {name: stats[name] for name in names if name in stats}


def since(before: dict[str, int]) -> dict[str, int]:
    """How much the counters have grown."""
    return {name: value - before[name] for name, value in counters().items()}


def sums() -> None:
    """Tensors of N(0, sigma), and one where a large and a small magnitude share a part."""
    ranks = dist.get_world_size()

    def normal(sigma: float, rank: int, small: float = 1.0) -> torch.Tensor:
        values = torch.randn(ELEMENTS, generator=torch.Generator().manual_seed(rank)) * sigma
        values[ELEMENTS // 2 :] *= small
        return values

    for sigma in SIGMAS:
        before = counters()
        got = normal(sigma, dist.get_rank())
        dist.all_reduce(got)
        errors = Errors()
        errors.add(got, [normal(sigma, rank).double() for rank in range(ranks)])
        report("sums", sigma=sigma, **errors.result(), **since(before))
    for small in (1e-2, 1e-4, 1e-6, 1e-8):
        got = normal(1.0, dist.get_rank(), small)
        dist.all_reduce(got)
        errors = Errors()
        half = slice(ELEMENTS // 2, None)
        errors.add(got[half], [normal(1.0, rank, small).double()[half] for rank in range(ranks)])
        report("mixed", small=small, **errors.result())


class CheckedSums:
    """A DDP hook that does what DDP does without one, and keeps what some of the steps have summed."""

    def __init__(self, side: Any) -> None:
        self.errors = Errors()
        self.side = side
        self.step = 0
        self._sums: list[tuple[torch.Tensor, torch.Tensor]] = []

    def hook(self, state: Any, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
        """Divides the bucket by the number of ranks and sums it."""
        buffer = bucket.buffer().div_(dist.get_world_size())
        local = None if self.step % CHECK_EVERY else buffer.clone()
        work = dist.all_reduce(buffer, async_op=True)

        def keep(future: Any) -> torch.Tensor:
            result: torch.Tensor = future.value()[0]
            if local is not None:
                self._sums.append((local, result.clone()))
            return result

        return work.get_future().then(keep)

    def after_step(self) -> None:
        """Compares the step's sums with those in float64; all ranks call it."""
        self.step += 1
        sums, self._sums = self._sums, []
        for local, got in sums:
            values = local.double()
            parts = [torch.empty_like(values) for _ in range(dist.get_world_size())]
            dist.all_gather(parts, values, group=self.side)
            self.errors.add(got, parts)


Batch = tuple[torch.Tensor, torch.Tensor]


def train(
    part: str,
    make: Callable[[], nn.Module],
    batches: Callable[[], Iterator[Batch]],
    evaluate: Callable[[nn.Module], dict[str, float]],
    rate: float,
    side: Any,
) -> None:
    """Trains once for each loss scale and reports each.

    Args:
        make: builds the model, seeded.
        batches: this rank's batches of one training.
        evaluate: figures of the trained model.
        rate: learning rate at loss scale 1.
        side: a gloo group, for the check.
    """
    for scale in LOSS_SCALES:
        torch.manual_seed(1)
        model = DistributedDataParallel(make())
        check = CheckedSums(side)
        model.register_comm_hook(None, check.hook)
        optimizer = torch.optim.SGD(model.parameters(), lr=rate / scale, momentum=0.9)
        before, begin, losses = counters(), time.monotonic(), []
        for inputs, labels in batches():
            optimizer.zero_grad()
            output = model(inputs)
            loss = nn.functional.cross_entropy(output.flatten(0, -2), labels.flatten())
            (loss * scale).backward()
            optimizer.step()
            check.after_step()
            losses.append(loss.item())
        seconds = round(time.monotonic() - begin, 2)
        tail = torch.tensor(sum(losses[-20:]) / len(losses[-20:]))
        dist.all_reduce(tail, group=side)
        figures = evaluate(model.module)
        loss_end = tail.item() / dist.get_world_size()
        report(
            part,
            loss_scale=scale,
            train_loss=loss_end,
            **figures,
            **check.errors.result(),
            **since(before),
            seconds=seconds,
        )
        dist.barrier(group=side)


def digits(side: Any) -> None:
    """examples/digits: 15 epochs, batches of 32 a rank."""
    import train as example

    images, labels, test_images, test_labels = example.load(1)
    rank, ranks = dist.get_rank(), dist.get_world_size()

    def batches() -> Iterator[Batch]:
        for epoch in range(15):
            order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(2 + epoch))
            for batch in order[: len(order) // ranks * ranks][rank::ranks].split(32):
                yield images[batch], labels[batch]

    def evaluate(model: nn.Module) -> dict[str, float]:
        with torch.no_grad():
            output = model(test_images)
        loss = nn.functional.cross_entropy(output, test_labels).item()
        return {"loss": loss, "accuracy": (output.argmax(1) == test_labels).float().mean().item()}

    train("digits", example.network, batches, evaluate, 0.05, side)


class Transformer(nn.Module):
    """Predicts the next character: two pre-norm layers of width 64 with four causal heads, 64 characters of context."""

    def __init__(self, characters: int, context: int) -> None:
        super().__init__()
        width = 64
        self.characters = nn.Embedding(characters, width)
        self.positions = nn.Parameter(0.02 * torch.randn(context, width))
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True)
            for _ in range(2)
        )
        self.norm = nn.LayerNorm(width)
        self.out = nn.Linear(width, characters)
        self.register_buffer("mask", nn.Transformer.generate_square_subsequent_mask(context), persistent=False)

    def forward(self, text: torch.Tensor) -> torch.Tensor:
        """text: (batch, context) -> logits (batch, context, characters)."""
        x = self.characters(text) + self.positions
        for layer in self.layers:
            x = layer(x, src_mask=self.mask, is_causal=True)
        return self.out(self.norm(x))


def transformer(side: Any) -> None:
    """Python's own reference, a text that its standard library carries: 400 steps of 16 x 64 characters a rank."""
    from pydoc_data.topics import topics

    context, batch, steps = 64, 16, 400
    raw = "\n".join(topics[name] for name in sorted(topics))
    text = torch.tensor([min(ord(character), 127) for character in raw])
    cut = len(text) * 9 // 10
    rank = dist.get_rank()

    def some(begin: int, end: int, count: int, generator: torch.Generator) -> Batch:
        at = torch.randint(begin, end - context - 1, (count,), generator=generator)
        windows = torch.stack([text[i : i + context + 1] for i in at])
        return windows[:, :-1], windows[:, 1:]

    def batches() -> Iterator[Batch]:
        generator = torch.Generator().manual_seed(100 + rank)
        for _ in range(steps):
            yield some(0, cut, batch, generator)

    def evaluate(model: nn.Module) -> dict[str, float]:
        inputs, labels = some(cut, len(text), 256, torch.Generator().manual_seed(7))
        with torch.no_grad():
            output = model(inputs)
        loss = nn.functional.cross_entropy(output.flatten(0, -2), labels.flatten()).item()
        return {"loss": loss, "accuracy": (output.argmax(-1) == labels).float().mean().item()}

    train("transformer", lambda: Transformer(128, context), batches, evaluate, 0.3, side)


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser()
    parser.add_argument("backend", choices=("gloo", "atp"))
    parser.add_argument("parts", nargs="+", choices=("sums", "digits", "transformer"))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.backend == "atp":
        import atp_client  # noqa: F401  makes the backend known
    dist.init_process_group(arguments.backend)
    side = dist.new_group(backend="gloo")
    for part in arguments.parts:
        if part == "sums":
            sums()
        else:
            {"digits": digits, "transformer": transformer}[part](side)
    dist.barrier(group=side)
    dist.destroy_process_group()


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()
