"""A batch comes out of a slab as it went in, whatever it is, and only what fits goes there."""

from __future__ import annotations

import copy
import gc
import io
import itertools
import os
import pickle
import threading
from multiprocessing import resource_sharer
from multiprocessing.reduction import ForkingPickler
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from streamloader import tree
from streamloader.layout import ALIGNMENT, FEW, LARGE, MEDIUM, dense
from streamloader.sent import LITTLE, Recipe, Sent, packed, wanted
from streamloader.shared import empty, filling
from tests.transported import (
    BATCHES,
    PAGE,
    Checked,
    Holder,
    Image,
    Moves,
    Traces,
    crossed,
    lies_in,
    memory,
    own,
    received,
    same,
    sent,
)

pytestmark = pytest.mark.filterwarnings("ignore:Sparse (CSR|CSC|invariant):UserWarning")


# -- what arrives --------------------------------------------------------------------------------


@pytest.mark.parametrize("make", BATCHES.values(), ids=BATCHES)
def test_a_batch_arrives_as_it_went(make: Any) -> None:
    same(own(sent(make)), make())


@pytest.mark.parametrize("make", BATCHES.values(), ids=BATCHES)
def test_a_batch_that_does_not_fit_arrives_as_it_went(make: Any) -> None:
    same(own(sent(make, pages=1, taken=PAGE)), make())


@pytest.mark.parametrize("make", BATCHES.values(), ids=BATCHES)
def test_whoever_does_not_ask_for_what_was_sent_gets_the_value(make: Any) -> None:
    shared, found = memory(each=2), []
    queued = crossed(shared, make)
    thread = threading.Thread(target=lambda: found.append(ForkingPickler.loads(queued)))
    with wanted():  # in this thread
        thread.start()
        thread.join()
    same(found[0], make())
    same(ForkingPickler.loads(crossed(shared, make)), make())


def test_whoever_asks_within_a_pass_leaves_it_as_it_was() -> None:
    shared = memory(each=2)
    queued = [crossed(shared, lambda: torch.ones(3)) for _ in range(2)]
    with wanted():
        with wanted():
            first = pickle.loads(queued[0])
        second = pickle.loads(queued[1])
    assert [type(first), type(second)] == [Sent, Sent]


def test_whoever_does_not_ask_gets_a_copy_of_what_is_pinned() -> None:
    """From pinned memory a copy of his own may run after he has let go of the batch."""
    shared, there = memory(), []
    for _ in range(2):
        value = pickle.loads(crossed(shared, lambda: [torch.arange(5), torch.ones(MEDIUM)]))
        same(value, [torch.arange(5), torch.ones(MEDIUM)])
        there.append([lies_in(shared, tensor) for tensor in value])
        shared.pin(0, 1, lambda _: int)
        del value
    assert there == [[True, True], [False, False]]


DTYPES = [torch.bool, torch.uint8, torch.int16, torch.float32, torch.float64, torch.complex128]
SIZES = st.one_of(st.integers(0, 5), st.sampled_from([63, 64, 65, MEDIUM, LARGE]))


@st.composite
def tensors(draw: st.DrawFn) -> Tensor:
    dtype, rows = draw(st.sampled_from(DTYPES)), draw(st.integers(1, 3))
    tensor = torch.arange(rows * draw(SIZES)).remainder(251).to(dtype).view(rows, -1)
    forms = [tensor, tensor.mT, tensor[:, ::2], tensor[:1], tensor[..., None].expand(-1, -1, 2)]
    return draw(st.sampled_from(forms))


structures = st.recursive(
    st.one_of(tensors(), st.integers(), st.text(max_size=3)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(st.text(max_size=2), inner, max_size=4),
        st.tuples(inner, inner),
    ),
    max_leaves=12,
)


@settings(max_examples=30)
@given(structures, st.sampled_from([1, 2, 5, 2000]))
def test_any_structure_arrives_from_a_slab_of_any_size(value: Any, pages: int) -> None:
    shared = memory(pages=pages)
    found = received(crossed(shared, lambda: value))
    if isinstance(found, Sent):
        tidy(found.recipe)
        fits = sum({id(leaf): leaf.nbytes for leaf in tree.leaves(value)}.values())
        assert found.recipe.nbytes + found.left_out == fits
        assert found.recipe.used <= pages * PAGE
    same(own(found), value)
    del found
    assert shared.take(0) is not None


def tidy(recipe: Recipe) -> None:
    """Every tensor is aligned, none lies in another, and blocks are what their tensors cover."""
    blocks = recipe.layout.blocks
    assert all(block.shared and block.offset is not None for block in blocks)
    ranges: list[list[tuple[int, int]]] = [[] for _ in blocks]
    for spec, place in zip(recipe.specs, recipe.layout.places, strict=True):
        start = (blocks[place.block].offset or 0) + place.offset
        assert start % ALIGNMENT == 0
        assert dense(spec.shape, spec.stride)
        ranges[place.block].append((start, start + spec.nbytes))
    for block, covered in zip(blocks, ranges, strict=True):
        start = block.offset or 0
        assert (min(covered)[0], max(end for _, end in covered)) == (start, start + block.nbytes)
    every = sorted(span for covered in ranges for span in covered if span[0] < span[1])
    assert all(before[1] <= after[0] for before, after in itertools.pairwise(every))
    assert recipe.used >= max((end for _, end in every), default=0)


def test_500_small_tensors_are_one_block() -> None:
    value = {f"feature {n}": torch.full((64 + n,), n) for n in range(500)}
    found = sent(lambda: value)
    assert len(found.recipe.layout.blocks) == 1
    assert not found.checked
    same(own(found), value)


def test_large_tensors_have_blocks_of_their_own() -> None:
    value = [torch.ones(LARGE // 4), *(torch.ones(MEDIUM // 4) for _ in range(FEW + 3))]
    assert len(sent(lambda: value).recipe.layout.blocks) == 1 + (FEW - 1) + 1


def test_what_was_made_in_the_slab_is_not_copied() -> None:
    shared = memory()
    slab = shared.take(0)
    assert slab is not None
    with filling(slab):
        made = empty((LARGE,), torch.uint8)
        empty((100,), torch.uint8)  # and dropped
    assert made is not None
    made.fill_(3)
    used = slab.used
    packed([made, made[: LARGE // 2]], slab, shared)
    assert slab.used == used


# -- memory of their own -------------------------------------------------------------------------


def test_a_tensor_is_copied_and_saved_as_itself_and_not_as_its_whole_slab() -> None:
    large, small = own(sent(lambda: [torch.ones(LARGE), torch.ones(3)]))
    assert copy.deepcopy(small).untyped_storage().nbytes() == 12
    assert large.untyped_storage().nbytes() == large.nbytes
    file = io.BytesIO()
    torch.save(small, file)
    assert file.tell() < 4096


def test_tensors_have_version_counters_of_their_own() -> None:
    one, other = own(sent(lambda: [torch.ones(3), torch.ones(3)]))
    one.add_(1)
    assert (one._version, other._version) == (1, 0)


@pytest.mark.parametrize("keep", ["value", "part"])
def test_the_slab_is_back_when_the_last_tensor_of_the_batch_is_gone(keep: str) -> None:
    shared = memory()
    value = own(received(crossed(shared, lambda: [torch.arange(5), torch.ones(3)])))
    kept = value if keep == "value" else value[1][1:]
    del value
    assert shared.take(0) is None
    del kept
    assert shared.take(0) is not None


def test_a_batch_that_is_thrown_away_unopened_gives_its_slab_back() -> None:
    shared = memory()
    received(crossed(shared, lambda: torch.ones(3)))
    assert shared.take(0) is not None


def test_it_can_be_opened_once() -> None:
    found = sent(lambda: [torch.ones(3)])
    own(found)
    with pytest.raises(EOFError):
        own(found)


# -- what stays out of the slab ------------------------------------------------------------------


def others() -> Any:
    """Half of it lies in the slab, as a part of what `default_collate` made there."""
    made = empty((LARGE,), torch.uint8)
    assert made is not None
    made.fill_(3)
    image = made.as_subclass(Image)
    return [torch.ones(5), torch.arange(6.0).as_subclass(Image), image, Moves(made[:9])]


def expected() -> Any:
    threes = torch.full((LARGE,), 3, dtype=torch.uint8)
    image = threes.as_subclass(Image)
    return [torch.ones(5), torch.arange(6.0).as_subclass(Image), image, Moves(threes[:9])]


def test_memory_of_other_tensors_has_left_the_worker_before_the_batch_is_opened() -> None:
    """A worker whose dataset has ended is gone by then, and with it whoever answers for it."""
    found = sent(others)
    resource_sharer.stop(timeout=10)
    same(own(found), expected())


def test_what_is_thrown_away_unopened_leaves_no_descriptor() -> None:
    shared, found = memory(), []
    for count in (1, 5):
        for _ in range(count):
            received(crossed(shared, others))
        resource_sharer.stop(timeout=10)  # it closes what it has handed out
        found.append(Traces.now())
    assert found[0] == found[1]


def test_containers_that_see_their_tensors_see_those_of_the_batch() -> None:
    found = sent(lambda: [Checked(image=torch.arange(7)), torch.ones(2)])
    assert found.checked
    assert not sent(lambda: {"a": [torch.ones(2), {"b": (1, None, "c")}]}).checked


def test_an_object_over_a_tensor_of_the_batch_has_that_tensor() -> None:
    tensor = torch.arange(6)
    value = own(sent(lambda: [tensor, Holder(tensor), Moves(tensor)]))
    assert value[0].tolist() == value[1].tensor.tolist() == value[2].tensor.tolist()


# -- too little room -----------------------------------------------------------------------------


def test_tensors_that_fit_go_into_the_slab_and_the_others_beside_it() -> None:
    value = [torch.ones(PAGE * 4, dtype=torch.uint8), torch.arange(100), torch.zeros(50)]
    found = sent(lambda: value, pages=1)
    assert (found.recipe.nbytes, found.left_out) == (800 + 200, PAGE * 4)
    same(own(found), value)


def test_a_tensor_that_is_tried_twice_is_left_out_once() -> None:
    def make() -> Tensor:
        assert empty((PAGE + 1,), torch.uint8) is None
        return torch.ones(PAGE + 1, dtype=torch.uint8)

    assert sent(make, pages=1).left_out == PAGE + 1


def test_what_was_only_tried_is_not_left_out() -> None:
    def make() -> Tensor:
        assert empty((PAGE + 1,), torch.uint8) is None
        return torch.ones(3)

    assert sent(make, pages=1).left_out == 0


def test_a_batch_without_tensors_leaves_the_slab_where_it_is() -> None:
    shared = memory()
    assert received(crossed(shared, lambda: ["a", 1])) == ["a", 1]
    assert shared.take(0) is not None


def test_a_batch_that_cannot_be_pickled_is_an_error_and_takes_no_slab() -> None:
    shared = memory()
    with pytest.raises(Exception, match="pickle"):
        crossed(shared, lambda: [torch.ones(3), lambda: 3])
    gc.collect()
    assert shared.take(0) is not None


def test_a_batch_of_a_loader_that_was_closed_is_an_error_that_says_so() -> None:
    queued = crossed(memory(), lambda: torch.ones(3))
    with pytest.raises(RuntimeError, match=r"^this batch lies in memory of a StreamLoader that"):
        received(queued)


def test_what_stands_for_a_tensor_means_nothing_elsewhere() -> None:
    with pytest.raises(NotImplementedError, match=r"^0$"):
        pickle.loads(sent(lambda: torch.ones(3))._payload.pickled)


def test_a_child_of_its_owner_may_look_and_gives_nothing_back() -> None:
    shared = memory()
    queued = crossed(shared, lambda: torch.arange(3))
    child = os.fork()
    if not child:
        os._exit(own(received(queued)).tolist() != [0, 1, 2])
    assert os.waitpid(child, 0)[1] == 0
    assert shared.take(0) is None


# -- what can be made where the caller waits for it ----------------------------------------------


@pytest.mark.parametrize(
    ("make", "whole"),
    [
        (lambda: [torch.ones(9), {"a": torch.ones(2), "b": ("text", 3)}], True),
        (lambda: torch.ones(9), True),
        (lambda: [torch.ones(9), torch.ones(2).as_subclass(Image)], False),
        (lambda: [torch.ones(9), Moves(torch.ones(2))], False),
        (lambda: Checked(a=torch.ones(7)), False),
        (lambda: [torch.ones(9), "x" * LITTLE], False),
        (lambda: [torch.ones(9), {"a": [3, {1, 2}]}], False),
        (lambda: [torch.ones(9), frozenset({1})], False),
        (lambda: {"a": torch.ones(9), "b": {(1, 2): 3}}, False),
        (lambda: {"a": torch.ones(9), 1: {None: 3}}, True),
    ],
    ids=[
        "containers",
        "a tensor",
        "subclass",
        "moves itself",
        "checks",
        "much",
        "set",
        "frozen",
        "keys",
        "simple keys",
    ],
)
def test_only_what_is_all_tensors_and_little_else_is_whole(make: Any, *, whole: bool) -> None:
    assert sent(make).whole is whole


def test_what_does_not_fit_is_not_whole() -> None:
    assert not sent(lambda: [torch.ones(PAGE), torch.ones(2)], pages=1).whole


HIDES: dict[str, Any] = {
    "a set": lambda tensor: {tensor},
    "a frozen set": lambda tensor: frozenset({tensor}),
    "a key": lambda tensor: {tensor: 1},
    "within a key": lambda tensor: {(tensor,): 1},
}


@pytest.mark.parametrize("hides", HIDES.values(), ids=HIDES)
def test_a_tensor_that_is_also_where_nobody_looks_is_there_itself(hides: Any) -> None:
    tensor = torch.arange(4)
    found = sent(lambda: [tensor, hides(tensor)])
    assert found.checked
    seen, [other] = own(found)
    assert seen is (other[0] if isinstance(other, tuple) else other)
    assert seen.tolist() == [0, 1, 2, 3]
