"""Transforms of a batch: samples mixed in pairs, by blending or by cutting and pasting."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
from typing_extensions import override

from streamloader.augment import checks, labels
from streamloader.augment.draws import Floats, Ints, below, uniforms
from streamloader.augment.mixing import BOX, Mix, Rows

__all__ = ["CutMix", "MixUp", "RandomChoice"]


@dataclass(frozen=True, kw_only=True)
class _Pair(Mix):
    """What MixUp and CutMix have in common: their arguments."""

    alpha: float = 1.0
    num_classes: int | None = None
    labels_getter: Any = "default"
    per_batch: bool = False

    draws: ClassVar[int] = 4

    def __post_init__(self) -> None:
        alpha: Any = self.alpha
        if isinstance(alpha, bool) or not isinstance(alpha, (int, float)):
            raise TypeError(f"alpha must be a number, got {alpha!r}")
        if not 0 < alpha < math.inf:
            raise ValueError(
                f"alpha must be above 0 and finite, got {alpha}: to mix nothing, leave "
                f"{type(self).__name__} out"
            )
        if self.num_classes is not None:
            checks.whole("num_classes", self.num_classes)
        labels.getter(self.labels_getter)
        object.__setattr__(self, "alpha", float(alpha))
        object.__setattr__(self, "per_batch", bool(self.per_batch))

    @property
    @override
    def labelled(self) -> tuple[int | None, Any]:
        return self.num_classes, self.labels_getter

    @override
    def rows(self, key: int, place: int, count: int, size: tuple[int, int]) -> Rows:
        uniform = uniforms(key, place, 1 if self.per_batch else count, self.draws)
        return self.decide(np.broadcast_to(uniform, (count, self.draws)), size)

    @abstractmethod
    def decide(self, uniform: Floats, size: tuple[int, int]) -> Rows:
        """`lambda`, `outside` and the box from (N, draws) uniform numbers."""


class MixUp(_Pair):
    """Blends each image with another, and their labels alike (Zhang et al. 2018, arXiv:1710.09412).

        image = lambda * image + (1 - lambda) * partner,  lambda from Beta(alpha, alpha)

    lambda is drawn for each sample (torchvision: for the batch). The partner is the sample before
    it in the batch, the last one for the first, as in torchvision: the batch should be shuffled. A
    batch of one sample is mixed with itself. Images are float, so it comes after `Normalize` or
    `ToDtype`; they are blended in float32 (float64 in float64) and rounded once.

    Args:
        alpha: Both parameters of the Beta distribution, above 0. Below 1 most lambdas are near 0
            or 1.
        num_classes: How many there are. None if labels are (N, num_classes) already.
        labels_getter: Where in the batch the labels are: integer classes, (N,), from 0 to
            num_classes - 1, or shares, (N, num_classes). "default": what has `label` in its name
            in a mapping, a dataclass or a namedtuple, else the other tensor of a pair, the second
            of more. Or a key, a field's name, an index, or a function of the batch that returns
            one of its tensors.
        per_batch: Whether all samples of a batch share one lambda, torchvision's way.

    Raises:
        TypeError: An argument is of the wrong kind.
        ValueError: `alpha` is not above 0, `num_classes` is below 1.
    """

    blends = True

    @property
    @override
    def columns(self) -> tuple[str, ...]:
        return ("lambda",)

    @override
    def decide(self, uniform: Floats, size: tuple[int, int]) -> Rows:
        share = _beta(uniform, self.alpha)
        none = np.zeros_like(share)
        return {"lambda": share, "outside": share} | dict.fromkeys(BOX, none)


class CutMix(_Pair):
    """Pastes a box of another image into each, and mixes labels by its area (Yun et al. 2019).

    arXiv:1905.04899. The box is drawn for each sample (torchvision: for the batch): its middle is
    uniform, its sides are sqrt(1 - lambda) of the image's, lambda from Beta(alpha, alpha), and what
    is outside of the image is cut off. Labels are mixed by the box's true area: lambda becomes
    1 - area / (H * W). Images of any dtype; pixels stay as they are. The partner: see `MixUp`.

    Args:
        alpha: As for `MixUp`: with 1, the box's share is uniform before it is cut off.
        num_classes: As for `MixUp`.
        labels_getter: As for `MixUp`.
        per_batch: Whether all samples of a batch share one box, torchvision's way.

    Raises:
        TypeError: An argument is of the wrong kind.
        ValueError: `alpha` is not above 0, `num_classes` is below 1.
    """

    blends = False
    draws = 4 + 2

    @property
    @override
    def columns(self) -> tuple[str, ...]:
        return ("lambda", *BOX)

    @override
    def decide(self, uniform: Floats, size: tuple[int, int]) -> Rows:
        half = 0.5 * np.sqrt(1.0 - _beta(uniform, self.alpha))
        top, bottom = _side(uniform[:, 4], half, size[0])
        left, right = _side(uniform[:, 5], half, size[1])
        height, width = bottom - top, right - left
        share = 1.0 - height * width / (size[0] * size[1])
        rows = {"lambda": share, "outside": np.ones_like(share)}
        box = (top, left, height, width)
        return rows | {name: one.astype(np.float64) for name, one in zip(BOX, box, strict=True)}


@dataclass(frozen=True)
class RandomChoice(Mix):
    """One of several ways to mix, picked for each sample (torchvision: for the batch).

        RandomChoice([MixUp(alpha=0.2, num_classes=1000), CutMix(num_classes=1000)])

    Args:
        transforms: `MixUp` and `CutMix`, with the same `num_classes` and `labels_getter`.
        p: How likely each is, in any unit: they are divided by their sum. None: all alike.
        per_batch: Whether all samples of a batch get the same one, torchvision's way. Whether they
            share a lambda too is for that one to say.

    Raises:
        TypeError: An argument is of the wrong kind, or a transform is another.
        ValueError: There is no transform, they differ in what labels are; `p` is of another
            length, negative, or all 0.
    """

    transforms: Sequence[_Pair]
    p: Sequence[float] | None = None
    per_batch: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        if not isinstance(self.transforms, Sequence):
            raise TypeError(f"transforms must be a sequence, got {self.transforms!r}")
        if not self.transforms:
            raise ValueError("transforms must hold at least one, got none")
        for one in self.transforms:
            if not isinstance(one, _Pair):
                raise TypeError(f"transforms must be MixUp and CutMix, got {one!r}")
        labelled = [one.labelled for one in self.transforms]
        if labelled.count(labelled[0]) != len(labelled):
            raise ValueError(
                "transforms must have the same num_classes and labels_getter, got "
                f"{', '.join(map(repr, labelled))}"
            )
        object.__setattr__(self, "transforms", tuple(self.transforms))
        if self.p is not None:
            object.__setattr__(self, "p", _likely(self.p, len(labelled)))

    @property
    @override
    def labelled(self) -> tuple[int | None, Any]:
        return self.transforms[0].labelled

    @property
    @override
    def blends(self) -> bool:
        return any(one.blends for one in self.transforms)

    @property
    @override
    def columns(self) -> tuple[str, ...]:
        return ("choice", "lambda", "outside", *BOX)

    @override
    def rows(self, key: int, place: int, count: int, size: tuple[int, int]) -> Rows:
        limits = np.cumsum(self.p or [1.0] * len(self.transforms))
        uniform = uniforms(key, place, 1 if self.per_batch else count, 1)[:, 0]
        choice = np.searchsorted(limits / limits[-1], uniform, side="right")
        choice = np.broadcast_to(choice, (count,))
        each = [one.rows(key, place + n, count, size) for n, one in enumerate(self.transforms, 1)]
        samples = np.arange(count)
        rows = {
            name: np.stack([drawn[name] for drawn in each])[choice, samples] for name in each[0]
        }
        return {"choice": choice.astype(np.float64)} | rows


def _likely(p: Any, count: int) -> tuple[float, ...]:
    """Probabilities in any unit.

    Raises:
        ValueError: Another number of them, or they are negative, or all 0.
    """
    shares = checks.numbers("p", p)
    if len(shares) != count:
        raise ValueError(
            f"p must hold a number for each of the {count} transforms, got {len(shares)}: {p!r}"
        )
    if min(shares) < 0 or not sum(shares):
        raise ValueError(f"p must hold no negative number, and one above 0, got {p!r}")
    return shares


def _beta(uniform: Floats, alpha: float) -> Floats:
    """Numbers from Beta(alpha, alpha), exactly, without rejecting any: (N, 4 or more) to (N,).

    Of Beta(alpha + 1, alpha + 1) by the polar method (Ulrich 1984), and from there by dividing
    gamma variates, since Gamma(a) = Gamma(a + 1) * U ** (1 / a) (both in Devroye, "Random variate
    generation in one line of code", 1996). Powers are logarithms, which do not underflow.
    """
    log = np.log1p(-uniform[:, [0, 2, 3]])  # of uniform numbers above 0, up to 1
    radius = np.sqrt(-np.expm1(log[:, 0] * 2 / (2 * alpha + 1)))
    middle = 0.5 + 0.5 * radius * np.cos(2 * math.pi * uniform[:, 1])
    # Beyond e**600, one of the two is nothing beside the other.
    factor = np.exp(np.clip((log[:, 2] - log[:, 1]) / alpha, -600, 600))
    share: Floats = middle / (middle + (1 - middle) * factor)
    return share


def _side(uniform: Floats, half: Floats, length: int) -> tuple[Ints, Ints]:
    """Where a box begins and ends along one side of an image, as in torchvision."""
    middle, reach = below(uniform, length), (half * length).astype(np.int64)
    return np.maximum(middle - reach, 0), np.minimum(middle + reach, length)
