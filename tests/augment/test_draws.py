"""Draws from a key and a place: the same always, others for others."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from streamloader.augment import draws

keys = st.integers(0, 2**64 - 1)


@given(keys, st.integers(0, 100), st.integers(0, 20), st.integers(0, 20), st.integers(0, 9))
def test_a_shorter_batch_has_the_first_rows(
    key: int, place: int, count: int, more: int, each: int
) -> None:
    short = draws.uniforms(key, place, count, each)
    longer = draws.uniforms(key, place, count + more, each)

    assert short.shape == (count, each)
    assert np.array_equal(short, longer[:count])


def test_these_are_the_numbers_for_good() -> None:
    numbers = draws.uniforms(key=1, place=2, count=1, each=3)

    assert numbers.tolist() == [[0.751610134832803, 0.9542084747804751, 0.7765064223344135]]


def test_another_key_or_place_gives_others() -> None:
    made = [draws.uniforms(key, place, 8, 4) for key in range(4) for place in range(4)]

    assert len({number for numbers in made for number in numbers.ravel().tolist()}) == 16 * 32


def test_they_are_uniform() -> None:
    numbers = np.sort(draws.uniforms(0, 0, 1000, 10).ravel())
    steps = np.arange(1, 10_001) / 10_000

    assert numbers[0] >= 0
    assert numbers[-1] < 1
    assert np.abs(numbers - steps).max() < 0.02  # Kolmogorov and Smirnov: p < 0.001 beyond 0.0195


def test_no_global_generator_is_touched() -> None:
    before = np.random.get_state()[1].copy()  # type: ignore[index]

    draws.uniforms(0, 0, 8, 8)

    assert np.array_equal(before, np.random.get_state()[1])  # type: ignore[index]


@given(st.floats(0, 1, exclude_max=True), st.integers(1, 8001))
def test_below_stays_below(uniform: float, bound: int) -> None:
    assert 0 <= draws.below(np.array([uniform]), bound)[0] < bound


@pytest.mark.parametrize("bound", [1, 3, 8001])
def test_below_stays_below_at_the_largest_number(bound: int) -> None:
    assert draws.below(np.array([1 - 2.0**-53]), bound)[0] == bound - 1


def test_chance_is_never_or_always_at_the_ends() -> None:
    uniform = draws.uniforms(0, 0, 1000, 1)[:, 0]

    assert not draws.chance(uniform, 0).any()
    assert draws.chance(uniform, 1).all()


def test_first_takes_the_first_that_fits() -> None:
    fits = np.array([[False, True, True], [False, False, False], [True, False, False]])
    values = np.array([[1, 2, 3], [4, 5, 6], [7, 8, 9]])

    assert draws.first(fits, values, np.array([0, -1, 0])).tolist() == [2, -1, 7]
