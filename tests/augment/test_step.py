"""How to add a transform."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch

from streamloader import augment
from streamloader.augment import program
from streamloader.augment.draws import Floats, between
from streamloader.augment.recipe import Alone
from streamloader.augment.step import Geometric, Pointwise, keep
from streamloader.augment.view import Motion, View
from tests.augment.oracle import bytes_, floats
from tests.test_repo import ROOT, code_blocks


@dataclass(frozen=True)
class Transposed(Geometric, Alone):
    """Turns both sides around, always."""

    motion = Motion(flips=True)

    def moved(self, view: View, uniform: Floats) -> View:
        one = np.ones(len(uniform), np.int64)
        return view.flipped(one, one)


@dataclass(frozen=True)
class Doubled(Pointwise, Alone):
    by: float = 2

    def __post_init__(self) -> None:
        keep(self, by=float(self.by))

    def op(self, column: int, dtype: torch.dtype) -> program.Scale:  # noqa: ARG002
        return program.Scale(self.by)


@dataclass(frozen=True)
class Drawn(Pointwise, Alone):
    """Erases a column of each image's own."""

    draws = 1
    fields = ("top", "left", "height", "width")

    def decide(self, uniform: Floats, heights: np.ndarray, widths: np.ndarray) -> Floats:
        none = np.zeros(len(uniform))
        left = np.floor(between(uniform[:, 0], 0, 1) * widths)
        return np.column_stack([none, left, heights, none + 1])

    def op(self, column: int, dtype: torch.dtype) -> program.Erase:  # noqa: ARG002
        return program.Erase(column, (0.0,))


def test_a_transform_of_ones_own_folds_and_runs_with_the_others() -> None:
    recipe = augment.Compose([augment.RandomResizedCrop(5), Transposed(), Doubled(3), Drawn()])
    images = floats(8, 3, 9, 9) + 0.5

    assert len(recipe.program(torch.float32).passes) == 1
    out = recipe(images)
    assert ((out == 0).sum(dim=(1, 2, 3)) == 3 * 5).all()
    assert out.max() > 3


def test_what_it_leaves_out_changes_nothing() -> None:
    images = bytes_(2, 7, 3, 4)

    assert torch.equal(Transposed()(images), images.flip(-1, -2))
    assert Doubled(1)(images).dtype == torch.uint8
    assert Doubled().columns == ()


def documented(name: str) -> Any:
    """A transform that the docs page adds."""
    blocks = code_blocks((ROOT / "docs/augment.md").read_text(encoding="utf-8")).values()
    names = {"__name__": "page", "augment": augment, "torch": torch, "MEAN": 0.5, "STD": 0.5}
    for code in blocks:
        if "Alone):" in code:
            exec(compile(code, "docs/augment.md", "exec"), names)
    return names[name]


def test_the_docs_corner_crop_is_a_corner() -> None:
    images = bytes_(40, 3, 9, 11)
    out = documented("RandomCornerCrop")(5)(images)

    halves = (slice(None, 5), slice(-5, None))
    corners = [images[:, :, rows, lines] for rows in halves for lines in halves]
    which = torch.stack([(out == corner).flatten(1).all(1) for corner in corners])
    assert (which.sum(0) == 1).all()
    assert which.any(1).all()
    with pytest.raises(ValueError, match=r"^size must be within every image, got 10$"):
        documented("RandomCornerCrop")(10)(images)


def test_the_docs_cutout_is_a_square_that_the_edge_may_cut_off() -> None:
    images = bytes_(40, 3, 9, 11).clamp(min=1)
    out = documented("Cutout")(4)(images)

    black = (out == 0).all(1)
    assert torch.equal(out, torch.where(black[:, None], 0, images))
    high, wide = black.any(2).sum(1), black.any(1).sum(1)
    assert torch.equal(black.sum((1, 2)), high * wide)
    assert high.unique().tolist() == wide.unique().tolist() == [2, 3, 4]
