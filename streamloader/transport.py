"""How batches come out of workers: through shared memory, if the loader is a `DataLoader`.

`iterate(loader)` puts `Collate` in front of the collate function of the user's own object while
`iter()` starts its workers, and never else. So it keeps its meaning, `state_dict()` of a
StatefulDataLoader included, which asks the loader for the iterator that it has: that of a copy
would not be it. Whoever else sees such a batch, the `__iter__` of a subclass or a loop of the
user's over the same persistent workers, sees its value (`sent.wanted`), which torch has not pinned.
"""

from __future__ import annotations

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
from streamloader.shared import Shape, Shared

__all__ = ["Transport", "budget", "shape"]

_OWN = (DataLoader.__module__, "torchdata.stateful_dataloader.stateful_dataloader")
"""Where the iterators are made whose batches nobody sees before us."""

_starting = threading.RLock()
"""Two threads must not put their collate functions into one loader at a time.

A sampler runs while it is held, and may iterate over another loader.
"""


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

    def iterate(self, loader: Any) -> tuple[Iterator[Any], Region | None]:
        """A pass over the loader, and the memory in which its batches come as `Sent`, if any."""
        divided = shape(loader, self._limit, self._ahead) if _shares(loader) else None
        if divided is None:
            return iter(loader), None
        if loader.persistent_workers and getattr(loader, "_iterator", None) is not None:
            iterator = iter(loader)  # its workers are running, with whatever they were given
            return iterator, self._region_of(iterator, None)
        with _starting:
            made = self._unused(divided)
            if made is None:
                return iter(loader), None
            with _collating(loader, Collate(loader.collate_fn, made.shared)):
                iterator = iter(loader)
            region = self._region_of(iterator, made)
        if region is not None and not loader.persistent_workers:
            # Or whoever keeps the iterator would keep the memory.
            iterator._collate_fn = loader.collate_fn  # noqa: SLF001
        return iterator, region

    def _unused(self, divided: Shape) -> Region | None:
        """A region of that shape that nobody writes to: one of an earlier pass, or a new one.

        None where there is no such memory: in a sandbox, or under a limit on addresses.
        """
        unused = [region for region in self._regions if region.unused()]
        self._regions = [region for region in self._regions if region not in unused]
        fitting = (region for region in unused if region.shared.shape == divided)
        try:
            return next(fitting, None) or Region(Shared(divided), self._ahead)
        except OSError:
            return None

    def _region_of(self, iterator: Any, made: Region | None) -> Region | None:
        """The region that this iterator's workers write to, for as long as they live.

        Args:
            iterator: The pass.
            made: What was made for it, which it need not have taken.
        """
        collate = getattr(iterator, "_collate_fn", None)
        if type(iterator).__module__ not in _OWN or not isinstance(collate, Collate):
            return None
        known = [region for region in [*self._regions, made] if region is not None]
        same = (region for region in known if region.shared is collate.shared)
        region = next(same, None) or Region(collate.shared, self._ahead)
        region.used_by(iterator._workers)  # noqa: SLF001  # nothing else knows when they are dead
        self._regions = [*(other for other in self._regions if other is not region), region]
        return region

    def close(self) -> None:
        """Lets go of all memory. Can be used again after it."""
        while self._regions:
            self._regions.pop().shared.unpin()


def _shares(loader: Any) -> bool:
    """Whether a loader's workers may write to shared memory."""
    if not (sys.platform == "linux" and hasattr(os, "memfd_create")):  # some Pythons lack it
        return False
    return (
        isinstance(loader, DataLoader) and loader.num_workers > 0 and "collate_fn" in vars(loader)
    )


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
