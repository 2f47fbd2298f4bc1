"""Where batches come from. A source is made once, and gives each loader its DataLoader."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler
from typing_extensions import override

from benchmarks._recipes import source_size

__all__ = [
    "Endless",
    "Images",
    "Punctuated",
    "Request",
    "Source",
    "comes_late",
    "memory",
]

CLASSES = 1000

POOL_BATCHES = 8
"""So many batches of distinct images: at 256 of 224 px 308 MB, more than a CPU's caches hold."""


@dataclass(frozen=True)
class Request:
    """What a source is to deliver.

    Attributes:
        batch_size: Images in a batch.
        image_size: The width and height in pixels of what the model takes.
        workers: Processes of each DataLoader.
        prefetch_factor: Batches that each of them has in hand.
        late: Every how manyth batch comes late; 0 is none.
        late_seconds: By how much.
        seed: Of the images.
        shards: Where they are; None if they do not come from shards.
        augment: Who augments: one of `_recipes.AUGMENT`.
    """

    batch_size: int
    image_size: int
    workers: int
    prefetch_factor: int
    late: int
    late_seconds: float
    seed: int
    shards: str | None = None
    augment: str = "cpu"


class Source(Protocol):
    """A DataLoader for one loader: endless, of (uint8 "b 3 s s" or ragged, int64 "b") batches."""

    def __call__(self, *, pin_memory: bool) -> DataLoader[Any]: ...


def memory(request: Request) -> Source:
    """Random images that are in memory from the start, so that only their way costs anything."""
    size = source_size(request.augment, request.image_size)
    images = Images(request.batch_size * POOL_BATCHES, size, request.seed)

    def source(*, pin_memory: bool) -> DataLoader[Any]:
        return Punctuated(
            images,
            late=request.late,
            late_seconds=request.late_seconds,
            batch_size=request.batch_size,
            sampler=Endless(),
            num_workers=request.workers,
            prefetch_factor=request.prefetch_factor,
            persistent_workers=True,
            pin_memory=pin_memory,
        )

    return source


Sample: TypeAlias = tuple[Tensor, int]


class Images(Dataset[Sample]):
    """A pool of random images in shared memory, made once, in the process that makes the dataset.

    Args:
        count: How many.
        size: Width and height in pixels.
        seed: Of their pixels and labels.
    """

    def __init__(self, count: int, size: int, seed: int) -> None:
        draw = torch.Generator().manual_seed(seed)
        pixels = torch.randint(0, 256, (count, 3, size, size), dtype=torch.uint8, generator=draw)
        self._images = pixels.share_memory_()
        self._labels: list[int] = torch.randint(0, CLASSES, (count,), generator=draw).tolist()

    @override
    def __getitem__(self, index: int) -> Sample:
        place = index % len(self._labels)
        return self._images[place], self._labels[place]


class Endless(Sampler[int]):
    """0, 1, 2, ...: no epoch ends inside a timed block."""

    @override
    def __iter__(self) -> Iterator[int]:
        return itertools.count()


class Punctuated(DataLoader[Any]):
    """A DataLoader that every `late`-th time hands its batch over `late_seconds` late.

    The delay is in this process, on the way out of the DataLoader: a batch that is slow in its
    worker is not late at all while the other workers' batches in hand bridge it.

    Args:
        late: Every how manyth batch; 0 is none.
        late_seconds: By how much.
        **arguments: The DataLoader's.
    """

    def __init__(self, *args: Any, late: int, late_seconds: float, **arguments: Any) -> None:
        self.late = late
        self.late_seconds = late_seconds
        super().__init__(*args, **arguments)

    @override
    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]  # not DataLoader's private class
        batches = super().__iter__()
        return self._punctuated(batches) if self.late else batches

    def _punctuated(self, batches: Iterator[Any]) -> Iterator[Any]:
        for number in itertools.count():
            if comes_late(number, self.late):
                time.sleep(self.late_seconds)
            yield next(batches)


def comes_late(number: int, every: int) -> bool:
    """Whether batch `number`, from 0, is late: one in any `every` that follow one another."""
    return number % every == every - 1
