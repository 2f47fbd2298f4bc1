"""Normalisation and dtypes against torchvision's."""

from typing import Any

import pytest
import torch
from torchvision.transforms import v2

from streamloader import augment
from tests.augment.oracle import assert_as_good, bytes_, floats

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
FLOATS = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


@pytest.mark.parametrize(
    ("channels", "mean", "std"), [(3, MEAN, STD), (1, [0.5], [0.25]), (4, [0.5], [0.25])]
)
def test_normalize_in_floats(channels: int, mean: Any, std: Any) -> None:
    assert_as_good(augment.Normalize(mean, std), floats(3, channels, 5, 4))


def test_normalize_scales_bytes_first() -> None:
    images = bytes_(3, 3, 5, 4)
    out = augment.Normalize(MEAN, STD)(images)

    expected = v2.functional.normalize(images.double() / 255, MEAN, STD)
    assert out.dtype == torch.float32
    assert (out - expected).abs().max() < 1e-5


def test_one_number_stands_for_every_channel() -> None:
    images = floats(2, 5, 3, 3)

    assert torch.equal(augment.Normalize(0.5, [0.25])(images), (images - 0.5) / 0.25)
    mixed = augment.Normalize(0.5, [0.25] * 5)
    assert torch.equal(mixed(images), (images - 0.5) / 0.25)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("scale", [False, True])
def test_bytes_to_floats(dtype: torch.dtype, *, scale: bool) -> None:
    images = bytes_(2, 3, 5, 4)
    out = augment.ToDtype(dtype, scale=scale)(images)
    theirs = v2.functional.to_dtype(images, dtype, scale)

    assert out.dtype == dtype
    assert torch.allclose(out.double(), theirs.double(), rtol=2 * torch.finfo(dtype).eps, atol=1e-6)


@pytest.mark.parametrize("dtype", FLOATS)
def test_floats_to_bytes_round_to_the_nearest(dtype: torch.dtype) -> None:
    values = torch.tensor([-1, 0, 0.25, 0.5, 1, 2], dtype=dtype).view(1, 1, 2, 3)

    scaled = augment.ToDtype(torch.uint8, scale=True)(values)
    plain = augment.ToDtype(torch.uint8)(values * 10)
    assert scaled.flatten().tolist() == [0, 0, 64, 128, 255, 255]
    assert plain.flatten().tolist() == [0, 0, 2, 5, 10, 20]


def test_a_round_trip_changes_no_byte() -> None:
    images = torch.arange(256, dtype=torch.uint8).view(1, 1, 16, 16)

    for scale in (False, True):
        there, back = augment.ToDtype(torch.float32, scale), augment.ToDtype(torch.uint8, scale)
        assert torch.equal(augment.Compose([there, back])(images), images)
        assert torch.equal(back(there(images)), images)


def test_the_last_dtype_is_what_comes_out_and_the_only_rounding() -> None:
    images = floats(2, 3, 5, 4)
    chain = augment.Compose(
        [
            augment.ToDtype(torch.float16),
            augment.Normalize(MEAN, STD),
            augment.ToDtype(torch.bfloat16),
        ]
    )

    assert torch.equal(chain(images), augment.Normalize(MEAN, STD)(images).bfloat16())


@pytest.mark.parametrize("dtype", FLOATS)
def test_floats_stay_what_they_are(dtype: torch.dtype) -> None:
    images = floats(2, 3, 5, 4).to(dtype)

    assert augment.Normalize(MEAN, STD)(images).dtype == dtype
    assert augment.RandomHorizontalFlip(1)(images).dtype == dtype


mistaken: Any = augment  # called with what its types forbid


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: mistaken.Normalize("x", 1), TypeError, "mean must be a number, or a sequence"),
        (lambda: mistaken.Normalize(0, ()), TypeError, "std must be a number, or a sequence"),
        (
            lambda: mistaken.Normalize(0, (1, 0)),
            ValueError,
            r"std must hold no 0, got \(1.0, 0.0\)",
        ),
        (
            lambda: mistaken.Normalize((1, 2), (1, 2, 3)),
            ValueError,
            "mean and std must be of one length, got",
        ),
        (
            lambda: mistaken.Normalize(0, 1, inplace=True),
            ValueError,
            "inplace must be False: the input is never written to; got True",
        ),
        (
            lambda: mistaken.ToDtype(torch.int32),
            TypeError,
            "dtype must be torch.uint8 or a floating-point dtype, got torch.int32",
        ),
        (lambda: mistaken.ToDtype({}), TypeError, r"dtype must be torch.uint8 or .*, got \{\}"),
    ],
)
def test_a_wrong_argument_is_refused(make: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"^{message}"):
        make()


@pytest.mark.parametrize("name", ["mean", "std"])
def test_numbers_for_other_channels_are_refused(name: str) -> None:
    arguments: dict[str, Any] = {"mean": 0.5, "std": 0.5} | {name: (0.5, 0.5)}
    with pytest.raises(
        ValueError,
        match=f"^{name} must be one number, or one for each of the images' 3 channels, got 2: ",
    ):
        augment.Normalize(**arguments)(floats(2, 3, 4, 4))


def test_reprs_show_the_arguments() -> None:
    assert repr(augment.Normalize([0.5], 2)) == "Normalize(mean=(0.5,), std=(2.0,), inplace=False)"
    assert repr(augment.ToDtype(torch.uint8)) == "ToDtype(dtype=torch.uint8, scale=False)"
