"""Transforms in a row."""

from typing import Any

import pytest
import torch
from torchvision.transforms import v2

from streamloader import augment
from tests.augment.oracle import bytes_

FLIP, NORMALIZE = augment.RandomHorizontalFlip(), augment.Normalize(0.5, 0.25)


def test_a_compose_within_takes_its_place() -> None:
    inner = augment.Compose([FLIP, NORMALIZE], memory_format=torch.channels_last)

    assert augment.Compose([inner, FLIP]).steps == (FLIP, NORMALIZE, FLIP)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("transform", [FLIP, augment.Resize(4), NORMALIZE])
def test_the_output_is_laid_out_as_asked(layout: torch.memory_format, transform: Any) -> None:
    compose = augment.Compose([transform], memory_format=layout)

    for images in (
        bytes_(2, 3, 5, 6),
        bytes_(2, 3, 5, 6).contiguous(memory_format=torch.channels_last),
    ):
        assert compose(images).is_contiguous(memory_format=layout)


mistaken: Any = augment  # called with what its types forbid


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: mistaken.Compose([]), ValueError, "transforms must hold at least one, got none"),
        (
            lambda: mistaken.Compose(FLIP),
            TypeError,
            r"transforms must be a sequence, got RandomHor",
        ),
        (
            lambda: mistaken.Compose([v2.RandomHorizontalFlip()]),
            TypeError,
            r"transforms must be those of streamloader.augment that work on single images, got R",
        ),
        (
            lambda: mistaken.Compose([FLIP], memory_format=torch.preserve_format),
            TypeError,
            "memory_format must be torch.contiguous_format or torch.channels_last, got torch.pres",
        ),
    ],
)
def test_a_wrong_argument_is_refused(make: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"^{message}"):
        make()


def test_a_repr_shows_the_transforms() -> None:
    assert repr(augment.Compose([FLIP])) == (
        "Compose(transforms=(RandomHorizontalFlip(p=0.5),), memory_format=torch.contiguous_format)"
    )
