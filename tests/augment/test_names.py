"""The public names, and what they need."""

import importlib
import inspect
import re
import sys

import pytest

from streamloader import augment
from tests.test_repo import ROOT

NAMES = [
    "CenterCrop",
    "ColorJitter",
    "Compose",
    "CutMix",
    "Layout",
    "MixUp",
    "Normalize",
    "RaggedImages",
    "RandomChoice",
    "RandomCrop",
    "RandomErasing",
    "RandomGrayscale",
    "RandomHorizontalFlip",
    "RandomResizedCrop",
    "RandomVerticalFlip",
    "Resize",
    "ToDtype",
    "collate",
    "preview",
]


def test_the_public_names_are_these() -> None:
    assert augment.__all__ == NAMES
    assert all(hasattr(augment, name) for name in NAMES)


def test_numpy_is_asked_for_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "numpy", None)
    with pytest.raises(ImportError, match=r'with NumPy: pip install "streamloader\[augment\]"$'):
        importlib.reload(augment)
    monkeypatch.undo()
    importlib.reload(augment)


OUR_OWN = {"per_batch"}
"""Arguments that torchvision has no word for."""


NO_TRANSFORMS = {"Compose", "Layout", "RaggedImages", "collate", "preview"}
"""Names that are not of a transform with torchvision's arguments."""


@pytest.mark.parametrize("name", [name for name in NAMES if name not in NO_TRANSFORMS])
def test_arguments_and_defaults_are_torchvisions(name: str) -> None:
    v2 = importlib.import_module("torchvision.transforms.v2")
    ours, theirs = (
        {one.name: one.default for one in inspect.signature(getattr(of, name)).parameters.values()}
        for of in (augment, v2)
    )
    assert {name: ours[name] for name in ours if name not in OUR_OWN} == theirs


def test_the_docs_list_every_transform_with_its_arguments() -> None:
    page = (ROOT / "docs/augment.md").read_text(encoding="utf-8")
    listed = {
        name: re.findall(r"`(\w+)`", arguments)
        for names, arguments in re.findall(r"^\| (`[A-Z].*?) \| (.*?) \|", page, re.MULTILINE)
        for name in re.findall(r"`(\w+)`", names)
    }
    known = set(NAMES) - (NO_TRANSFORMS - {"Compose"})
    assert listed == {
        name: list(inspect.signature(getattr(augment, name)).parameters) for name in known
    }
