"""Sources, batches and devices that the contract's tests share."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from streamloader.testing import FakeDevice

__all__ = ["DEPTHS", "SWEPT", "Recording", "batches", "devices", "fill", "ids", "number_of"]

DEPTHS = (0, 1, 2, 3)
"""The values of `prefetch_batches` that tests sweep."""

SWEPT = (*DEPTHS[:-1], pytest.param(DEPTHS[-1], marks=pytest.mark.slow))
"""The same as parameters; the quick tests leave the last one out."""


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
