"""Which part of a batch holds the labels, and labels as targets: a share for each class."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from streamloader import tree
from streamloader.augment.ragged import RaggedImages

__all__ = ["check", "find", "getter", "shares"]

HOW = (
    "say where they are with labels_getter: a key, a field's name, an index, or a function of the "
    "batch"
)


def getter(value: Any) -> None:
    """Refuses None, with which torchvision's other transforms say that there are no labels.

    Raises:
        TypeError: It is None.
    """
    if value is None:
        raise TypeError(
            'labels_getter must be "default", a key, a field\'s name, an index or a function of '
            "the batch, got None: labels are mixed as images are"
        )


def find(batch: Any, where: Any, images: int) -> tuple[Tensor, int]:
    """The labels and their place among the leaves of a batch.

    Args:
        batch: A container.
        where: "default" is torchvision's guess: what is called `labels`, else what has `label` in
            its name, in a mapping, a dataclass or a namedtuple (whatever the case; tensors alone
            are looked at); else the item behind the images, or of two the other, or what is called
            so in that. Otherwise a key, a field's name, an index, or a function of the batch.
        images: The place of the images among the leaves.

    Raises:
        TypeError: There are none, or they are no tensor.
        ValueError: `where` leads nowhere, or to what is not in the batch.
    """
    leaves = tree.leaves(batch, RaggedImages)
    if isinstance(where, str) and where == "default":
        found = _guess(batch, leaves[images])
        if found is None:
            raise TypeError(f"the batch must hold labels, got {tree.describe(batch)}: {HOW}")
    else:
        found = where(batch) if callable(where) else _part(batch, where)
    if not isinstance(found, Tensor):
        raise TypeError(
            f"labels_getter must lead to a tensor, got {tree.describe(found)} from "
            f"labels_getter={where!r}"
        )
    places = [place for place, leaf in enumerate(leaves) if leaf is found]
    if not places:
        raise ValueError(
            "labels_getter must give a tensor of the batch itself, which targets can replace, got "
            f"another, {tree.describe(found)}, for the batch {tree.describe(batch)}"
        )
    return found, places[0]


def _part(batch: Any, key: Any) -> Any:
    """What is there.

    Raises:
        ValueError: Nothing is.
    """
    try:
        return tree.part(batch, key)
    except (AttributeError, IndexError, KeyError, TypeError) as error:
        raise ValueError(
            f"labels_getter={key!r} must be a key, a field's name or an index of the batch, got "
            f"{tree.describe(batch)}"
        ) from error


def _guess(batch: Any, images: Any) -> Any:
    """What the labels may be; None if there is no telling."""
    named = _by_name(batch)
    if named is not None or not isinstance(batch, (list, tuple)) or len(batch) < 2:
        return named
    if any(leaf is images for leaf in tree.leaves(batch[0], RaggedImages)):
        other = batch[1]
    else:
        other = batch[0] if len(batch) == 2 else None
    return other if isinstance(other, Tensor) else _by_name(other)


def _by_name(node: Any) -> Tensor | None:
    """Of the tensors in a mapping, a dataclass or a namedtuple the one called like labels."""
    names: dict[Any, Any] = {}
    if isinstance(node, Mapping):
        names = dict(node)
    elif dataclasses.is_dataclass(node):
        names = {field.name: getattr(node, field.name, None) for field in dataclasses.fields(node)}
    elif hasattr(node, "_asdict"):
        names = node._asdict()
    found = [
        (name.lower(), value)
        for name, value in names.items()
        if isinstance(name, str) and isinstance(value, Tensor) and "label" in name.lower()
    ]
    return dict(found[::-1]).get("labels", found[0][1]) if found else None


def check(labels: Tensor, num_classes: int | None, count: int) -> None:
    """Refuses labels that cannot become targets, by shape and dtype alone.

    Raises:
        TypeError: Classes are not whole numbers, or shares are complex.
        ValueError: Another shape, another number of classes or images, or no `num_classes`.
    """
    shown = tree.describe(labels)
    if labels.ndim not in (1, 2) or len(labels) != count:
        raise ValueError(
            f"labels must be classes ({count},), or shares ({count}, num_classes), a row for each "
            f"image, got {shown}: if these are not the labels, {HOW}"
        )
    if labels.ndim == 2:
        if labels.dtype.is_complex:
            raise TypeError(f"labels must be real, got {shown}")
        if num_classes not in (None, labels.shape[1]):
            raise ValueError(
                f"num_classes must be that of the labels, {labels.shape[1]}, or None, got "
                f"{num_classes}"
            )
        return
    if labels.dtype.is_floating_point or labels.dtype.is_complex or labels.dtype == torch.bool:
        raise TypeError(
            f"labels of one dimension must be classes, whole numbers, got {shown}: shares are "
            "(N, num_classes)"
        )
    if num_classes is None:
        raise ValueError(
            f"num_classes must be given where labels are classes, got None for {shown}"
        )


def shares(labels: Tensor, num_classes: int | None) -> Tensor:
    """float32, (N, num_classes): 1 for the class of each sample, 0 for others; or what is given.

    Raises:
        ValueError: A class is not below `num_classes`. Only where torch says so in time: on a CPU.
    """
    if labels.ndim == 2:
        return labels.float()
    assert num_classes is not None
    none = torch.zeros(len(labels), num_classes, device=labels.device)
    try:
        return none.scatter_(1, labels.long()[:, None], 1.0)
    except (IndexError, RuntimeError) as error:
        raise ValueError(
            f"labels must be classes from 0 to {num_classes - 1}, as num_classes={num_classes} "
            f"says: {error}"
        ) from error
