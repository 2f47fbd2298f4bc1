"""How memory is divided, which loaders share it, that they are left as they were, and all clean."""

from __future__ import annotations

import errno
import gc
import mmap
import os
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Sampler, default_collate
from torchdata.stateful_dataloader import StatefulDataLoader
from typing_extensions import override

from streamloader import StreamLoader, transport
from streamloader.collate import Collate
from streamloader.shared import Shape
from streamloader.testing import FakeDevice
from streamloader.transport import Transport, budget, shape
from tests.transported import PAGE, Image, Items, Traces, items, lies_in, same

pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata's
ROOM = 1 << 24


# -- how it is divided ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("workers", "prefetch", "ahead", "each"),
    [(1, None, 7, 2 + 7 + 1), (2, 4, 7, 4 + 4 + 1), (16, 2, 7, 2 + 1 + 1), (4, 2, 4, 2 + 1 + 1)],
)
def test_a_worker_has_slabs_for_what_waits_and_for_its_part_of_what_is_on_its_way(
    workers: int, prefetch: int | None, ahead: int, each: int
) -> None:
    loader: Any = SimpleNamespace(num_workers=workers, prefetch_factor=prefetch)
    for room in (PAGE, 10 * PAGE):
        limit = room * workers * each
        assert shape(loader, limit, ahead) == Shape(workers, each, room)
        assert shape(loader, limit + PAGE - 1, ahead) == Shape(workers, each, room)
    assert shape(loader, PAGE * workers * each - 1, ahead) is None


class Group:
    """Stands for pathlib's Path: a control group's limit."""

    text: str | None = None

    def __init__(self, _: str) -> None:
        pass

    def exists(self) -> bool:
        return self.text is not None

    def read_text(self, **_: Any) -> str | None:
        return self.text


@pytest.mark.parametrize(
    ("text", "expected"), [(None, 0), ("max\n", 0), (f"{1 << 30}\n", 1 << 27), (f"{1 << 60}\n", 0)]
)
def test_the_default_is_an_eighth_of_what_the_host_or_its_group_has(
    text: str | None, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Group, "text", text)
    monkeypatch.setattr(transport, "Path", Group)
    whole = os.sysconf("SC_PHYS_PAGES") * PAGE
    assert budget() == (expected or whole // 8)


def no_linux(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transport, "sys", SimpleNamespace(platform="darwin"))
    assert budget() == 0


def no_such_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "memfd_create")


def no_such_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOMEM, "no addresses left")

    monkeypatch.setattr(mmap, "mmap", refuse)


@pytest.mark.parametrize("lack", [no_linux, no_such_call, no_such_memory])
def test_where_there_is_none_a_loader_is_left_alone(
    lack: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    before, plain = Traces.now(), Prepares(Items(2), 2, num_workers=2)
    lack(monkeypatch)
    iterator, region = Transport(1 << 30, 7).iterate(plain)
    monkeypatch.undo()
    assert region is None
    assert plain.seen == (default_collate, False)
    same(list(iterator), list(items(2)))
    del iterator
    assert Traces.now() == before


# -- which share ---------------------------------------------------------------------------------


class Generates(DataLoader[Any]):
    """Its pass is its own: workers start at the first `next()`, and nobody knows."""

    @override
    def __iter__(self) -> Any:
        yield from super().__iter__()


class Sees(DataLoader[Any]):
    """Looks at each batch before anybody else, in a pass whose workers start at once."""

    @override
    def __iter__(self) -> Any:
        return map(doubled, super().__iter__())


class Prepares(DataLoader[Any]):
    """Does something at the start of a pass, which is torch's own.

    Attributes:
        seen: What its attributes were then.
    """

    seen: tuple[Any, ...] = ()

    @override
    def _get_iterator(self) -> Any:
        self.seen = self.collate_fn, self.pin_memory
        return super()._get_iterator()


class Stands(DataLoader[Any]):
    """Stands for another, to which it passes on what it is asked; it has nothing of its own."""

    def __init__(self, other: DataLoader[Any]) -> None:
        vars(self)["other"] = other

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["other"], name)

    @override
    def __iter__(self) -> Any:
        return iter(self.other)


def doubled(batch: list[Tensor]) -> list[Tensor]:
    return [part * 2 for part in batch]


OWN: dict[str, tuple[Callable[[], Any], bool]] = {
    "DataLoader": (items, True),
    "without workers": (lambda: items(num_workers=0), False),
    "that prepares": (lambda: Prepares(Items(8), 2, num_workers=2), True),
    "that generates": (lambda: Generates(Items(8), 2, num_workers=2), False),
    "that sees batches": (lambda: Sees(Items(8), 2, num_workers=2), False),
    "that stands for another": (lambda: Stands(items()), False),
    "stateful": (lambda: StatefulDataLoader(Items(8), 2, num_workers=2), True),
    "a list": (lambda: list(items()), False),
}


@pytest.mark.slow
@pytest.mark.parametrize(("make", "shares"), OWN.values(), ids=OWN)
def test_a_loader_shares_memory_if_nobody_sees_its_batches_before(
    make: Callable[[], Any],
    shares: bool,  # noqa: FBT001
) -> None:
    before, plain = Traces.now(), make()
    attributes = dict(vars(plain)) if isinstance(plain, DataLoader) else {}
    loader = StreamLoader(plain, FakeDevice(looks=1))
    for _ in range(2):
        same(list(loader), list(make()))
    assert loader.stats.total.shared == (8 if shares else 0)
    now = vars(plain) if attributes else {}
    changed = {name for name in now if now[name] is not attributes.get(name)}
    assert changed <= {"seen", "_iterator", "_dataset_kind"}
    del loader, plain, now
    gc.collect()
    assert Traces.now() == before


@pytest.mark.parametrize("limit", [0, PAGE])
def test_without_memory_for_a_page_a_slab_a_loader_is_left_alone(limit: int) -> None:
    plain = Prepares(Items(2), 2, num_workers=2)
    iterator: Any
    iterator, region = Transport(limit, 7).iterate(plain)
    assert region is None
    assert plain.seen == (default_collate, False)
    assert iterator._collate_fn is default_collate


@pytest.mark.parametrize("value", [False, 0])
def test_it_can_be_turned_off(value: Any) -> None:
    loader = StreamLoader(items(4), FakeDevice(), shared_memory=value)
    same(list(loader), list(items(4)))
    assert loader.stats.total.shared == 0


@pytest.mark.parametrize(
    ("value", "kind", "text"),
    [
        (-1, ValueError, r"^shared_memory must be at least 0, got -1$"),
        (0.5, TypeError, r"^shared_memory must be True, False or a number of bytes, got 0\.5$"),
        (None, TypeError, r"^shared_memory must be True, False or a number of bytes, got None$"),
    ],
)
def test_a_bad_value_is_an_error_that_quotes_it(
    value: Any, kind: type[Exception], text: str
) -> None:
    with pytest.raises(kind, match=text):
        StreamLoader([], shared_memory=value)


# -- the user's own object -----------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:.*pin_memory.*no accelerator")
def test_while_iter_runs_its_functions_are_ours_and_the_users_again_afterwards() -> None:
    plain = Prepares(Items(4), 2, num_workers=2)
    plain.pin_memory = True
    iterator: Any
    iterator, region = Transport(ROOM, 7).iterate(plain)
    collate_fn, pin_memory = plain.seen
    assert region is not None
    assert isinstance(collate_fn, Collate)
    assert collate_fn.shared is region.shared
    assert pin_memory is False  # so torch's thread does not pin what we do
    assert (plain.collate_fn, plain.pin_memory) == (default_collate, True)
    assert iterator._collate_fn is default_collate  # a loader that keeps it keeps no memory


class Broken(Sampler[int]):
    def __init__(self) -> None:
        pass

    @override
    def __iter__(self) -> Iterator[int]:
        raise KeyError("no order")


def test_it_is_the_users_again_when_iter_raised() -> None:
    before, plain = Traces.now(), items(sampler=Broken())
    attributes = dict(vars(plain))
    with pytest.raises(KeyError, match="no order"):
        next(iter(StreamLoader(plain, "cpu")))
    assert vars(plain) == attributes
    gc.collect()
    assert Traces.now() == before


@pytest.mark.slow
def test_the_state_of_a_stateful_loader_is_that_of_the_plain_one() -> None:
    def make() -> Any:
        return StatefulDataLoader(Items(16), 2, num_workers=2, snapshot_every_n_steps=1)

    plain, wrapped = make(), make()
    loader = StreamLoader(wrapped, FakeDevice())
    torch.manual_seed(1)
    expected = list(plain)
    torch.manual_seed(1)
    same(list(loader), expected)
    same(wrapped.state_dict(), plain.state_dict())
    iterator = iter(plain)
    expected = [next(iterator) for _ in range(3)]
    state = plain.state_dict()
    resumed = make()
    resumed.load_state_dict(state)
    found = list(StreamLoader(resumed, FakeDevice()))
    same([*expected, *found], list(make()))
    assert wrapped.state_dict()["_steps_since_snapshot"] == 0


# -- whose memory --------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_pass_takes_over_the_memory_of_one_whose_workers_are_dead() -> None:
    shared, plain = Transport(ROOM, 7), items(2)
    first, region = shared.iterate(plain)
    second, another = shared.iterate(plain)
    assert region is not another
    assert (len(list(first)), len(list(second))) == (1, 1)  # and their workers are dead
    third, taken = shared.iterate(plain)
    assert taken in (region, another)
    assert len(list(third)) == 1
    fourth, other = shared.iterate(items(2, prefetch_factor=3))
    assert other not in (region, another)  # it is divided otherwise
    assert len(list(fourth)) == 1


def test_in_a_forked_child_memory_of_the_parent_is_left_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shared, plain = Transport(ROOM, 7), items(2)
    _, region = shared.iterate(plain)
    assert region is not None
    monkeypatch.setattr(region.shared, "owner", -1)
    region.used_by(["whose state only their parent may ask for"])
    iterator, another = shared.iterate(plain)
    assert another is not region
    assert len(list(iterator)) == 1


@pytest.mark.slow
def test_persistent_workers_keep_theirs_whoever_iterates() -> None:
    plain, expected = items(persistent_workers=True), list(items())
    loaders = [StreamLoader(plain, "cpu"), StreamLoader(plain, FakeDevice())]
    for loader in (*loaders, *loaders):
        same(list(loader), expected)
        same(list(plain), expected)  # the user's own loop, over the same workers
    assert [loader.stats.total.shared for loader in loaders] == [8, 8]
    regions = [loader._transport._regions[0].shared for loader in loaders]
    assert regions[0] is regions[1]


def test_workers_that_run_already_go_on_as_they_did() -> None:
    plain, expected = items(persistent_workers=True), list(items())
    same(list(plain), expected)
    loader = StreamLoader(plain, FakeDevice())
    same(list(loader), expected)
    assert loader.stats.total.shared == 0


@pytest.mark.slow
@pytest.mark.parametrize("depth", [1, 2, 4])
@pytest.mark.parametrize("device", ["cpu", "fake"])
def test_two_live_passes_and_two_loaders_over_one(device: str, depth: int) -> None:
    plain, expected = items(16), list(items(16))
    first, second = (
        StreamLoader(plain, device if device == "cpu" else FakeDevice(3), prefetch_batches=depth)
        for _ in range(2)
    )
    for one, other, another in zip(first, first, second, strict=True):
        same([one, other, another], [expected.pop(0)] * 3)
    assert first.stats.total.shared == 2 * second.stats.total.shared == 16


# -- clean ---------------------------------------------------------------------------------------


def closed(loader: StreamLoader[Any]) -> None:
    loader.close()


def dropped(_: StreamLoader[Any]) -> None:
    """Whoever has it drops it."""


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", "fake"])
@pytest.mark.parametrize("end", [closed, dropped])
@pytest.mark.parametrize(
    "options", [{}, {"persistent_workers": True}], ids=["workers anew", "the same workers"]
)
def test_nothing_is_left(options: Any, end: Callable[[Any], None], device: str) -> None:
    gc.collect()
    before = Traces.now()
    fake = FakeDevice(looks=2)
    loader = StreamLoader(items(**options), "cpu" if device == "cpu" else fake)
    batch = next(iter(loader))
    assert Traces.now().mapped == 1
    end(loader)
    del loader, batch
    gc.collect()
    assert Traces.now() == before
    assert len(fake.verbs("pin")) == len(fake.verbs("unpin"))


def test_closed_nothing_is_pinned_though_a_pass_and_its_batches_are_kept() -> None:
    device = FakeDevice()
    loader = StreamLoader(items(persistent_workers=True), device)
    passes = iter(loader)
    kept = next(passes)
    loader.close()
    assert len(device.verbs("pin")) == len(device.verbs("unpin")) > 0
    same(list(kept), list(next(iter(items()))))
    same(list(loader), list(items()))  # and it can be used again


def breaks(count: int, device: Any, **options: Any) -> None:
    """Early breaks leave nothing, and a whole pass afterwards finds every slab."""
    loader = StreamLoader(items(12, "numbers", **options), device)
    found = []
    for number in range(count):
        next(iter(loader))
        if number % (count // 2) == count // 4:
            gc.collect()
            found.append(Traces.now())
    assert abs(found[0].descriptors - found[1].descriptors) < 10  # of what is on its way
    assert found[0]._replace(descriptors=0) == found[1]._replace(descriptors=0)
    same(list(loader), list(items(12, "numbers", **options)))
    assert loader.stats.epoch.shared == 6


@pytest.mark.slow
def test_100_early_breaks_of_persistent_workers_leave_nothing() -> None:
    breaks(100, FakeDevice(), persistent_workers=True)


@pytest.mark.slow
@pytest.mark.parametrize("device", ["cpu", "fake"])
def test_100_early_breaks_leave_nothing(device: str) -> None:
    breaks(100, "cpu" if device == "cpu" else FakeDevice())


@pytest.mark.slow
def test_1000_early_breaks_leave_nothing() -> None:
    breaks(1000, FakeDevice(), persistent_workers=True)


@pytest.mark.slow
def test_early_breaks_of_batches_that_need_more_than_a_slab_leave_nothing() -> None:
    """What torch sends beside the slab has a descriptor in the worker until it is unpickled."""
    breaks(100, FakeDevice(), persistent_workers=True, collate_fn=hidden)


def hidden(samples: Any) -> Any:
    return [default_collate(samples).as_subclass(Image), default_collate(samples)]


def test_on_the_cpu_a_batch_is_what_lies_in_shared_memory() -> None:
    loader = StreamLoader(items(), "cpu")
    for images, labels in loader:
        shared = loader._transport._regions[0].shared
        assert lies_in(shared, images)
        assert lies_in(shared, labels)
