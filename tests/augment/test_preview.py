"""A grid of a batch's images."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from streamloader import augment
from tests.augment.oracle import bytes_, floats

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)


def shown(picture: Tensor, row: int, column: int, height: int, width: int) -> Tensor:
    """One image of a grid, (C, H, W)."""
    top, left = row * (height + 2), column * (width + 2)
    return picture[top : top + height, left : left + width].permute(2, 0, 1)


def test_images_stand_row_by_row_with_white_between() -> None:
    images = bytes_(5, 3, 4, 6)
    picture = augment.preview(images)

    assert (picture.dtype, picture.shape) == (torch.uint8, (2 * 6 - 2, 3 * 8 - 2, 3))
    for n in range(5):
        assert torch.equal(shown(picture, *divmod(n, 3), 4, 6), images[n])
    assert (picture[4:6] == 255).all()
    assert (picture[:, 6:8] == 255).all()
    assert (shown(picture, 1, 2, 4, 6) == 255).all()


@pytest.mark.parametrize(
    ("options", "size"),
    [
        ({"columns": 1}, (5 * 6 - 2, 6)),
        ({"columns": 5}, (4, 5 * 8 - 2)),
        ({"columns": 9}, (4, 5 * 8 - 2)),
        ({"count": 2}, (4, 2 * 8 - 2)),
        ({"count": 1, "columns": 3}, (4, 6)),
        ({"count": 99}, (2 * 6 - 2, 3 * 8 - 2)),
    ],
)
def test_columns_and_count_say_how_many(options: dict[str, int], size: tuple[int, int]) -> None:
    assert augment.preview(bytes_(5, 3, 4, 6), **options).shape == (*size, 3)  # type: ignore[arg-type]


def test_of_a_batch_the_first_images_are_shown() -> None:
    images, labels = bytes_(2, 3, 4, 6), torch.arange(2)
    wanted = augment.preview(images)

    assert torch.equal(augment.preview((labels, images)), wanted)
    assert torch.equal(augment.preview({"label": labels, "image": images}), wanted)
    assert torch.equal(augment.preview(images[0]), images[0].permute(1, 2, 0))


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn]
)
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_floats_from_0_to_1_are_shown_as_they_are(
    dtype: torch.dtype, memory_format: torch.memory_format
) -> None:
    images = (floats(2, 3, 4, 6) * 0.5).contiguous(memory_format=memory_format).to(dtype)
    kept = images.clone()
    picture = augment.preview(images, columns=1)

    assert torch.equal(shown(picture, 1, 0, 4, 6), (images[1].float() * 255).round().byte())
    assert torch.equal(images.float(), kept.float())


def test_one_channel_is_grey() -> None:
    images = bytes_(1, 1, 4, 6)
    assert torch.equal(augment.preview(images), images[0, 0, :, :, None].expand(4, 6, 3))


def test_mean_and_std_bring_colours_back() -> None:
    images = bytes_(4, 3, 5, 7)
    normalised = augment.Normalize(MEAN, STD)(images)

    wanted = augment.preview(images)
    assert torch.equal(augment.preview(normalised, mean=MEAN, std=STD), wanted)
    assert torch.equal(augment.preview(images, mean=MEAN, std=STD), wanted)
    assert torch.equal(augment.preview(images / 127.5 - 1, mean=0.5, std=0.5), wanted)


def test_without_them_each_channel_is_stretched_over_the_grid() -> None:
    images = torch.tensor([[-2.0, 2.0], [0.0, 10.0]])[:, :, None, None].expand(2, 2, 1, 3)
    picture = augment.preview(torch.cat((images, images[:, :1]), 1), columns=1)

    assert picture[0, 0].tolist() == [0, 0, 0]
    assert picture[3, 0].tolist() == [255, 255, 255]
    assert augment.preview(torch.full((1, 1, 2, 2), 3.0)).unique().tolist() == [0]


def test_what_is_not_finite_is_black_and_changes_nothing_else() -> None:
    images = torch.tensor([0.5, -1, 1, torch.nan, torch.inf, -torch.inf]).view(1, 1, 1, 6)
    stretched = augment.preview(images)[0, :, 0]
    assert stretched.tolist() == [191, 0, 255, 0, 0, 0]
    restored = augment.preview(images, mean=0.5, std=0.5)[0, :, 0]
    assert restored.tolist() == [191, 0, 255, 0, 0, 0]


def test_one_image_is_seen_under_many_draws() -> None:
    image = bytes_(3, 9, 9)
    recipe = augment.Compose([augment.RandomResizedCrop(6), augment.RandomHorizontalFlip()])
    picture = augment.preview(recipe(image.expand(4, -1, -1, -1)))

    cells = {tuple(shown(picture, *divmod(n, 2), 6, 6).flatten().tolist()) for n in range(4)}
    assert len(cells) == 4


@pytest.mark.parametrize("kind", [str, Path])
def test_a_path_is_written(kind: type, tmp_path: Path) -> None:
    picture = augment.preview(bytes_(3, 3, 4, 6), path=kind(tmp_path / "batch.png"))
    with Image.open(tmp_path / "batch.png") as file:
        assert np.array_equal(np.asarray(file), picture.numpy())


def test_pillow_is_asked_for_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    augment.preview(bytes_(1, 3, 2, 2))
    with pytest.raises(ImportError, match=r"^augment.preview .* Pillow: pip install pillow$"):
        augment.preview(bytes_(1, 3, 2, 2), path=tmp_path / "batch.png")


@pytest.mark.parametrize(
    ("batch", "options", "kind", "message"),
    [
        (torch.arange(3), {}, TypeError, r"^the batch must hold images"),
        (torch.zeros(2, 3, 4, 4, 4), {}, ValueError, r"^images must be \(N, C, H, W\)"),
        (torch.zeros(0, 3, 4, 4), {}, ValueError, r"^the batch must hold images with pixels"),
        (torch.zeros(2, 4, 4, 3), {}, ValueError, r"^images must have 3 channels, or 1,.* got .*4"),
        (
            torch.zeros(2, 3, 4, 4).int(),
            {},
            TypeError,
            r"^the images' dtype must be .*int32",
        ),
        (bytes_(1, 3, 2, 2), {"count": 0}, ValueError, r"^count must be at least 1, got 0$"),
        (bytes_(1, 3, 2, 2), {"columns": 0}, ValueError, r"^columns must be at least 1, got 0$"),
        (bytes_(1, 3, 2, 2), {"columns": 1.5}, TypeError, r"^columns must be a whole number"),
        (floats(1, 3, 2, 2), {"mean": 0.5}, ValueError, r"given together, got mean=0.5, std=None$"),
        (floats(1, 3, 2, 2), {"std": 0.5}, ValueError, r"given together, got mean=None, std=0.5$"),
        (floats(1, 3, 2, 2), {"mean": MEAN[:2], "std": 1}, ValueError, r"^mean must be one number"),
        (floats(1, 3, 2, 2), {"mean": 0, "std": "1"}, TypeError, r"^std must be a number"),
    ],
)
def test_what_cannot_be_shown_is_an_error(
    batch: Tensor, options: dict[str, Any], kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message):
        augment.preview(batch, **options)
