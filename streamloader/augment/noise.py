"""Noise without a generator's state, the same on every device and in every executor. Pure.

Philox 4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", 2011), with the first
word of the counter for the pixel, and Box and Muller's transform, as in `triton.language.randn`.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

__all__ = ["normal", "philox"]

ROUNDS = 10
MASK = 0xFFFFFFFF
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
WEYL = (0x9E3779B9, 0xBB67AE85)


def _product(constant: int, words: Tensor) -> tuple[Tensor, Tensor]:
    """The high and the low word of a product, whose 64 bits an int64 has no room for."""
    low = constant * (words & 0xFFFF)  # less than 2**48
    high = constant * (words >> 16) + (low >> 16)
    return high >> 16, ((high & 0xFFFF) << 16) | (low & 0xFFFF)


def philox(key: tuple[int, int], counters: Tensor) -> tuple[Tensor, Tensor]:
    """Two random words for each counter, of the four that there are.

    Args:
        key: Two words of 32 bits.
        counters: int64, from 0 to below 2**32.

    Returns:
        Two tensors of its shape, int64, from 0 to below 2**32.
    """
    none = torch.zeros_like(counters)
    words = (counters, none, none, none)
    for turn in range(ROUNDS):
        low, high = ((key[n] + turn * WEYL[n]) & MASK for n in range(2))
        (high0, low0), (high2, low2) = (_product(MULTIPLIERS[n], words[2 * n]) for n in range(2))
        words = (high2 ^ words[1] ^ low, low2, high0 ^ words[3] ^ high, low0)
    return words[0], words[1]


def _uniform(words: Tensor) -> Tensor:
    """From 0 up to 1, float32: the word as a signed one, and what is negative turned over."""
    signed = torch.where(words > 0x7FFFFFFF, words - (1 << 32), words)
    return torch.where(signed < 0, -signed - 1, signed).float() * 4.6566127342e-10


def normal(key: tuple[int, int], counters: Tensor) -> Tensor:
    """A number of mean 0 and deviation 1 for each counter: float32, as `philox`."""
    radius, angle = map(_uniform, philox(key, counters))
    return torch.sqrt(-2 * torch.log(radius.clamp(min=1e-7))) * torch.cos(2 * math.pi * angle)
