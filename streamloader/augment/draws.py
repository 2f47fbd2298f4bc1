"""Random numbers without a generator's state: a key and a place give them. Pure.

Philox is a function of a key and a counter: the key is the batch's, the counter's high word the
transform's place, its low words count on from sample to sample. So no draw depends on what was
drawn before, and a shorter batch has the first rows of a longer one.
"""

from __future__ import annotations

import math
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "ATTEMPTS",
    "Floats",
    "Ints",
    "below",
    "between",
    "chance",
    "first",
    "sides",
    "uniforms",
]

Floats: TypeAlias = NDArray[np.float64]
Ints: TypeAlias = NDArray[np.int64]

ATTEMPTS = 10
"""How often torchvision tries to find a rectangle of a random area and shape."""


def uniforms(key: int, place: int, count: int, each: int) -> Floats:
    """Numbers from 0 up to, but not, 1: (count, each), the first rows alike whatever the count.

    Args:
        key: The batch's, below 2**64: `Context.key`.
        place: The transform's among those of its recipe.
        count: Samples.
        each: Numbers for a sample.

    Made from the generator's raw words, which NumPy promises to keep; what its own methods make of
    them may change from release to release.
    """
    words = np.random.Philox(key=key, counter=place << 192).random_raw(count * each)
    numbers = (words >> np.uint64(11)).astype(np.float64) * 2.0**-53  # a double has 53 bits
    return numbers.reshape(count, each)


def between(uniform: Floats, low: float, high: float) -> Floats:
    """Uniform from `low` to `high`."""
    return low + (high - low) * uniform


def below(uniform: Floats, bound: Ints | int) -> Ints:
    """A whole number from 0 to `bound - 1`."""
    return np.floor(uniform * bound).astype(np.int64)


def chance(uniform: Floats, p: float) -> Ints:
    """1 with probability `p`, else 0."""
    return (uniform < p).astype(np.int64)


def sides(
    uniform: Floats, areas: Ints, scale: tuple[float, float], ratio: tuple[float, float]
) -> tuple[Ints, Ints]:
    """The sides of rectangles, all attempts at once; their quotient is log-uniform within `ratio`.

    The formula of torchvision's `RandomResizedCrop` (width, height) and `RandomErasing` (height,
    width), whose rounding, half to even, this is.

    Args:
        uniform: (N, 2 * ATTEMPTS).
        areas: (N,), of which the rectangle takes a share within `scale`.
        scale: The share, least and most.
        ratio: First side by second, least and most.

    Returns:
        The first and the second side, each (N, ATTEMPTS).
    """
    area = areas[:, None] * between(uniform[:, :ATTEMPTS], *scale)
    aspect = np.exp(between(uniform[:, ATTEMPTS:], math.log(ratio[0]), math.log(ratio[1])))
    first_side, second_side = np.rint(np.sqrt(area * aspect)), np.rint(np.sqrt(area / aspect))
    return first_side.astype(np.int64), second_side.astype(np.int64)


def first(fits: NDArray[np.bool_], values: Ints, otherwise: Ints) -> Ints:
    """Of each row the first value that fits, else `otherwise`: (N, ATTEMPTS), (N,) to (N,)."""
    chosen = values[np.arange(len(values)), fits.argmax(axis=1)]
    return np.where(fits.any(axis=1), chosen, otherwise)
