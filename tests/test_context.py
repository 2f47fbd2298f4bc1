"""A batch's randomness depends on its seed, epoch, number, rank and stage, and on nothing else."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from streamloader.context import Context, rank

contexts = st.builds(
    Context,
    st.integers(0, 2**64 - 1),
    st.integers(0, 1000),
    st.integers(0, 10**9),
    st.integers(0, 10**5),
)


@given(contexts, st.integers(0, 10))
def test_a_key_is_63_bits_that_a_generator_takes(context: Context, stage: int) -> None:
    key = context._replace(stage=stage).key()

    assert 0 <= key < 2**63
    assert torch.Generator().manual_seed(key).initial_seed() == key


def test_a_key_is_the_same_in_every_process_and_release() -> None:
    assert Context(0, 0, 0, 0).key() == 268742502790376492
    assert Context(1, 2, 3, 4, 5).key() == 7089945055952193378


def test_contexts_that_differ_in_anything_have_different_keys() -> None:
    few = (0, 1, 11)
    keys = [
        Context(seed, epoch, number, of_rank, stage).key()
        for seed, epoch, number, of_rank, stage in itertools.product(few, repeat=5)
    ]

    assert len(set(keys)) == len(keys)


def test_a_key_does_not_depend_on_who_else_draws() -> None:
    assert Context(0, 0, 0, 0, apart=False).key() == Context(0, 0, 0, 0).key()


def test_keys_of_neighbours_share_no_bits_to_speak_of() -> None:
    keys = [Context(0, 0, number, 0).key() for number in range(200)]
    flipped = [(a ^ b).bit_count() for a, b in itertools.pairwise(keys)]

    assert 28 < sum(flipped) / len(flipped) < 35


# -- rank --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("variable", "expected"), [(None, 0), ("", 0), ("3", 3), ("12", 12), ("x", 0), ("-1", 0)]
)
def test_the_rank_is_the_variable(
    monkeypatch: pytest.MonkeyPatch, variable: str | None, expected: int
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    if variable is not None:
        monkeypatch.setenv("RANK", variable)

    assert rank() == expected


def test_the_process_group_knows_the_rank_better(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setattr(torch.distributed, "is_available", lambda: True)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 5)

    assert rank() == 5


def test_a_digit_that_is_no_number_is_no_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "²")

    assert rank() == 0
