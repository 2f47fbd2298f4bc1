"""The definition: whole recipes against torchvision's."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from streamloader import augment
from streamloader.augment import reference
from streamloader.augment.recipe import Recipe
from tests.augment.oracle import assert_as_good, bytes_, floats, planned, rows, torchvision

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
NORMALIZE = augment.Normalize(MEAN, STD)
JITTER = augment.ColorJitter(0.4, 0.4, 0.4, 0.1)
FLIP = augment.RandomHorizontalFlip()
edges = st.integers(1, 20)

RECIPES = {
    "imagenet": augment.Compose([augment.RandomResizedCrop(12), FLIP, NORMALIZE]),
    "jitter": augment.Compose(
        [
            augment.RandomResizedCrop(12),
            FLIP,
            JITTER,
            augment.RandomGrayscale(0.5),
            NORMALIZE,
            augment.RandomErasing(),
        ]
    ),
    "cifar": augment.Compose([augment.RandomCrop(32, 4, pad_if_needed=True), FLIP, NORMALIZE]),
    "evaluation": augment.Compose([augment.Resize(14), augment.CenterCrop(12), NORMALIZE]),
    "two means": augment.Compose([JITTER, FLIP, JITTER]),
    "two resizes": augment.Compose(
        [augment.Resize(9), JITTER, augment.RandomVerticalFlip(), augment.RandomResizedCrop(12)]
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES.keys())
@settings(max_examples=25)
@given(edges, edges, st.integers(0, 99))
def test_a_chain_in_floats(recipe: Recipe, height: int, width: int, number: int) -> None:
    assert_as_good(recipe, floats(3, 3, height, width, seed=number), number)


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES.keys())
def test_a_chain_in_float64_is_torchvisions(recipe: Recipe) -> None:
    images = floats(4, 3, 20, 17).double()
    table = planned(recipe, images)
    ours = reference.run(recipe.program(torch.float64), images, table, compute=torch.float64)

    for image, mine, row in zip(images, ours, rows(recipe, table), strict=True):
        assert (mine - torchvision(recipe, image, row)).abs().max() < 1e-9


def test_a_chain_on_bytes_is_the_one_on_floats() -> None:
    images = bytes_(4, 3, 20, 17)
    recipe = RECIPES["jitter"]
    table = planned(recipe, images)

    assert (recipe.run(images, table) - recipe.run(images / 255, table)).abs().max() < 1e-5


def test_bytes_stay_bytes_unless_something_makes_them_floats() -> None:
    images = bytes_(2, 3, 9, 9)

    assert augment.Compose([augment.Resize(4), JITTER])(images).dtype == torch.uint8
    assert RECIPES["imagenet"](images).dtype == torch.float32


def test_the_input_may_have_any_strides() -> None:
    images = bytes_(4, 9, 9, 3).permute(0, 3, 1, 2)
    table = planned(RECIPES["jitter"], images)

    expected = RECIPES["jitter"].run(images.contiguous(), table)
    assert torch.equal(RECIPES["jitter"].run(images, table), expected)


@pytest.mark.parametrize("size", [(1, 8000), (8000, 1), (1, 1)])
@pytest.mark.parametrize("name", ["imagenet", "evaluation", "cifar"])
def test_extreme_sizes(name: str, size: tuple[int, int]) -> None:
    images = floats(2, 3, *size)
    out = RECIPES[name](images)

    assert out.isfinite().all()
    assert out.shape[-2:] in ((12, 12), (32, 32))


@pytest.mark.slow
def test_large_images() -> None:
    images = bytes_(1, 3, 1, 1).expand(1, 3, 8000, 6000)
    recipe = augment.Compose([augment.Resize(32), augment.CenterCrop(32)])

    assert (recipe(images).int() - images[:, :, :32, :32].int()).abs().max() == 0
