"""What a program says of itself."""

import pytest

from streamloader.augment.program import (
    Grayscale,
    Jitter,
    Normalize,
    Op,
    Pass,
    Scale,
    per_channel,
)
from streamloader.augment.view import View

CONTRAST, HUE = Jitter(0, (False, True, False, False)), Jitter(0, (True, False, True, True))


@pytest.mark.parametrize(
    ("ops", "mean"),
    [
        ((), None),
        ((HUE, Scale(2)), None),
        ((CONTRAST,), 0),
        ((Grayscale(0), Normalize((0,), (1,)), CONTRAST), 2),
    ],
)
def test_a_pass_says_which_operation_needs_the_mean(ops: tuple[Op, ...], mean: int | None) -> None:
    assert Pass((), None, ops).mean == mean


def test_a_view_has_twelve_columns() -> None:
    assert len(View._fields) == 12


def test_numbers_are_one_or_one_per_channel() -> None:
    per_channel("fill", (1.0,), 3)
    per_channel("fill", (1.0, 2.0, 3.0), 3)
    with pytest.raises(ValueError, match=r"^fill must be one number, or one for each of the im"):
        per_channel("fill", (1.0, 2.0), 3)
