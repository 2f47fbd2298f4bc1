"""What is drawn is distributed as in torchvision. The seeds, 0, were fixed before the first run."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from torchvision.transforms import v2

from streamloader import augment
from streamloader.augment.recipe import Recipe
from tests.augment.oracle import context

COUNT = 3000
SIZES = [(375, 500), (40, 9), (32, 32)]


def ours(recipe: Recipe, height: int, width: int, count: int = COUNT) -> dict[str, Any]:
    table = recipe.plan(augment.Layout.dense(count, 3, height, width), context()).numpy()
    names = [name.rpartition(".")[2] for name in recipe.columns]
    return dict(zip(names, table.T.astype(np.float64), strict=True))


def theirs(transform: v2.Transform, height: int, width: int) -> dict[str, Any]:
    image = torch.empty(1).expand(3, height, width)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        drawn = [transform.make_params([image]) for _ in range(COUNT)]
    names = [name for name, value in drawn[0].items() if isinstance(value, (int, float))]
    return {name: np.array([row[name] for row in drawn], np.float64) for name in names}


def distance(first: Any, second: Any) -> float:
    """Kolmogorov and Smirnov's: the most by which two empirical distributions differ."""
    everything = np.concatenate([first, second])
    shares = [
        np.searchsorted(np.sort(one), everything, "right") / len(one) for one in (first, second)
    ]
    return float(np.abs(shares[0] - shares[1]).max())


CRITICAL = math.sqrt(-math.log(1e-4 / 2) / COUNT)
"""The distance of two samples of COUNT that chance exceeds once in 10,000 times, or less often."""


def test_the_distance_sees_what_it_should() -> None:
    uniform = np.random.Generator(np.random.Philox(0)).random((3, COUNT))

    assert distance(uniform[0], uniform[1]) < CRITICAL < 0.06
    assert distance(uniform[0], uniform[1] ** 1.2) > CRITICAL
    assert distance(uniform[0], 0.9 * uniform[2]) > CRITICAL


@pytest.mark.slow
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("arguments", [{}, {"scale": (0.3, 0.5), "ratio": (0.5, 3.0)}])
def test_random_resized_crop(size: tuple[int, int], arguments: dict[str, Any]) -> None:
    mine = ours(augment.RandomResizedCrop(8, **arguments), *size)
    other = theirs(v2.RandomResizedCrop(8, **arguments), *size)

    for name in ("top", "left", "height", "width"):
        assert distance(mine[name], other[name]) < CRITICAL
    for made in (mine, other):
        made["area"], made["shape"] = made["height"] * made["width"], made["width"] / made["height"]
        made["middle"] = made["top"] + made["height"] / 2
    for name in ("area", "shape", "middle"):
        assert distance(mine[name], other[name]) < CRITICAL


@pytest.mark.slow
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("arguments", [{}, {"scale": (0.3, 0.5), "ratio": (0.5, 3.0)}])
def test_random_erasing(size: tuple[int, int], arguments: dict[str, Any]) -> None:
    mine = ours(augment.RandomErasing(1, **arguments), *size)
    other = theirs(v2.RandomErasing(1, **arguments), *size)
    none = other["h"] == size[0]  # torchvision's way of saying so
    other["h"][none] = other["w"][none] = 0

    erased = mine["height"] > 0
    assert abs(erased.mean() - (~none).mean()) < CRITICAL
    for name, same in (("top", "i"), ("left", "j")):
        assert distance(mine[name][erased], other[same][~none]) < CRITICAL
    for name, same in (("height", "h"), ("width", "w")):
        assert distance(mine[name], other[same]) < CRITICAL


@pytest.mark.slow
@pytest.mark.parametrize("size", SIZES)
def test_random_crop(size: tuple[int, int]) -> None:
    arguments: dict[str, Any] = {"size": (30, 20), "padding": (3, 1), "pad_if_needed": True}
    mine = ours(augment.RandomCrop(**arguments), *size)
    other = theirs(v2.RandomCrop(**arguments), *size)
    params = v2.RandomCrop(**arguments).make_params([torch.empty(3, *size)])

    left, top, *_ = params["padding"]
    assert distance(mine["window_top"] + top, other["top"]) < CRITICAL
    assert distance(mine["window_left"] + left, other["left"]) < CRITICAL


@pytest.mark.slow
def test_color_jitter() -> None:
    arguments: dict[str, Any] = {
        "brightness": 0.4,
        "contrast": (0.2, 3.0),
        "saturation": 2,
        "hue": (-0.1, 0.4),
    }
    mine = ours(augment.ColorJitter(**arguments), 4, 4)
    other = theirs(v2.ColorJitter(**arguments), 4, 4)

    for name in ("brightness", "contrast", "saturation", "hue"):
        assert distance(mine[name], other[f"{name}_factor"]) < CRITICAL


def test_the_order_of_jitter_is_any() -> None:
    drawn = ours(augment.ColorJitter(0.1), 4, 4, count=24_000)
    code = sum(drawn[turn] * 4**n for n, turn in enumerate(("first", "second", "third")))
    counts = np.unique(code, return_counts=True)[1]

    assert len(counts) == 24
    assert ((counts - 1000) ** 2 / 1000).sum() < 60  # chi-squared, 23 degrees: p < 0.0001 beyond


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
@pytest.mark.parametrize(
    ("make", "column"),
    [
        (augment.RandomHorizontalFlip, "flip_horizontal"),
        (augment.RandomVerticalFlip, "flip_vertical"),
        (augment.RandomGrayscale, "flag"),
        (augment.RandomErasing, "height"),
    ],
)
def test_how_often(make: Any, column: str, p: float) -> None:
    done = ours(make(p), 400, 400)[column] > 0
    deviation = math.sqrt(p * (1 - p) / COUNT)

    assert abs(done.mean() - p) < 4 * deviation


def test_draws_of_one_sample_do_not_hang_together() -> None:
    recipe = augment.Compose(
        [
            augment.RandomCrop(8),
            augment.RandomHorizontalFlip(),
            augment.ColorJitter(0.4, 0.4, 0.4, 0.1),
            augment.RandomGrayscale(0.5),
        ]
    )
    table = recipe.plan(augment.Layout.dense(COUNT, 3, 99, 99), context()).numpy()
    varied = table[:, table.std(axis=0) > 0][:, [0, 1, 2, 3, 4, 5, 6, -1]]  # without the order
    correlations = np.corrcoef(varied.T) - np.eye(varied.shape[1])

    assert varied.shape[1] == 8
    assert np.abs(correlations).max() < 4 / math.sqrt(COUNT)
