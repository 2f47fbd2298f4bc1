"""Images of different sizes on a real accelerator, where kernels are compiled."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from streamloader import StreamLoader, augment
from streamloader.augment import RaggedImages, reference
from streamloader.augment.recipe import Recipe
from streamloader.context import Context
from tests.gpu.sources import busy, nothing_waits

pytestmark = pytest.mark.gpu

SIZES = ((375, 500), (1, 1), (90, 33), (500, 334))
SEED = 5
JITTER = augment.ColorJitter(0.4, 0.4, 0.4, 0.1)
TAIL = (augment.RandomHorizontalFlip(), augment.Normalize((0.5, 0.4, 0.3), (0.2, 0.3, 0.2)))
RECIPES: dict[str, Sequence[Recipe]] = {
    "crop": [augment.RandomResizedCrop(64), *TAIL],
    "crop and jitter": [augment.RandomResizedCrop(64), JITTER, *TAIL],
    "jitter first": [JITTER, augment.RandomResizedCrop(64), *TAIL],
    "evaluation": [augment.Resize(80), augment.CenterCrop(64), *TAIL],
}


class Pictures(Dataset[Any]):
    """Of several sizes, in memory pixel after pixel."""

    def __init__(self, batches: int) -> None:
        self.batches = batches

    def __len__(self) -> int:
        return self.batches * len(SIZES)

    def __getitem__(self, index: int) -> Any:
        drawn = torch.Generator().manual_seed(index)
        size = (*SIZES[index % len(SIZES)], 3)
        image = torch.randint(0, 256, size, dtype=torch.uint8, generator=drawn)
        return image.permute(2, 0, 1), index


def loader(batches: int, workers: int = 0) -> DataLoader[Any]:
    return DataLoader(
        Pictures(batches), len(SIZES), num_workers=workers, collate_fn=augment.collate
    )


def expected(recipe: Recipe, images: RaggedImages, number: int) -> Tensor:
    table = recipe.plan(images, Context(SEED, 0, number, 0))
    return reference.run(recipe.program(images.dtype), images, table)


@pytest.mark.parametrize("transforms", RECIPES.values(), ids=RECIPES)
def test_kernels_do_what_the_definition_says(transforms: Sequence[Recipe]) -> None:
    recipe = augment.Compose(transforms, memory_format=torch.channels_last)
    made = StreamLoader(loader(3), "cuda", transform=recipe, seed=SEED)
    for number, ((images, _), (packed, _)) in enumerate(zip(made, loader(3), strict=True)):
        assert images.is_contiguous(memory_format=torch.channels_last)
        # In 0..1; divided by deviations of 0.2 it may be five times as much.
        torch.testing.assert_close(
            images.cpu(), expected(recipe, packed, number), rtol=0, atol=5e-4
        )


def test_packed_or_not_the_bits_are_the_same() -> None:
    recipe = augment.Compose(RECIPES["crop and jitter"])
    images = torch.randint(0, 256, (6, 3, 90, 70), dtype=torch.uint8)
    packed = RaggedImages.pack(list(images)).to("cuda")
    table = recipe.plan(images, Context(SEED, 0, 0, 0)).cuda()
    assert torch.equal(recipe.run(packed, table), recipe.run(images.cuda(), table))


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
def test_nothing_on_the_training_thread_waits_for_the_device() -> None:
    recipe = augment.Compose(RECIPES["crop and jitter"])
    batches = iter(StreamLoader(loader(20, workers=2), "cuda", transform=recipe))
    next(batches)  # compiles, and sends what is constant
    with nothing_waits():
        for images, _ in batches:
            busy(2)
            images.sum()
