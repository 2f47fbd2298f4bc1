"""Crops against torchvision's."""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torchvision.transforms import v2

from streamloader import augment
from streamloader.augment.recipe import Recipe
from tests.augment.oracle import (
    assert_as_good,
    assert_within_a_level,
    bytes_,
    context,
    floats,
    planned,
    rows,
)

edges = st.integers(1, 24)
pairs = st.tuples(edges, edges)
channels = st.integers(1, 5)


# -- RandomResizedCrop -------------------------------------------------------------------------


@settings(max_examples=40)
@given(count=channels, old=pairs, new=pairs, number=st.integers(0, 99), antialias=st.booleans())
def test_random_resized_crop_in_floats(
    count: int, old: tuple[int, int], new: tuple[int, int], number: int, *, antialias: bool
) -> None:
    crop = augment.RandomResizedCrop(new, antialias=antialias)
    assert_as_good(crop, floats(2, count, *old), number)


@settings(max_examples=40)
@given(channels, pairs, pairs, st.integers(0, 99))
def test_random_resized_crop_in_bytes(
    count: int, old: tuple[int, int], new: tuple[int, int], number: int
) -> None:
    assert_within_a_level(augment.RandomResizedCrop(new), bytes_(2, count, *old), number)


@pytest.mark.parametrize("mode", ["bilinear", "bicubic", "nearest", "nearest-exact"])
@pytest.mark.parametrize("new", [7, (40, 9)])
def test_random_resized_crop_in_every_mode(mode: str, new: Any) -> None:
    crop = augment.RandomResizedCrop(new, interpolation=mode)
    assert_as_good(crop, floats(4, 3, 31, 23))
    assert_within_a_level(crop, bytes_(4, 3, 31, 23))


def boxes(crop: Recipe, height: int, width: int, count: int = 500) -> np.ndarray[Any, Any]:
    table = crop.plan(augment.Layout.dense(count, 3, height, width), context())
    return table.numpy()[:, :4].astype(np.int64)


@given(
    st.integers(1, 8000),
    st.integers(1, 8000),
    st.tuples(st.floats(0, 1), st.floats(0, 3)).map(sorted),
    st.tuples(st.floats(0.01, 100), st.floats(0.01, 100)).map(sorted),
)
def test_a_box_lies_within_its_image(
    height: int, width: int, scale: list[float], ratio: list[float]
) -> None:
    crop = augment.RandomResizedCrop(8, scale=(scale[0], scale[1]), ratio=(ratio[0], ratio[1]))
    top, left, high, wide = boxes(crop, height, width, count=8).T

    assert (top >= 0).all()
    assert (left >= 0).all()
    assert (high >= 1).all()
    assert (wide >= 1).all()
    assert (top + high <= height).all()
    assert (left + wide <= width).all()


@pytest.mark.parametrize(
    ("size", "box"),
    [
        ((1000, 10), (493, 0, 13, 10)),  # too narrow: 10 by 10 / (3 / 4), half to even
        ((10, 1000), (0, 493, 10, 13)),  # too wide
        ((12, 10), (0, 0, 12, 10)),  # neither: all of it
    ],
)
def test_where_nothing_fits_the_largest_central_box_is_taken(
    size: tuple[int, int], box: tuple[int, ...]
) -> None:
    crop = augment.RandomResizedCrop(8, scale=(2, 2))  # twice the image's area never fits
    theirs = v2.RandomResizedCrop(8, scale=(2, 2)).make_params([torch.empty(3, *size)])

    assert boxes(crop, *size, count=1).tolist() == [list(box)]
    assert tuple(theirs[part] for part in ("top", "left", "height", "width")) == box


# -- CenterCrop --------------------------------------------------------------------------------


@settings(max_examples=60)
@given(channels, pairs, pairs)
def test_center_crop_is_torchvisions(
    count: int, old: tuple[int, int], new: tuple[int, int]
) -> None:
    images = bytes_(2, count, *old)
    assert torch.equal(augment.CenterCrop(new)(images), v2.CenterCrop(new)(images))


def test_center_crop_of_one_number_is_square() -> None:
    assert augment.CenterCrop(3) == augment.CenterCrop((3, 3)) == augment.CenterCrop([3])


# -- RandomCrop --------------------------------------------------------------------------------


@settings(max_examples=60)
@given(
    pairs,
    pairs,
    st.one_of(
        st.none(),
        st.integers(0, 9),
        st.lists(st.integers(0, 9), min_size=1, max_size=1),
        st.lists(st.integers(0, 9), min_size=2, max_size=2),
        st.lists(st.integers(0, 9), min_size=4, max_size=4),
    ),
    st.sampled_from([0, 7, (1, 2, 3), None]),
    st.integers(0, 99),
)
def test_random_crop_is_a_crop_of_the_padded_image(
    old: tuple[int, int], new: tuple[int, int], padding: Any, fill: Any, number: int
) -> None:
    crop = augment.RandomCrop(new, padding, pad_if_needed=True, fill=fill)
    images = bytes_(1, 3, *old)
    table = planned(crop, images, number)
    theirs = v2.RandomCrop(new, padding, pad_if_needed=True)
    params = theirs.make_params([images[0]])
    row = rows(crop, table)[0]
    top = int(row["view0.window_top"]) + params["padding"][1]
    left = int(row["view0.window_left"]) + params["padding"][0]
    padded = v2.functional.pad(images[0], params["padding"], fill=fill)

    assert 0 <= top <= padded.shape[1] - new[0]
    assert 0 <= left <= padded.shape[2] - new[1]
    expected = v2.functional.crop(padded, top, left, *new)
    assert torch.equal(crop.run(images, table)[0], expected)


def test_random_crop_fills_in_the_units_of_its_images() -> None:
    crop = augment.RandomCrop(3, padding=2, fill=(0.25, 0.5))
    assert_as_good(crop, floats(8, 2, 4, 4))
    normalized = augment.Compose(
        [augment.Normalize(0.5, 0.5), augment.RandomCrop(3, padding=3, fill=-7)]
    )
    assert (normalized(bytes_(8, 3, 4, 4)) == -7).any()


def test_a_crop_that_may_lie_within_the_border_is_filled() -> None:
    images = bytes_(64, 3, 1, 1) // 2
    out = augment.RandomCrop(1, padding=3, fill=255)(images)

    assert (out == 255).all(dim=1).sum() > 32


@pytest.mark.parametrize("padding", [None, 2, (1, 0)])
def test_random_crop_refuses_what_is_too_small(padding: Any) -> None:
    crop = augment.RandomCrop(9, padding)
    with pytest.raises(
        ValueError,
        match=r"^size must be within the image and its padding, got size=\(9, 9\) for an image "
        r"of \(4, 5\) with padding=.*: pad_if_needed=True pads it$",
    ):
        crop(bytes_(2, 3, 4, 5))


def test_fills_for_other_channels_are_refused() -> None:
    with pytest.raises(ValueError, match=r"^fill must be one number, or one for each of the imag"):
        augment.RandomCrop(2, 1, fill=(1, 2))(bytes_(2, 3, 4, 4))


# -- arguments ---------------------------------------------------------------------------------


mistaken: Any = augment  # called with what its types forbid


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: mistaken.CenterCrop((1, 2, 3)), ValueError, r"size must be a number or \(height"),
        (lambda: mistaken.CenterCrop(0), ValueError, "size must be at least 1, got 0"),
        (lambda: mistaken.RandomCrop(2.5), TypeError, "size must be a whole number, got 2.5"),
        (lambda: mistaken.RandomCrop(2, (1, 2, 3)), ValueError, "padding must be a number, "),
        (lambda: mistaken.RandomCrop(2, -1), ValueError, "padding must be at least 0, got -1"),
        (
            lambda: mistaken.RandomCrop(2, padding_mode="edge"),
            ValueError,
            "padding_mode must be \"constant\", got 'edge'",
        ),
        (lambda: mistaken.RandomCrop(2, fill={}), TypeError, "fill must be a number, or"),
        (
            lambda: mistaken.RandomResizedCrop(2, scale=(1, 0)),
            ValueError,
            r"scale must be \(least, most\), rising, at least 0, got \(1, 0\)",
        ),
        (lambda: mistaken.RandomResizedCrop(2, scale=0.5), TypeError, "scale must be two numbers"),
        (lambda: mistaken.RandomResizedCrop(2, ratio=(0, 1)), ValueError, "ratio must be above 0"),
        (
            lambda: mistaken.RandomResizedCrop(2, interpolation="lanczos"),
            ValueError,
            "interpolation must be one of 'nearest', 'bilinear', 'bicubic', 'nearest-exact', got",
        ),
    ],
)
def test_a_wrong_argument_is_refused(make: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"^{message}"):
        make()


def test_reprs_show_the_arguments() -> None:
    assert repr(augment.CenterCrop(3)) == "CenterCrop(size=(3, 3))"
    assert repr(augment.RandomCrop(3, padding=4)) == (
        "RandomCrop(size=(3, 3), padding=(4, 4, 4, 4), pad_if_needed=False, fill=(0.0,), "
        "padding_mode='constant')"
    )
    assert repr(augment.RandomResizedCrop(3)) == (
        "RandomResizedCrop(size=(3, 3), scale=(0.08, 1.0), ratio=(0.75, 1.3333333333333333), "
        "interpolation='bilinear', antialias=True)"
    )
