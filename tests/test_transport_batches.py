"""Batches of workers through shared memory are the plain loader's, whatever happens to them."""

from __future__ import annotations

import ctypes
import functools
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset, Sampler, default_collate, get_worker_info
from torchdata.stateful_dataloader import StatefulDataLoader
from typing_extensions import override

from streamloader import StreamLoader, augment, transport
from streamloader.device import RefusedError
from streamloader.region import Region
from streamloader.sent import packed
from streamloader.shared import Shape, Slab
from streamloader.slabs import Slabs
from streamloader.testing import FakeDevice, FakeStream
from tests.loaders import devices, ended, printed
from tests.transported import (
    MEDIUM,
    PAGE,
    SAMPLES,
    Image,
    Items,
    Stream,
    items,
    lies_in,
    memory,
    moved,
    received,
    same,
    stacked,
)

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata's
SLOW = pytest.mark.slow
WAIT = 30.0
SLOWLY = [pytest.param(*param.values, id=param.id, marks=SLOW) for param in devices()[:-1]]


def compared(
    make: Callable[[], Any], device: Any = "cpu", passes: int = 1, **options: Any
) -> StreamLoader[Any]:
    """Asserts that passes are those of the plain loader, and returns the loader."""
    plain = make()
    torch.manual_seed(3)
    expected = [list(plain) for _ in range(passes)]
    torch.manual_seed(3)
    loader = StreamLoader(make(), device, **options)
    for batches in expected:
        same(list(loader), batches)
    return loader


# -- of any loader -------------------------------------------------------------------------------


@pytest.mark.parametrize("shared", [True, pytest.param(False, marks=SLOW)])
@pytest.mark.parametrize("depth", [2, *(pytest.param(n, marks=SLOW) for n in (0, 1, 4))])
@pytest.mark.parametrize("make_device", [*SLOWLY, devices()[-1]])
def test_batches_are_those_of_the_plain_loader(
    make_device: Any,
    depth: int,
    shared: bool,  # noqa: FBT001
) -> None:
    make = functools.partial(items, 14, "nested", shuffle=True)
    options: Any = {"prefetch_batches": depth, "shared_memory": shared}
    loader = compared(make, make_device(), passes=2, **options)
    assert loader.stats.total.shared == (14 if shared and depth else 0)


def init(worker: int) -> None:
    torch.manual_seed(worker)


class Drawing(Items):
    """Its samples depend on the worker."""

    def __getitem__(self, index: int) -> Any:
        info = get_worker_info()
        return torch.rand(3), -1 if info is None else info.id, index


class Ragged(Items):
    def __getitem__(self, index: int) -> Any:
        return torch.full((3, 40 + index, 50), index, dtype=torch.uint8), index


class Collating(Items):
    """Calls `default_collate` itself, as a dataset of clips may."""

    def __getitem__(self, index: int) -> Any:
        return default_collate([SAMPLES["tuples"](index + n) for n in range(3)])


class Iterating(Sampler[int]):
    """Reads another loader first, as a sampler that weighs samples may."""

    def __init__(self, count: int) -> None:
        self._count = count

    @override
    def __iter__(self) -> Iterator[int]:
        for batch in StreamLoader(items(2, num_workers=1), "cpu"):
            yield int(batch[1][0])
        yield from range(1, self._count)


def counted(samples: Sequence[Any]) -> Any:
    """How often this worker has called it."""
    counted.calls = getattr(counted, "calls", 0) + 1  # type: ignore[attr-defined]
    return torch.tensor([counted.calls, *(sample[1] for sample in samples)])  # type: ignore[attr-defined]


def keeping(samples: Sequence[Any]) -> Any:
    """The batch, and a look at those that it has kept of the ones before."""
    kept = vars(keeping).setdefault("kept", [])
    batch = default_collate(list(samples))
    kept.append(batch)
    return [batch, *(images.float().mean() for images, _ in kept[-4:])]


def loader(dataset: Any, batch_size: int | None = 2, **options: Any) -> Callable[[], Any]:
    return lambda: DataLoader(dataset, batch_size, num_workers=2, **options)


CASES: dict[str, Callable[[], Any]] = {
    **{kind: functools.partial(items, 6, kind) for kind in SAMPLES},
    **{f.__name__: loader(Items(6), collate_fn=f) for f in (stacked, moved, tuple, counted)},
    "kept in the worker": loader(Items(30), collate_fn=keeping),
    "batch_size=None": loader(Items(5), None),
    "iterable": loader(Stream(5)),
    "iterable, each alone": loader(Stream(3), None),
    "worker_init_fn": loader(Drawing(6), worker_init_fn=init),
    "that collates by itself": loader(Collating(6)),
    "a timeout": loader(Items(6), timeout=WAIT),
    "persistent": loader(Items(6), persistent_workers=True),
    "ragged": loader(Ragged(6), 3, collate_fn=augment.collate),
    "a sampler that iterates": loader(Items(6), sampler=Iterating(6)),
    "stateful": lambda: StatefulDataLoader(Items(6), 2, num_workers=2),
}
QUICK = ("dicts", "moved", "iterable, each alone", "stateful")


@pytest.mark.parametrize("device", [pytest.param("cpu", marks=SLOW), "fake"])
@pytest.mark.parametrize(
    "case", [name if name in QUICK else pytest.param(name, marks=SLOW) for name in CASES]
)
def test_a_loader_of_any_kind_keeps_its_batches(case: str, device: str) -> None:
    made = compared(CASES[case], "cpu" if device == "cpu" else FakeDevice(looks=2))
    assert made.stats.total.shared > made.stats.total.batches // 2


@SLOW
@pytest.mark.parametrize(
    ("context", "persistent"),  # those that are not forked take seconds to start
    [("fork", False), ("fork", True), ("spawn", True), ("forkserver", True)],
)
def test_workers_may_be_started_in_any_way(context: str, persistent: bool) -> None:  # noqa: FBT001
    options: Any = {"multiprocessing_context": context, "persistent_workers": persistent}
    made = compared(functools.partial(items, 6, **options), FakeDevice(looks=2), passes=2)
    assert made.stats.total.shared == 6


@SLOW
def test_batches_in_any_order_are_all_there() -> None:
    made = StreamLoader(items(20, in_order=False), FakeDevice(looks=1))
    found = sorted(made, key=lambda batch: int(batch[1][0]))
    same(found, list(items(20)))


class Uneven(IterableDataset[Any]):
    """The first worker has nothing until the second has ended, whose batches wait meanwhile."""

    def __init__(self) -> None:
        self._other = torch.multiprocessing.get_context("fork").Value("i", 0)

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        assert info is not None
        if info.id:
            self._other.value = os.getpid()
        else:
            while not self._other.value:
                threading.Event().wait(0.01)
            assert ended([self._other.value])
        return iter([torch.full((5,), info.id).as_subclass(Image)])


@SLOW
def test_batches_of_a_worker_that_has_ended_can_still_be_opened() -> None:
    made = StreamLoader(DataLoader(Uneven(), None, num_workers=2), FakeDevice())
    assert [(type(batch), int(batch[0])) for batch in made] == [(Image, 0), (Image, 1)]


class Noted(DataLoader[Any]):
    """Keeps its iterators: in an error's garbage each would wait 5 s for each of its workers."""

    iterators: tuple[Any, ...] = ()

    @override
    def _get_iterator(self) -> Any:
        self.iterators += (super()._get_iterator(),)
        return self.iterators[-1]


def until_it_fails(loader: Any) -> tuple[list[Any], str]:
    """The batches before an error, and what it says, but for where."""
    found: list[Any] = []
    with pytest.raises(KeyError) as error:  # the callers compare
        found.extend(loader)
    return found, str(error.value).replace("worker process 0", "").split("Original")[0]


def test_an_exception_in_a_worker_is_the_plain_loaders_after_the_batches_before_it() -> None:
    plain = Noted(Items(8, fail=5), 2, num_workers=2)
    _, expected = until_it_fails(plain)
    found, text = until_it_fails(StreamLoader(plain, FakeDevice(looks=1)))
    for iterator in plain.iterators:
        iterator._shutdown_workers()
    assert text == expected
    assert "KeyError" in text
    same(found, list(items(8))[:2])


# -- too few slabs, too small ones ---------------------------------------------------------------


def images(samples: Sequence[Any]) -> Tensor:
    return torch.stack([sample[0] for sample in samples])


def divided(monkeypatch: pytest.MonkeyPatch, each: int) -> None:
    """Whatever it was told, a worker has so many slabs."""
    shape = Shape(2, each, 1 << 20)
    monkeypatch.setattr(transport, "shape", lambda *_: shape)


def test_with_every_slab_kept_batches_go_the_ordinary_way(monkeypatch: pytest.MonkeyPatch) -> None:
    divided(monkeypatch, each=1)
    made = StreamLoader(items(40), "cpu")
    kept = list(made)
    same(kept, list(items(40)))
    assert made.stats.total.shared == 2  # the first of each worker
    shared = made._transport._regions[0].shared
    assert [lies_in(shared, images) for images, _ in kept] == [True] * 2 + [False] * 18


@SLOW
@pytest.mark.parametrize("depth", [1, 4])
def test_with_too_few_slabs_for_what_is_on_its_way_nothing_blocks(
    monkeypatch: pytest.MonkeyPatch, depth: int
) -> None:
    divided(monkeypatch, each=1)
    compared(functools.partial(items, 40), FakeDevice(looks=5), prefetch_batches=depth)


LIMITS = {"tensor by tensor": default_collate, "wholly": images}


@pytest.mark.parametrize("device", ["cpu", pytest.param("fake", marks=SLOW)])
@pytest.mark.parametrize("collate_fn", LIMITS.values(), ids=LIMITS)
def test_what_is_too_large_for_its_share_goes_the_ordinary_way_with_one_warning(
    collate_fn: Callable[[Any], Any], device: str
) -> None:
    """A share is a page: images do not fit, labels do."""
    make = functools.partial(items, 8, collate_fn=collate_fn)
    limit, text = 14 * PAGE, rf"^{2 * MEDIUM:,} bytes of a batch came the ordinary way"
    with pytest.warns(UserWarning, match=text) as caught:
        made = compared(make, FakeDevice() if device == "fake" else device, 1, shared_memory=limit)
    assert len(caught) == 1
    assert made.stats.total.shared == 4
    shape = made._transport._regions[0].shared.shape
    assert shape.workers * shape.each * shape.room <= limit


# -- on the CPU ----------------------------------------------------------------------------------


@SLOW
def test_on_the_cpu_batches_that_are_kept_leave_slabs_to_the_workers() -> None:
    made = StreamLoader(items(80), "cpu", prefetch_batches=1)
    kept = list(made)
    same(kept, list(items(80)))
    assert made.stats.total.shared > 20
    shared = made._transport._regions[0].shared
    there = [lies_in(shared, images) for images, _ in kept]
    assert there[0]
    assert not there[-1]
    del kept
    assert shared.held == 0


# -- pinned --------------------------------------------------------------------------------------


class NoPins(FakeDevice):
    def __init__(self, error: str | None) -> None:
        super().__init__(looks=2)
        self._error = error

    @override
    def pin(self, memory: Tensor) -> Callable[[], object] | None:
        if self._error is not None:
            raise RefusedError(self._error)
        return None


@pytest.mark.parametrize("error", [pytest.param(None, marks=SLOW), "no pages left"])
def test_where_it_cannot_be_pinned_batches_are_copied_into_slabs_that_are(
    error: str | None, recwarn: pytest.WarningsRecorder
) -> None:
    device = NoPins(error)
    made = compared(functools.partial(items, 40), device)
    assert made.stats.total.shared == 20
    assert device.verbs("slab")
    texts = [str(warning.message) for warning in recwarn]
    assert len(texts) == (error is not None)
    assert all(f"unpinned, so each batch is copied once more: {error};" in text for text in texts)


class Growing(Items):
    def __getitem__(self, index: int) -> Any:
        return torch.full((PAGE * (index + 1),), index, dtype=torch.uint8)


@SLOW
def test_a_slab_is_pinned_anew_for_a_batch_that_grows_and_unpinned_first() -> None:
    device = FakeDevice()
    made = compared(loader(Growing(16), 1), device)
    pins = [entry[0] for entry in device.log if entry[0] in ("pin", "unpin")]
    assert pins.count("pin") > pins.count("unpin") > 0
    assert device.verbs("slab") == []
    made.close()
    assert len(device.verbs("pin")) == len(device.verbs("unpin"))


# -- memory rule 1: the device may still read ----------------------------------------------------


class Raw(FakeDevice):
    """Its copies hold no reference to what they read, as those of a GPU do not."""

    def __init__(self) -> None:
        super().__init__()
        self.streams: list[FakeStream] = []

    @override
    def stream(self, name: str, priority: int = 0) -> FakeStream:
        self.streams.append(super().stream(name, priority))
        return self.streams[-1]

    @override
    def copy(self, destination: Tensor, source: Tensor) -> None:
        move = functools.partial(ctypes.memmove, destination.data_ptr(), source.data_ptr())
        self.current().submit(functools.partial(move, source.nbytes))


class Worker:
    """Stands for a loader's transport: a worker in this process, with slabs of its own.

    It writes to the slab that it has used last, if that is free.

    Args:
        count: How many batches there are.

    Attributes:
        shared: Its memory.
        written: For each batch, set when the worker has written it.
    """

    def __init__(self, count: int) -> None:
        self.shared = memory(each=16, pages=1)
        self.written = [threading.Event() for _ in range(count)]
        self._region = Region(self.shared, 99)
        self._used = [*range(16)]

    def iterate(self, _: object) -> tuple[Iterator[Any], Region]:
        return self._batches(), self._region

    def _batches(self) -> Iterator[Any]:
        for number, written in enumerate(self.written):
            batch = received(self._write(torch.full((9,), number)))
            written.set()
            yield batch
            del batch

    def _write(self, batch: Tensor) -> bytes:
        free = [number for number in self._used if not self.shared._bytes[number]]
        self._used.remove(free[0])
        self._used.insert(0, free[0])
        slab = Slab(free[0], torch.frombuffer(self.shared._memory(free[0]), dtype=torch.uint8))
        return bytes(ForkingPickler.dumps(packed(batch, slab, self.shared)))

    def close(self) -> None:
        """Nothing is left to close."""


def late() -> list[list[int]]:
    """What arrives when the worker refills a slab as soon as it may, long before each copy."""
    worker, device, found = Worker(20), Raw(), []
    made: Any = StreamLoader([], device)
    made._transport = worker
    for number, batch in enumerate(made):
        found.append(sorted(set(batch.tolist())))
        assert worker.written[min(number + 3, 19)].wait(WAIT)
    return found


def test_no_slab_is_given_back_before_its_copy() -> None:
    assert late() == [[number] for number in range(20)]


def test_without_the_loan_it_would_be(monkeypatch: pytest.MonkeyPatch) -> None:
    lend = Slabs.lend

    def lend_nothing(self: Slabs, event: Any, slab: Any, _: Any) -> None:
        lend(self, event, slab, [])

    monkeypatch.setattr(Slabs, "lend", lend_nothing)
    assert late() != [[number] for number in range(20)]


def test_a_slab_is_held_until_the_host_has_seen_the_copy_complete() -> None:
    worker, device = Worker(2), Raw()
    made: Any = StreamLoader([], device, prefetch_batches=1)
    made._transport = worker
    passes = iter(made)
    next(passes)
    [copy] = device.streams
    copy.held = True
    next(passes)  # its copy has run, and the host has not seen that
    held = worker.shared.held
    copy.held = False
    assert list(passes) == []
    made.close()
    assert (held > 0, worker.shared.held) == (True, 0)


# -- processes that are killed -------------------------------------------------------------------

PRELUDE = """
import gc, multiprocessing, os, signal, sys, threading, torch
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from streamloader import StreamLoader
from streamloader.testing import FakeDevice
from tests.transported import Traces, items, lies_in, same

def workers():
    return [child.pid for child in multiprocessing.active_children()]
"""


def outcome(text: str) -> str:
    """What a program prints that begins with `PRELUDE`."""
    return printed(PRELUDE + text)


KILLED_WORKER = """
loader = StreamLoader(items(400), FakeDevice() if sys.argv[1:] else "cpu")
passes = iter(loader)
batch = next(passes)
region = loader._transport._regions[0]
try:
    os.kill(workers()[0], signal.SIGKILL)
    for batch in passes:
        pass
except (RuntimeError, OSError, EOFError) as error:
    print("an error", "exited unexpectedly" in str(error) or "killed" in str(error))
del passes, batch
for thread in threading.enumerate():
    if thread.name == "streamloader":
        thread.join(20)  # torch looks after its workers every 5 s
gc.collect()
same(list(loader), list(items(400)))
print(loader.stats.epoch.shared > 100, loader._transport._regions[-1] is region, region.shared.held)
region.unused()
print(sum(region.shared._bytes[: region.shared.shape.workers * region.shared.shape.each]))
"""


@SLOW
def test_a_worker_that_is_killed_is_an_error_and_the_next_pass_has_every_slab() -> None:
    assert outcome(KILLED_WORKER) == "an error True\nTrue True 0\n0\n"


KILLED_TRAINER = """
loader = StreamLoader(items(4000), "cpu")
passes = iter(loader)
kept = [next(passes) for _ in range(5)]
print(*workers(), flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@SLOW
def test_a_trainer_that_is_killed_leaves_no_worker_and_nothing_in_dev_shm() -> None:
    before = set(Path("/dev/shm").iterdir())
    pids = [int(pid) for pid in outcome(KILLED_TRAINER).split()]
    assert len(pids) == 2
    assert ended(pids, seconds=30)  # torch's workers look every 5 s
    assert set(Path("/dev/shm").iterdir()) <= before
