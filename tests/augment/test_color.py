"""Colours against torchvision's."""

from typing import Any

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
    floats,
    planned,
    rows,
)

edges = st.integers(1, 12)
factors = st.tuples(st.floats(0, 3), st.floats(0, 3)).map(sorted).map(tuple)
turns = st.tuples(st.floats(-0.5, 0.5), st.floats(-0.5, 0.5)).map(sorted).map(tuple)


@settings(max_examples=100)
@given(
    st.sampled_from([1, 3]),
    edges,
    edges,
    *[st.one_of(st.none(), factors)] * 3,
    st.one_of(st.none(), turns),
    st.integers(0, 99),
)
def test_jitter_in_floats(
    channels: int,
    height: int,
    width: int,
    brightness: Any,
    contrast: Any,
    saturation: Any,
    hue: Any,
    number: int,
) -> None:
    jitter = augment.ColorJitter(brightness, contrast, saturation, hue)
    assert_as_good(jitter, floats(3, channels, height, width, seed=number), number)


@pytest.mark.parametrize("name", ["brightness", "contrast", "saturation", "hue"])
@pytest.mark.parametrize("channels", [1, 3])
def test_one_step_of_jitter_in_bytes(name: str, channels: int) -> None:
    # torchvision rounds grey down before it blends: at 1.5 that alone is half a level.
    jitter = augment.ColorJitter(**{name: 0.5})
    assert_within_a_level(jitter, bytes_(16, channels, 9, 8))


def test_greys_and_extremes_have_a_hue_of_no_matter() -> None:
    colours = torch.tensor([[0, 0, 0], [1, 1, 1], [0.5, 0.5, 0.5], [1, 0, 0], [0, 1, 1], [1, 1, 0]])
    assert_as_good(augment.ColorJitter(hue=0.5), colours.view(6, 3, 1, 1).repeat(1, 1, 2, 2))


def test_jitter_has_an_order_of_each_samples_own() -> None:
    jitter = augment.ColorJitter(0.1)
    table = planned(jitter, floats(64, 3, 1, 1))
    orders = {
        tuple(row[f"0.ColorJitter.{turn}"] for turn in ("first", "second", "third", "fourth"))
        for row in rows(jitter, table)
    }

    assert len(orders) > 16
    assert all(sorted(order) == [0, 1, 2, 3] for order in orders)


def test_jitter_of_nothing_is_nothing() -> None:
    images = floats(2, 3, 4, 4) * 2 - 1  # a step would clamp

    for jitter in (augment.ColorJitter(), augment.ColorJitter(0, (1, 1), 0, (0, 0))):
        assert torch.equal(jitter(images), images)


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("p", [0, 0.5, 1])
def test_grayscale(channels: int, p: float) -> None:
    assert_as_good(augment.RandomGrayscale(p), floats(8, channels, 5, 4))
    assert_within_a_level(augment.RandomGrayscale(p), bytes_(8, channels, 5, 4))


@pytest.mark.parametrize("transform", [augment.ColorJitter(hue=0.1), augment.RandomGrayscale()])
def test_other_channels_are_refused(transform: Recipe) -> None:
    name = type(transform).__name__
    with pytest.raises(TypeError, match=f"^{name} takes images of 3 channels, or 1, got 2$"):
        transform(floats(2, 2, 4, 4))


@pytest.mark.parametrize("value", [None, 0, 0.4, 2, (0.5, 1.5), [1, 1], (0.2, 0.2)])
def test_ranges_are_torchvisions(value: Any) -> None:
    ours, theirs = augment.ColorJitter(value), v2.ColorJitter(value)
    assert ours.brightness == theirs.brightness


@pytest.mark.parametrize("value", [None, 0, 0.4, 0.5, (-0.5, 0.1), [0, 0]])
def test_ranges_of_hue_are_torchvisions(value: Any) -> None:
    assert augment.ColorJitter(hue=value).hue == v2.ColorJitter(hue=value).hue


mistaken: Any = augment  # called with what its types forbid


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (
            lambda: mistaken.ColorJitter(-1),
            ValueError,
            "brightness must be at least 0 where it is one number, got -1",
        ),
        (
            lambda: mistaken.ColorJitter(hue=0.6),
            ValueError,
            r"hue must be .* from -0.5 to 0.5, got",
        ),
        (lambda: mistaken.ColorJitter(contrast=(2, 1)), ValueError, "contrast must be .*, rising"),
        (lambda: mistaken.ColorJitter(saturation="x"), TypeError, "saturation must be two numbers"),
        (lambda: mistaken.RandomGrayscale(-1), ValueError, "p must be from 0 to 1, got -1"),
    ],
)
def test_a_wrong_argument_is_refused(make: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"^{message}"):
        make()


def test_reprs_show_the_arguments() -> None:
    assert repr(augment.RandomGrayscale()) == "RandomGrayscale(p=0.1)"
    assert repr(augment.ColorJitter(0.5, hue=(-0.1, 0.2))) == (
        "ColorJitter(brightness=(0.5, 1.5), contrast=None, saturation=None, hue=(-0.1, 0.2))"
    )
