"""Batches for the article's loops: a pool of them in host memory, served by a DataLoader.

The article's DataLoader makes each random tensor anew in a worker. What that costs is not asked
here, and on a fast GPU it would bound every rung alike, so the batches are made before: a few,
which come round and round, pinned or not. The DataLoader has no workers and copies nothing.

Each batch has a brightness of its own, so that one which is taken for another is noticed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, default_collate
from torch.utils.data._utils.collate import default_collate_fn_map
from typing_extensions import override

from benchmarks._article_models import CLASSES

__all__ = ["Pair", "loader", "pinned", "pool"]

Pair: TypeAlias = tuple[Tensor, Tensor]

POOL_BYTES = 1 << 29
"""So much a pool may have, if that is two batches at least."""

MOST = 8
ENDLESS = 1 << 40
"""Batches of a pass."""


def pool(experiment: str, batch_size: int, side: int) -> list[Pair]:
    """Batches in ordinary memory: images, and a label for each pixel or each image."""
    one = _pair(experiment, batch_size, side, 1.0)
    count = min(max(POOL_BYTES // sum(tensor.nbytes for tensor in one), 2), MOST)
    shades = [1 - number / (2 * count) for number in range(1, count)]
    return [one, *(_pair(experiment, batch_size, side, shade) for shade in shades)]


def _pair(experiment: str, batch_size: int, side: int, shade: float) -> Pair:
    size = (batch_size, 3, side, side)
    if experiment == "augment":
        images = torch.randint(0, int(256 * shade), size, dtype=torch.uint8)
        return images, torch.randint(0, CLASSES, (batch_size,))
    labels = torch.randint(0, CLASSES, (batch_size, side, side))
    return torch.rand(size).mul_(shade), labels


def pinned(batches: Sequence[Pair], device: torch.device) -> list[Pair]:
    """The same in pinned memory, where `device` has a use for it."""
    if device.type != "cuda":
        return list(batches)
    return [(images.pin_memory(), labels.pin_memory()) for images, labels in batches]


@dataclass(frozen=True)
class _Whole:
    """A batch that is one already."""

    pair: Pair


def _unwrapped(batch: Sequence[_Whole], *, collate_fn_map: object = None) -> list[Tensor]:  # noqa: ARG001  # torch passes it
    return list(batch[0].pair)


# A loader with torch's own collate function, so that StreamLoader knows what holds of a pool too:
# nobody writes to a batch that was handed out.
default_collate_fn_map[_Whole] = _unwrapped


class _Rounds(Dataset[Any]):
    def __init__(self, batches: Sequence[Pair]) -> None:
        self._batches = [_Whole(pair) for pair in batches]

    @override
    def __getitem__(self, number: int) -> _Whole:
        return self._batches[number % len(self._batches)]

    def __len__(self) -> int:
        return ENDLESS


def loader(batches: Sequence[Pair]) -> DataLoader[Any]:
    """Batch after batch, without end; with `pin_memory` if they are pinned, which costs nothing."""
    pins = batches[0][0].is_pinned()
    return DataLoader(_Rounds(batches), batch_size=1, collate_fn=default_collate, pin_memory=pins)
