"""Crops, resizes and flips as one view: the same as one after the other."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from streamloader import augment
from streamloader.augment import draws
from streamloader.augment.program import Resample
from streamloader.augment.reference import resample
from streamloader.augment.step import Geometric
from streamloader.augment.view import Fold, Motion, View
from tests.augment.oracle import floats

sizes = st.integers(1, 12)
pairs = st.tuples(sizes, sizes)
smooth = st.sampled_from(["bilinear", "bicubic"])
modes = st.sampled_from(["bilinear", "bicubic", "nearest", "nearest-exact"])
steps: st.SearchStrategy[Geometric] = st.one_of(
    st.just(augment.RandomHorizontalFlip()),
    st.just(augment.RandomVerticalFlip()),
    st.builds(augment.CenterCrop, pairs),
    st.builds(
        augment.RandomCrop,
        pairs,
        st.integers(0, 9),
        pad_if_needed=st.just(value=True),
        fill=st.floats(0, 1),
    ),
    st.builds(augment.Resize, pairs, modes, st.none(), st.booleans()),
    st.builds(augment.Resize, sizes, smooth),
    st.builds(augment.RandomResizedCrop, pairs, interpolation=modes),
)


def made(image: Tensor, view: View, motions: list[Motion]) -> Tensor:
    """The image that a view is of."""
    spec = Resample(0)
    for motion in motions:
        if motion.resizes:
            spec = Resample(0, motion.interpolation, motion.antialias, spec.fill)
        if motion.pads:
            spec = Resample(0, spec.interpolation, spec.antialias, motion.fill)
    return resample(spec, image, [float(part[0]) for part in view])


@pytest.mark.slow
@settings(max_examples=300)
@given(pairs, st.lists(steps, min_size=1, max_size=5), st.integers(0, 2**32))
def test_folding_a_chain_equals_one_transform_after_the_other(
    size: tuple[int, int], chain: list[Geometric], key: int
) -> None:
    image = floats(2, *size).double()
    folded, fold = View.whole(*(np.array([edge]) for edge in size)), Fold()
    one_by_one, motions = image, list[Motion]()
    for place, step in enumerate(chain):
        if not fold.takes(step.motion):
            break
        uniform = draws.uniforms(key, place, 1, step.draws)
        alone = View.whole(*(np.array([edge]) for edge in one_by_one.shape[1:]))
        one_by_one = made(one_by_one, step.moved(alone, uniform), [step.motion])
        folded, fold = step.moved(folded, uniform), fold.then(step.motion)
        motions.append(step.motion)

    together = made(image, folded, motions)

    assert together.shape == one_by_one.shape
    assert (together - one_by_one).abs().max() < 1e-6  # interpolate's weights differ by rounding


@settings(max_examples=200)
@given(pairs, steps, st.integers(0, 2**32))
def test_sizes_are_known_without_a_draw(size: tuple[int, int], step: Geometric, key: int) -> None:
    heights, widths = (np.array([edge, edge + 1]) for edge in size)
    view = step.moved(View.whole(heights, widths), draws.uniforms(key, 0, 2, step.draws))

    expected = step.sizes(heights, widths)
    assert (view.out_height.tolist(), view.out_width.tolist()) == tuple(
        part.tolist() for part in expected
    )


FLIP, CROP = Motion(flips=True), Motion(crops=True)
PAD, RESIZE = Motion(crops=True, pads=True), Motion(resizes=True)
CROP_RESIZE = Motion(crops=True, resizes=True)
NEAREST = Motion(resizes=True, interpolation="nearest")


def folds(*motions: Motion) -> bool:
    fold = Fold()
    for motion in motions:
        if not fold.takes(motion):
            return False
        fold = fold.then(motion)
    return True


@pytest.mark.parametrize(
    "motions",
    [
        (CROP_RESIZE, FLIP),  # ImageNet, for training
        (RESIZE, PAD),  # ImageNet, for evaluation
        (PAD, FLIP),  # CIFAR
        (CROP_RESIZE, PAD, FLIP, CROP),
        (FLIP, CROP, CROP, CROP_RESIZE),
        (FLIP, RESIZE),
        (CROP, NEAREST, FLIP),
    ],
)
def test_these_are_one_view(motions: tuple[Motion, ...]) -> None:
    assert folds(*motions)


@pytest.mark.parametrize(
    "motions",
    [
        (RESIZE, RESIZE),
        (PAD, RESIZE),  # the border would be blurred with the image
        (CROP, PAD),  # what was cut away would be seen again
        (RESIZE, CROP, PAD),
        (PAD, PAD),
        (FLIP, NEAREST),  # of two that are as near it takes the later
    ],
)
def test_these_are_two(motions: tuple[Motion, ...]) -> None:
    assert folds(*motions[:-1])
    assert not folds(*motions)


@pytest.mark.parametrize(("up", "across"), [(0, 0), (0, 1), (1, 0), (1, 1)])
def test_a_crop_after_a_flip_is_on_the_other_side(up: int, across: int) -> None:
    image = torch.arange(35.0).view(1, 5, 7)
    one = np.array([1])
    view = View.whole(5 * one, 7 * one).flipped(up * one, across * one)

    cropped = view.cropped(one, 2 * one, 3 * one, 4 * one)

    flips = [axis for axis, flag in ((1, up), (2, across)) if flag]
    expected = image.flip(flips)[:, 1:4, 2:6]
    assert torch.equal(made(image, cropped, []), expected)
