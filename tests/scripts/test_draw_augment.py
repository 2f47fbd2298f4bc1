"""`scripts/draw_augment.py`: the pictures of the docs page, and that they are those in the docs."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from scripts import draw_augment
from streamloader import augment

ROOT = Path(__file__).parents[2]

# Nothing to see: of what values mean, not of pixels. And what is no transform of its own.
NOT_DRAWN = {"Compose", "Layout", "Normalize", "RandomChoice", "ToDtype", "preview"}
NOT_DRAWN |= {"RaggedImages", "collate"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("augment") / "new"
    assert sorted(draw_augment.draw(out)) == sorted(out.iterdir())
    return out


def test_every_transform_that_one_can_see_is_drawn() -> None:
    titles = {figure.calls[0][0] for figure in draw_augment.FIGURES.values()}
    assert titles | {"MixUp", "CutMix"} == set(augment.__all__) - NOT_DRAWN


@pytest.mark.slow
def test_the_files_are_small(folder: Path) -> None:
    sizes = [path.stat().st_size for path in folder.iterdir()]
    assert max(sizes) < 60_000
    assert sum(sizes) < 500_000


@pytest.mark.slow
def test_the_docs_show_what_the_script_draws(folder: Path) -> None:
    """But for a level here and there: other versions of Pillow may round otherwise."""
    names = {path.name for path in folder.iterdir()}
    assert {path.name for path in draw_augment.OUT.iterdir()} == names
    for name in names:
        new, old = (
            np.asarray(Image.open(path / name).convert("RGB"), np.int16)
            for path in (folder, draw_augment.OUT)
        )
        assert new.shape == old.shape, f"{name}: run python -m scripts.draw_augment"
        apart = np.abs(new - old).mean()
        assert apart < 4, f"{name} is {apart} levels off: run python -m scripts.draw_augment"


@pytest.mark.slow
def test_the_command_makes_the_same_bytes(folder: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "scripts.draw_augment", "--out", str(tmp_path)]
    report = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert f"{tmp_path / 'mixup.png'} " in report
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {
        path.name: path.read_bytes() for path in folder.iterdir()
    }


def test_a_call_is_written_as_one_writes_it() -> None:
    call = ("Resize", {"size": (3, 4), "antialias": False})
    assert draw_augment.written(call) == "Resize(size=(3, 4), antialias=False)"
    assert draw_augment.recipe_of(call) == augment.Resize((3, 4), antialias=False)
