"""One writer and one clearer of each slab's busy byte, and nothing left when all have let go."""

from __future__ import annotations

import gc
import os
import pickle
import threading
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from streamloader.carve import ALIGNMENT
from streamloader.shared import Shape, Shared, Slab, empty, filling, part
from tests.transported import PAGE, Traces, memory


def slab_of(shared: Shared, worker: int = 0) -> Slab:
    slab = shared.take(worker)
    assert slab is not None
    return slab


class Pins:
    """`Device.pin`, and what was done to which address."""

    def __init__(self) -> None:
        self.log: list[tuple[str, int]] = []

    def __call__(self, memory: Tensor) -> Callable[[], object]:
        self.log.append(("pin", memory.nbytes))
        return lambda: self.log.append(("unpin", memory.nbytes))


# -- shape ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("workers", "each", "pages"), [(1, 1, 1), (64, 64, 1), (64, 65, 2)])
def test_the_header_has_a_byte_for_each_slab_in_whole_pages(
    workers: int, each: int, pages: int
) -> None:
    assert Shape(workers, each, PAGE).header == pages * PAGE


def test_pages_cost_nothing_until_they_are_touched() -> None:
    shared = Shared(Shape(1, 2, 1 << 38))
    slab_of(shared).write(0, torch.ones(10, dtype=torch.uint8))
    assert os.fstat(shared._file).st_blocks * 512 < 1 << 22


# -- busy: a slab's way --------------------------------------------------------------------------


def test_a_worker_has_its_own_slabs_and_no_others() -> None:
    shared = Shared(Shape(3, 2, PAGE))
    taken = []
    while (slab := shared.take(1)) is not None:
        taken.append(slab.number)
        shared.send(slab.number)
    assert taken == [2, 3]
    assert slab_of(shared, 2).number == 4


def test_none_is_given_when_all_are_busy_and_the_same_again_when_it_is_back() -> None:
    shared = memory(each=1)
    shared.send(slab_of(shared).number)
    assert shared.take(0) is None
    assert shared.held == 0
    received = shared.received(0)
    assert shared.held == 1
    assert shared.take(0) is None
    del received
    assert shared.held == 0
    assert slab_of(shared).number == 0


def test_a_slab_is_back_only_when_the_last_reference_to_its_memory_is_gone() -> None:
    shared = memory()
    shared.send(slab_of(shared).number)
    kept = part(shared.received(0), 64, 8)[2:].view(2, 3)
    assert shared.take(0) is None
    del kept
    assert shared.take(0) is not None


def test_what_a_worker_keeps_is_not_written_to_again() -> None:
    shared = memory(each=2)
    slab = slab_of(shared)
    with filling(slab):
        kept = empty((4,), torch.float32)
    shared.send(slab.number)
    del slab
    shared.received(0)  # and dropped: the owner has let go of it
    assert slab_of(shared).number == 1
    del kept
    assert slab_of(shared).number == 0


def test_a_forked_child_that_drops_a_slab_does_not_give_it_back() -> None:
    shared = memory()
    shared.send(slab_of(shared).number)
    received = shared.received(0)
    child = os.fork()
    if not child:
        del received
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert shared.take(0) is None
    del received
    assert shared.take(0) is not None


def test_whoever_does_not_own_it_gives_nothing_back(monkeypatch: pytest.MonkeyPatch) -> None:
    shared = memory()
    shared.send(slab_of(shared).number)
    received = shared.received(0)
    monkeypatch.setattr(shared, "owner", -1)
    del received
    assert shared.take(0) is None


def test_what_was_lost_with_its_workers_is_free_again_and_what_is_held_is_not() -> None:
    shared = memory(each=3)
    for number in range(3):
        shared.send(number)
    held = shared.received(1)
    shared.recover()
    assert [slab_of(shared).number, held.numel()] == [0, shared.shape.room]
    shared.send(0)
    assert slab_of(shared).number == 2


# -- pinned --------------------------------------------------------------------------------------


def test_a_slab_is_pinned_once_whole_pages_and_anew_when_a_batch_grows() -> None:
    shared, pins = memory(pages=100), Pins()
    for nbytes in (10, 10 * PAGE, 4 * PAGE, 10 * PAGE + 1, 11 * PAGE):
        assert shared.pin(0, nbytes, pins)
    grown = 10 * PAGE + 10 * PAGE // 8
    assert pins.log[:2] == [("pin", PAGE), ("unpin", PAGE)]
    assert pins.log[2][1] % PAGE == 0
    assert pins.log[2][1] >= grown
    assert pins.log[3:] == []


def test_no_more_than_a_slab_is_pinned() -> None:
    shared, pins = memory(pages=2), Pins()
    shared.pin(0, 1, pins)
    shared.pin(0, 2 * PAGE, pins)
    assert pins.log[-1] == ("pin", 2 * PAGE)


def test_a_device_that_cannot_pin_says_so_each_time() -> None:
    shared = memory()
    assert not shared.pin(0, 10, lambda _: None)
    assert not shared.pin(0, 10, lambda _: None)


def test_a_slab_that_cannot_be_pinned_anew_is_not_pinned() -> None:
    shared, pins = memory(), Pins()

    def refuse(_: Tensor) -> None:
        raise RuntimeError("no more")

    shared.pin(0, 10, pins)
    with pytest.raises(RuntimeError, match=r"^no more$"):
        shared.pin(0, 2 * PAGE, refuse)
    del shared
    assert pins.log == [("pin", PAGE), ("unpin", PAGE)]


def test_unpinning_leaves_what_is_about_to_be_copied_until_it_has_been() -> None:
    shared, pins = memory(each=2), Pins()
    shared.received(0), shared.pin(0, 10, pins)
    under_way = shared.received(1)
    shared.pin(1, 10, pins)
    shared._give_back(0)
    shared.unpin()
    assert pins.log.count(("unpin", PAGE)) == 1
    del under_way
    shared.unpin()
    assert pins.log.count(("unpin", PAGE)) == 2
    shared.unpin()
    assert len(pins.log) == 4


def maps() -> str:
    return Path("/proc/self/maps").read_text(encoding="utf-8")


def test_dropped_it_unpins_before_it_unmaps() -> None:
    shared, mapped = memory(), []
    start = f"{shared.received(0).data_ptr() - PAGE:x}-"  # a mapping begins with the header
    shared.pin(0, 1, lambda _: lambda: mapped.append(start in maps()))
    del shared
    assert mapped == [True]
    assert start not in maps()


def test_a_forked_child_unpins_nothing() -> None:
    shared, pins = memory(), Pins()
    shared.pin(0, 10, pins)
    child = os.fork()
    if not child:
        del shared
        os._exit(len(pins.log))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 1
    del shared
    assert len(pins.log) == 2


# -- clean ---------------------------------------------------------------------------------------


def test_nothing_is_left_when_it_is_dropped() -> None:
    gc.collect()
    before = Traces.now()
    shared = memory(each=4)
    shared.send(slab_of(shared).number)
    received = shared.received(0)
    during = Traces.now()
    del shared
    assert Traces.now() == during  # what is held keeps all
    assert received.fill_(3)[-1] == 3
    del received
    assert Traces.now() == before
    assert (during.mapped, during.named) == (1, before.named)


# -- in another process --------------------------------------------------------------------------


def test_pickled_it_is_the_same_memory_of_the_same_owner() -> None:
    shared, pins = memory(), Pins()
    shared.pin(0, 1, pins)
    other: Shared = pickle.loads(ForkingPickler.dumps(shared))
    assert (other.owner, other.key, other.shape) == (os.getpid(), shared.key, shared.shape)
    assert Shared.find(other.owner, other.key) is shared
    slab_of(other).write(0, torch.arange(5, dtype=torch.uint8))
    other.send(0)
    del other
    assert shared.received(0)[:5].tolist() == [0, 1, 2, 3, 4]
    assert len(pins.log) == 1


def test_it_is_found_by_its_owner_and_key_while_it_lives() -> None:
    shared, another = memory(), memory()
    key = (shared.owner, shared.key)
    assert Shared.find(*key) is shared is not another
    assert Shared.find(0, shared.key) is None
    del shared
    assert Shared.find(*key) is None


# -- a slab that is being filled -----------------------------------------------------------------


@given(st.lists(st.integers(0, 300), max_size=20))
def test_parts_of_a_slab_are_aligned_and_follow_one_another(sizes: list[int]) -> None:
    slab, end = Slab(0, torch.empty(2000, dtype=torch.uint8)), 0
    for size in sizes:
        start = slab.take(size)
        following = -(-end // ALIGNMENT) * ALIGNMENT
        assert start == (following if following + size <= 2000 else None)
        end = end if start is None else start + size
        assert slab.used == end


def test_a_tensor_that_lies_in_a_slab_is_found_there() -> None:
    slab = Slab(0, torch.empty(1000, dtype=torch.uint8))
    with filling(slab):
        first, second = empty((10,), torch.int8), empty((2, 3), torch.float32)
    assert first is not None
    assert second is not None
    assert (slab.offset(first), slab.offset(second), slab.offset(second[1])) == (0, 64, 76)
    assert slab.offset(torch.empty(3)) is None
    behind = part(slab._memory, 128, 8)  # nobody has taken that
    assert slab.offset(behind) is None


def test_memory_is_given_only_while_a_slab_is_filled_in_this_thread() -> None:
    slab = Slab(0, torch.empty(1000, dtype=torch.uint8))
    assert empty((1,), torch.int8) is None
    found = []
    with filling(slab):
        thread = threading.Thread(target=lambda: found.append(empty((1,), torch.int8)))
        thread.start()
        thread.join()
        assert empty((1,), torch.int8) is not None
        assert empty((1001,), torch.int8) is None
    with pytest.raises(KeyError, match=r"^'x'$"), filling(slab):
        raise KeyError("x")
    assert found == [None]
    assert empty((1,), torch.int8) is None


def test_memory_has_a_storage_of_its_own_which_keeps_the_slab() -> None:
    shared = memory()
    with filling(slab_of(shared)):
        empty((3,), torch.int8)
        tensor = empty((2, 3), torch.complex128)
    assert tensor is not None
    assert tensor.untyped_storage().nbytes() == tensor.nbytes == 96
    assert tensor.is_contiguous()
    assert shared.take(0) is None


# -- mapped before it is pinned ------------------------------------------------------------------


def test_pages_are_mapped_once_for_each_size(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    class Libc:
        @staticmethod
        def madvise(_: Any, nbytes: Any, advice: int) -> int:
            asked.append(nbytes.value)
            assert advice == 23
            return 0

    monkeypatch.setattr("streamloader.shared.ctypes.CDLL", lambda _: Libc)
    shared = Shared(Shape(1, 2, 4 * PAGE))
    for nbytes in (1, PAGE, PAGE + 1, 5, 4 * PAGE):
        shared.populate(0, nbytes)
    shared.populate(1, PAGE)
    assert asked == [PAGE, PAGE, 2 * PAGE, 4 * PAGE, PAGE]


def test_mapped_pages_are_those_of_the_slab() -> None:
    shared = Shared(Shape(1, 2, 4 * PAGE))
    shared.populate(1, 2 * PAGE)
    assert shared.received(1).sum() == 0
