"""Which part of a batch holds the images."""

from typing import Any

import pytest
import torch
from torchvision import tv_tensors

from streamloader.augment import batches
from tests.augment.oracle import floats


def test_the_first_of_three_or_more_dimensions() -> None:
    images, masks = floats(2, 3, 4, 4), floats(2, 1, 4, 4)
    found, place = batches.images({"label": torch.arange(2), "image": images, "mask": masks})

    assert isinstance(found, torch.Tensor)
    assert torch.equal(found, images)
    assert place == 1


def test_torchvisions_images_are_plain_afterwards() -> None:
    found, _ = batches.images(tv_tensors.Image(floats(2, 3, 4, 4)))

    assert type(found) is torch.Tensor


@pytest.mark.parametrize(
    "moved",
    [
        tv_tensors.BoundingBoxes([[0, 0, 1, 1]], format="XYXY", canvas_size=(4, 4)),
        tv_tensors.Mask(torch.zeros(1, 4, 4)),
        tv_tensors.Video(torch.zeros(2, 3, 4, 4)),
    ],
)
def test_what_would_have_to_move_with_the_image_is_refused(moved: Any) -> None:
    with pytest.raises(
        TypeError, match=rf"^tv_tensors.{type(moved).__name__} cannot be augmented yet, and would"
    ):
        batches.images((floats(2, 3, 4, 4), moved))


@pytest.mark.parametrize("batch", [torch.arange(3), "text", {"label": torch.arange(3)}, []])
def test_a_batch_without_images_is_refused(batch: Any) -> None:
    with pytest.raises(TypeError, match=r"^the batch must hold images, a tensor \(N, C, H, W\), "):
        batches.images(batch)


def test_five_dimensions_are_refused() -> None:
    with pytest.raises(ValueError, match=r"^images must be \(N, C, H, W\), got float32\[1, 2, 3"):
        batches.images(floats(1, 2, 3, 4, 5))


@pytest.mark.parametrize("shape", [(0, 3, 4, 4), (2, 0, 4, 4), (2, 3, 0, 4), (3, 4, 0)])
def test_images_without_pixels_are_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"^the batch must hold images with pixels, got float32"):
        batches.layout(torch.empty(shape))


def test_a_layout_is_that_of_the_shape() -> None:
    many, one = batches.layout(floats(2, 3, 4, 5)), batches.layout(floats(3, 4, 5))

    assert (many.count, many.channels, many.size) == (2, 3, (4, 5))
    assert (one.count, one.channels, one.size) == (1, 3, (4, 5))


def test_only_the_place_that_was_found_is_replaced() -> None:
    images, other = floats(2, 3, 4, 4), floats(2, 3, 2, 2)
    first, second = batches.replaced((images, images), 0, other)

    assert first is other
    assert second is images
