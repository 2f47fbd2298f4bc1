"""How to add a transform."""

from dataclasses import dataclass

import numpy as np
import torch

from streamloader import augment
from streamloader.augment import program
from streamloader.augment.draws import Floats, between
from streamloader.augment.recipe import Alone
from streamloader.augment.step import Geometric, Pointwise, keep
from streamloader.augment.view import Motion, View
from tests.augment.oracle import bytes_, floats


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
