"""What it costs to get a batch out of a worker: plain DataLoader and StreamLoader.

    python -m benchmarks.transport [--rounds N] [--device cuda] [--json FILE]

from the root of the repository. Two persistent workers, whose samples are in memory already, so
that transport is all there is. Both loaders' batches stay on the host and are consumed alike:

    summed    uint8 (256, 3, 224, 224), 38.5 MB; all bytes are added up, and the sum is checked
    unread    the same, handed back unread
    small     500 float32 tensors of 256 bytes to 3.8 KB; all are added up, and checked

Rates are of the wall clock, a pass at a time; main CPU is what this process spends, all its
threads, a batch. Passes take turns, the order turned around every other round, so ratios are of
neighbours; the first round, in which shared memory is touched for the first time, is not counted.

With an accelerator the same run also says, on the device:

    link      bytes a second from a slab that was pinned where it lies, over those from memory that
              torch has pinned, for 32, 64 and 128 MiB
    many      the 500 tensors to the device, until all have arrived: from a worker's slab, all that
              this process does with a batch; from a list in memory, by a whole StreamLoader; by
              `.to(device)` of each from pageable memory; by `.to(device, non_blocking=True)` of
              each from pinned memory
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from typing_extensions import override

from benchmarks import _transport_device as on_device
from benchmarks._summary import estimate
from streamloader import StreamLoader

__all__ = ["CASES", "Case", "Cost", "main", "measured", "ratios"]

WORKERS = 2
BATCH = 256
IMAGE = (3, 224, 224)
BANK = 64
"""So many different samples."""

SMALL = 500
ROUNDS = 7


class Images(Dataset[Tensor]):
    """Samples that are there: sample `i` is the bank's `i % BANK`.

    Args:
        batches: How many of `batch` samples.
        batch: Samples of each.
        shape: Of a sample.
    """

    def __init__(self, batches: int, batch: int, shape: tuple[int, ...]) -> None:
        generator = torch.Generator().manual_seed(0)
        self._bank = torch.randint(0, 256, (BANK, *shape), dtype=torch.uint8, generator=generator)
        self._count = batches * batch
        self.total = _summed(self._bank) * (batch // BANK)

    def __len__(self) -> int:
        return self._count

    @override
    def __getitem__(self, index: int) -> Tensor:
        return self._bank[index % BANK]


class Many(Dataset[dict[str, Tensor]]):
    """Batches of many small tensors, one a sample.

    Args:
        batches: How many.
        count: Tensors of each.
    """

    def __init__(self, batches: int, count: int) -> None:
        sizes = [64 * (1 + number % 15) for number in range(count)]
        self.batch = {f"feature {n}": torch.full((size,), 1.0) for n, size in enumerate(sizes)}
        self._batches = batches
        self.total = sum(sizes)

    def __len__(self) -> int:
        return self._batches

    @override
    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return self.batch


@dataclass(frozen=True)
class Case:
    """What is moved, and what is done with it.

    Attributes:
        name: By which its ratios go.
        batch_size: None where a sample is a batch.
        batches: Of a pass.
        make: The dataset, of so many batches.
        consume: What the loop does with a batch; what it returns is checked.
    """

    name: str
    batch_size: int | None
    batches: int
    make: Callable[[int], Any]
    consume: Callable[[Any], int | None]


def _summed(batch: Tensor) -> int:
    """Eight bytes at a time: no byte can change and the sum stay, nor two that do not conspire."""
    return int(batch.view(-1).view(torch.int64).sum())


def _all_summed(batch: dict[str, Tensor]) -> int:
    return int(torch.cat([*batch.values()]).sum())


def _unread(batch: object) -> None:
    """Nothing."""


def cases(batch: int, shape: tuple[int, ...], batches: int, small: int) -> list[Case]:
    """The three of them, at a size."""

    def images(count: int) -> Images:
        return Images(count, batch, shape)

    return [
        Case("summed", batch, batches, images, _summed),
        Case("unread", batch, batches, images, _unread),
        Case("small", None, batches, lambda count: Many(count, small), _all_summed),
    ]


CASES = cases(BATCH, IMAGE, 40, SMALL)


@dataclass
class Cost:
    """What a loader's passes took, a batch, in milliseconds.

    Attributes:
        wall: Of the wall clock.
        cpu: Of this process's CPU time.
        shared: Share of the batches that came in shared memory.
    """

    wall: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)
    shared: float = 0.0


def measured(case: Case, rounds: int) -> dict[str, Cost]:
    """Both loaders' costs, a pass of each a round."""
    dataset = case.make(case.batches)

    def loader() -> DataLoader[Any]:
        return DataLoader(
            dataset,
            case.batch_size,
            num_workers=WORKERS,
            persistent_workers=True,
            prefetch_factor=4,
        )

    stream = StreamLoader(loader(), "cpu")
    loaders: dict[str, Iterable[Any]] = {"plain": loader(), "stream": stream}
    costs = {name: Cost() for name in loaders}
    for number in range(rounds + 1):
        order = list(loaders) if number % 2 else list(loaders)[::-1]
        for name in order:
            wall, cpu = _pass(loaders[name], case, dataset)
            if number:  # the first one touches memory for the first time
                costs[name].wall.append(wall / case.batches * 1e3)
                costs[name].cpu.append(cpu / case.batches * 1e3)
    total = stream.stats.total
    costs["stream"].shared = total.shared / total.batches
    stream.close()
    return costs


def _pass(loader: Iterable[Any], case: Case, dataset: Any) -> tuple[float, float]:
    """Wall and CPU seconds.

    Raises:
        ValueError: A batch is not what the dataset has.
    """
    start, cpu = time.perf_counter(), time.process_time()
    for batch in loader:
        found = case.consume(batch)
        if found is not None and found != dataset.total:
            raise ValueError(f"{case.name}: a batch adds up to {found}, not to {dataset.total}")
    return time.perf_counter() - start, time.process_time() - cpu


def ratios(costs: dict[str, dict[str, Cost]]) -> dict[str, float]:
    """For each case the stream's rate over the plain loader's, and its CPU time likewise."""
    found = {}
    for name, both in costs.items():
        plain, stream = both["plain"], both["stream"]
        pairs = zip(plain.wall, stream.wall, strict=True)
        found[f"{name}: rate"] = statistics.median(a / b for a, b in pairs)
        pairs = zip(plain.cpu, stream.cpu, strict=True)
        found[f"{name}: main CPU"] = statistics.median(b / a for a, b in pairs)
    return found


def table(costs: dict[str, dict[str, Cost]]) -> str:
    """A line for each case and loader."""
    head = f"{'':20}{'batches/s':>22}{'main CPU ms':>24}{'shared':>9}"
    lines = [head]
    for case, both in costs.items():
        for name, cost in both.items():
            rate = estimate([1e3 / ms for ms in cost.wall])
            cpu = estimate(cost.cpu)
            lines.append(
                f"{case + ', ' + name:20}"
                f"{f'{rate.median:,.0f} [{rate.low:,.0f}, {rate.high:,.0f}]':>22}"
                f"{f'{cpu.median:.2f} [{cpu.low:.2f}, {cpu.high:.2f}]':>24}"
                f"{cost.shared:>9.2f}"
            )
    return "\n".join(lines)


def main(argv: Sequence[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(
        prog="transport.py", description=(__doc__ or "").split("\n")[0]
    )
    parser.add_argument(
        "--rounds", type=int, default=ROUNDS, metavar="N", help=f"default: {ROUNDS}"
    )
    parser.add_argument("--device", help="also measure copies to this one, such as cuda")
    parser.add_argument("--quick", action="store_true", help="tiny sizes, to see that all runs")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the ratios")
    options = parser.parse_args(argv)
    if options.rounds < 1:
        parser.error(f"--rounds must be at least 1, got {options.rounds}")
    torch.set_num_threads(1)
    chosen = cases(BANK, (3, 16, 16), 4, 20) if options.quick else CASES
    costs = {case.name: measured(case, options.rounds) for case in chosen}
    print(table(costs))
    found = ratios(costs)
    if options.device is not None:
        found |= on_device.measured(torch.device(options.device), Many(1, SMALL).batch)
    for name, value in found.items():
        print(f"{name:40} {value:.3f}")
    if options.json is not None:
        options.json.write_text(json.dumps({"ratios": found}, indent=2), encoding="utf-8")


if __name__ == "__main__":
    main()
