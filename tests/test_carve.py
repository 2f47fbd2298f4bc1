"""Tensors lie where they should, one call for many, and none knows of another."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from streamloader.carve import carve, contiguous, cuts
from streamloader.layout import Place, Spec

DTYPES = (torch.uint8, torch.float32, torch.int64, torch.complex64, torch.bool, torch.bfloat16)


def spec(shape: tuple[int, ...], dtype: torch.dtype, stride: tuple[int, ...] | None = None) -> Spec:
    nbytes = math.prod(shape) * dtype.itemsize
    return Spec(shape, stride or contiguous(shape), dtype, nbytes, pinned=False)


def test_tensors_of_two_blocks_lie_where_they_should() -> None:
    blocks = [torch.arange(256, dtype=torch.uint8), torch.zeros(300, dtype=torch.uint8)[64:]]
    specs = [
        spec((2, 3), torch.uint8, (1, 2)),
        spec((2,), torch.int64),
        spec((4,), torch.uint8),
        spec((), torch.float32),
    ]
    places = [Place(0, 64), Place(1, 0), Place(0, 128), Place(1, 64)]
    blocks[1][64:68] = torch.tensor([2.5]).view(torch.uint8)

    made = carve(blocks, cuts(specs, places))

    assert made[0].tolist() == [[64, 66, 68], [65, 67, 69]]
    assert [one.tolist() for one in made[1:]] == [[0, 0], [128, 129, 130, 131], 2.5]
    assert [(one.shape, one.stride(), one.dtype) for one in made] == [
        (one.shape, one.stride, one.dtype) for one in specs
    ]


def test_none_is_a_view_nor_shares_a_version_counter() -> None:
    specs = [spec((4,), torch.uint8), spec((2, 2), torch.uint8), spec((2, 2), torch.uint8, (1, 2))]
    made = carve(
        [torch.zeros(256, dtype=torch.uint8)], cuts(specs, [Place(0, n) for n in (0, 64, 128)])
    )
    for number, tensor in enumerate(made):
        before = [one._version for one in made]
        tensor.add_(1)
        assert not tensor._is_view()
        assert [one._version for one in made] == [
            version + (place == number) for place, version in enumerate(before)
        ]


def test_neighbours_of_a_dtype_are_one_call() -> None:
    specs = [spec((16,), torch.float32)] * 3 + [spec((3,), torch.float32)] * 2
    places = [Place(0, 64 * n) for n in range(5)]
    (cut,) = cuts(specs, places)
    assert cut.sizes == (16, 16, 16, 3, 13, 3)
    assert [pick.piece for pick in cut.picks] == [0, 1, 2, 3, 5]


def test_two_tensors_of_one_place_are_both_made() -> None:
    specs = [spec((4,), torch.uint8), spec((2, 2), torch.uint8)]
    one, other = carve([torch.arange(8, dtype=torch.uint8)], cuts(specs, [Place(0, 4)] * 2))
    assert one.tolist() == [4, 5, 6, 7]
    assert other.tolist() == [[4, 5], [6, 7]]


def test_many_cost_each_what_a_few_do() -> None:
    """Else this would take minutes, which no test has."""
    count = 200_000
    (cut,) = cuts([spec((16,), torch.float32)] * count, [Place(0, 64 * n) for n in range(count)])
    assert len(cut.picks) == count


shapes = st.lists(st.integers(0, 4), max_size=3).map(tuple)


@given(st.lists(st.tuples(shapes, st.sampled_from(DTYPES), st.booleans()), max_size=9), st.data())
def test_each_gets_the_bytes_of_its_place(
    kinds: list[tuple[tuple[int, ...], torch.dtype, bool]], data: st.DataObject
) -> None:
    specs = []
    for shape, dtype, turned in kinds:
        last_first = contiguous(shape[::-1])[::-1] if turned else None
        specs.append(spec(shape, dtype, last_first))
    order = data.draw(st.permutations(range(len(specs))))
    places, end = {}, 0
    for number in order:
        places[number] = Place(0, end)
        end += -(-max(specs[number].nbytes, 1) // 64) * 64
    block = torch.randint(0, 2, (end,), dtype=torch.uint8)

    made = carve([block], cuts(specs, [places[n] for n in range(len(specs))]))

    for number, tensor in enumerate(made):
        wanted, start = specs[number], places[number].offset
        raw = block[start : start + wanted.nbytes].view(wanted.dtype)
        expected = raw.as_strided(wanted.shape, wanted.stride, raw.storage_offset())
        assert (tensor.shape, tensor.stride()) == (wanted.shape, wanted.stride)
        assert torch.equal(tensor, expected)


@pytest.mark.parametrize("count", [0, 1, 500])
def test_there_are_as_many_as_were_asked_for(count: int) -> None:
    specs = [spec((5,), torch.float32)] * count
    block = torch.zeros(64 * max(count, 1), dtype=torch.uint8)
    assert len(carve([block], cuts(specs, [Place(0, 64 * n) for n in range(count)]))) == count


@given(st.lists(st.integers(0, 4), max_size=5))
def test_contiguous_strides_are_torchs(shape: list[int]) -> None:
    assert contiguous(shape) == torch.empty(shape).stride()
