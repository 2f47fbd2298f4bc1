from pathlib import Path

from benchmarks._loaders import RECIPES
from benchmarks._plot import colour, draw, longer
from benchmarks._report import Run
from benchmarks._summary import rows
from tests.benchmarks.test_report import OPTIONS, blocks


def test_each_loader_has_a_colour_of_its_own() -> None:
    assert len({colour(name) for name in RECIPES}) == len(RECIPES)


def test_the_share_of_longer_steps_falls_from_one() -> None:
    times, shares = longer([0.003, 0.001, 0.002, 0.004])
    assert times == [1, 2, 3, 4]
    assert shares == [1, 0.75, 0.5, 0.25]


def test_a_picture_of_steps_that_nobody_timed_is_empty_not_an_error(tmp_path: Path) -> None:
    measured = blocks(100, 100)
    found = rows(measured, "ceiling", dict.fromkeys(OPTIONS.loaders))
    draw(tmp_path / "run.svg", "title", [Run(OPTIONS, found, measured)])
    assert (tmp_path / "run.svg").stat().st_size > 0
