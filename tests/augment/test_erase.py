"""Erasing against torchvision's."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from streamloader import augment
from tests.augment.oracle import assert_as_good, assert_within_a_level, bytes_, floats, planned

edges = st.integers(1, 24)


@settings(max_examples=60)
@given(st.integers(1, 4), edges, edges, st.floats(-2, 2), st.integers(0, 99))
def test_erasing(channels: int, height: int, width: int, value: float, number: int) -> None:
    values = [value + channel for channel in range(channels)]

    assert_as_good(augment.RandomErasing(1, value=values), floats(4, channels, height, width))
    whole = augment.RandomErasing(1, value=[abs(int(value)) for value in values])
    assert_within_a_level(whole, bytes_(4, channels, height, width), number)


def test_each_image_is_erased_or_not() -> None:
    images = torch.zeros(64, 1, 20, 20)
    erased = (augment.RandomErasing(value=1)(images) == 1).any(dim=(1, 2, 3))

    assert 16 < erased.sum() < 48


def test_a_grey_image_is_erased_channel_by_channel() -> None:
    recipe = augment.Compose(
        [augment.RandomGrayscale(1), augment.RandomErasing(1, value=(5, 6, 7))]
    )
    out = recipe(floats(2, 3, 9, 9))

    assert (out.amax(dim=(2, 3)) == torch.tensor([5, 6, 7])).all()


@given(st.integers(1, 8000), st.integers(1, 8000))
def test_a_rectangle_lies_within_its_image(height: int, width: int) -> None:
    erasing = augment.RandomErasing(1, scale=(0, 1), ratio=(0.01, 100))
    layout = augment.Layout.dense(16, 3, height, width)
    table = planned(erasing, torch.empty(16, 3, 1, 1).expand(16, 3, height, width))

    top, left, high, wide = table.T
    assert layout.count == len(table)
    assert (top >= 0).all()
    assert (left >= 0).all()
    assert (high < height).all()
    assert (wide < width).all()
    assert (top + high <= height).all()
    assert (left + wide <= width).all()


def test_what_never_fits_is_not_erased() -> None:
    images = floats(8, 3, 4, 4)
    assert torch.equal(augment.RandomErasing(1, scale=(1, 1), ratio=(1, 1))(images), images)


def test_values_are_in_the_units_of_their_images() -> None:
    erasing = augment.RandomErasing(1, value=51)
    scaled = augment.Compose([augment.ToDtype(torch.float32, scale=True), erasing])
    later = augment.Compose([erasing, augment.ToDtype(torch.float32, scale=True)])
    images = torch.zeros(2, 1, 9, 9, dtype=torch.uint8)

    assert erasing(images).unique().tolist() == [0, 51]
    assert scaled(images).unique().tolist() == [0, 51]
    assert later(images).unique().tolist() == pytest.approx([0, 0.2])


def test_random_values_are_normal_and_of_each_images_own() -> None:
    erasing = augment.RandomErasing(1, scale=(0.9, 0.9), ratio=(1, 1), value="random")
    images = torch.full((2, 3, 64, 64), 9.0)
    table = planned(erasing, images)
    first, second = erasing.run(images, table)

    written = first[first != 9]
    assert written.numel() > 3 * 3000
    assert abs(written.mean()) < 0.04
    assert abs(written.std() - 1) < 0.03
    assert (first == second)[(first != 9) & (second != 9)].float().mean() < 0.01
    assert torch.equal(erasing.run(images, table)[0], first)
    assert erasing.columns[-2:] == ("0.RandomErasing.key_low", "0.RandomErasing.key_high")


def test_random_values_are_refused_in_bytes() -> None:
    erasing = augment.RandomErasing(value="random")
    with pytest.raises(ValueError, match=r'^value="random" is noise around 0, which uint8 cannot'):
        erasing(bytes_(2, 3, 4, 4))

    normalized = augment.Compose([augment.Normalize(0.5, 0.5), erasing])
    assert normalized(bytes_(2, 3, 4, 4)).dtype == torch.float32


mistaken: Any = augment  # called with what its types forbid


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (
            lambda: mistaken.RandomErasing(value="noise"),
            ValueError,
            "value must be numbers or \"random\", got 'noise'",
        ),
        (lambda: mistaken.RandomErasing(value={}), TypeError, "value must be a number, or"),
        (lambda: mistaken.RandomErasing(scale=(0, 2)), ValueError, "scale must be .* from 0 to 1"),
        (lambda: mistaken.RandomErasing(ratio=(0, 2)), ValueError, "ratio must be above 0"),
        (lambda: mistaken.RandomErasing(inplace=True), ValueError, "inplace must be False"),
        (lambda: mistaken.RandomErasing(1.5), ValueError, "p must be from 0 to 1, got 1.5"),
    ],
)
def test_a_wrong_argument_is_refused(make: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"^{message}"):
        make()


def test_values_for_other_channels_are_refused() -> None:
    with pytest.raises(ValueError, match=r"^value must be one number, or one for each of the"):
        augment.RandomErasing(value=(1, 2))(floats(2, 3, 4, 4))


def test_a_repr_shows_the_arguments() -> None:
    assert repr(augment.RandomErasing(value="random")) == (
        "RandomErasing(p=0.5, scale=(0.02, 0.33), ratio=(0.3, 3.3), value='random', inplace=False)"
    )
