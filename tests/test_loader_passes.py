"""Passes over the loader: order, number, over-read, ends, errors, closing, exit."""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import re
import signal
import subprocess
import sys
import textwrap
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import webdataset
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader
from typing_extensions import override

import streamloader.source
from streamloader import StreamLoader
from streamloader.source import Source
from streamloader.testing import FakeDevice
from tests.loaders import SWEPT, Recording, batches, devices, ended, fill, ids, number_of

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata's

WAIT = 10.0
ROOT = Path(__file__).parent.parent
AHEAD = SWEPT[1:]


class Numbers(Dataset[Tensor]):
    """Samples 0, 1, ...; the one that is `bad` raises."""

    def __init__(self, count: int, bad: int = -1) -> None:
        self.count, self.bad = count, bad

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Tensor:
        if index == self.bad:
            raise LookupError(f"sample {index}")
        return torch.full((3,), index)


class Stream(IterableDataset[Tensor]):
    """The same as a stream, shared out among workers by batches of one worker each."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[Tensor]:
        info = torch.utils.data.get_worker_info()
        first, step = (0, 1) if info is None else (info.id, info.num_workers)
        return (torch.full((3,), number) for number in range(first, self.count, step))


class Gate:
    """A source that stops inside `next()` after `open` batches, until `go`."""

    def __init__(self, count: int, opened: int) -> None:
        self.count, self.opened = count, opened
        self.inside, self.go, self.left = (threading.Event() for _ in range(3))

    def __iter__(self) -> Iterator[Tensor]:
        try:
            for number in range(self.count):
                if number == self.opened:
                    self.inside.set()
                    assert self.go.wait(WAIT)
                yield fill(number)
        finally:
            self.left.set()


_before: set[threading.Thread] = set()


@pytest.fixture(autouse=True)
def _only_own_threads() -> None:
    """A failed test's pass lives on in its traceback: that is not to fail the tests after it."""
    _before.clear()
    _before.update(threading.enumerate())


def threads() -> list[threading.Thread]:
    """The loader threads that this test has started and that are alive."""
    alive = set(threading.enumerate()) - _before
    return [thread for thread in alive if thread.name == "streamloader"]


def settle() -> None:
    """Lets the loader threads that were told to end do so."""
    for thread in threads():
        thread.join(WAIT)


def plainly(loader: Any) -> list[list[Any]]:
    return [batch.tolist() for batch in loader]


SOURCES: dict[str, Callable[[int], Any]] = {
    "list": batches,
    "recording": lambda n: Recording(batches(n)),
    "generator": lambda n: (fill(i) for i in range(n)),
    "map": lambda n: DataLoader(Numbers(3 * n), batch_size=3),
    "map, partial": lambda n: DataLoader(Numbers(max(3 * n - 1, 0)), batch_size=3),
    "iterable": lambda n: DataLoader(Stream(2 * n), batch_size=2),
    "ready": lambda n: DataLoader(Stream(n), batch_size=None),
    "web": lambda n: webdataset.WebLoader(Stream(n), batch_size=None),
    "stateful": lambda n: StatefulDataLoader(Numbers(3 * n), batch_size=3),
}

WORKERS: dict[str, Callable[[], Any]] = {
    "map": lambda: DataLoader(Numbers(11), batch_size=2, num_workers=2),
    "persistent": lambda: DataLoader(
        Numbers(11), batch_size=2, num_workers=2, persistent_workers=True
    ),
    "iterable": lambda: DataLoader(Stream(11), batch_size=2, num_workers=2),
    "ready": lambda: DataLoader(Stream(7), batch_size=None, num_workers=2),
    "web": lambda: webdataset.WebLoader(Stream(7), batch_size=None, num_workers=1),
    "stateful": lambda: StatefulDataLoader(Numbers(11), batch_size=2, num_workers=2),
}


# -- the same batches ----------------------------------------------------------------------------


@pytest.mark.parametrize("make_device", devices())
@pytest.mark.parametrize("depth", SWEPT)
@pytest.mark.parametrize("kind", SOURCES)
def test_d02_d04_the_same_batches_for_every_number_of_them(
    kind: str, depth: int, make_device: Any
) -> None:
    for count in (0, 1, 2, 3, 4, 5, 9):
        expected = plainly(SOURCES[kind](count))
        loader = StreamLoader(SOURCES[kind](count), make_device(), prefetch_batches=depth)
        assert plainly(loader) == expected


@pytest.mark.slow
@pytest.mark.parametrize("depth", [0, 2])
@pytest.mark.parametrize("kind", WORKERS)
def test_the_same_batches_from_workers_in_two_passes(kind: str, depth: int) -> None:
    expected = plainly(WORKERS[kind]())
    loader = StreamLoader(WORKERS[kind](), prefetch_batches=depth)
    assert plainly(loader) == expected
    assert plainly(loader) == expected
    assert threads() == []


@pytest.mark.parametrize("depth", SWEPT)
def test_the_same_shuffle_and_the_same_generator_afterwards(depth: int) -> None:
    def loader() -> DataLoader[Tensor]:
        return DataLoader(Numbers(20), batch_size=3, shuffle=True)

    torch.manual_seed(5)
    expected = plainly(loader()), torch.rand(3).tolist()
    torch.manual_seed(5)
    assert (plainly(StreamLoader(loader(), prefetch_batches=depth)), torch.rand(3).tolist()) == (
        expected
    )


def test_the_same_seeds_in_workers_as_with_the_plain_loader() -> None:
    class Random(Numbers):
        def __getitem__(self, index: int) -> Tensor:
            return torch.rand(2)

    def loader() -> DataLoader[Tensor]:
        return DataLoader(Random(6), batch_size=2, num_workers=1)

    torch.manual_seed(5)
    expected = plainly(loader())
    torch.manual_seed(5)
    assert plainly(StreamLoader(loader())) == expected


@pytest.mark.parametrize("depth", SWEPT)
def test_d03_every_pass_starts_anew(depth: int) -> None:
    loader = StreamLoader(DataLoader(Numbers(9), batch_size=3), prefetch_batches=depth)
    whole = plainly(loader)
    assert len(whole) == 3
    for read in range(4):
        for number, _ in enumerate(loader):
            if number == read:
                break
        assert plainly(loader) == whole


@pytest.mark.parametrize("depth", SWEPT)
def test_d03_a_generator_has_one_pass(depth: int) -> None:
    loader = StreamLoader((fill(number) for number in range(5)), prefetch_batches=depth)
    assert ids(loader) == [0, 1, 2, 3, 4]
    assert ids(loader) == []


@pytest.mark.parametrize("make_device", devices())
@pytest.mark.parametrize("depth", SWEPT)
def test_d04_an_empty_loader_yields_nothing_and_can_be_filled(depth: int, make_device: Any) -> None:
    items: list[Tensor] = []
    loader = StreamLoader(items, make_device(), prefetch_batches=depth)
    assert ids(loader) == ids(loader) == []
    items.extend(batches(2))
    assert ids(loader) == [0, 1]


@pytest.mark.parametrize("depth", SWEPT)
def test_d06_two_live_passes_are_independent(depth: int) -> None:
    loader = StreamLoader(DataLoader(Numbers(8), batch_size=2), prefetch_batches=depth)
    pairs = list(zip(loader, loader, strict=True))
    assert len(pairs) == 4
    assert all(torch.equal(one, other) for one, other in pairs)
    first = iter(loader)
    next(first)
    second = iter(loader)
    assert next(second)[0, 0] == 0
    assert next(first)[0, 0] == 2
    assert next(second)[0, 0] == 2


@pytest.mark.parametrize("depth", SWEPT)
def test_d07_a_pass_that_was_given_up_never_shows_in_the_next(depth: int) -> None:
    device = FakeDevice(looks=2)
    loader = StreamLoader(batches(9), device, prefetch_batches=depth)
    iterator = iter(loader)
    kept = [next(iterator) for _ in range(3)]
    assert ids(loader) == list(range(9))
    assert [number_of(batch) for batch in kept] == [0, 1, 2]
    assert ids(iterator) == [3, 4, 5, 6, 7, 8]


def test_d06_a_second_live_pass_over_a_generator_is_an_error() -> None:
    loader = StreamLoader((fill(number) for number in range(9)), prefetch_batches=1)
    iterator = iter(loader)
    next(iterator)
    with pytest.raises(RuntimeError, match=r"^a second pass over this generator cannot start"):
        next(iter(loader))
    assert ids(iterator) == list(range(1, 9))


def test_d06_a_second_live_pass_over_persistent_workers_is_an_error() -> None:
    plain = DataLoader(Numbers(40), batch_size=2, num_workers=1, persistent_workers=True)
    loader = StreamLoader(plain, prefetch_batches=1)
    iterator = iter(loader)
    assert next(iterator)[0, 0] == 0
    with pytest.raises(RuntimeError, match=r"^a second pass over this DataLoader cannot start"):
        next(iter(loader))
    assert [int(batch[0, 0]) for batch in iterator] == list(range(2, 40, 2))
    for batch in loader:  # left early, and started again at once
        assert batch[0, 0] == 0
        break
    assert [int(batch[0, 0]) for batch in loader] == list(range(0, 40, 2))


@pytest.mark.parametrize("make", [SOURCES["map"], SOURCES["stateful"], SOURCES["web"]])
def test_g03_wrapping_a_used_loader_starts_anew(make: Any) -> None:
    plain = make(4)
    expected = plainly(plain)
    assert plainly(StreamLoader(plain)) == expected
    assert plainly(plain) == expected


def test_d06_a_second_live_pass_over_a_web_loaders_persistent_workers_is_an_error() -> None:
    plain = webdataset.WebLoader(
        Stream(12), batch_size=None, num_workers=1, persistent_workers=True
    )
    loader = StreamLoader(plain, prefetch_batches=1)
    iterator = iter(loader)
    next(iterator)
    with pytest.raises(RuntimeError, match=r"^a second pass over this WebLoader cannot start"):
        next(iter(loader))


# -- how far ahead -------------------------------------------------------------------------------


@pytest.mark.parametrize("make_device", devices())
@pytest.mark.parametrize("depth", SWEPT)
def test_over_read_is_at_most_depth_and_one(depth: int, make_device: Any) -> None:
    source = Recording(batches(30))
    loader = StreamLoader(source, make_device(), prefetch_batches=depth)
    for taken, _ in enumerate(loader, start=1):
        assert source.pulls <= taken + (depth + 1 if depth else 0)
        if taken == 12:
            break
    assert source.pulls <= 12 + (depth + 1 if depth else 0)
    settle()
    assert source.ended == 0


@pytest.mark.parametrize("depth", AHEAD)
def test_it_does_read_ahead_while_the_caller_is_busy(depth: int) -> None:
    gate = Gate(20, opened=1 + depth)
    loader = StreamLoader(gate, prefetch_batches=depth)
    iterator = iter(loader)
    assert number_of(next(iterator)) == 0
    assert gate.inside.wait(WAIT)  # batches 1 to depth have come meanwhile
    gate.go.set()


@pytest.mark.parametrize("depth", SWEPT)
def test_iter_does_no_work(depth: int) -> None:
    source = Recording(batches(3))
    device = FakeDevice()
    loader = StreamLoader(source, device, prefetch_batches=depth)
    iterator = iter(loader)
    assert (source.passes, source.pulls, device.log, threads()) == (0, 0, [], [])
    del iterator
    assert (source.passes, threads()) == (0, [])


@pytest.mark.parametrize("depth", SWEPT)
def test_iter_and_the_first_batch_are_got_on_the_callers_thread(depth: int) -> None:
    where: list[threading.Thread] = []

    class Source:
        def __iter__(self) -> Iterator[Tensor]:
            where.append(threading.current_thread())
            return self.batches()

        def batches(self) -> Iterator[Tensor]:
            for number in range(4):
                where.append(threading.current_thread())
                yield fill(number)

    assert ids(StreamLoader(Source(), prefetch_batches=depth)) == [0, 1, 2, 3]
    here = threading.current_thread()
    assert where[:2] == [here, here]
    if depth:
        assert len({*where[2:]}) == 1
        assert here not in where[2:]
    else:
        assert {*where} == {here}


def test_inline_starts_no_thread_and_records_no_event(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: threading.Thread) -> None:
        raise AssertionError("a thread was started")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    device = FakeDevice()
    assert ids(StreamLoader(batches(4), device, prefetch_batches=0)) == [0, 1, 2, 3]
    assert {verb for verb, *_ in device.log} <= {"stream"}


@pytest.mark.parametrize("make_device", devices())
@pytest.mark.parametrize("depth", SWEPT)
def test_a_batch_that_the_caller_drops_is_gone(depth: int, make_device: Any) -> None:
    """As with the plain loader: the suspended pass holds nothing of it."""
    plain = DataLoader(Numbers(12), batch_size=2)
    iterator: Any
    for iterator in (iter(plain), iter(StreamLoader(plain, make_device(), prefetch_batches=depth))):
        batch = next(iterator)
        gone = weakref.ref(batch)
        del batch
        assert gone() is None


def test_disabled_it_is_the_plain_loader(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STREAMLOADER_DISABLE", "1")
    source = Recording(batches(5))
    seen: list[int] = []

    def transform(batch: Tensor) -> Tensor:
        assert threading.current_thread() is threading.main_thread()
        seen.append(source.pulls)
        return batch + 1

    assert ids(StreamLoader(source, "cpu", transform=transform)) == [1, 2, 3, 4, 5]
    assert seen == [1, 2, 3, 4, 5]
    assert threads() == []


# -- the end -------------------------------------------------------------------------------------


@pytest.mark.parametrize("make_device", devices())
@pytest.mark.parametrize("depth", SWEPT)
def test_after_the_end_next_keeps_raising_stop_iteration(depth: int, make_device: Any) -> None:
    class Restless:
        """Has more to give after its end, as iterators should not."""

        calls = 0

        def __iter__(self) -> Restless:
            return self

        def __next__(self) -> Tensor:
            self.calls += 1
            if self.calls == 3:
                raise StopIteration
            return fill(self.calls)

    source = Restless()
    iterator = iter(StreamLoader(source, make_device(), prefetch_batches=depth))
    assert ids(iterator) == [1, 2]
    for _ in range(3):
        assert next(iterator, None) is None
    assert source.calls == 3


@pytest.mark.slow
@pytest.mark.parametrize("depth", SWEPT)
@pytest.mark.parametrize("make_device", devices())
def test_c05_whole_passes_leave_nothing_behind(depth: int, make_device: Any) -> None:
    loader = StreamLoader(batches(3), make_device(), prefetch_batches=depth)
    gc.collect()
    for _ in range(60):
        assert ids(loader) == [0, 1, 2]
        assert threads() == []
    assert len(loader._pools) <= 1


@pytest.mark.parametrize("depth", SWEPT)
@pytest.mark.parametrize("make_device", devices())
def test_c01_leaving_early_leaves_no_thread(depth: int, make_device: Any) -> None:
    loader = StreamLoader(Recording(batches(50)), make_device(), prefetch_batches=depth)
    for _ in range(60):
        for _ in loader:
            break
        next(iter(loader))
        iterator = iter(loader)
        next(iterator)
        next(iterator)
        del iterator
        with contextlib.suppress(ZeroDivisionError):
            for _ in loader:
                _ = 1 / 0
        assert threads() == []
    assert len(loader._pools) <= 2  # in the last, the error's traceback holds a pass for a moment


@pytest.mark.parametrize("depth", SWEPT)
def test_c01_the_sources_own_cleanup_has_run_when_the_loop_is_left(depth: int) -> None:
    gate = Gate(20, opened=99)
    for _ in StreamLoader(gate, prefetch_batches=depth):
        break
    assert gate.left.is_set()


@pytest.mark.parametrize("depth", [0, 2])
def test_c01_leaving_early_leaves_no_worker(depth: int) -> None:
    loader = StreamLoader(
        DataLoader(Numbers(40), batch_size=2, num_workers=1), prefetch_batches=depth
    )
    for _ in range(3):
        for _ in loader:
            break
        assert multiprocessing.active_children() == []
        assert threads() == []


def test_b03_descriptors_of_worker_batches_are_let_go_once_they_are_sent() -> None:
    class Many(Numbers):
        def __getitem__(self, index: int) -> Any:
            return [torch.full((3,), index) for _ in range(10)]

    def most(loader: Any) -> int:
        kept, counts = [], []
        for batch in loader:
            kept.append(batch)
            counts.append(len(os.listdir("/proc/self/fd")))  # noqa: PTH208
        return max(counts[2:]) - min(counts[2:])

    plain = DataLoader(Many(60), batch_size=2, num_workers=1)
    if torch.multiprocessing.get_sharing_strategy() == "file_descriptor":
        assert most(plain) > 100  # the scenario can fail
    assert most(StreamLoader(plain, FakeDevice(), prefetch_batches=3)) <= 100


# -- errors --------------------------------------------------------------------------------------


@pytest.mark.parametrize("make_device", devices())
@pytest.mark.parametrize("depth", SWEPT)
@pytest.mark.parametrize("good", [0, 1, 2, 5])
@pytest.mark.parametrize("kind", [LookupError, KeyboardInterrupt, SystemExit])
def test_c02_an_error_in_the_source_comes_after_the_batches_before_it(
    depth: int, good: int, kind: type[BaseException], make_device: Any
) -> None:
    def source() -> Iterator[Tensor]:
        yield from batches(good)
        raise kind("boom")

    iterator = iter(StreamLoader(source(), make_device(), prefetch_batches=depth))
    for number in range(good):
        assert number_of(next(iterator)) == number
    with pytest.raises(kind, match=r"^boom$") as caught:
        next(iterator)
    assert traceback.extract_tb(caught.value.__traceback__)[-1].name == "source"
    assert list(iterator) == []
    settle()
    assert threads() == []


@pytest.mark.parametrize("make_device", devices())
@pytest.mark.parametrize("depth", SWEPT)
@pytest.mark.parametrize("good", [0, 1, 2, 5])
def test_c02_an_error_in_a_transform_comes_after_the_batches_before_it(
    depth: int, good: int, make_device: Any
) -> None:
    seen: list[int] = []

    def broken(batch: Tensor) -> Tensor:
        seen.append(number_of(batch))
        if batch[0] == good:
            raise LookupError("boom")
        return batch

    source = Recording(batches(12))
    loader = StreamLoader(source, make_device(), transform=broken, prefetch_batches=depth)
    iterator = iter(loader)
    for number in range(good):
        assert number_of(next(iterator)) == number
    with pytest.raises(LookupError, match=r"^boom") as caught:
        next(iterator)
    assert traceback.extract_tb(caught.value.__traceback__)[-1].name == "broken"
    assert list(iterator) == []
    assert seen == list(range(good + 1))  # nothing after it, nothing twice
    settle()
    assert threads() == []


@pytest.mark.parametrize("depth", SWEPT)
def test_c02_an_error_of_iter_is_the_callers(depth: int) -> None:
    class Broken:
        def __iter__(self) -> Iterator[Tensor]:
            raise LookupError("no iterator")

    iterator = iter(StreamLoader(Broken(), prefetch_batches=depth))
    with pytest.raises(LookupError, match=r"^no iterator$"):
        next(iterator)
    assert list(iterator) == []


@pytest.mark.parametrize("depth", [0, 2])
@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_c02_an_error_in_a_dataset_has_its_own_type(depth: int, workers: int) -> None:
    plain = DataLoader(Numbers(10, bad=5), batch_size=2, num_workers=workers)
    got: list[int] = []
    with pytest.raises(LookupError, match=r"sample 5"):
        got.extend(int(batch[0, 0]) for batch in StreamLoader(plain, prefetch_batches=depth))
    assert got == [0, 2]
    assert ids_or_error(StreamLoader(plain, prefetch_batches=depth)) == [0, 2]
    gc.collect()  # a DataLoader that raised joins its workers only now, for 5 s, wrapped or not


def ids_or_error(loader: Any) -> list[int]:
    got: list[int] = []
    with contextlib.suppress(LookupError):
        got.extend(int(batch[0, 0]) for batch in loader)
    return got


@pytest.mark.parametrize("depth", SWEPT)
def test_c02_the_loader_can_be_used_after_an_error(depth: int) -> None:
    bad = [True]

    class Sometimes:
        def __iter__(self) -> Iterator[Tensor]:
            yield fill(0)
            if bad[0]:
                raise LookupError("boom")
            yield fill(1)

    loader = StreamLoader(Sometimes(), FakeDevice(), prefetch_batches=depth)
    with pytest.raises(LookupError, match=r"^boom$"):
        ids(loader)
    bad[0] = False
    assert ids(loader) == [0, 1]


# -- closing -------------------------------------------------------------------------------------


@pytest.mark.parametrize("make_device", devices())
@pytest.mark.parametrize("depth", SWEPT)
def test_close_is_idempotent_and_the_loader_can_be_used_again(depth: int, make_device: Any) -> None:
    loader = StreamLoader(batches(9), make_device(), prefetch_batches=depth)
    loader.close()
    for _ in range(3):
        iterator = iter(loader)
        assert number_of(next(iterator)) == 0
        loader.close()
        loader.close()
        assert threads() == []
        assert ids(loader) == list(range(9))


@pytest.mark.parametrize("depth", SWEPT)
def test_with_closes_also_after_an_error(depth: int) -> None:
    loader = StreamLoader(batches(9), FakeDevice(), prefetch_batches=depth)
    kept: list[Any] = []
    for _ in range(2):
        with contextlib.suppress(LookupError), loader as entered:
            assert entered is loader
            kept.append(iter(entered))
            next(kept[-1])
            raise LookupError
        assert threads() == []
    assert loader._pools == []


@pytest.mark.slow
@pytest.mark.parametrize("make_device", devices())
def test_c06_close_from_another_thread_ends_a_blocked_next(make_device: Any) -> None:
    gate = Gate(9, opened=1)
    loader = StreamLoader(gate, make_device())
    outcome: list[str] = []

    def consume() -> None:
        with pytest.raises(RuntimeError, match=r"^this pass ended because .*close\(\) was called"):
            outcome.extend(str(number) for number in ids(loader))
        outcome.append("over")

    thread = threading.Thread(target=consume, daemon=True)
    thread.start()
    assert gate.inside.wait(WAIT)
    start = time.monotonic()
    loader.close()
    thread.join(WAIT)
    assert time.monotonic() - start < 3
    assert outcome == ["over"]
    gate.go.set()
    settle()
    assert gate.left.is_set()
    gate.opened = 99
    assert ids(loader) == list(range(9))


@pytest.mark.slow
def test_c06_nothing_is_pulled_ahead_before_close_can_find_the_pass(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As soon as the thread waits, it is for a permit; it would be inside its second pull."""
    gate, stays, early = Gate(9, opened=1), threading.Event(), []
    start = Source.__init__

    class Inside(threading.Event):
        def set(self) -> None:
            super().set()
            stays.set()

    gate.inside = Inside()

    def started(self: Source, *arguments: Any, changed: Any, **options: Any) -> None:
        wait = changed.wait

        def noted(timeout: float | None = None) -> bool:
            stays.set()
            return bool(wait(timeout))

        monkeypatch.setattr(changed, "wait", noted)
        start(self, *arguments, changed=changed, **options)
        assert stays.wait(WAIT)
        early.append(gate.inside.is_set())

    monkeypatch.setattr(Source, "__init__", started)
    with StreamLoader(gate, "cpu") as loader:
        next(iter(loader))
        gate.go.set()
    assert early == [False]


@pytest.mark.slow  # a second each: close() gives the transform that long to end
@pytest.mark.parametrize("make_device", devices())
@pytest.mark.parametrize("depth", AHEAD)
def test_c06_close_from_another_thread_while_next_is_inside_a_transform(
    depth: int, make_device: Any
) -> None:
    def transform(batch: Tensor) -> Tensor:
        if batch[0] == 1:
            closer = threading.Thread(target=loader.close)
            closer.start()
            closer.join(WAIT)
        return batch

    loader = StreamLoader(batches(9), make_device(), transform=transform, prefetch_batches=depth)
    with pytest.raises(RuntimeError, match=r"^this pass ended because .*close\(\) was called"):
        ids(loader)
    assert threads() == []


@pytest.mark.slow
@pytest.mark.parametrize("how", ["close", "del", "break"])
def test_c06_leaving_while_the_source_is_blocked_takes_at_most_a_second(how: str) -> None:
    gate = Gate(9, opened=2)
    loader = StreamLoader(gate, prefetch_batches=2)
    iterator = iter(loader)
    next(iterator)
    assert gate.inside.wait(WAIT)
    start = time.monotonic()
    if how == "close":
        loader.close()
    elif how == "del":
        del iterator
    else:
        for _ in iterator:
            break
        del iterator
    assert time.monotonic() - start < 2
    gate.go.set()
    settle()
    assert gate.left.is_set()
    assert threads() == []


@pytest.mark.parametrize("depth", AHEAD)
def test_c06_close_while_the_queue_is_full(depth: int) -> None:
    full = threading.Event()

    class Source:
        def __iter__(self) -> Iterator[Tensor]:
            for number in range(30):
                if number == depth + 1:
                    full.set()
                yield fill(number)

    loader = StreamLoader(Source(), FakeDevice(), prefetch_batches=depth)
    ids(loader)  # its slabs are made: a first pass reads ahead as they come
    full.clear()
    iterator = iter(loader)
    next(iterator)
    assert full.wait(WAIT)
    start = time.monotonic()
    loader.close()
    assert time.monotonic() - start < 0.9
    assert threads() == []


def test_persistent_workers_are_waited_for_before_the_next_pass(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(streamloader.source, "JOIN_SECONDS", 0.01)
    inside, go = threading.Event(), multiprocessing.Event()

    class Held(Numbers):
        def __getitem__(self, index: int) -> Tensor:
            if index == 4:
                assert go.wait(WAIT)
            return super().__getitem__(index)

    class Telling(DataLoader[Tensor]):
        @override
        def __iter__(self) -> Any:
            iterator = super().__iter__()
            for number in range(5):
                if number == 2:
                    inside.set()
                yield next(iterator)

    plain = Telling(Held(10), batch_size=2, num_workers=1, persistent_workers=True)
    loader = StreamLoader(plain)
    for _ in loader:
        assert inside.wait(WAIT)
        break
    assert threads() != []  # it is inside the source, and was left there
    timer = threading.Timer(0.1, go.set)
    timer.start()
    assert plainly(loader) == plainly(plain)
    timer.join(WAIT)


def test_d06_persistent_workers_are_free_once_the_first_pass_has_read_them_to_the_end() -> None:
    plain = DataLoader(Numbers(6), batch_size=2, num_workers=1, persistent_workers=True)
    loader = StreamLoader(plain, prefetch_batches=3)
    first = iter(loader)
    assert next(first)[0, 0] == 0
    for source in loader._sources:
        source.join(WAIT)
    assert [int(batch[0, 0]) for batch in loader] == [0, 2, 4]
    assert [int(batch[0, 0]) for batch in first] == [2, 4]


# -- threads -------------------------------------------------------------------------------------


@pytest.mark.parametrize("depth", SWEPT)
def test_the_callers_grad_and_inference_mode_are_taken_over(depth: int) -> None:
    modes: list[tuple[bool, bool]] = []

    class Source:
        def __iter__(self) -> Iterator[Tensor]:
            for number in range(4):
                modes.append((torch.is_grad_enabled(), torch.is_inference_mode_enabled()))
                yield fill(number)

    loader = StreamLoader(Source(), prefetch_batches=depth)
    contexts: list[tuple[Any, tuple[bool, bool]]] = [
        (torch.no_grad, (False, False)),
        (torch.enable_grad, (True, False)),
        (torch.inference_mode, (False, True)),
    ]
    for context, expected in contexts:
        modes.clear()
        with context():
            assert ids(loader) == [0, 1, 2, 3]
        assert modes == [expected] * 4


@pytest.mark.slow
def test_c07_a_pass_in_a_helper_thread_with_workers() -> None:
    got: list[list[list[Any]]] = []
    plain = DataLoader(Numbers(8), batch_size=2, num_workers=1)

    def consume() -> None:
        got.append(plainly(StreamLoader(plain)))

    for _ in range(3):
        thread = threading.Thread(target=consume)
        thread.start()
        thread.join(30)
    assert got == [plainly(plain)] * 3


def test_next_may_be_called_from_changing_threads() -> None:
    iterator = iter(StreamLoader(batches(6), FakeDevice(1)))
    got: list[int] = []
    for _ in range(6):
        thread = threading.Thread(target=lambda: got.append(number_of(next(iterator))))
        thread.start()
        thread.join(WAIT)
    assert got == [0, 1, 2, 3, 4, 5]


def test_waiting_for_the_source_and_for_the_device_are_counted_apart() -> None:
    device = FakeDevice()
    stream = device.current()
    loader = StreamLoader(batches(4), device, prefetch_batches=1)
    iterator = iter(loader)
    next(iterator)
    stream.held = True
    timer = threading.Timer(0.2, lambda: setattr(stream, "held", False))
    timer.start()
    next(iterator)
    next(iterator)
    timer.join(WAIT)
    waited = loader.stats.epoch
    assert waited.device_seconds > 0.1
    assert waited.source_seconds < waited.device_seconds

    gate = Gate(3, opened=1)
    loader = StreamLoader(gate, FakeDevice())
    iterator = iter(loader)
    next(iterator)
    timer = threading.Timer(0.2, gate.go.set)
    timer.start()
    next(iterator)
    waited = loader.stats.epoch
    assert waited.source_seconds > 0.1
    assert waited.device_seconds < waited.source_seconds


# -- processes -----------------------------------------------------------------------------------


@pytest.mark.slow
def test_c04_a_killed_worker_is_an_error() -> None:
    """In a process of its own, and without torch's signal handler.

    That raises in the main thread wherever it is then, which may be after the loop. Without it the
    error is what the loader thread finds: that the worker is gone, or its socket.
    """
    done = program(
        """
        import multiprocessing, signal
        loader = StreamLoader(DataLoader(Numbers(), batch_size=2, num_workers=1))
        iterator = iter(loader)
        next(iterator)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        (worker,) = multiprocessing.active_children()
        os.kill(worker.pid, signal.SIGKILL)
        try:
            for _ in iterator:
                pass
        except (RuntimeError, OSError, EOFError):
            print("an error")
        start = time.monotonic()
        del iterator
        loader.close()
        print(time.monotonic() - start < 5)
        print("streamloader" in [thread.name for thread in threading.enumerate()])
        """,
        PRELUDE,
    )
    out, err = done.communicate(timeout=60)
    assert (out, err) == ("an error\nTrue\nFalse\n", "")


@pytest.mark.slow
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_f03_workers_can_be_started_by_other_methods(method: str) -> None:
    done = program(
        f"""
        from torch.utils.data import DataLoader
        import pickle, torch
        from streamloader import StreamLoader

        class Numbers:
            def __len__(self): return 8
            def __getitem__(self, index): return torch.tensor(index)

        if __name__ == "__main__":
            plain = DataLoader(
                Numbers(), batch_size=2, num_workers=1, multiprocessing_context="{method}"
            )
            loader = StreamLoader(plain, transform=lambda batch: batch)  # stays in this process
            print([batch.tolist() for batch in loader])
        """
    )
    out, err = done.communicate(timeout=60)
    assert (out, err) == ("[[0, 1], [2, 3], [4, 5], [6, 7]]\n", "")


PRELUDE = """
import os, sys, threading, time
import torch
from torch.utils.data import DataLoader
from streamloader import StreamLoader

inside = threading.Event()

def blocked(count):
    for number in range(count):
        yield torch.full((2,), number)
    inside.set()
    time.sleep(60)

class Numbers:
    def __len__(self): return 100_000
    def __getitem__(self, index): return torch.tensor(index)

def now():
    print("now", flush=True)
"""


class Programs:
    """Scripts, kept for the time of a test."""

    started: ClassVar[list[subprocess.Popen[str]]] = []
    folder: ClassVar[Path]


@pytest.fixture(autouse=True)
def _programs(tmp_path: Path) -> Iterator[None]:
    Programs.folder = tmp_path
    yield
    for process in Programs.started:
        if process.poll() is None:
            process.kill()
            process.communicate()
    Programs.started.clear()


def program(text: str, prelude: str = "") -> subprocess.Popen[str]:
    script = Programs.folder / "script.py"
    script.write_text(prelude + textwrap.dedent(text))
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore::DeprecationWarning", str(script)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        start_new_session=True,
    )
    Programs.started.append(process)
    return process


def seconds_to_end(process: subprocess.Popen[str]) -> tuple[float, str]:
    """From the program's "now" to its end; and its standard error."""
    assert process.stdout
    assert process.stdout.readline() == "now\n"
    start = time.monotonic()
    _, err = process.communicate(timeout=60)
    return time.monotonic() - start, err


EXITS = {
    "live iterator": """
        iterator = iter(StreamLoader(Numbers_loader()))
        next(iterator)
        now()
        """,
    "live workers": """
        iterator = iter(StreamLoader(DataLoader(Numbers(), 2, num_workers=2)))
        next(iterator)
        now()
        """,
    "blocked source": """
        iterator = iter(StreamLoader(blocked(3)))
        next(iterator)
        inside.wait(10)
        now()
        """,
    "sys.exit in the loop, blocked source": """
        for _ in StreamLoader(blocked(3)):
            inside.wait(10)
            now()
            sys.exit()
        """,
    "sys.exit in a function's loop, blocked source": """
        def train():
            for _ in StreamLoader(blocked(3)):
                inside.wait(10)
                now()
                sys.exit()
        train()
        """,
}


@pytest.mark.slow
@pytest.mark.parametrize("text", EXITS.values(), ids=EXITS)
def test_the_process_ends_with_a_live_pass_no_later_than_a_second(text: str) -> None:
    plain, _ = seconds_to_end(program("now()", PRELUDE))
    text = textwrap.dedent(text).replace("Numbers_loader()", "DataLoader(Numbers(), 2)")
    process = program(text, PRELUDE)
    seconds, err = seconds_to_end(process)
    assert err == ""
    assert process.returncode == 0
    assert seconds < plain + 1.5  # a second, and what the machine's other work takes


def children_of(pid: int) -> list[int]:
    listed = Path(f"/proc/{pid}/task/{pid}/children").read_text()
    return [int(child) for child in listed.split()]


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs /proc")
@pytest.mark.parametrize("whole_group", [False, True], ids=["parent", "group"])
@pytest.mark.parametrize("where", ["step", "source", "device"])
def test_c03_ctrl_c_ends_the_process_and_its_workers(where: str, whole_group: bool) -> None:  # noqa: FBT001
    process = program(
        f"""
        class Slow(Numbers):
            def __getitem__(self, index):
                if {where == "source"} and index >= 4:
                    time.sleep(60)
                return torch.tensor(index)

        from streamloader.testing import FakeDevice
        device = FakeDevice() if {where == "device"} else None
        for number, _ in enumerate(StreamLoader(DataLoader(Slow(), 2, num_workers=2), device)):
            if number == 1:
                now()
                if device:
                    device.current().held = True
                while {where == "step"}:
                    time.sleep(0.01)
        """,
        PRELUDE,
    )
    assert process.stdout
    assert process.stdout.readline() == "now\n"
    workers = children_of(process.pid)
    assert len(workers) == 2
    threading.Event().wait(0.3)  # so that it is inside next(); early would be no other outcome
    start = time.monotonic()
    if whole_group:
        os.killpg(process.pid, signal.SIGINT)
    else:
        process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    seconds = time.monotonic() - start
    assert re.search(r"^KeyboardInterrupt", err, re.MULTILINE)
    assert "Fatal" not in err
    assert process.returncode in (-signal.SIGINT, 1)
    assert seconds < 4
    assert ended(workers)
