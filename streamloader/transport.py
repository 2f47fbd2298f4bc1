"""How batches come out of workers: through shared memory where that changes nothing else.

    iterate(loader)    the user's own DataLoader, with `Collate` in front of its collate_fn while
                       `iter()` starts its workers, and never else
    persistent         a shallow copy of it with workers of its own, kept as long as they live
    any other          iter(loader), nothing more

A copy for each pass would be simpler, and would break `state_dict()` of a StatefulDataLoader, which
asks the loader for the iterator that it has.
"""

from __future__ import annotations

import copy
import mmap
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch.utils.data import DataLoader

from streamloader.collate import Collate
from streamloader.region import Region
from streamloader.shared import Shape

__all__ = ["Transport", "budget", "shape"]

_STATEFUL = "torchdata.stateful_dataloader.stateful_dataloader"

_starting = threading.Lock()
"""Two threads must not put their collate functions into one loader at a time."""


class Transport:
    """A StreamLoader's ways into its loader.

    Args:
        limit: Bytes of shared memory of a pass at most; 0 is none at all.
        ahead: How many batches this process holds at a time, if the caller keeps none.
    """

    def __init__(self, limit: int, ahead: int) -> None:
        self._limit = limit
        self._ahead = ahead
        self._regions: list[Region] = []
        self._persistent: tuple[DataLoader[Any], Region] | None = None

    def iterate(self, loader: Any) -> tuple[Iterator[Any], Region | None]:
        """A pass over the loader, and the memory that its batches may come in."""
        divided = shape(loader, self._limit, self._ahead) if suits(loader) else None
        if divided is None:
            return iter(loader), None
        if loader.persistent_workers:
            return self._again(loader, divided)
        region = self._region(divided)
        with _starting, _collating(loader, Collate(loader.collate_fn, region.shared)):
            iterator = iter(loader)
        region.used_by(getattr(iterator, "_workers", ()))
        return iterator, region

    def _region(self, divided: Shape) -> Region:
        """One that no other pass uses."""
        self._regions = [r for r in self._regions if r.shared.shape == divided or not r.free()]
        for region in self._regions:
            if region.shared.shape == divided and region.free():
                return region
        self._regions.append(Region(divided, self._ahead))
        return self._regions[-1]

    def _again(
        self, loader: DataLoader[Any], divided: Shape
    ) -> tuple[Iterator[Any], Region | None]:
        if self._persistent is None:
            if getattr(loader, "_iterator", None) is not None:
                return iter(loader), None  # somebody iterates over it: those workers are running
            own, region = copy.copy(loader), Region(divided, self._ahead)
            own.collate_fn = Collate(loader.collate_fn, region.shared)
            own.pin_memory = False
            self._persistent = own, region
        own, region = self._persistent
        return iter(own), region

    def close(self) -> None:
        """Lets go of all memory, and of workers that were kept. Can be used again after it."""
        self._regions.clear()
        self._persistent = None


def suits(loader: Any) -> bool:
    """Whether a loader's workers may write to shared memory.

    It does if its iterator is torch's own, or torchdata's, and is this pass's alone.
    """
    if not (sys.platform == "linux" and isinstance(loader, DataLoader) and loader.num_workers):
        return False
    kind, own = type(loader), DataLoader
    stateful: Any = sys.modules.get(_STATEFUL)
    if stateful is not None and isinstance(loader, stateful.StatefulDataLoader):
        if loader.persistent_workers:
            return False
        own = stateful.StatefulDataLoader
    ours = [(getattr(kind, name), getattr(own, name)) for name in ("__iter__", "_get_iterator")]
    return "collate_fn" in vars(loader) and all(mine is theirs for mine, theirs in ours)


def shape(loader: DataLoader[Any], limit: int, ahead: int) -> Shape | None:
    """How to divide the memory for a loader; None if there is too little of it.

    A worker needs a slab for each batch that it may have prepared, which is being written or waits
    in the queue, for its part of those that are on their way to the device, and one more.

    Args:
        loader: With workers.
        limit: Bytes in all.
        ahead: How many batches are on their way.
    """
    workers = loader.num_workers
    each = (loader.prefetch_factor or 2) + -(-ahead // workers) + 1
    room = limit // (workers * each) // mmap.PAGESIZE * mmap.PAGESIZE
    return Shape(workers, each, room) if room else None


@contextmanager
def _collating(loader: DataLoader[Any], collate: Collate) -> Iterator[None]:
    """The loader with another collate function, and without the thread that would pin."""
    before = loader.collate_fn, loader.pin_memory
    loader.collate_fn, loader.pin_memory = collate, False
    try:
        yield
    finally:
        loader.collate_fn, loader.pin_memory = before


def budget() -> int:
    """Bytes of shared memory that a pass may use unless told: an eighth of the host's.

    Of the container's, where its control group sets a limit.
    """
    if sys.platform != "linux":
        return 0
    whole = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    group = Path("/sys/fs/cgroup/memory.max")
    limit = group.read_text(encoding="ascii").strip() if group.exists() else "max"
    return (min(whole, int(limit)) if limit.isdigit() else whole) // 8
