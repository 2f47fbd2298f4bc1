"""The loaders that are compared, each a recipe in a table."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from benchmarks._sources import Source
from streamloader import StreamLoader, on

__all__ = ["RECIPES", "Feed", "Setup", "Waits"]

Pair: TypeAlias = tuple[Tensor, Tensor]
Waits: TypeAlias = tuple[float, float]
"""Seconds waited in `next()` so far, for the source and for the device."""


@dataclass(frozen=True)
class Setup:
    """What a recipe has to work with.

    Attributes:
        source: Gives a DataLoader.
        device: Where batches go.
        transform: Of the images, on the device; the same object for all.
        prefetch_batches: How far ahead a loader that can look ahead does.
        in_workers: How many batches a DataLoader's workers can have in hand.
        resident: A transformed batch that stays on the device.
    """

    source: Source
    device: torch.device
    transform: Callable[[Tensor], Tensor]
    prefetch_batches: int
    in_workers: int
    resident: Pair


@dataclass(frozen=True)
class Feed:
    """A loader that is open.

    Attributes:
        batches: Its pass, which lasts for the run.
        in_hand: How many batches it can have prefetched, all stages together.
        close: Ends it.
        waits: Its own account, None if it keeps none.
    """

    batches: Iterator[Any]
    in_hand: int
    close: Callable[[], None]
    waits: Callable[[], Waits] | None = None


def _plain(setup: Setup) -> Feed:
    """DataLoader, `.to(device)`, transform: what most scripts do."""
    return _moving(setup, pinned=False)


def _pinned(setup: Setup) -> Feed:
    """DataLoader with pin_memory, `.to(device, non_blocking=True)`, transform."""
    return _moving(setup, pinned=True)


def _moving(setup: Setup, *, pinned: bool) -> Feed:
    pinned = pinned and setup.device.type != "cpu"  # where there is nothing to pin for
    batches = _moved(setup, setup.source(pin_memory=pinned), non_blocking=pinned)
    return Feed(batches, setup.in_workers, batches.close)


def _moved(setup: Setup, loader: Any, *, non_blocking: bool) -> Any:
    for images, labels in loader:
        images = images.to(setup.device, non_blocking=non_blocking)  # noqa: PLW2901  # as in scripts
        labels = labels.to(setup.device, non_blocking=non_blocking)  # noqa: PLW2901
        images = setup.transform(images)  # noqa: PLW2901
        yield images, labels


def _stream(setup: Setup) -> Feed:
    """StreamLoader around a DataLoader that does not pin."""
    loader: StreamLoader[Any] = StreamLoader(
        setup.source(pin_memory=False),
        setup.device,
        transform=on(0, setup.transform),
        prefetch_batches=setup.prefetch_batches,
    )

    def waits() -> Waits:
        total = loader.stats.total
        return total.source_seconds, total.device_seconds

    ahead = setup.prefetch_batches + 2  # those launched, those packed
    return Feed(iter(loader), setup.in_workers + ahead, loader.close, waits)


def _ceiling(setup: Setup) -> Feed:
    """The bare step, always on the same batch."""
    return Feed(itertools.repeat(setup.resident), 0, lambda: None)


RECIPES: dict[str, Callable[[Setup], Feed]] = {
    "plain": _plain,
    "pinned": _pinned,
    "stream": _stream,
    "ceiling": _ceiling,
}
