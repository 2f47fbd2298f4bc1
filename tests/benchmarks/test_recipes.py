"""Who augments, and that it comes to the same kind of batch."""

import pytest
import torch

from benchmarks._models import Normalize
from benchmarks._recipes import AUGMENT, source_size, transform
from streamloader.augment import (
    ColorJitter,
    Compose,
    RaggedImages,
    RandomErasing,
    RandomGrayscale,
    RandomResizedCrop,
    Resize,
)

CPU = torch.device("cpu")


def images(*sizes: tuple[int, int]) -> list[torch.Tensor]:
    return [torch.randint(0, 256, (3, *size), dtype=torch.uint8) for size in sizes]


@pytest.mark.parametrize("augment", AUGMENT)
def test_the_step_gets_what_it_takes(augment: str) -> None:
    out = transform(augment, 8, CPU, torch.bfloat16)(torch.stack(images((8, 8), (8, 8))))
    assert (out.shape, out.dtype) == ((2, 3, 8, 8), torch.bfloat16)
    assert out.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize("augment", AUGMENT[1:])
def test_images_of_different_sizes_become_one_size(augment: str) -> None:
    batch = RaggedImages.pack(images((9, 14), (20, 5)))
    assert transform(augment, 8, CPU, torch.float32)(batch).shape == (2, 3, 8, 8)


def test_each_does_its_part() -> None:
    kinds = {}
    for augment in AUGMENT[1:]:
        recipe = transform(augment, 8, CPU, torch.float32)
        assert isinstance(recipe, Compose)
        kinds[augment] = {type(one) for one in recipe.transforms}
    assert isinstance(transform("cpu", 8, CPU, torch.float32), Normalize)
    assert kinds["gpu-jitter"] - kinds["gpu"] == {ColorJitter}
    assert kinds["gpu-full"] - kinds["gpu-jitter"] == {RandomGrayscale, RandomErasing}
    assert kinds["gpu-cut"] - kinds["gpu"] == {Resize}
    assert kinds["gpu"] - kinds["gpu-cut"] == {RandomResizedCrop}


def test_what_is_cropped_is_larger() -> None:
    assert (source_size("cpu", 224), source_size("gpu", 224)) == (224, 256)
