"""Batches from tar shards through `streamloader.shards`: read and decoded in workers.

NOTE [Epochs]
~~~~~~~~~~~~~
An epoch's first batches are made from nothing: every worker starts one at the same moment, and the
step waits for a whole one. That is one batch's time in 5,004 batches of ImageNet, but would be one
in 78 of a folder of 20,000 images, which is about as many as a timed block has. So an epoch here
has as many images as ImageNet's, and the workers start their shards again as often as that takes
(`length` of `shards.loader`), with no stop between. Should a run last longer than that,
`endless` iterates anew: the workers are persistent, and shuffle by the next epoch's number.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader

from benchmarks._recipes import DELIVER
from benchmarks._sources import Request, Source, memory

__all__ = ["EPOCH_IMAGES", "SOURCES", "endless", "from_shards"]

EPOCH_IMAGES = 1_281_167
"""ImageNet's training images."""


def from_shards(request: Request) -> Source:
    """Training batches from `request.shards`.

    Raises:
        SystemExit: The package's extras are missing, or these shards cannot be used; it says why.
    """
    try:
        shards = importlib.import_module("streamloader.shards")
    except ImportError as error:
        raise SystemExit(f"--source shards: {error}") from error

    def source(*, pin_memory: bool) -> DataLoader[Any]:
        loader: DataLoader[Any] = shards.loader(
            request.shards,
            batch_size=request.batch_size,
            size=request.image_size,
            deliver=DELIVER[request.augment],
            train=True,
            num_workers=request.workers,
            seed=request.seed,
            length=EPOCH_IMAGES,
            prefetch_factor=request.prefetch_factor,
            persistent_workers=True,
            pin_memory=pin_memory,
        )
        return loader

    one = re.search(r"[*?[{]|^\w+:|::", str(request.shards)) is None
    if one and not Path(str(request.shards)).exists():
        raise SystemExit(f"--shards {request.shards}: no such folder or file")
    try:
        source(pin_memory=False)  # no worker starts: whatever is wrong is said before the work
    except (OSError, ValueError) as error:
        raise SystemExit(f"--shards {request.shards}: {error}") from error
    return source


SOURCES: dict[str, Callable[[Request], Source]] = {"memory": memory, "shards": from_shards}


def endless(loader: Iterable[Any]) -> Iterator[Any]:
    """The batches of `loader`, pass after pass: see NOTE [Epochs].

    Raises:
        RuntimeError: A pass has no batches.
    """
    while True:
        empty = True
        for batch in loader:
            empty = False
            yield batch
        if empty:
            raise RuntimeError("the source has no batches")
