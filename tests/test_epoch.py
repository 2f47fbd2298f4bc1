"""One pass with look-ahead, on a device that keeps its promises as late as it may."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from typing_extensions import override

import streamloader.epoch
from streamloader import StreamLoader
from streamloader.context import Context
from streamloader.device import resolve
from streamloader.epoch import Epoch, inline
from streamloader.pack import Packer
from streamloader.slabs import Slabs
from streamloader.source import Source
from streamloader.stages import Pipeline
from streamloader.stats import Meter
from streamloader.testing import FakeDevice, FakeEvent, FakeStream
from streamloader.window import Window
from tests.loaders import batches, fill, ids, number_of

WAIT = 10.0
CONTEXT = Context(0, 0, 0, 0)


class Watched(FakeDevice):
    """Numbers the events that are recorded on the caller's stream, and those seen complete.

    Attributes:
        seen: The latest ask that the host has seen complete, -1 before any.
        launches: For each copy, `seen` when it was submitted.
    """

    def __init__(self, looks: int = 0) -> None:
        super().__init__(looks)
        self.asks: dict[int, int] = {}
        self.events: list[FakeEvent] = []
        self.seen = -1
        self.launches: list[int] = []

    @override
    def record(self, stream: FakeStream) -> FakeEvent:
        event = super().record(stream)
        if stream.name == "default":
            self.asks[id(event)] = len(self.events)
            self.events.append(event)  # kept, so that ids stay unique
        return event

    @override
    def done(self, event: Any) -> bool:
        done = super().done(event)
        if done and id(event) in self.asks:
            self.seen = max(self.seen, self.asks[id(event)])
        return done

    @override
    def copy(self, destination: Tensor, source: Tensor) -> None:
        self.launches.append(self.seen)
        super().copy(destination, source)


class Failing(FakeDevice):
    """Fails at one `arena` or `copy`, counted from 0."""

    def __init__(self, verb: str, at: int) -> None:
        super().__init__()
        self._verb, self._at = verb, at

    def _count(self, verb: str) -> None:
        if verb == self._verb:
            self._at -= 1
            if self._at == -1:
                raise MemoryError(f"no {verb}")

    @override
    def arena(self, nbytes: int) -> Tensor:
        self._count("arena")
        return super().arena(nbytes)

    @override
    def copy(self, destination: Tensor, source: Tensor) -> None:
        super().copy(destination, source)
        self._count("copy")


def make(
    items: Iterable[Any],
    device: FakeDevice,
    *,
    depth: int = 2,
    slabs: Slabs | None = None,
    meter: Meter | None = None,
) -> Epoch:
    iterator = iter(items)
    slabs = slabs or Slabs(device, depth + 2)
    return Epoch(
        iterator,
        [next(iterator)],
        pack=Packer(device, slabs.take, fresh=False, pinned=False),
        pipeline=Pipeline(device, []),
        device=device,
        slabs=slabs,
        window=Window(device, depth),
        depth=depth,
        context=CONTEXT,
        meter=meter or Meter(),
    )


def wait_for_batches(epoch: Epoch, count: int) -> None:
    """Waits until so many have come that were not handed over."""
    with epoch.slabs.changed:
        assert epoch.slabs.changed.wait_for(
            lambda: len(epoch.source._items) + len(epoch._launched) >= count, WAIT
        )


# -- the ask window ------------------------------------------------------------------------------


@pytest.mark.parametrize("looks", [0, 1, 3, 10])
@pytest.mark.parametrize("depth", [1, 2, 3])
def test_batch_i_is_launched_only_after_ask_i_minus_depth_is_seen(depth: int, looks: int) -> None:
    device = Watched(looks)
    assert ids(make(batches(12), device, depth=depth).batches()) == list(range(12))
    assert len(device.launches) == 12
    for number, seen in enumerate(device.launches):
        assert seen >= number - depth


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_while_the_device_is_held_exactly_depth_batches_come(depth: int) -> None:
    device = Watched()
    stream = device.current()
    stream.held = True
    got: list[int] = []
    last, over = threading.Event(), threading.Event()

    def consume() -> None:
        with device.on(stream):
            for batch in make(batches(8), device, depth=depth).batches():
                got.append(number_of(batch))
                if len(got) == depth:
                    last.set()
        over.set()

    thread = threading.Thread(target=consume, daemon=True)
    thread.start()
    assert last.wait(WAIT)
    assert not over.wait(0.05)
    assert got == list(range(depth))
    assert len(device.launches) == depth
    stream.held = False
    assert over.wait(WAIT)
    assert got == list(range(8))


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_memory_on_the_device_is_bounded_when_batches_are_dropped(depth: int) -> None:
    device = FakeDevice()
    most = 0
    for batch in make(batches(30), device, depth=depth).batches():
        del batch
        most = max(most, device.arenas)
    assert most <= depth + 2


def test_an_ask_waits_for_the_stream_that_took_the_batch_before() -> None:
    device = Watched()
    side = device.stream("side")
    epoch = make(batches(6), device, depth=1)
    passes = epoch.batches()
    with device.on(side):
        assert number_of(next(passes)) == 0
    device.log.clear()
    assert number_of(next(passes)) == 1
    assert ("record", "side") in device.log
    assert ("record", "default") in device.log
    epoch.close()


def test_a_batch_of_nothing_but_labels_takes_no_slab() -> None:
    device = FakeDevice()
    assert list(make(["a", "b", "c", "d"], device).batches()) == ["a", "b", "c", "d"]
    assert device.verbs("slab") == []
    assert device.verbs("copy") == []


# -- slabs ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("looks", [0, 3])
def test_a_pass_makes_no_more_slabs_than_its_limit(depth: int, looks: int) -> None:
    device = FakeDevice(looks)
    assert ids(make(batches(40), device, depth=depth).batches()) == list(range(40))
    assert 1 <= len(device.verbs("slab")) <= depth + 2


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("sizes", [range(1, 30), range(30, 1, -1), [1, 29] * 15, [7, 7, 29] * 8])
def test_batches_of_varying_sizes_come_through(depth: int, sizes: Any) -> None:
    items = [fill(number, size) for number, size in enumerate(sizes)]
    got = list(make(items, FakeDevice(2), depth=depth).batches())
    assert [batch.tolist() for batch in got] == [item.tolist() for item in items]


@pytest.mark.slow
@pytest.mark.parametrize("looks", [0, 3])
@pytest.mark.parametrize("read", [1, 2])
def test_slabs_are_given_back_on_early_close(looks: int, read: int) -> None:
    device = FakeDevice(looks)
    loader = StreamLoader(batches(9), device)
    for _ in range(200):
        iterator = iter(loader)
        assert [number_of(next(iterator)) for _ in range(read)] == list(range(read))
        del iterator
    assert len(device.verbs("slab")) == 4
    assert ids(loader) == list(range(9))


def test_slabs_are_given_back_when_the_pass_ends_itself() -> None:
    device = FakeDevice()
    loader = StreamLoader(batches(3), device, prefetch_batches=3)
    for _ in range(50):
        assert ids(loader) == [0, 1, 2]
    assert len(device.verbs("slab")) <= 5


def test_slabs_are_given_back_when_the_transform_fails() -> None:
    def fail(batch: Tensor) -> Tensor:
        if batch[0] == 1:
            raise ValueError("at one")
        return batch

    device = FakeDevice()
    loader = StreamLoader(batches(8), device, transform=fail)
    for _ in range(50):
        iterator = iter(loader)
        assert number_of(next(iterator)) == 0
        with pytest.raises(ValueError, match=r"^at one"):
            next(iterator)
    assert len(device.verbs("slab")) == 4


@pytest.mark.parametrize("verb", ["arena", "copy"])
def test_a_failure_while_sending_lends_the_slab_until_the_copy_is_over(verb: str) -> None:
    device = Failing(verb, 2)
    slabs = Slabs(device, 4)
    epoch = make(batches(8), device, slabs=slabs)
    passes = epoch.batches()
    assert [number_of(next(passes)) for _ in range(2)] == [0, 1]
    with pytest.raises(MemoryError, match=rf"^no {verb}$"):
        next(passes)
    assert list(passes) == []
    assert epoch.close()
    slabs.serve()
    assert not slabs.busy
    again = make(batches(8), device, slabs=slabs)  # no slab is missing
    assert ids(again.batches()) == list(range(8))
    assert len(device.verbs("slab")) == 4


def test_a_slab_that_was_lent_is_not_written_before_the_host_saw_its_copy_complete() -> None:
    device = FakeDevice(looks=50)
    assert ids(make(batches(20), device, depth=3).batches()) == list(range(20))


# -- ends ----------------------------------------------------------------------------------------


def test_close_is_idempotent_and_ends_the_thread() -> None:
    epoch = make(batches(9), FakeDevice())
    passes = epoch.batches()
    assert number_of(next(passes)) == 0
    assert epoch.close()
    assert epoch.close()
    assert not epoch.source.alive


def test_a_closed_pass_gives_nothing_more_though_batches_were_launched() -> None:
    epoch = make(batches(9), FakeDevice(), depth=2)
    passes = epoch.batches()
    assert number_of(next(passes)) == 0
    wait_for_batches(epoch, 2)
    assert number_of(next(passes)) == 1
    assert epoch._launched

    epoch.close()

    with pytest.raises(
        RuntimeError,
        match=r"^this pass ended because StreamLoader\.close\(\) was called during it$",
    ):
        next(passes)
    assert list(passes) == []


def test_closing_gives_back_the_slabs_of_batches_that_were_not_launched() -> None:
    device = FakeDevice()
    device.current().held = True  # batches 0 and 1 are admitted, and no others
    slabs = Slabs(device, 4)
    epoch = make(batches(9), device, slabs=slabs)
    next(epoch.batches())
    wait_for_batches(epoch, 3)
    assert epoch.source._items

    assert epoch.close()
    slabs.serve()

    assert len(slabs._free) == 4


def test_close_does_not_wait_for_a_caller_who_stays_inside_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(streamloader.epoch, "JOIN_SECONDS", 0.01)
    epoch = make(batches(9), FakeDevice())

    with epoch._inside:  # as during next()
        assert not epoch.close()

    assert epoch.close()


def test_close_before_the_first_batch_gives_all_slabs_back() -> None:
    device = FakeDevice()
    slabs = Slabs(device, 4)
    for _ in range(20):
        assert make(batches(9), device, slabs=slabs).close()
    assert ids(make(batches(9), device, slabs=slabs).batches()) == list(range(9))
    assert len(device.verbs("slab")) == 4


def test_an_error_comes_after_the_batches_before_it_and_then_the_pass_is_over() -> None:
    def source() -> Iterator[Tensor]:
        yield from batches(3)
        raise LookupError("gone")

    for depth in (1, 2, 3, 5):
        passes = make(source(), FakeDevice(1), depth=depth).batches()
        assert [number_of(next(passes)) for _ in range(3)] == [0, 1, 2]
        with pytest.raises(LookupError, match=r"^gone$"):
            next(passes)
        assert list(passes) == []


def test_closing_while_the_caller_is_about_to_wait_wakes_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The moment between looking whether the pass is closed, and waiting for news of it."""
    never, over = threading.Event(), threading.Event()

    def source() -> Iterator[Tensor]:
        yield fill(0)
        never.wait(WAIT)

    epoch = make(source(), FakeDevice(), depth=1)
    passes = epoch.batches()
    assert number_of(next(passes)) == 0
    epoch.slabs.serve()
    assert not epoch.slabs.busy  # with nothing to look at, the caller waits until it is told
    wait = Source.wait

    def late(self: Source, *arguments: Any) -> float:
        closer = threading.Thread(target=self.stop)
        closer.start()
        closer.join(WAIT)
        return wait(self, *arguments)

    monkeypatch.setattr(Source, "wait", late)

    def consume() -> None:
        with contextlib.suppress(RuntimeError):
            next(passes, None)
        over.set()

    threading.Thread(target=consume, daemon=True).start()
    woken = over.wait(1)
    never.set()
    epoch.close()
    epoch.source.stop()  # wakes it now, at the latest
    assert over.wait(WAIT)
    assert woken


# -- what was waited for -------------------------------------------------------------------------


def test_waiting_for_the_device_is_counted_apart() -> None:
    meter = Meter()
    epoch = make(["no", "bytes", "so", "no", "slab"], FakeDevice(looks=200), depth=1, meter=meter)
    passes = epoch.batches()
    next(passes)
    for _ in range(100):
        if epoch.source.peek() is not None:
            break
        epoch.source.wait(lambda: epoch.source.peek() is not None, 0.1)
    assert epoch.source.peek() is not None  # from here on, only the device is late
    before = meter.counts()
    next(passes)
    after = meter.counts()
    epoch.close()
    waited = after.device_seconds - before.device_seconds
    assert waited > 0
    assert after.source_seconds - before.source_seconds < waited


def test_waiting_for_the_source_is_counted_apart() -> None:
    go = threading.Event()

    def source() -> Iterator[Tensor]:
        yield fill(0)
        go.wait(WAIT)
        yield fill(1)

    meter = Meter()
    passes = make(source(), FakeDevice(), depth=2, meter=meter).batches()
    next(passes)
    before = meter.counts()
    timer = threading.Timer(0.1, go.set)
    timer.start()
    next(passes)
    timer.join(WAIT)
    after = meter.counts()
    assert after.source_seconds - before.source_seconds > 0.05
    assert after.device_seconds - before.device_seconds < 0.05


# -- inline --------------------------------------------------------------------------------------


def test_inline_pulls_nothing_ahead_and_does_all_in_the_callers_thread() -> None:
    threads: set[int] = set()
    pulled: list[int] = []

    def source() -> Iterator[Tensor]:
        for number in range(4):
            threads.add(threading.get_ident())
            pulled.append(number)
            yield fill(number)

    def transform(batch: Tensor) -> Tensor:
        threads.add(threading.get_ident())
        return batch + 10

    device = resolve(torch.device("cpu"))
    meter = Meter()
    passes = inline(source(), Pipeline(device, [transform]), lambda batch: batch, CONTEXT, meter)
    assert pulled == []
    for number in range(4):
        assert number_of(next(passes)) == number + 10
        assert len(pulled) == number + 1
    assert list(passes) == []
    assert threads == {threading.get_ident()}
    assert meter.batches == 4
    assert meter.device_seconds == 0


def test_a_pass_that_could_pin_nothing_leaves_no_error_to_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    device = FakeDevice()
    loader = StreamLoader(batches(4), device)
    with monkeypatch.context() as patched:

        def full(nbytes: int) -> Tensor:
            raise RuntimeError(f"no room for {nbytes}")

        patched.setattr(device, "slab", full)
        with pytest.raises(RuntimeError, match=r"^no room for \d+$"):
            next(iter(loader))
    assert [number_of(batch) for batch in loader] == [0, 1, 2, 3]
