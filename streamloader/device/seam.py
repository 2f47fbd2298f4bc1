"""The seam: everything the loader asks of a device, in eighteen verbs.

A stream and an event are opaque here: only the device that made one looks inside.
"""

from __future__ import annotations

import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeAlias

import torch
from torch import Tensor

__all__ = ["POLL_SECONDS", "Device", "Event", "RefusedError", "Stream"]

Stream: TypeAlias = Any
Event: TypeAlias = Any

POLL_SECONDS = 2e-4
"""Seconds between two looks at an event: a wait inside the driver would spin a core."""


class RefusedError(RuntimeError):
    """The driver pins no more host memory."""


class Device(ABC):
    """What the loader asks of a device.

    Every verb serves a memory rule: NOTE [Memory rules], window.py.

    Attributes:
        device: The `torch.device`, with its index where the type has one.
        host: Whether its memory is the host's, so that batches stay where they are.
    """

    device: torch.device
    host: bool = False

    @abstractmethod
    def stream(self, name: str, priority: int = 0) -> Stream:
        """A stream of the loader's own, for the loader's life.

        Args:
            name: For logs.
            priority: At most 0; work of a lower number goes first, as far as the device knows any.
        """

    @abstractmethod
    def current(self) -> Stream:
        """The stream that is current on this device, in the calling thread, now."""

    @abstractmethod
    def on(self, stream: Stream) -> AbstractContextManager[object]:
        """A context in which the calling thread's work goes to `stream`."""

    @abstractmethod
    def record(self, stream: Stream) -> Event:
        """A fresh event that completes when all work now in `stream` has run. Recorded once."""

    @abstractmethod
    def wait(self, stream: Stream, event: Event) -> None:
        """Later work in `stream` runs after `event`; the host does not wait."""

    @abstractmethod
    def done(self, event: Event) -> bool:
        """Whether the host may rely on `event` having completed. Never blocks."""

    @abstractmethod
    def slab(self, nbytes: int) -> Tensor:
        """Pinned host memory: a uint8 tensor of shape (nbytes,), unpinned when it dies."""

    @abstractmethod
    def pin(self, memory: Tensor) -> Callable[[], object] | None:
        """Pins host memory where it lies: whole pages, a uint8 tensor.

        Returns:
            What unpins it; the memory must stay mapped until then. None if this device cannot.

        Raises:
            RefusedError: The driver refuses.
        """

    @abstractmethod
    def arena(self, nbytes: int) -> Tensor:
        """Device memory: a uint8 tensor of shape (nbytes,), made on the current stream."""

    @abstractmethod
    def copy(self, destination: Tensor, source: Tensor) -> None:
        """Copies host bytes to device bytes on the current stream; does not block if pinned."""

    @abstractmethod
    def uses(self, tensor: Tensor, stream: Stream) -> None:
        """`stream` reads `tensor` too: its memory is not reused before that work has run."""

    @abstractmethod
    def holds(self, tensor: Tensor) -> bool:
        """Whether `tensor` is on this device already."""

    @abstractmethod
    def generators(self) -> Sequence[torch.Generator]:
        """Those that are drawn from where none is named: the CPU's and this device's."""

    @abstractmethod
    def inherit(self) -> AbstractContextManager[object]:
        """The calling thread's device and stream, as a context for another thread to enter."""

    def draws(self, seed: int) -> AbstractContextManager[object]:
        """A context in which `generators` are seeded anew.

        On leaving it they are as they were, so that a transform never moves the caller's.
        """
        return _seeded(self.generators(), seed)

    def named(self, text: str) -> AbstractContextManager[object]:
        """A context whose work a profiler shows by this name."""
        # A range costs 9 us whether anybody looks or not, and this one question 0.1 us.
        looked_at = torch.autograd.profiler._is_profiler_enabled  # noqa: SLF001  # no public name
        return torch.profiler.record_function(text) if looked_at else nullcontext()

    def condition(self) -> threading.Condition:
        """By what two threads of the loader hand work to one another; a fake may look on."""
        return threading.Condition()

    def join(self, event: Event, until: Callable[[], bool]) -> bool:
        """Waits on the host for `event`.

        Polls, because the driver's own wait spins a core and cannot be interrupted.

        Returns:
            True when `event` completed, False when `until()` became true first.
        """
        while not self.done(event):
            if until():
                return False
            time.sleep(POLL_SECONDS)
        return True


@contextmanager
def _seeded(generators: Sequence[torch.Generator], seed: int) -> Iterator[None]:
    """Seeds `generators` anew inside, and leaves them as they were."""
    states = [generator.get_state() for generator in generators]
    for generator in generators:
        generator.manual_seed(seed)
    try:
        yield
    finally:
        for generator, state in zip(generators, states, strict=True):
            generator.set_state(state)
