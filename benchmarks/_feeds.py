"""What a loader is made from, and what it is once it is open."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from benchmarks._sources import Source

__all__ = ["Feed", "Pair", "Setup", "Waits"]

Pair: TypeAlias = tuple[Tensor, Tensor]
Waits: TypeAlias = tuple[float, float]
"""Seconds waited in `next()` so far, for the source and for the device."""


@dataclass(frozen=True)
class Setup:
    """What a recipe has to work with.

    Attributes:
        source: Gives a DataLoader.
        device: Where batches go.
        dtype: Of the images that the step takes.
        transform: Of the images, on the device, to that; the same object for all.
        prefetch_batches: How far ahead a loader that can look ahead does.
        in_workers: How many batches a DataLoader's workers can have in hand.
        resident: A transformed batch that stays on the device.
    """

    source: Source
    device: torch.device
    dtype: torch.dtype
    transform: Callable[[Any], Tensor]
    prefetch_batches: int
    in_workers: int
    resident: Pair

    @property
    def pins(self) -> bool:
        """Whether there is anything to pin for."""
        return self.device.type != "cpu"


@dataclass(frozen=True)
class Feed:
    """A loader that is open.

    Attributes:
        batches: Its passes, which last for the run.
        in_hand: How many batches it can have prefetched, all stages together.
        close: Ends it.
        waits: Its own account, None if it keeps none.
        trains: Whether its batches are for the step; else they are only pulled.
    """

    batches: Iterator[Any]
    in_hand: int
    close: Callable[[], None]
    waits: Callable[[], Waits] | None = None
    trains: bool = True
