"""Sources, batches, devices and memory that the contract's tests share; how processes end."""

from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from streamloader.testing import FakeDevice

__all__ = [
    "DEPTHS",
    "SWEPT",
    "Foreign",
    "Recording",
    "batches",
    "devices",
    "ended",
    "fill",
    "ids",
    "number_of",
    "printed",
]

DEPTHS = (0, 1, 2, 3)
"""The values of `prefetch_batches` that tests sweep."""

SWEPT = tuple(
    pytest.param(depth, marks=[pytest.mark.slow] if depth % 2 else [])
    for depth in DEPTHS
    if depth != 3
)
"""Those that differ in kind, as parameters; the quick tests leave the odd one out."""


def fill(number: int, size: int = 4) -> Tensor:
    """A batch in which every element is `number`, so that any mix-up shows."""
    return torch.full((size,), number, dtype=torch.int64)


def batches(count: int, size: int = 4) -> list[Tensor]:
    """`fill(0)`, `fill(1)`, ..."""
    return [fill(number, size) for number in range(count)]


def ids(loader: Iterable[Any]) -> list[int]:
    """The numbers of all batches of one pass over `fill` batches, each checked to be whole."""
    return [number_of(batch) for batch in loader]


def number_of(batch: Tensor) -> int:
    """The number that `fill` was given; an error if the batch is a mix."""
    assert batch.numel(), "an empty batch has no number"
    numbers = set(batch.flatten().tolist())
    assert len(numbers) == 1, f"a mixed batch: {sorted(numbers)}"
    return int(numbers.pop())


class Recording:
    """A source of batches that counts what was pulled from it, in all passes.

    Args:
        items: Its batches.

    Attributes:
        pulls: How many batches were pulled, in all passes.
        passes: How many passes were started.
        ended: How many passes came to their end.
    """

    def __init__(self, items: Sequence[Any]) -> None:
        self.items = items
        self.pulls = 0
        self.passes = 0
        self.ended = 0

    def __len__(self) -> int:
        return len(self.items)

    def __iter__(self) -> Iterator[Any]:
        self.passes += 1
        return self._pass()

    def _pass(self) -> Iterator[Any]:
        for item in self.items:
            self.pulls += 1
            yield item
        self.ended += 1


def _the_cpu() -> None:
    """`StreamLoader(device=None)`: the CPU where there is no accelerator."""


def _late() -> FakeDevice:
    return FakeDevice(looks=3)


def devices() -> list[Any]:
    """For `parametrize("make_device", devices())`: call it for None or a fresh device."""
    made: list[tuple[Callable[[], FakeDevice | None], str]] = [
        (_the_cpu, "cpu"),
        (FakeDevice, "fake"),
        (_late, "late"),
    ]
    return [pytest.param(make, id=name) for make, name in made]


class Foreign:
    """Host memory that torch's allocator does not watch over.

    It is scribbled over, and given out again, once it is dropped.

    Args:
        pin: Called with the address and the size of each buffer that is made.

    Attributes:
        made: All buffers that there are: what was dropped is used first.
    """

    SCRIBBLE = 0xFB

    def __init__(self, pin: Callable[[int, int], None] = lambda *_: None) -> None:
        self.free: list[Any] = []
        self.made: list[Any] = []
        self._pin = pin

    def put(self, tensor: Tensor) -> Tensor:
        """`tensor`, in memory of this kind; all that are put are of one size."""
        buffer = self.free.pop() if self.free else self._make(tensor.nbytes)
        array = np.frombuffer(buffer, dtype=np.uint8)
        weakref.finalize(array, self._back, buffer)
        placed = torch.from_numpy(array).view(tensor.dtype).view(tensor.shape)
        del array
        return placed.copy_(tensor)

    def _make(self, nbytes: int) -> Any:
        buffer = (ctypes.c_char * nbytes)()
        self._pin(ctypes.addressof(buffer), nbytes)
        self.made.append(buffer)
        return buffer

    def _back(self, buffer: Any) -> None:
        ctypes.memset(buffer, self.SCRIBBLE, len(buffer))
        self.free.append(buffer)


def printed(program: str) -> str:
    """What a program prints, run in a process of its own; nothing may be on its standard error."""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)},
    )
    assert done.stderr == ""
    return done.stdout


def ended(pids: Iterable[int], seconds: float = 10) -> bool:
    """Whether these processes have all ended, or do so within `seconds`; needs /proc."""
    left = list(pids)
    for _ in range(int(seconds * 10)):
        left = [pid for pid in left if _alive(pid)]
        if not left:
            break
        threading.Event().wait(0.1)
    return not left


def _alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0]
    except OSError:  # also where it ends between the opening and the reading
        return False
    return state != "Z"
