"""A device for tests, without a device: the code that runs on a GPU, run on the CPU.

    device = FakeDevice()
    loader = StreamLoader(batches, device, transform=augment)
    assert device.log[0] == ("stream", "copy")

`FakeDevice` logs what it is told to do. What a real device does late it does as late as it may: a
copy runs when something that was told to wait for it needs it, or when the host has asked `done`
often enough. New memory is filled with garbage. So a missing wait reads garbage, and a slab that is
written too early sends the wrong bytes: tests fail where a GPU would corrupt a batch now and then.
"""

from __future__ import annotations

import functools
import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from streamloader.device.seam import Device, Event

__all__ = ["FakeDevice", "FakeEvent", "FakeStream"]

GARBAGE = 0xA5
"""Every byte of fresh memory, host or device."""


@dataclass(eq=False)
class FakeStream:
    """Work in order, not run yet.

    Attributes:
        name: As given to `FakeDevice.stream`.
        priority: Likewise.
        held: While true, the host sees none of its events complete.
    """

    name: str
    priority: int = 0
    held: bool = False
    todo: deque[Callable[[], object]] = field(default_factory=deque, repr=False)
    submitted: int = 0
    finished: int = 0

    def submit(self, work: Callable[[], object]) -> None:
        """Queues `work` behind all that was submitted before."""
        self.todo.append(work)
        self.submitted += 1

    def run(self, upto: int) -> None:
        """Runs the first `upto` pieces of work ever submitted, those that have not run."""
        while self.finished < upto:
            self.finished += 1
            self.todo.popleft()()


@dataclass(eq=False)
class FakeEvent:
    """A point in a stream: complete when the work submitted before it has run.

    Attributes:
        stream: Where it was recorded.
        position: How much work the stream had been given.
        looks: How often the host must still ask before it is told that the event is complete.
    """

    stream: FakeStream
    position: int
    looks: int


class FakeDevice(Device):
    """A `Device` that keeps its memory on the CPU and its promises as late as it may.

    Args:
        looks: How often `done` answers False about each event before it is True.

    Attributes:
        log: One tuple for each verb that does something: its name, then the names of its streams
            and the numbers of bytes it was called with.
    """

    def __init__(self, looks: int = 0) -> None:
        self.device = torch.device("cpu")
        self.log: list[tuple[Any, ...]] = []
        self._looks = looks
        self._default = FakeStream("default")
        self._thread = threading.local()
        self._memory: dict[int, int] = {}

    @property
    def arenas(self) -> int:
        """How many arenas are alive now."""
        return len(self._memory)

    def verbs(self, name: str) -> list[tuple[Any, ...]]:
        """The log's entries of one verb."""
        return [entry for entry in self.log if entry[0] == name]

    def put(self, tensor: Tensor) -> Tensor:
        """A copy of `tensor` that is on this device already, as a source may yield one."""
        arena = self.arena(tensor.nbytes)
        placed = torch.empty(0, dtype=tensor.dtype, device="cpu")
        placed.set_(arena.untyped_storage(), 0, tensor.shape, tensor.contiguous().stride())
        return placed.copy_(tensor)

    @override
    def stream(self, name: str, priority: int = 0) -> FakeStream:
        self.log.append(("stream", name))
        return FakeStream(name, priority)

    @override
    def current(self) -> FakeStream:
        return getattr(self._thread, "stream", self._default)

    @override
    def on(self, stream: FakeStream) -> AbstractContextManager[object]:
        return self._on(stream)

    @contextmanager
    def _on(self, stream: FakeStream) -> Iterator[None]:
        before = self.current()
        self._thread.stream = stream
        try:
            yield
        finally:
            self._thread.stream = before

    @override
    def record(self, stream: FakeStream) -> FakeEvent:
        self.log.append(("record", stream.name))
        return FakeEvent(stream, stream.submitted, self._looks)

    @override
    def wait(self, stream: FakeStream, event: FakeEvent) -> None:
        """Runs what was waited for, and nothing else.

        The work of a transform, or of the caller, runs when Python calls it: what it was told to
        wait for must have run by then.
        """
        self.log.append(("wait", stream.name, event.stream.name))
        event.stream.run(event.position)

    @override
    def done(self, event: Event) -> bool:
        if event.looks > 0 or event.stream.held:
            event.looks -= 1
            return False
        event.stream.run(event.position)
        return True

    @override
    def slab(self, nbytes: int) -> Tensor:
        self.log.append(("slab", nbytes))
        return torch.full((nbytes,), GARBAGE, dtype=torch.uint8, device="cpu")

    @override
    def pin(self, memory: Tensor) -> Callable[[], object] | None:
        self.log.append(("pin", memory.nbytes))
        return functools.partial(self.log.append, ("unpin", memory.nbytes))

    @override
    def arena(self, nbytes: int) -> Tensor:
        self.log.append(("arena", self.current().name, nbytes))
        arena = torch.full((nbytes,), GARBAGE, dtype=torch.uint8, device="cpu")
        key = _key(arena)
        self._memory[key] = nbytes
        weakref.finalize(arena.untyped_storage(), self._memory.pop, key)
        return arena

    @override
    def copy(self, destination: Tensor, source: Tensor) -> None:
        self.log.append(("copy", self.current().name, source.nbytes))
        self.current().submit(functools.partial(destination.copy_, source))

    @override
    def uses(self, tensor: Tensor, stream: FakeStream) -> None:
        self.log.append(("uses", stream.name, tensor.untyped_storage().nbytes()))

    @override
    def holds(self, tensor: Tensor) -> bool:
        return tensor.layout == torch.strided and _key(tensor) in self._memory

    @override
    def generators(self) -> Sequence[torch.Generator]:
        return [torch.default_generator]

    @override
    def draws(self, seed: int) -> AbstractContextManager[object]:
        self.log.append(("draws", seed))
        return super().draws(seed)

    @override
    def inherit(self) -> AbstractContextManager[object]:
        return self.on(self.current())


def _key(tensor: Tensor) -> int:
    """Which memory `tensor` lies in: tensors made by `set_` on one storage have one key."""
    return int(tensor.untyped_storage()._cdata)  # noqa: SLF001  # a storage has no public identity
