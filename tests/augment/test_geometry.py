"""Flips and resizes against torchvision's."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torchvision.transforms import InterpolationMode, v2

from streamloader import augment
from streamloader.augment.recipe import Recipe
from tests.augment.oracle import assert_as_good, assert_within_a_level, bytes_, floats

edges = st.integers(1, 24)
pairs = st.tuples(edges, edges)


@pytest.mark.parametrize("flip", ["RandomHorizontalFlip", "RandomVerticalFlip"])
@pytest.mark.parametrize("p", [0, 1])
def test_a_flip_is_torchvisions(flip: str, p: int) -> None:
    images = bytes_(3, 2, 4, 5)
    assert torch.equal(getattr(augment, flip)(p)(images), getattr(v2, flip)(p)(images))


def test_each_image_is_flipped_or_not() -> None:
    images = floats(64, 1, 1, 2)
    flipped = (augment.RandomHorizontalFlip()(images) != images).any(dim=(1, 2, 3))

    assert 16 < flipped.sum() < 48


@settings(max_examples=40)
@given(channels=st.integers(1, 5), old=pairs, new=pairs, antialias=st.booleans())
def test_resize_in_floats(
    channels: int, old: tuple[int, int], new: tuple[int, int], *, antialias: bool
) -> None:
    assert_as_good(augment.Resize(new, antialias=antialias), floats(2, channels, *old))


@settings(max_examples=40)
@given(st.integers(1, 5), pairs, pairs)
def test_resize_in_bytes(channels: int, old: tuple[int, int], new: tuple[int, int]) -> None:
    assert_within_a_level(augment.Resize(new), bytes_(2, channels, *old))


@pytest.mark.parametrize("mode", ["bilinear", "bicubic", "nearest", "nearest-exact"])
@pytest.mark.parametrize("new", [(7, 5), (40, 9)])
def test_resize_in_every_mode(mode: str, new: tuple[int, int]) -> None:
    resize = augment.Resize(new, interpolation=mode)
    assert_as_good(resize, floats(2, 3, 31, 23))
    assert_within_a_level(resize, bytes_(2, 3, 31, 23))


def test_bicubic_overshoots_in_floats_and_not_in_bytes() -> None:
    edge = torch.tensor([0, 0, 0, 255, 255, 255], dtype=torch.uint8).expand(1, 1, 6, 6)
    resize = augment.Resize((12, 12), interpolation="bicubic")
    later = augment.Compose([resize, augment.ToDtype(torch.float32, scale=True)])

    assert resize(edge / 255).max() > 1
    assert later(edge).max() == 1


@given(
    st.integers(1, 8000),
    st.integers(1, 8000),
    st.integers(1, 500),
    st.one_of(st.none(), st.integers(1, 500)),
)
def test_resize_by_the_shorter_edge_gives_torchvisions_size(
    height: int, width: int, size: int, above: int | None
) -> None:
    max_size = above and size + above
    layout = augment.Layout.dense(1, 3, height, width)
    sizes = augment.Resize(size, max_size=max_size).layouts(layout)[-1].size

    theirs = v2.functional._geometry._compute_resized_output_size(
        (height, width), size=[size], max_size=max_size
    )
    assert sizes == tuple(max(edge, 1) for edge in theirs)


@given(st.integers(1, 8000), st.integers(1, 8000), st.integers(1, 500))
def test_resize_by_the_longer_edge_gives_torchvisions_size(
    height: int, width: int, longer: int
) -> None:
    layout = augment.Layout.dense(1, 3, height, width)
    sizes = augment.Resize(None, max_size=longer).layouts(layout)[-1].size

    theirs = v2.functional._geometry._compute_resized_output_size(
        (height, width), size=None, max_size=longer
    )
    assert sizes == tuple(max(edge, 1) for edge in theirs)


@pytest.mark.parametrize(
    ("given", "kept"),
    [(InterpolationMode.BICUBIC, "bicubic"), (2, "bilinear"), (0, "nearest")],
)
def test_interpolation_may_be_torchvisions_or_pillows(given: Any, kept: str) -> None:
    assert augment.Resize(3, interpolation=given).interpolation == kept


def test_no_antialias_is_none_or_false() -> None:
    assert augment.Resize(3, antialias=None) == augment.Resize(3, antialias=False)


mistaken: Any = augment  # called with what its types forbid


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: mistaken.RandomHorizontalFlip(2), ValueError, "p must be from 0 to 1, got 2"),
        (
            lambda: mistaken.RandomVerticalFlip("x"),
            TypeError,
            "p must be a number from 0 to 1, got",
        ),
        (lambda: mistaken.Resize(()), ValueError, "size must be a number or"),
        (lambda: mistaken.Resize(None), TypeError, "max_size must be a whole number, got None"),
        (
            lambda: mistaken.Resize((3, 4), max_size=5),
            ValueError,
            r"max_size must be None where size gives height and width, got max_size=5 with size=",
        ),
        (
            lambda: mistaken.Resize(3, max_size=3),
            ValueError,
            "max_size must be above size, 3, got 3",
        ),
        (lambda: mistaken.Resize(3, interpolation=1), ValueError, "interpolation must be one of"),
    ],
)
def test_a_wrong_argument_is_refused(make: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"^{message}"):
        make()


@pytest.mark.parametrize(
    ("transform", "text"),
    [
        (augment.RandomHorizontalFlip(), "RandomHorizontalFlip(p=0.5)"),
        (augment.RandomVerticalFlip(0.25), "RandomVerticalFlip(p=0.25)"),
        (
            augment.Resize([256]),
            "Resize(size=256, interpolation='bilinear', max_size=None, antialias=True)",
        ),
        (
            augment.Resize([3, 4]),
            "Resize(size=(3, 4), interpolation='bilinear', max_size=None, antialias=True)",
        ),
    ],
)
def test_reprs_show_the_arguments(transform: Recipe, text: str) -> None:
    assert repr(transform) == text
