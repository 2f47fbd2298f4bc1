"""Public failure cases, group C: passes that are left, broken or closed, many times over."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import resource
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader
from typing_extensions import override

import streamloader.pack
import streamloader.source
from streamloader import StreamLoader
from streamloader.testing import FakeDevice
from tests.loaders import SWEPT, batches, devices, fill, ids, number_of

WAIT = 10.0
MIB = 1 << 20
AHEAD = SWEPT[1:]

needs_proc = pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs /proc")


def resident() -> int:
    """Bytes of this process that are in memory now, but for what malloc keeps for later.

    The threads of many passes leave it tens of megabytes, which are no pass's any more.
    """
    with contextlib.suppress(AttributeError):  # another C library than glibc
        ctypes.CDLL(None).malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def descriptors() -> int:
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


_before: set[threading.Thread] = set()


@pytest.fixture(autouse=True)
def _only_own_threads() -> None:
    """Another test's pass may live on, in the traceback of its error for one."""
    _before.clear()
    _before.update(threading.enumerate())


def threads() -> list[threading.Thread]:
    """Those that this test has started; but what a multiprocessing queue has ends by itself."""
    alive = set(threading.enumerate()) - _before
    return [thread for thread in alive if thread.name != "QueueFeederThread"]


# -- C01, C05: nothing is left behind ------------------------------------------------------------


def first_of(loader: Any) -> None:
    next(iter(loader))


def first_by_break(loader: Any) -> None:
    for _ in loader:
        break


def three(loader: Any) -> None:
    iterator = iter(loader)
    assert [int(next(iterator)[-1]) for _ in range(3)] == [0, 1, 2]


def whole(loader: Any) -> None:
    assert [int(batch[-1]) for batch in loader] == [0, 1, 2, 3, 4]


def flat(loader: Any, device: FakeDevice | None, times: int, read: Callable[[Any], None]) -> None:
    """Asserts that the last of `times` passes leaves no more behind than the tenth.

    A batch has 1 MB. Half of one for each pass is too much: more than what comes and goes, and less
    than what one that stays behind in each adds.
    """

    def left() -> int:
        gc.collect()
        return descriptors() + (device.arenas if device else 0)

    for _ in range(10):
        read(loader)
    before, memory = left(), resident()  # in this order: the first collects
    for _ in range(times - 10):
        read(loader)
        assert threads() == []
    assert left() <= before + 20  # a worker's queue, say, which ends by itself
    assert resident() - memory < (times - 10) * MIB / 2
    assert len(loader._live) == 0
    assert len(loader._pools) <= 1


@needs_proc
@pytest.mark.slow
@pytest.mark.parametrize("make_device", devices())
@pytest.mark.parametrize("read", [first_of, first_by_break, three])
def test_c01_150_partial_reads_cost_nothing_lasting(
    read: Callable[[Any], None], make_device: Any
) -> None:
    device = make_device()
    loader = StreamLoader([fill(number, MIB // 8) for number in range(5)], device)
    flat(loader, device, 150, read)


@needs_proc
@pytest.mark.slow
@pytest.mark.parametrize("persistent", [False, True], ids=["new workers", "persistent workers"])
def test_c01_partial_reads_of_workers_cost_nothing_lasting(persistent: bool) -> None:  # noqa: FBT001
    dataset: Any = [fill(number, MIB // 8) for number in range(10)]
    plain: DataLoader[Any] = DataLoader(
        dataset, batch_size=None, num_workers=1, persistent_workers=persistent
    )
    flat(StreamLoader(plain, FakeDevice()), None, 50, first_of)


def test_c01_a_pass_that_is_dropped_in_a_cycle_goes_with_the_cycle() -> None:
    """What holds an iterator may itself be held by a cycle: it then ends with the collector."""

    class Trainer:
        def __init__(self) -> None:
            self.me = self
            self.batches = iter(StreamLoader(batches(9), FakeDevice()))

    trainer = Trainer()
    next(trainer.batches)
    assert len(threads()) == 1
    del trainer
    gc.collect()
    assert threads() == []


@needs_proc
@pytest.mark.slow
@pytest.mark.parametrize("make_device", devices())
@pytest.mark.parametrize("depth", [0, 2])
def test_c05_100_whole_passes_leave_nothing_behind(depth: int, make_device: Any) -> None:
    device = make_device()
    source = [fill(number, MIB // 8) for number in range(5)]
    loader = StreamLoader(source, device, prefetch_batches=depth)
    flat(loader, device, 100, whole)


@pytest.mark.slow
def test_c05_100_loaders_leave_nothing_behind() -> None:
    """As `for batch in StreamLoader(short_source())` in each epoch makes them."""
    alive: weakref.WeakSet[Any] = weakref.WeakSet()
    for _ in range(100):
        device = FakeDevice()
        loader = StreamLoader((fill(number) for number in range(3)), device)
        alive.add(loader)
        alive.add(device)
        assert ids(loader) == [0, 1, 2]
        del loader, device
        assert threads() == []
    gc.collect()
    assert len(alive) == 0


# -- C02: errors of the legs between the source and the transforms -------------------------------


class Failing(FakeDevice):
    """Its `verb` fails for batches of more than 100 bytes."""

    def __init__(self, verb: str) -> None:
        super().__init__()
        self._verb = verb

    def _fail(self, verb: str, nbytes: int) -> None:
        if verb == self._verb and nbytes > 100:
            raise MemoryError(f"no {verb}")

    @override
    def slab(self, nbytes: int) -> Tensor:
        self._fail("slab", nbytes)
        return super().slab(nbytes)

    @override
    def arena(self, nbytes: int) -> Tensor:
        self._fail("arena", nbytes)
        return super().arena(nbytes)

    @override
    def copy(self, destination: Tensor, source: Tensor) -> None:
        self._fail("copy", source.nbytes)
        super().copy(destination, source)


@pytest.mark.parametrize("verb", ["slab", "arena", "copy"])
@pytest.mark.parametrize("good", [0, 1, 2, 5])
@pytest.mark.parametrize("depth", AHEAD)
def test_c02_an_error_in_pinning_or_copying_comes_after_the_batches_before_it(
    depth: int, good: int, verb: str
) -> None:
    device = Failing(verb)
    source = [*batches(good), fill(99, 64), *batches(3)]
    loader = StreamLoader(source, device, prefetch_batches=depth)
    iterator = iter(loader)
    assert [number_of(next(iterator)) for _ in range(good)] == list(range(good))
    with pytest.raises(MemoryError, match=rf"^no {verb}$"):
        next(iterator)
    assert list(iterator) == []
    assert threads() == []
    source[good] = fill(99)
    assert ids(loader) == [*range(good), 99, 0, 1, 2]


@pytest.mark.parametrize("depth", SWEPT)
def test_c02_an_error_in_an_objects_own_to_comes_after_the_batches_before_it(depth: int) -> None:
    class Broken:
        def to(self, _: torch.device) -> Broken:
            raise LookupError("in to")

    source: list[Any] = [fill(0), fill(1), Broken(), fill(2)]
    iterator = iter(StreamLoader(source, FakeDevice(), prefetch_batches=depth))
    assert [number_of(next(iterator)) for _ in range(2)] == [0, 1]
    with pytest.raises(LookupError, match=r"^in to$"):
        next(iterator)


# -- C06: closing, in each state that a pass can be in -------------------------------------------


class State:
    """A source of batches that is somewhere, and says so."""

    def __init__(self, stop: int) -> None:
        self.stop = stop
        self.there, self.go = threading.Event(), threading.Event()

    def __iter__(self) -> Iterator[Tensor]:
        for number in range(30):
            if number == self.stop:
                self.there.set()
                self._stay()
            yield fill(number)

    def _stay(self) -> None:
        """Goes on at once."""


class Inside(State):
    """Stays inside its `next()`, as a slow one does."""

    @override
    def _stay(self) -> None:
        assert self.go.wait(WAIT)


def queue_is_full(_: pytest.MonkeyPatch) -> State:
    return State(3)  # pulled as the last that may be: one more than prefetch_batches


def queue_is_empty(_: pytest.MonkeyPatch) -> State:
    return Inside(1)


def inside_next(_: pytest.MonkeyPatch) -> State:
    return Inside(2)


def inside_copy(monkeypatch: pytest.MonkeyPatch) -> State:
    """The loader thread is copying a batch's bytes to pinned memory."""
    source, move, moved = State(99), streamloader.pack._memmove_locked, []

    def slow(*args: int) -> object:
        moved.append(args)
        if len(moved) == 3:
            source.there.set()
            assert source.go.wait(WAIT)
        return move(*args)

    monkeypatch.setattr(streamloader.pack, "_memmove_locked", slow)
    return source


def waiting_for_a_slab(monkeypatch: pytest.MonkeyPatch) -> State:
    """The loader thread waits for pinned memory, which the caller would have to give back."""
    source = State(99)
    take = streamloader.slabs.Slabs.take

    def noted(self: Any, nbytes: int, until: Callable[[], bool]) -> Tensor | None:
        if self._count and self._best(nbytes) is None:
            source.there.set()
        return take(self, nbytes, until)

    monkeypatch.setattr(streamloader.slabs.Slabs, "take", noted)
    return source


STATES = [queue_is_full, queue_is_empty, inside_next, inside_copy, waiting_for_a_slab]


LIMIT = 5.0
"""Seconds that leaving may take on a busy machine, and that no wait below is near to."""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["close", "del"])
@pytest.mark.parametrize("state", STATES)
def test_c06_leaving_is_quick_in_every_state(
    state: Callable[[pytest.MonkeyPatch], State], how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a thread that waits, it is quick if it wakes it; of a busy one, if it does not wait long.

    How long it waits for it is set here: far longer than the limit, or far less.
    """
    waits = state in (queue_is_full, waiting_for_a_slab)
    monkeypatch.setattr(streamloader.source, "JOIN_SECONDS", 4 * LIMIT if waits else LIMIT / 50)
    source = state(monkeypatch)
    device = FakeDevice(looks=50 if state is waiting_for_a_slab else 0)
    loader = StreamLoader(source, device)
    iterator = iter(loader)
    next(iterator)
    if state is waiting_for_a_slab:
        next(iterator)
    assert source.there.wait(WAIT)
    start = time.monotonic()
    if how == "close":
        loader.close()
        loader.close()
    else:
        del iterator
    assert time.monotonic() - start < LIMIT
    source.go.set()
    for thread in threads():
        thread.join(WAIT)
    assert threads() == []
    monkeypatch.undo()
    source.stop = 99
    device._looks = 0
    assert ids(loader) == list(range(30))
