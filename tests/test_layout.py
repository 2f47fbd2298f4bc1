"""What a recipe promises, for any tensors."""

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from streamloader.carve import cuts
from streamloader.layout import (
    ALIGNMENT,
    EMPTY,
    FEW,
    LARGE,
    MEDIUM,
    Block,
    Layout,
    Place,
    Spec,
    dense,
    layout,
    merged,
    plain,
    runs,
)


def spec(nbytes: int, *, pinned: bool = False) -> Spec:
    return Spec((nbytes,), (1,), torch.uint8, nbytes, pinned)


SIZES = [0, 1, 63, 64, 65, MEDIUM - 1, MEDIUM, MEDIUM + 1, LARGE - 1, LARGE, LARGE + 1]
recipes = st.lists(
    st.builds(
        lambda nbytes, pinned: spec(nbytes, pinned=pinned),
        st.one_of(st.sampled_from(SIZES), st.integers(0, 4 * LARGE)),
        st.booleans(),
    ),
    max_size=20,
).map(tuple)


def members(plan: Layout, block: int) -> list[int]:
    return [number for number, place in enumerate(plan.places) if place.block == block]


# -- layout ------------------------------------------------------------------------------------


@given(recipes)
def test_every_tensor_is_aligned_and_inside_its_block(specs: tuple[Spec, ...]) -> None:
    plan = layout(specs)

    assert len(plan.places) == len(specs)
    for place, one in zip(plan.places, specs, strict=True):
        assert place.offset % ALIGNMENT == 0
        assert 0 <= place.offset <= plan.blocks[place.block].nbytes - one.nbytes


@given(recipes)
def test_tensors_of_one_block_do_not_overlap(specs: tuple[Spec, ...]) -> None:
    plan = layout(specs)

    for block in range(len(plan.blocks)):
        ranges = [(plan.places[n].offset, specs[n].nbytes) for n in members(plan, block)]
        for (start, nbytes), (following, _) in itertools.pairwise(ranges):
            assert start + nbytes <= following


@given(recipes)
def test_blocks_in_the_slab_are_aligned_disjoint_and_inside(specs: tuple[Spec, ...]) -> None:
    plan = layout(specs)

    end = 0
    for block in plan.blocks:
        if block.offset is not None:
            assert block.offset % ALIGNMENT == 0
            assert block.offset >= end
            end = block.offset + block.nbytes
    assert end <= plan.slab


@given(recipes)
def test_little_of_the_slab_is_unused(specs: tuple[Spec, ...]) -> None:
    plan = layout(specs)
    packed = [n for n in range(len(specs)) if plan.blocks[plan.places[n].block].offset is not None]

    assert plan.slab <= sum(specs[n].nbytes + ALIGNMENT - 1 for n in packed)


@given(recipes)
def test_a_large_tensor_is_alone(specs: tuple[Spec, ...]) -> None:
    plan = layout(specs)

    for number, one in enumerate(specs):
        if one.nbytes >= LARGE:
            assert members(plan, plan.places[number].block) == [number]


@given(recipes)
def test_blocks_are_few(specs: tuple[Spec, ...]) -> None:
    large = sum(one.nbytes >= LARGE for one in specs)

    assert len(layout(specs).blocks) <= max(large, FEW) + 1


@given(recipes)
def test_a_small_tensor_is_never_in_a_block_with_one_that_has_its_own(
    specs: tuple[Spec, ...],
) -> None:
    plan = layout(specs)
    shared = [block for block in range(len(plan.blocks)) if len(members(plan, block)) > 1]

    assert len(shared) <= 1
    assert all(specs[n].nbytes < LARGE for block in shared for n in members(plan, block))


@given(recipes)
def test_only_a_pinned_tensor_that_is_alone_is_sent_from_where_it_lies(
    specs: tuple[Spec, ...],
) -> None:
    plan = layout(specs)

    for number, block in enumerate(plan.blocks):
        assert block.first == members(plan, number)[0]
        if block.offset is None:
            assert members(plan, number) == [block.first]
            assert specs[block.first].pinned
            assert block.nbytes == specs[block.first].nbytes


@given(recipes)
def test_every_block_has_a_tensor(specs: tuple[Spec, ...]) -> None:
    plan = layout(specs)

    assert {place.block for place in plan.places} == set(range(len(plan.blocks)))


def test_no_tensors_need_nothing() -> None:
    assert layout(()) == EMPTY


def test_images_and_labels_are_two_blocks() -> None:
    made = layout((spec(2 * LARGE), spec(2000), spec(256)))
    assert made == Layout(
        blocks=(Block(2 * LARGE, 0, 0), Block(2048 + 256, 2 * LARGE, 1)),
        places=(Place(0, 0), Place(1, 0), Place(1, 2048)),
        slab=2 * LARGE + 2048 + 256,
        cuts=made.cuts,
    )


def test_a_pinned_image_takes_no_room_in_the_slab() -> None:
    made = layout((spec(LARGE, pinned=True), spec(100)))
    assert made == Layout(
        blocks=(Block(LARGE, None, 0), Block(100, 0, 1)),
        places=(Place(0, 0), Place(1, 0)),
        slab=128,
        cuts=made.cuts,
    )


def test_a_small_pinned_tensor_goes_through_the_slab() -> None:
    assert layout((spec(100, pinned=True),)).blocks == (Block(100, 0, 0),)


@pytest.mark.parametrize(("nbytes", "blocks"), [(MEDIUM - 1, 1), (MEDIUM, 2)])
def test_tensors_of_medium_size_do_not_share_while_they_are_few(nbytes: int, blocks: int) -> None:
    assert len(layout((spec(nbytes), spec(nbytes))).blocks) == blocks


def test_of_many_medium_tensors_the_largest_are_alone() -> None:
    sizes = [MEDIUM + n for n in range(FEW + 3)]
    plan = layout(tuple(map(spec, sizes)))

    assert [n for n in range(len(sizes)) if len(members(plan, plan.places[n].block)) == 1] == list(
        range(3, FEW + 3)
    )


def test_a_recipe_is_made_once_for_batches_of_one_shape() -> None:
    assert layout((spec(5), spec(6))) is layout((spec(5), spec(6)))


# -- dense -------------------------------------------------------------------------------------

shapes = st.lists(st.integers(0, 4), max_size=4)


def fills_a_range(shape: list[int], stride: list[int]) -> bool:
    """The definition, by enumeration."""
    indices = itertools.product(*map(range, shape))
    offsets = sorted(sum(map(int.__mul__, index, stride)) for index in indices)
    return offsets == list(range(math.prod(shape)))


@given(shapes.flatmap(lambda shape: st.tuples(st.just(shape), st.permutations(range(len(shape))))))
def test_a_permuted_tensor_is_dense(case: tuple[list[int], list[int]]) -> None:
    shape, order = case
    tensor = torch.empty(shape).permute(order)

    assert dense(tensor.shape, tensor.stride())


@given(shapes.flatmap(lambda s: st.tuples(st.just(s), st.tuples(*[st.integers(0, 16) for _ in s]))))
def test_dense_is_what_fills_one_range_each_place_once(
    case: tuple[list[int], tuple[int, ...]],
) -> None:
    shape, stride = case

    assert dense(shape, stride) == fills_a_range(shape, list(stride))


X = torch.empty(2, 3, 4, 5)


@pytest.mark.parametrize(
    ("tensor", "expected"),
    [
        (torch.tensor(1.0), True),
        (torch.empty(0), True),
        (torch.empty(3, 0, 2), True),
        (X, True),
        (X.to(memory_format=torch.channels_last), True),
        (X.mT, True),
        (X[1:], True),
        (X[:, 1:2], False),
        (X[..., ::2], False),
        (X[:1, :, 0], False),
        (torch.empty(3, 1).expand(3, 4), False),
        (torch.empty(1, 1).expand(1, 4), False),
        (torch.empty(5).as_strided((3, 3), (1, 1)), False),
        (torch.empty(1).as_strided((1, 1), (7, 9)), True),
    ],
)
def test_dense_tensors_are_told_from_slices(tensor: torch.Tensor, *, expected: bool) -> None:
    assert dense(tensor.shape, tensor.stride()) is expected


# -- plain -------------------------------------------------------------------------------------


class Dispatching(torch.Tensor):
    """Answers for its operations itself."""

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise NotImplementedError


@pytest.mark.filterwarnings(r"ignore:torch\.quantize_per_tensor:UserWarning")
@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda: X, True),
        (lambda: torch.nn.Parameter(X), True),
        (lambda: torch.eye(2).to_sparse(), False),
        (lambda: torch.empty(2, device="meta"), False),
        (lambda: torch.ones(2, dtype=torch.complex64).conj(), False),
        (lambda: torch.ones(2, dtype=torch.complex64).conj().imag, False),
        (lambda: torch.quantize_per_tensor(torch.ones(2), 0.5, 0, torch.qint8), False),
        (lambda: torch.empty(2).as_subclass(Dispatching), False),
    ],
)
def test_a_plain_tensor_is_its_bytes(make: Callable[[], torch.Tensor], *, expected: bool) -> None:
    assert plain(make()) is expected


# -- runs --------------------------------------------------------------------------------------


@given(recipes)
def test_every_tensor_is_alone_or_with_the_others(specs: tuple[Spec, ...]) -> None:
    alone, others = runs(specs)

    assert sorted(alone + others) == list(range(len(specs)))
    assert [alone, others] == [sorted(alone), sorted(others)]


def test_a_tensor_that_is_to_share_is_alone_only_when_it_is_large() -> None:
    specs = [spec(MEDIUM)._replace(shares=True), spec(LARGE)._replace(shares=True), spec(MEDIUM)]

    assert runs(specs) == ([1, 2], [0])


# -- merged ------------------------------------------------------------------------------------


@given(recipes, recipes, st.randoms(use_true_random=False))
def test_tensors_of_two_recipes_keep_their_places(
    there: tuple[Spec, ...], here: tuple[Spec, ...], random: Any
) -> None:
    one, other = layout(there), layout(here)
    numbers = [*range(len(there)), *[None] * len(here)]
    random.shuffle(numbers)
    others = iter(here)
    specs = tuple(next(others) if n is None else there[n] for n in numbers)

    both = merged(one, other, numbers, specs)

    assert both.blocks[: len(one.blocks)] == one.blocks
    assert both.slab == other.slab
    assert both.cuts == cuts(specs, both.places)
    after = iter(other.places)
    for number, place in zip(numbers, both.places, strict=True):
        if number is not None:
            assert place == one.places[number]
            continue
        before = next(after)
        assert place == Place(before.block + len(one.blocks), before.offset)
        old = other.blocks[before.block]
        assert both.blocks[place.block] == old._replace(first=old.first + len(there))


def test_where_nothing_else_travels_the_recipe_is_the_one_that_is_there() -> None:
    there = layout((spec(MEDIUM), spec(9)))
    for numbers, same in (([0, 1], True), ([1, 0], False), ([0], False)):
        specs = [(spec(MEDIUM), spec(9))[number] for number in numbers]
        assert (merged(there, EMPTY, numbers, specs).cuts is there.cuts) is same
