"""Noise from a key and a counter."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from streamloader.augment.noise import normal, philox

words = st.integers(0, 2**32 - 1)


def by_hand(key: tuple[int, int], counter: int) -> tuple[int, int]:
    """Philox 4x32-10 with Python's numbers, which do not overflow."""
    mask = 2**32 - 1
    (k0, k1), (c0, c1, c2, c3) = key, (counter, 0, 0, 0)
    for _ in range(10):
        first, second = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = second >> 32 ^ c1 ^ k0, second & mask, first >> 32 ^ c3 ^ k1, first & mask
        k0, k1 = k0 + 0x9E3779B9 & mask, k1 + 0xBB67AE85 & mask
    return c0, c1


def test_it_is_philox() -> None:
    # Random123's own known answers begin with this one.
    assert by_hand((0, 0), 0) == (0x6627E8D5, 0xE169C58D)
    made = philox((0, 0), torch.tensor([0]))
    assert (made[0].item(), made[1].item()) == (0x6627E8D5, 0xE169C58D)


@given(words, words, words)
def test_no_word_overflows(low: int, high: int, counter: int) -> None:
    made = philox((low, high), torch.tensor([counter]))

    assert (made[0].item(), made[1].item()) == by_hand((low, high), counter)


def test_numbers_are_normal() -> None:
    numbers = normal((1, 2), torch.arange(20_000)).double().sort().values
    expected = torch.special.ndtr(numbers)

    assert numbers.isfinite().all()
    assert (expected - torch.arange(1, 20_001) / 20_000).abs().max() < 0.0138  # p = 0.001


def test_another_key_gives_others() -> None:
    counters = torch.arange(100)

    assert not torch.equal(normal((1, 2), counters), normal((1, 3), counters))
    assert not torch.equal(normal((1, 2), counters), normal((2, 2), counters))
    assert torch.equal(normal((1, 2), counters[50:]), normal((1, 2), counters)[50:])


@pytest.mark.parametrize("counter", [0, 2**31, 2**32 - 1])
def test_box_and_muller_as_written(counter: int) -> None:
    first, second = (word - 2**32 if word >= 2**31 else word for word in by_hand((5, 6), counter))
    radius, angle = (abs(word + (word < 0)) * 4.6566127342e-10 for word in (first, second))
    expected = math.sqrt(-2 * math.log(radius)) * math.cos(2 * math.pi * angle)

    assert normal((5, 6), torch.tensor([counter])).item() == pytest.approx(expected, abs=1e-5)
