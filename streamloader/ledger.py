"""Who did what to which memory: what the checked device knows, and what it reports.

Actors are streams and host threads; each has a clock (clocks.py). Work of a thread or a stream is
checked against what was done to the same memory before, and memory that is given back against all
that was done to it.
"""

from __future__ import annotations

import functools
import math
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from typing_extensions import override

from streamloader.clocks import Access, Clock, Memory
from streamloader.testing import FakeStream

__all__ = ["CheckedStream", "Cost", "Host", "Kernels", "Ledger", "caller", "place"]

Cost = Callable[[str, str], float]


@dataclass(eq=False)
class CheckedStream(FakeStream):
    """A stream, as an actor."""

    clock: Clock = field(default_factory=Clock)

    @override
    def __str__(self) -> str:
        return f"stream {self.name!r}"


@dataclass(eq=False)
class Host:
    """A host thread, as an actor.

    Attributes:
        name: The thread's.
        clock: What it knows.
        due: When the first of the events completes that it has looked at in vain.
        watched: Whether its kernels are seen.
        muted: Whether it is at work for the fake itself.
        busy: Whether it is the loader's, and does not wait for another thread.
    """

    name: str
    clock: Clock = field(default_factory=Clock)
    due: float = math.inf
    watched: bool = False
    muted: bool = False
    busy: bool = False

    def waited(self) -> None:
        """It has waited a while: until the next event that it is interested in."""
        if self.due < math.inf:
            self.clock.time = max(self.clock.time, self.due)
            self.due = math.inf

    @override
    def __str__(self) -> str:
        return f"thread {self.name!r}"


class Ledger:
    """What was done to all memory there is, and by whom.

    Args:
        current: The calling thread's current stream.
        cost: Virtual seconds of a piece of work, given its stream's name and its own.

    Attributes:
        current: As given.
        reports: What was found, a line each.
        guests: The threads that the loader has started.
        lock: Held while clocks of streams change.
    """

    def __init__(self, current: Callable[[], CheckedStream], cost: Cost | None) -> None:
        self.reports: list[str] = []
        self.guests: list[Host] = []
        self.lock: AbstractContextManager[object] = threading.RLock()  # finalisers run anywhere
        self.current, self._cost = current, cost
        self._hosts = threading.local()
        self._seen = Clock()
        self._known: dict[int, Memory] = {}
        self._sizes: list[tuple[float, int]] = []
        self._process = os.getpid()

    @property
    def foreign(self) -> bool:
        """Whether this is a process that was forked: a worker, whose work concerns nobody."""
        return os.getpid() != self._process

    @property
    def host(self) -> Host:
        """The calling thread."""
        if not hasattr(self._hosts, "own"):
            self._hosts.own = Host(threading.current_thread().name)
        host: Host = self._hosts.own
        return host

    def guest(self) -> Host:
        """A thread that the calling one is about to start: it will know what this one does."""
        self.guests.append(Host("", Clock().join(self.host.clock), busy=True))
        return self.guests[-1]

    def enter(self, guest: Host) -> None:
        """The calling thread is that one."""
        guest.clock.join(self.host.clock)
        guest.name, guest.watched = self.host.name, self.host.watched
        self._hosts.own = guest

    @property
    def peak(self) -> int:
        """Most bytes of device memory at one time, as an allocator sees it."""
        total = most = 0
        for _, nbytes in sorted(self._sizes, key=lambda change: change[0]):
            total += nbytes
            most = max(most, total)
        return most

    def report(self, text: str) -> None:
        """Something is wrong; said once."""
        if text not in self.reports:
            self.reports.append(text)

    def memory(self, tensor: Tensor) -> Memory:
        """A tensor's storage, which is seen for the first time perhaps."""
        storage = tensor.untyped_storage()
        key = int(storage._cdata)  # noqa: SLF001  # a storage has no public identity
        with self.lock:
            memory = self._known.get(key)
            if memory is None:
                memory = Memory(storage.nbytes(), place(), self.current())
                self._known[key] = memory
                weakref.finalize(storage, self._died, key).atexit = False
        return memory

    def on_host(self, tensor: Tensor) -> Memory:
        """The storage of a tensor that is the host's."""
        memory = self.memory(tensor)
        if memory.on_device is None:
            memory.on_device = False
        return memory

    def on_device(self, tensor: Tensor) -> Memory:
        """The storage of a tensor that is the device's, unless it is known to be the host's."""
        memory = self.memory(tensor)
        if memory.on_device is None:
            memory.on_device = True
            self._sizes.append((self.host.clock.time, memory.nbytes))
        return memory

    def launch(self, name: str, reads: Sequence[Memory], writes: Sequence[Memory]) -> None:
        """Work of the current stream."""
        host, stream = self.host, self.current()
        with self.lock:
            stream.clock.join(host.clock)
            where = self._check(stream, reads, writes)
            if self._cost is not None:
                stream.clock.time += self._cost(stream.name, name)
            point = stream.clock.tick(stream)
            for verb, memory in _uses(reads, writes):
                memory.note(Access(verb, where, stream.clock.time, None, point))

    def learn(self, clock: Clock) -> None:
        """The calling thread has seen that what `clock` knows of is over."""
        with self.lock:
            self.host.clock.join(clock)
            self._seen.order(clock)

    def act(self, reads: Sequence[Memory], writes: Sequence[Memory], *, open_: bool) -> None:
        """Work of the calling thread; if `open_`, unless its memory turns out to be the device's.

        Then it will have been work of the current stream.
        """
        host, stream = self.host, self.current()
        with self.lock:
            where = self._check(host, reads, writes)
            point, other = host.clock.tick(host), None
            if open_:
                stream.clock.join(host.clock)
                other = stream.clock.tick(stream)
            for verb, memory in _uses(reads, writes):
                memory.note(Access(verb, where, host.clock.time, point, other))

    def _check(
        self, actor: Host | CheckedStream, reads: Sequence[Memory], writes: Sequence[Memory]
    ) -> str:
        """Reports what `actor` does not know to be over, and makes it as late as that.

        Returns:
            Where in the code it is at work.
        """
        where = place()
        for verb, memory in _uses(reads, writes):
            earlier = memory.conflicts(verb)
            for access in memory.unordered(earlier, actor.clock):
                self.report(f"{verb} by {actor} at {where}: nothing orders it after {access}")
            actor.clock.time = max([actor.clock.time, *(access.end for access in earlier)])
        return where

    def _died(self, key: int) -> None:
        """A storage is given back."""
        if self.foreign:
            return
        with self.lock:
            memory, clock = self._known.pop(key), Clock().join(self.host.clock)
            if memory.on_device:
                clock.join(*(stream.clock for stream in memory.users))
                self._sizes.append((clock.time, -memory.nbytes))
                clock.join(memory.own.clock)
            else:  # whichever thread it was that saw it: they all let go of it
                clock.order(self._seen)
            for access in memory.unordered(memory.accesses(), clock):
                # What threads do to the host's ends before they let go of it.
                if memory.on_device or access.host is None:
                    self.report(
                        f"given back too early: {memory.nbytes} bytes, made at {memory.made}, may "
                        f"be in use: {access}"
                    )


class Kernels(TorchDispatchMode):
    """Enters every operator of a thread into the ledger."""

    def __init__(self, ledger: Ledger) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._ledger = ledger

    @override
    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        if not (self._ledger.host.muted or self._ledger.foreign):
            named = zip(func._schema.arguments, args, strict=False)  # noqa: SLF001
            self._enter(func, {argument.name: value for argument, value in named} | kwargs, result)
        return result

    def _enter(self, func: Any, given: dict[str, Any], result: Any) -> None:
        ledger, schema = self._ledger, func._schema  # noqa: SLF001
        taken = [tensor for value in given.values() for tensor in _tensors(value)]
        memories = [ledger.memory(tensor) for tensor in taken]
        if func.name().startswith(_UNSEEN) or any(map(_is_view, schema.returns)):
            return
        device = any(memory.on_device for memory in memories)
        known = ledger.on_device if device else ledger.memory
        changed = [argument.name for argument in schema.arguments if _is_written(argument)]
        writes = [known(tensor) for name in changed for tensor in _tensors(given.get(name))]
        writes += [m for m in map(known, _tensors(result)) if m not in memories]
        reads = [memory for memory in map(known, taken) if memory not in writes]
        if "empty" in func.name():
            return
        if not device:
            ledger.act(reads, writes, open_=True)
            return
        ledger.launch(func.name(), reads, writes)
        if _SYNCS.intersection(func.tags):
            ledger.learn(ledger.current().clock)


_UNSEEN = ("aten::set_", "aten::resize_", "aten::is_pinned", "aten::unsafe_split")
"""Operators that touch no element, whatever their schemas say."""

_SYNCS = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
"""Operators of which the host needs the result, so that it waits for the stream."""


def _tensors(value: Any) -> list[Tensor]:
    """Those in an operator's argument or result, the ones without a storage left out."""
    if isinstance(value, (list, tuple)):
        return [tensor for each in value for tensor in _tensors(each)]
    return [value] if isinstance(value, Tensor) and value.layout == torch.strided else []


def _is_written(argument: Any) -> bool:
    return argument.alias_info is not None and bool(argument.alias_info.is_write)


def _is_view(result: Any) -> bool:
    return result.alias_info is not None and not result.alias_info.is_write


def _uses(reads: Sequence[Memory], writes: Sequence[Memory]) -> Iterable[tuple[str, Memory]]:
    return [("read", memory) for memory in reads] + [("written", memory) for memory in writes]


_BETWEEN = tuple(
    os.fspath(path)
    for path in (
        *(Path(__file__).with_name(f"{name}.py") for name in ("checker", "ledger", "testing")),
        *(Path(os.__file__).with_name(f"{name}.py") for name in ("contextlib", "weakref")),
        Path(torch.__file__).parent,
    )
)
"""Code that stands between a mistake and what shows it."""


def caller() -> FrameType:
    """The innermost frame that is neither the checker's nor torch's."""
    frame = sys._getframe()  # noqa: SLF001  # the documented way to a frame
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_BETWEEN):
        frame = frame.f_back
    return frame


def place() -> str:
    """Where in the code that is."""
    frame = caller()
    return f"{_short(frame.f_code.co_filename)}:{frame.f_lineno} in {frame.f_code.co_name}"


@functools.cache
def _short(path: str) -> str:
    return "/".join(Path(path).parts[-2:])
