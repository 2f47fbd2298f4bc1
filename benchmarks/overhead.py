"""What StreamLoader's own Python costs a batch, without any model.

    python -m benchmarks.overhead [--device cuda] [--json FILE]    from the root of the repository

Two costs, of batches (uint8 "256 3 s s", int64 "256"), with s = 1, so that bytes are next to
nothing, and with s = 224:

- in the loader thread: the CPU time it spends from one call of the source's `next()` to the next
  call. The source is a list, and takes the thread's clock when it is entered and left. Moving the
  bytes, one memmove, is measured apart; that is no Python, and does not hold the interpreter lock.
- in the caller's `next()`: for a batch that was launched already, and for one that `next()` itself
  launches. The source hands out only what it is told to, and the caller asks only once the loader
  thread has packed that and is back at the source; so it is known which `next()` launches what.
"""

from __future__ import annotations

import argparse
import ctypes
import itertools
import json
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor
from typing_extensions import Self, override

from streamloader import StreamLoader
from streamloader.device import DeviceLike

Pair: TypeAlias = tuple[Tensor, Tensor]

BATCH = 256
DISTINCT = 4
"""So many different batches go round."""

DEPTH = 2
WARM = 20
"""Rounds that are not counted: slabs and the allocator grow, code is run for the first time."""

PACKED_SECONDS = 0.1
"""How long the loader thread may take for a batch or two; some 5 ms each, if they are large."""

THREAD_TARGET_MS = 0.5
LAUNCHED_TARGET_MS = 0.1
LAUNCHES_TARGET_MS = 0.5


class Gate(list[Pair]):
    """A source that yields as many batches as it was told to, and notes when it is asked.

    A list by class, and nothing else of one: of a list StreamLoader knows that it draws nothing, so
    that transforms are seeded, which belongs to what is measured.

    Args:
        batches: They go round, without end.

    Attributes:
        spent: CPU seconds of the loader thread, between leaving `next()` and entering it again.
    """

    def __init__(self, batches: Sequence[Pair]) -> None:
        super().__init__()
        self.spent: list[float] = []
        self._batches = itertools.cycle(batches)
        self._changed = threading.Condition()
        self._allowed = 0
        self._asked = 0
        self._left: tuple[int, float] | None = None

    @override
    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Pair:
        """The next batch, once it is allowed."""
        self._note()
        with self._changed:
            self._asked += 1
            number = self._asked
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._allowed >= number)
        batch = next(self._batches)
        self._left = threading.get_ident(), time.thread_time()
        return batch

    def _note(self) -> None:
        # The first batch is pulled in the caller's thread, whose clock says nothing of the other's.
        if self._left is not None and self._left[0] == threading.get_ident():
            self.spent.append(time.thread_time() - self._left[1])

    def allow(self, count: int) -> bool:
        """Lets `count` more batches go.

        Returns:
            Whether the loader thread soon came back for one more, so that all these are packed.
        """
        with self._changed:
            self._allowed += count
            self._changed.notify_all()
            return self._changed.wait_for(lambda: self._asked > self._allowed, PACKED_SECONDS)


@dataclass(frozen=True)
class Spread:
    """Times in milliseconds.

    Attributes:
        p10: The 10th percentile.
        p50: The median.
        p90: The 90th percentile.
    """

    p10: float
    p50: float
    p90: float


@dataclass(frozen=True)
class Case:
    """What was measured for one kind of batch.

    Attributes:
        name: What it is.
        megabytes: Of a batch.
        rounds: Rounds in which the loader thread was ahead, which are those that count.
        thread: CPU time of the loader thread a batch, moving the bytes included.
        memmove_ms: CPU time of moving the bytes, the median.
        launched: Wall time of a `next()` whose batch was launched already.
        launches: Wall time of a `next()` that launches its batch.
    """

    name: str
    megabytes: float
    rounds: int
    thread: Spread
    memmove_ms: float
    launched: Spread
    launches: Spread


def spread(seconds: Sequence[float]) -> Spread:
    """The percentiles of `seconds`, at least two, in milliseconds."""
    tenths = statistics.quantiles(seconds, n=10, method="inclusive")
    return Spread(tenths[0] * 1e3, tenths[4] * 1e3, tenths[8] * 1e3)


def batches(size: int) -> list[Pair]:
    """A few different batches of `size` px images, in ordinary memory."""
    shape = (BATCH, 3, size, size)
    images = [torch.randint(0, 256, shape, dtype=torch.uint8) for _ in range(DISTINCT)]
    return [(image, torch.randint(0, 1000, (BATCH,))) for image in images]


def case(name: str, size: int, transform: Any, rounds: int, device: DeviceLike) -> Case:
    """Measures one kind of batch over `rounds` rounds of three.

    Raises:
        RuntimeError: The loader thread was never ahead of `next()`.
    """
    data = batches(size)
    gate = Gate(data)
    loader = StreamLoader(gate, device, transform=transform, prefetch_batches=DEPTH)
    with loader:
        asks = _ask(gate, iter(loader), WARM + rounds, _synchronizer(device))
    kept = [ask for ask in asks[WARM:] if ask is not None]
    if len(kept) < 2:
        raise RuntimeError(
            f"the loader thread had its batches packed before next() in only {len(kept)} of "
            f"{rounds} rounds"
        )
    return Case(
        name=name,
        megabytes=sum(tensor.nbytes for tensor in data[0]) / 1e6,
        rounds=len(kept),
        thread=spread(gate.spent[3 * WARM :]),
        memmove_ms=_memmove_ms(data[0][0]),
        launched=spread([launched for launched, _ in kept]),
        launches=spread([launches for _, launches in kept]),
    )


def _ask(
    gate: Gate, batches: Iterator[Any], rounds: int, synchronize: Callable[[], None]
) -> list[tuple[float, float] | None]:
    """Goes through `rounds` rounds.

    In each, two batches are packed; `next()` launches both and hands over the first; the second is
    launched already. Then one is packed, which `next()` launches and hands over.

    Returns:
        For each round, the seconds in `next()` for the batch that was launched already, and for the
        one that it launched; None for a round in which the loader thread was not ahead.
    """
    found: list[tuple[float, float] | None] = []
    gate.allow(1)
    next(batches)
    for _ in range(rounds):
        ahead = gate.allow(2)
        next(batches)
        synchronize()
        launched = _timed(batches)
        ahead = gate.allow(1) and ahead
        synchronize()
        launches = _timed(batches)
        found.append((launched, launches) if ahead else None)
    return found


def _timed(batches: Iterator[Any]) -> float:
    start = time.perf_counter()
    next(batches)
    return time.perf_counter() - start


def _synchronizer(device: DeviceLike) -> Callable[[], None]:
    on_cpu = not isinstance(device, (str, torch.device)) or torch.device(device).type == "cpu"
    return (lambda: None) if on_cpu else torch.accelerator.synchronize


def _memmove_ms(tensor: Tensor) -> float:
    """CPU milliseconds of copying `tensor`'s bytes into memory that has been written before."""
    target = torch.zeros_like(tensor)
    spent = []
    for _ in range(20):
        start = time.thread_time()
        ctypes.memmove(target.data_ptr(), tensor.data_ptr(), tensor.nbytes)
        spent.append(time.thread_time() - start)
    return statistics.median(spent) * 1e3


HEAD = ("batch", "MB", "rounds", "thread, CPU ms", "of it bytes", "launched, ms", "launches, ms")


def table(cases: Sequence[Case]) -> list[str]:
    """The cases, a line each, under a head."""
    form = "{:<22}{:>8}{:>8}{:>26}{:>12}{:>26}{:>26}"
    lines = [form.format(*HEAD)]
    for one in cases:
        batch = (one.name, f"{one.megabytes:.2f}", one.rounds)
        thread = (_three(one.thread), f"{one.memmove_ms:.3f}")
        lines.append(form.format(*batch, *thread, _three(one.launched), _three(one.launches)))
    return lines


def _three(value: Spread) -> str:
    return f"{value.p10:.3f} / {value.p50:.3f} / {value.p90:.3f}"


def against_targets(one: Case) -> list[str]:
    """How the medians of the case with next to no bytes compare with what is aimed at."""
    aims = (
        ("loader thread, CPU", one.thread.p50, THREAD_TARGET_MS),
        ("next(), launched already", one.launched.p50, LAUNCHED_TARGET_MS),
        ("next(), launching", one.launches.p50, LAUNCHES_TARGET_MS),
    )
    return [
        f"{name}: {value:.3f} ms, {'within' if value <= aim else 'OVER'} the target of {aim} ms"
        for name, value, aim in aims
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    """Measures, and prints the table."""
    given = _parser().parse_args(arguments)
    sizes, transforms = {"tiny": 1, "224 px": 224}, {"no transform": None, "a transform": _nothing}
    cases = [
        case(f"{name}, {how}", size, transform, given.rounds, given.device)
        for name, size in sizes.items()
        for how, transform in transforms.items()
    ]
    print(f"StreamLoader on {given.device}, torch {torch.__version__}: ", end="")
    print("10th percentile / median / 90th percentile")
    print(*table(cases), "", f"With {cases[1].name}:", *against_targets(cases[1]), sep="\n")
    if given.json:
        data = {"benchmark": "overhead", "device": given.device, "torch": torch.__version__}
        text = json.dumps(data | {"cases": [asdict(one) for one in cases]}, indent=1)
        given.json.write_text(text + "\n", encoding="utf-8")


def _nothing(batch: Any) -> Any:
    """A transform that costs nothing itself: what is left is how it is called."""
    return batch


def _parser() -> argparse.ArgumentParser:
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    parser = argparse.ArgumentParser(description="What StreamLoader's own Python costs a batch.")
    parser.add_argument("--device", default=found.type if found else "cpu")
    parser.add_argument("--rounds", type=int, default=200, metavar="N", help="default: 200")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the table as JSON")
    return parser


if __name__ == "__main__":
    main()
