"""Where labels are found in a batch, and what they are as targets."""

from collections import namedtuple
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

from streamloader.augment import batches, labels

IMAGES, LABELS = torch.zeros(4, 3, 2, 2), torch.arange(4)


class Pair(NamedTuple):
    image: Tensor
    target: Tensor


@dataclass
class Sample:
    image: Tensor
    label: Tensor


Many = namedtuple("Many", ["ids", "Labels", "image"])  # without types


def find(batch: Any, where: Any = "default") -> tuple[Tensor, int]:
    return labels.find(batch, where, batches.images(batch)[1])


@pytest.mark.parametrize(
    ("batch", "place"),
    [
        ((IMAGES, LABELS), 1),
        ([IMAGES, LABELS], 1),
        ((LABELS, IMAGES), 0),
        ((IMAGES, LABELS, torch.ones(4)), 1),
        (({"image": IMAGES}, LABELS), 1),
        ((IMAGES, {"id": torch.ones(4), "label": LABELS}), 2),
        ((IMAGES, Sample(torch.ones(4), LABELS)), 2),
        ({"label": LABELS, "image": IMAGES}, 0),
        ({"my_labels": torch.ones(4), "LABELS": LABELS, "image": IMAGES}, 1),
        ({"label": LABELS, "label2": torch.ones(4), "image": IMAGES}, 0),
        ({"label_name": ["a"], 0: torch.ones(4), "FooLaBeLBar": LABELS, "image": IMAGES}, 1),
        (Sample(IMAGES, LABELS), 1),
        (Pair(IMAGES, LABELS), 1),
        (Many(torch.ones(4), LABELS, IMAGES), 1),
    ],
)
def test_labels_are_found(batch: Any, place: int) -> None:
    found, where = find(batch)
    assert found is LABELS
    assert where == place


@pytest.mark.parametrize(
    "batch",
    [
        IMAGES,
        (IMAGES,),
        [torch.ones(4), IMAGES, LABELS],
        {"image": IMAGES, "target": LABELS},
        (IMAGES, "cat"),
        (IMAGES, {"target": LABELS}),
    ],
)
def test_where_there_is_no_telling_it_has_to_be_said(batch: Any) -> None:
    with pytest.raises(
        TypeError, match=r"^the batch must hold labels, got .*: say where they are with labels_get"
    ):
        find(batch)


def second(batch: Any) -> Any:
    return batch[1]


@pytest.mark.parametrize(
    ("batch", "where"),
    [
        ({"image": IMAGES, "target": LABELS}, "target"),
        ({"image": IMAGES, "default": LABELS}, lambda batch: batch["default"]),
        (Sample(IMAGES, LABELS), "label"),
        (Pair(IMAGES, LABELS), "target"),
        ((torch.ones(4), IMAGES, LABELS), 2),
        ([IMAGES, LABELS], second),
    ],
)
def test_labels_are_where_one_says(batch: Any, where: Any) -> None:
    assert find(batch, where)[0] is LABELS


@pytest.mark.parametrize(
    ("where", "error", "message"),
    [
        (
            "label",
            ValueError,
            r"labels_getter='label' must be a key, a field's name or an index of",
        ),
        (
            3,
            ValueError,
            r"labels_getter=3 must be a key, .* got tuple\(float32\[4, 3, 2, 2\], int64",
        ),
        (lambda _: "x", TypeError, r"labels_getter must lead to a tensor, got str from labels_get"),
        (lambda b: b[1] + 1, ValueError, r"labels_getter must give a tensor of the batch itself"),
    ],
)
def test_what_leads_nowhere_is_refused(where: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=f"^{message}"):
        find((IMAGES, LABELS), where)


def test_there_must_be_labels() -> None:
    with pytest.raises(TypeError, match=r'^labels_getter must be "default", a key, .*, got None: '):
        labels.getter(None)
    labels.getter("default")


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16, torch.int32, torch.int64], ids=str)
def test_classes_become_shares(dtype: torch.dtype) -> None:
    given = torch.tensor([2, 0], dtype=dtype)
    labels.check(given, 3, 2)

    out = labels.shares(given, 3)
    assert out.tolist() == [[0, 0, 1], [1, 0, 0]]
    assert out.dtype == torch.float32


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64, torch.int64, torch.bool])
@pytest.mark.parametrize("num_classes", [None, 3])
def test_shares_stay(dtype: torch.dtype, num_classes: int | None) -> None:
    given = torch.tensor([[1, 0, 1], [0, 0, 1]], dtype=dtype)
    labels.check(given, num_classes, 2)

    out = labels.shares(given, num_classes)
    assert out.tolist() == given.tolist()
    assert out.dtype == torch.float32


ones: Callable[..., Tensor] = torch.ones


@pytest.mark.parametrize(
    ("given", "num_classes", "error", "message"),
    [
        (ones(4, 2, 2), 3, ValueError, r"labels must be classes \(4,\), or shares \(4, num_cl"),
        (ones(()), 3, ValueError, r"labels must be classes .*, got float32\[\]: if these are not"),
        (ones(3).long(), 3, ValueError, r"labels must be classes \(4,\), .* got int64\[3\]"),
        (
            ones(4, 2).to(torch.complex64),
            2,
            TypeError,
            r"labels must be real, got complex64\[4, 2\]$",
        ),
        (ones(4, 2), 3, ValueError, "num_classes must be that of the labels, 2, or None, got 3$"),
        (ones(4), 3, TypeError, r"labels of one dimension must be classes, whole numbers, got fl"),
        (ones(4).bool(), 3, TypeError, "labels of one dimension must be classes"),
        (ones(4).to(torch.complex64), 3, TypeError, "labels of one dimension must be classes"),
        (ones(4).long(), None, ValueError, r"num_classes must be given where labels are classes"),
    ],
)
def test_what_cannot_become_targets_is_refused(
    given: Tensor, num_classes: int | None, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=f"^{message}"):
        labels.check(given, num_classes, 4)


@pytest.mark.parametrize("wrong", [3, -1])
def test_a_class_that_is_none_is_refused(wrong: int) -> None:
    with pytest.raises(ValueError, match=r"^labels must be classes from 0 to 2, as num_classes=3"):
        labels.shares(torch.tensor([0, wrong]), 3)
