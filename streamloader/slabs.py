"""Pinned slabs: permanent host memory that batches are packed into and sent from.

A slab goes round: taken by the loader thread, filled, sent, and free again once the host has seen
its copy complete (rule 1). A pass has `prefetch_batches + 2` of them, of the size its batches need,
and from then on allocates nothing. Only the caller's thread makes one and takes one back, since
that means asking the device (rule 7).
"""

from __future__ import annotations

import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import TypeAlias

from torch import Tensor

from streamloader.device import Device, Event

__all__ = ["Slabs", "roomy"]

Loan: TypeAlias = tuple[Event, Tensor | None, list[Tensor]]

DRAIN_SECONDS = 10.0
"""How long to wait for copies that are under way; a device that needs longer has failed."""

_abandoned: list[Loan] = []
"""Memory that a failed device may still read: never given back."""


class Slabs:
    """The slabs of one pass at a time; the next pass takes them over.

    Args:
        device: Pins them.
        limit: How many there may be.

    Attributes:
        changed: Notified when a slab is wanted, or free again. The pass's own condition, shared so
            that a wait for anything at all is one wait.
    """

    def __init__(self, device: Device, limit: int) -> None:
        self.changed = device.condition()
        self._device = device
        self._limit = limit
        self._count = 0
        self._free: list[Tensor] = []
        self._wanted: int | None = None
        self._failure: Exception | None = None
        self._busy: deque[Loan] = deque()

        finaliser = weakref.finalize(self, _drain, device, self._busy)
        finaliser.atexit = False  # nothing is unpinned then, so nothing has to be waited for

    @property
    def wanted(self) -> bool:
        """Whether the loader thread waits for a slab."""
        return self._wanted is not None

    @property
    def busy(self) -> bool:
        """Whether a copy is under way, as far as the host has seen."""
        return bool(self._busy)

    def take(self, nbytes: int, until: Callable[[], bool]) -> Tensor | None:
        """A slab of at least `nbytes`, for the loader thread, which waits for one.

        Returns:
            The slab, or None when `until()` became true first.

        Raises:
            RuntimeError: No more host memory can be pinned.
        """
        with self.changed:
            while not until():
                if (number := self._best(nbytes)) is not None:
                    self._wanted = None
                    return self._free.pop(number)
                if self._failure is not None:
                    failure, self._failure, self._wanted = self._failure, None, None
                    raise failure  # once: the next pass takes over the slabs, and tries again
                if self._wanted != nbytes:
                    self._wanted = nbytes
                    self.changed.notify_all()
                self.changed.wait()
            self._wanted = None
            return None

    def give_back(self, slab: Tensor | None) -> None:
        """`slab` is free: it was never sent, or its copy is complete."""
        if slab is not None:
            with self.changed:
                self._free.append(slab)
                self.changed.notify_all()

    def lend(self, event: Event, slab: Tensor | None, sources: list[Tensor]) -> None:
        """Nobody writes or frees `slab` and `sources` before the host has seen `event` complete."""
        self._busy.append((event, slab, sources))

    def serve(self) -> None:
        """Takes back what the device has read, and makes a slab if one is wanted and none fits."""
        while self._busy and self._device.done(self._busy[0][0]):
            self.give_back(self._busy.popleft()[1])
        with self.changed:
            if self._wanted is not None and self._best(self._wanted) is None:
                try:
                    self._make(self._wanted)
                except Exception as error:  # noqa: BLE001  # it is the batch's that is being packed
                    self._failure = error
                    self.changed.notify_all()

    def _best(self, nbytes: int) -> int | None:
        """The place in the free list of the smallest slab that has `nbytes`."""
        sizes = [(slab.numel(), number) for number, slab in enumerate(self._free)]
        return min(((size, n) for size, n in sizes if size >= nbytes), default=(0, None))[1]

    def _make(self, nbytes: int) -> None:
        """All slabs at once, so that the loader thread never waits for the caller to make one.

        Exactly `nbytes` while all batches are of one size; once they grow, a little more.
        """
        if self._free:
            self._free.pop(min(range(len(self._free)), key=lambda n: self._free[n].numel()))
            self._count -= 1
            nbytes = roomy(nbytes)
        while self._count < self._limit:
            self._free.append(self._device.slab(nbytes))
            self._count += 1
            self.changed.notify_all()

    def close(self) -> None:
        """Waits on the host for every copy, and drops every slab."""
        _drain(self._device, self._busy)
        self._free.clear()
        self._count = 0


def _drain(device: Device, busy: deque[Loan]) -> None:
    """Apart from the class, because it also runs as its finaliser (rule 1)."""
    deadline = time.monotonic() + DRAIN_SECONDS
    try:
        while busy and device.join(busy[0][0], until=lambda: time.monotonic() > deadline):
            busy.popleft()
    finally:
        _abandoned.extend(busy)
        busy.clear()


def roomy(nbytes: int) -> int:
    """`nbytes` rounded up to an eighth of a power of two: sizes that vary soon stop growing."""
    step = max(1 << (nbytes.bit_length() - 4), 1) if nbytes >= 8 else 1
    return -(-nbytes // step) * step
