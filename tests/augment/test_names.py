"""The public names, and what they need."""

import importlib
import sys

import pytest

from streamloader import augment

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


NOT_TORCHVISIONS = {"Compose", "Layout", "RaggedImages", "collate"}


@pytest.mark.parametrize("name", [name for name in NAMES if name not in NOT_TORCHVISIONS])
def test_arguments_and_defaults_are_torchvisions(name: str) -> None:
    inspect = importlib.import_module("inspect")
    v2 = importlib.import_module("torchvision.transforms.v2")
    ours, theirs = (
        {one.name: one.default for one in inspect.signature(getattr(of, name)).parameters.values()}
        for of in (augment, v2)
    )
    assert {name: ours[name] for name in ours if name not in OUR_OWN} == theirs
