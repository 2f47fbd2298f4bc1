"""This process's side of the memory that workers write: pinned where it lies, taken over."""

from __future__ import annotations

import os
import warnings
from collections.abc import Sequence
from typing import Any

from streamloader.device import Device, RefusedError
from streamloader.sent import Sent
from streamloader.shared import Shared

__all__ = ["Region"]


class Region:
    """Shared memory of one pass at a time; the next one takes it over.

    Args:
        shared: The memory.
        ahead: How many batches this process holds at a time, if the caller keeps none.

    Attributes:
        shared: Likewise.
        refused: Whether it cannot be pinned: batches are copied into memory that is.
    """

    def __init__(self, shared: Shared, ahead: int) -> None:
        self.shared = shared
        self.refused = False
        self._ahead = ahead
        self._warned = False
        self._workers: Sequence[Any] = ()

    @property
    def short(self) -> bool:
        """Whether the caller keeps batches, so that workers would soon have no slab left."""
        return self.shared.held > self._ahead

    def used_by(self, workers: Sequence[Any]) -> None:
        """`workers` write to it, processes, until they are dead."""
        self._workers = workers

    def unused(self) -> bool:
        """Whether nobody writes to it any more; then all slabs that nobody holds are free."""
        if self.shared.owner != os.getpid():  # in a forked child it stays the parent's
            return False
        if any(worker.is_alive() for worker in self._workers):
            return False
        self.shared.recover()
        return True

    def ready(self, sent: Sent, device: Device) -> None:
        """Makes sure that a batch can be sent from where it lies; in the caller's thread.

        One that cannot be pinned is sent all the same, slowly: the driver copies it first.
        """
        if self.refused:
            return
        try:
            self.refused = not self.shared.pin(sent.number, sent.recipe.used, device.pin)
        except RefusedError as error:
            self.refused = True
            warnings.warn(
                f"shared memory of workers stays unpinned, so each batch is copied once more: "
                f"{error}; shared_memory=False leaves it out",
                stacklevel=2,
            )

    def noticed(self, sent: Sent) -> None:
        """Warns, once, if a batch did not fit."""
        if sent.left_out and not self._warned:
            self._warned = True
            shape = self.shared.shape
            most = shape.workers * shape.each * shape.room
            warnings.warn(
                f"{sent.left_out:,} bytes of a batch came the ordinary way, with copies: its share "
                f"of shared memory is {shape.room:,} bytes, {shape.each} such shares for each of "
                f"{shape.workers} workers. Pass shared_memory=BYTES, more than {most:,}, or lower "
                f"num_workers, prefetch_factor or the batch size",
                stacklevel=2,
            )
