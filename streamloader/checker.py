"""A fake device that proves the order of things: what may race is reported, with both places.

    device = CheckedDevice()
    with device.on(device.current()):  # so that it sees the kernels of this loop
        for batch in StreamLoader(batches, device, transform=augment):
            step(batch)
    device.verify()

Each stream and each host thread has a clock (clocks.py), carried along every edge there is: program
order, a launch, an event that is waited for, an event that the host has seen complete, a thread
that is started, the loader's condition. Reported (ledger.py) are

- two accesses to the same memory, one of them a write, that no chain of edges orders;
- memory given back while an access to it is not known to be over: neither by the stream that it was
  allocated on, nor by one that was recorded on it; for pinned memory, by the host;
- an event that is waited for and was never recorded.

Work happens when it is called, since nothing depends on when. Time is virtual: a kernel takes what
`cost` says and a wait takes the maximum, so what overlaps is arithmetic.

It sees what passes torch's dispatcher in a thread that is inside `on(...)`: not a kernel that is
launched past the dispatcher, nor `tolist()` or NumPy, nor other processes. Two parts of a storage
are one to it. Memory of unknown origin is the host's until a kernel uses it together with the
device's; from then on it is the device's, and always was.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from types import FrameType, TracebackType
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from streamloader.clocks import Clock
from streamloader.ledger import CheckedStream, Cost, Host, Kernels, Ledger, caller, place
from streamloader.testing import FakeDevice, FakeEvent, FakeStream

__all__ = ["CheckedDevice"]


@dataclass(eq=False)
class _Event(FakeEvent):
    clock: Clock | None = None  # None: never recorded


class CheckedDevice(FakeDevice):
    """A `FakeDevice` that reports what may race.

    Args:
        looks: As for `FakeDevice`.
        cost: Virtual seconds of a piece of work, given its stream's name and its own ("copy", or an
            operator's, as in "aten::mul.Tensor"). None: nothing takes time.
        skip: Whether a verb does nothing, given its name and the frame that calls it: `done` and
            `join` answer True, `record` records nothing. To prove that the call is needed.
    """

    _default: CheckedStream  # type: ignore[mutable-override]  # nobody sets it but __init__

    def __init__(
        self,
        looks: int = 0,
        *,
        cost: Cost | None = None,
        skip: Callable[[str, FrameType], bool] | None = None,
    ) -> None:
        super().__init__(looks)
        self._default = CheckedStream("default")
        self._skip = skip
        self._ledger = Ledger(self.current, cost)

    # -- what it found ----------------------------------------------------------------------------

    @property
    def reports(self) -> list[str]:
        """What was found so far, a line each."""
        return self._ledger.reports

    def verify(self) -> None:
        """To be called at the end.

        Raises:
            AssertionError: Something was reported.
        """
        if self.reports:
            raise AssertionError("\n".join(self.reports))

    @property
    def peak(self) -> int:
        """Most bytes of device memory at one virtual time, as an allocator sees it.

        What other streams were recorded on is free again when they have come to where it died.
        """
        return self._ledger.peak

    @property
    def time(self) -> float:
        """What time it is in the calling thread, in virtual seconds."""
        return self._ledger.host.clock.time

    def finished(self, stream: CheckedStream) -> float:
        """When all work now in `stream` is over, in virtual seconds."""
        return stream.clock.time

    def advance(self, seconds: float) -> None:
        """The calling thread is busy for so long."""
        self._ledger.host.clock.time += seconds

    @property
    def settled(self) -> bool:
        """Whether the loader's threads have ended, or wait for the caller to go on.

        A caller that goes on only then finds the same each time: time depends on nothing else.
        """
        return not any(guest.busy for guest in self._ledger.guests)

    # -- streams and events -----------------------------------------------------------------------

    @override
    def stream(self, name: str, priority: int = 0) -> CheckedStream:
        return CheckedStream(super().stream(name).name, priority)

    @override
    def current(self) -> CheckedStream:
        stream: CheckedStream = getattr(self._thread, "stream", self._default)
        return stream

    @override
    @contextmanager
    def _on(self, stream: FakeStream) -> Iterator[None]:
        host = self._ledger.host
        with super()._on(stream):
            if host.watched:
                yield
                return
            host.watched = True
            try:
                with Kernels(self._ledger):
                    yield
            finally:
                host.watched = False

    @override
    def inherit(self) -> AbstractContextManager[object]:
        return self._inherited(self.current(), self._ledger.guest())

    @contextmanager
    def _inherited(self, stream: CheckedStream, guest: Host) -> Iterator[None]:
        self._ledger.enter(guest)
        try:
            with self.on(stream):
                yield
        finally:
            guest.busy = False

    @override
    def record(self, stream: Any) -> _Event:
        super().record(stream)
        if self._skips("record"):
            return _Event(stream, 0, 0)
        with self._ledger.lock:
            clock = Clock().join(stream.clock, self._ledger.host.clock)
        return _Event(stream, 0, self._looks, clock)

    @override
    def wait(self, stream: Any, event: Any) -> None:
        super().wait(stream, event)
        if not self._skips("wait"):
            with self._ledger.lock:
                stream.clock.join(self._recorded(event))

    @override
    def done(self, event: Any) -> bool:
        if self._skips("done"):
            return True
        host, clock = self._ledger.host, self._recorded(event)
        if not super().done(event):
            return False
        if clock.time > host.clock.time:
            host.due = min(host.due, clock.time)
            return False
        self._ledger.learn(clock)
        return True

    @override
    def join(self, event: Any, until: Callable[[], bool]) -> bool:
        def over() -> bool:
            self._ledger.host.waited()
            return until()

        return self._skips("join") or super().join(event, over)

    @override
    def condition(self) -> threading.Condition:
        return _Condition(lambda: self._ledger.host)

    def _recorded(self, event: _Event) -> Clock:
        if event.clock is None:
            self._ledger.report(f"waited for at {place()}: an event that was never recorded")
            return Clock()
        return event.clock

    def _skips(self, verb: str) -> bool:
        return self._skip is not None and self._skip(verb, caller())

    # -- memory -----------------------------------------------------------------------------------

    @override
    def slab(self, nbytes: int) -> Tensor:
        with self._muted():
            plain = super().slab(nbytes)
        memory = self._ledger.on_host(plain)
        slab = plain.as_subclass(_Slab)
        slab.written = lambda: self._ledger.act([], [memory], open_=False)
        return slab

    @override
    def arena(self, nbytes: int) -> Tensor:
        with self._muted():
            arena = super().arena(nbytes)
        self._ledger.on_device(arena)
        return arena

    @override
    def put(self, tensor: Tensor) -> Tensor:
        with self._muted():
            placed = super().put(tensor)
        self._ledger.launch("copy", [], [self._ledger.on_device(placed)])
        return placed

    @override
    def copy(self, destination: Tensor, source: Tensor) -> None:
        self.log.append(("copy", self.current().name, source.nbytes))
        with self._muted():
            destination.copy_(source)
        reads, writes = [self._ledger.on_host(source)], [self._ledger.on_device(destination)]
        self._ledger.launch("copy", reads, writes)

    @override
    def uses(self, tensor: Tensor, stream: FakeStream) -> None:
        super().uses(tensor, stream)
        if not self._skips("uses"):
            self._ledger.memory(tensor).users.add(stream)

    @contextmanager
    def _muted(self) -> Iterator[None]:
        host = self._ledger.host
        before, host.muted = host.muted, True
        try:
            yield
        finally:
            host.muted = before


class _Slab(Tensor):
    """Pinned memory. Nothing sees a memmove, but who asks for its address is about to write it."""

    __torch_function__: Any = torch._C._disabled_torch_function_impl  # noqa: SLF001  # parts: plain
    written: Callable[[], None]

    @override
    def data_ptr(self) -> int:
        self.written()
        return super().data_ptr()


class _Condition(threading.Condition):
    """What a thread did before it leaves is known to whoever enters next.

    That takes no time: who goes on with another's work is made as late by the memory it is in.
    """

    def __init__(self, host: Callable[[], Host]) -> None:
        super().__init__()
        self._host = host
        self._clock = Clock()
        self._waiting: list[Host] = []

    @override
    def __enter__(self) -> bool:
        entered = super().__enter__()
        self._host().clock.order(self._clock)
        return entered

    @override
    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._clock.order(self._host().clock)
        super().__exit__(kind, error, traceback)

    @override
    def wait(self, timeout: float | None = None) -> bool:
        host = self._host()
        self._clock.order(host.clock)
        host.busy = False
        self._waiting.append(host)
        notified = super().wait(timeout)
        self._waiting.remove(host)
        host.busy = True
        host.clock.order(self._clock)
        if timeout is not None:
            host.waited()
        return notified

    @override
    def notify(self, n: int = 1) -> None:
        for host in self._waiting:
            host.busy = True
        super().notify(n)
