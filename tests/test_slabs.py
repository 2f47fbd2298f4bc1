"""Slabs go round: none is written before the host has seen its copy complete."""

import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from typing_extensions import override

from streamloader import slabs as module
from streamloader.device import Event
from streamloader.slabs import Slabs, roomy
from streamloader.testing import FakeDevice

WAITS = 50


class Serving(threading.Condition):
    """Where the loader thread would wait, the caller serves: both in one thread."""

    def __init__(self, slabs: Slabs) -> None:
        super().__init__()
        self.slabs = slabs
        self.waits = 0

    @override
    def wait(self, timeout: float | None = None) -> bool:
        self.waits += 1
        assert self.waits < WAITS, "nobody can give this slab"
        self.slabs.serve()
        return True


def served(device: FakeDevice, limit: int) -> Slabs:
    slabs = Slabs(device, limit)
    slabs.changed = Serving(slabs)
    return slabs


def never() -> bool:
    return False


def taken(slabs: Slabs, nbytes: int) -> Tensor:
    slab = slabs.take(nbytes, never)
    assert slab is not None
    assert slab.numel() >= nbytes
    return slab


def sent(device: FakeDevice, slabs: Slabs, slab: Tensor) -> Tensor:
    """The device memory that `slab` is sent to."""
    arena = device.arena(slab.numel())
    device.copy(arena, slab)
    slabs.lend(device.record(device.current()), slab, [])
    return arena


def made(device: FakeDevice) -> list[int]:
    return [nbytes for _, nbytes in device.verbs("slab")]


# -- going round -------------------------------------------------------------------------------


def test_the_loader_thread_makes_no_slab_itself() -> None:
    device = FakeDevice()
    slabs = Slabs(device, 3)
    threads: list[threading.Thread] = []
    pinned = device.slab

    def slab(nbytes: int) -> Tensor:
        threads.append(threading.current_thread())
        return pinned(nbytes)

    device.slab = slab  # type: ignore[method-assign]
    found: list[Tensor | None] = []
    thread = threading.Thread(target=lambda: found.append(slabs.take(4, never)), daemon=True)
    with slabs.changed:
        thread.start()
        assert slabs.changed.wait_for(lambda: slabs.wanted, timeout=10)
    assert made(device) == []

    slabs.serve()
    thread.join(10)

    assert threads == [threading.current_thread()] * 3
    assert made(device) == [4, 4, 4]
    assert found[0] is not None
    assert not slabs.wanted


def test_taking_ends_when_told_to() -> None:
    device = FakeDevice()
    slabs = Slabs(device, 3)
    over = threading.Event()
    found: list[Tensor | None] = []
    thread = threading.Thread(target=lambda: found.append(slabs.take(4, over.is_set)), daemon=True)
    with slabs.changed:
        thread.start()
        assert slabs.changed.wait_for(lambda: slabs.wanted, timeout=10)
        over.set()
        slabs.changed.notify_all()
    thread.join(10)

    assert found == [None]
    assert not slabs.wanted
    slabs.serve()
    assert made(device) == []


def test_nothing_is_taken_once_it_is_over() -> None:
    slabs = Slabs(FakeDevice(), 3)
    slabs.give_back(torch.empty(8, dtype=torch.uint8))

    assert slabs.take(4, lambda: True) is None


@pytest.mark.parametrize("limit", [1, 3])
def test_batches_of_one_size_pin_no_more_than_the_limit(limit: int) -> None:
    device = FakeDevice(looks=3)
    slabs = served(device, limit)

    for _ in range(10):
        sent(device, slabs, taken(slabs, 100))

    assert made(device) == [100] * limit


def test_a_slab_that_is_free_is_used_before_one_is_made() -> None:
    device = FakeDevice()
    slabs = served(device, 3)
    taken(slabs, 100)
    assert isinstance(slabs.changed, Serving)
    assert slabs.changed.waits == 1

    taken(slabs, 60)
    taken(slabs, 100)

    assert made(device) == [100, 100, 100]
    assert slabs.changed.waits == 1


def test_while_all_are_in_use_none_is_made() -> None:
    device = FakeDevice()
    slabs = served(device, 2)
    slab, _ = taken(slabs, 8), taken(slabs, 8)
    slabs._wanted = 16  # as the loader thread would

    slabs.serve()
    assert made(device) == [8, 8]

    slabs.give_back(slab)
    slabs.serve()
    assert made(device) == [8, 8, 16]


def test_the_smallest_slab_that_fits_is_taken() -> None:
    slabs = Slabs(FakeDevice(), 3)
    small, medium, large = (torch.empty(n, dtype=torch.uint8) for n in (10, 20, 30))
    for slab in (large, small, medium):
        slabs.give_back(slab)

    assert slabs.take(11, never) is medium
    assert slabs.take(11, never) is large
    assert slabs.take(10, never) is small


def test_no_slab_is_nothing_to_give_back() -> None:
    slabs = Slabs(FakeDevice(), 3)

    slabs.give_back(None)

    assert slabs._free == []


# -- rule 1 ------------------------------------------------------------------------------------


def test_a_slab_comes_back_only_after_its_copy_was_seen_complete() -> None:
    device = FakeDevice()
    slabs = served(device, 2)
    device.current().held = True
    slab = taken(slabs, 8)
    sent(device, slabs, slab)

    slabs.serve()
    assert (slabs.busy, taken(slabs, 8) is slab) == (True, False)

    device.current().held = False
    slabs.serve()
    assert (slabs.busy, taken(slabs, 8) is slab) == (False, True)


def test_at_the_limit_the_loader_thread_waits_for_the_device() -> None:
    device = FakeDevice(looks=5)
    slabs = served(device, 1)
    slab = taken(slabs, 8)
    sent(device, slabs, slab)

    assert taken(slabs, 8) is slab
    assert isinstance(slabs.changed, Serving)
    assert slabs.changed.waits > 5


class Hasty(FakeDevice):
    """Says that a copy is complete before it has run."""

    @override
    def done(self, event: Event) -> bool:
        return True


@pytest.mark.parametrize(("device", "right"), [(FakeDevice(2), True), (Hasty(), False)])
def test_bytes_arrive_as_they_were_because_slabs_wait(device: FakeDevice, *, right: bool) -> None:
    slabs = served(device, 2)
    arenas = [sent(device, slabs, taken(slabs, 4).fill_(number)) for number in range(5)]
    device.wait(device.current(), device.record(device.current()))

    assert ([arena[0].item() for arena in arenas] == [0, 1, 2, 3, 4]) is right


@pytest.mark.slow
def test_memory_sent_from_where_it_lies_is_kept_until_its_copy_was_seen_complete() -> None:
    device = FakeDevice()
    slabs = Slabs(device, 2)
    device.current().held = True
    source = torch.empty(4)
    alive = weakref.ref(source)
    slabs.lend(device.record(device.current()), None, [source])
    del source

    slabs.serve()
    gc.collect()
    assert alive() is not None

    device.current().held = False
    slabs.serve()
    gc.collect()
    assert alive() is None


@pytest.mark.slow
@pytest.mark.parametrize("drop", [lambda slabs: slabs.close(), lambda _: None])
def test_closing_and_dropping_wait_for_every_copy(drop: Callable[[Slabs], None]) -> None:
    device = FakeDevice(looks=2)
    slabs = served(device, 2)
    arenas = [sent(device, slabs, taken(slabs, 4).fill_(7)) for _ in range(2)]

    drop(slabs)
    slabs.changed = threading.Condition()  # breaks the cycle with the one that serves
    del slabs
    gc.collect()

    assert [arena[0].item() for arena in arenas] == [7, 7]


def test_slabs_are_made_again_after_close() -> None:
    device = FakeDevice()
    slabs = served(device, 1)
    slabs.give_back(taken(slabs, 8))

    slabs.close()
    slabs.close()
    taken(slabs, 8)

    assert made(device) == [8, 8]


class Full(FakeDevice):
    """Has no more host memory to pin."""

    @override
    def slab(self, nbytes: int) -> Tensor:
        raise RuntimeError("no memory")


def test_that_nothing_can_be_pinned_is_an_error_of_the_one_who_takes() -> None:
    slabs = served(Full(), 2)

    with pytest.raises(RuntimeError, match=r"^no memory$"):
        slabs.take(8, never)


def test_what_a_device_that_has_failed_may_still_read_is_never_freed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    abandoned: list[Any] = []
    monkeypatch.setattr(module, "DRAIN_SECONDS", 0.01)
    monkeypatch.setattr(module, "_abandoned", abandoned)
    device = FakeDevice()
    slabs = served(device, 1)
    device.current().held = True
    slab = taken(slabs, 8)
    sent(device, slabs, slab)

    slabs.close()

    assert not slabs.busy
    assert [kept is slab for _, kept, _ in abandoned] == [True]


def test_a_wait_that_was_for_something_else_asks_only_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    slabs = Slabs(FakeDevice(), 1)
    waits: list[int] = []

    def wait() -> None:
        waits.append(1)
        if len(waits) == 2:
            slabs.serve()

    notices: list[int] = []
    monkeypatch.setattr(slabs.changed, "wait", wait)
    monkeypatch.setattr(slabs.changed, "notify_all", lambda: notices.append(len(waits)))

    taken(slabs, 8)

    assert len(waits) == 2
    assert notices == [0, 2]  # wanted, and made


# -- sizes -------------------------------------------------------------------------------------


def test_batches_that_grow_replace_the_smallest_slab_by_a_roomy_one() -> None:
    device = FakeDevice()
    slabs = served(device, 2)
    for slab in [taken(slabs, 100), taken(slabs, 100)]:
        slabs.give_back(slab)

    slab = taken(slabs, 129)

    assert slab.numel() == roomy(129) == 144
    assert made(device) == [100, 100, 144]
    assert [free.numel() for free in slabs._free] == [100]


@given(st.lists(st.integers(1, 5000), max_size=40), st.integers(1, 4), st.integers(0, 3))
def test_sizes_that_vary_never_pin_more_than_the_limit(
    sizes: list[int], limit: int, looks: int
) -> None:
    device = FakeDevice(looks)
    slabs = served(device, limit)
    alive: weakref.WeakValueDictionary[int, Tensor] = weakref.WeakValueDictionary()

    for nbytes in sizes:
        assert isinstance(slabs.changed, Serving)
        slabs.changed.waits = 0
        slab = taken(slabs, nbytes)
        alive[id(slab)] = slab
        sent(device, slabs, slab)
        del slab
        assert len(alive) <= limit


@given(st.integers(0, 2**40))
def test_a_roomy_size_is_an_eighth_larger_at_most(nbytes: int) -> None:
    assert nbytes <= roomy(nbytes) <= max(nbytes * 9 / 8, nbytes)
    assert roomy(roomy(nbytes)) == roomy(nbytes)


def test_roomy_sizes_are_eight_for_a_power_of_two() -> None:
    assert [len({roomy(n) for n in range(top + 1, 2 * top + 1)}) for top in (8, 64, 1024)] == [
        8,
        8,
        8,
    ]
