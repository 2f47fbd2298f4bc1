"""Batches, and datasets for workers, that cross shared memory; what is looked at on either side."""

from __future__ import annotations

import ctypes
import dataclasses
import os
import pickle
from collections import OrderedDict, namedtuple
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, IterableDataset, default_collate

from streamloader.sent import Sent, packed, wanted
from streamloader.shared import Shape, Shared, filling
from streamloader.tree import Parts

__all__ = [
    "BATCHES",
    "SAMPLES",
    "SMALLEST",
    "Checked",
    "Image",
    "Item",
    "Items",
    "Moves",
    "Pair",
    "Stream",
    "Traces",
    "crossed",
    "items",
    "lies_in",
    "memory",
    "own",
    "received",
    "same",
    "sent",
    "stacked",
]

SMALLEST: Any = getattr(torch, "uint4")  # noqa: B009  # mypy does not know it
PAGE = os.sysconf("SC_PAGE_SIZE")
MEDIUM = 1 << 14
"""Bytes from which a tensor is stacked straight into a slab."""


class Pair(NamedTuple):
    image: Any
    label: Any


Old = namedtuple("Old", ["a", "b"])  # as older code has them


@dataclasses.dataclass
class Item:
    image: Any
    name: str = "item"


@dataclasses.dataclass(frozen=True, eq=False)
class Both(Parts):
    """Has a `.to`, and is a container all the same."""

    image: Any
    label: Any

    def to(self, device: Any) -> Both:
        return Both(self.image.to(device), self.label.to(device))


class Moves:
    """Has a `.to` of its own, and hides a tensor."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    def to(self, device: Any) -> Moves:
        return Moves(self.tensor.to(device))


class Holder:
    """Has no `.to`: whatever it hides stays on the host."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


class Image(Tensor):
    """A tensor of a subclass."""


class Checked(dict[str, Any]):
    """Refuses tensors that do not hold 7 elements, also while it is unpickled."""

    def __setitem__(self, name: str, value: Any) -> None:
        assert value.numel() == 7
        super().__setitem__(name, value)


def _twice() -> Any:
    tensor = torch.arange(5.0)
    return [tensor, {"again": tensor}, tensor[:2]]


def _nested() -> Any:
    return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)], layout=torch.jagged)


def _every_dtype() -> Any:
    dtypes = [torch.bool, torch.uint8, torch.int16, torch.int64, torch.uint32, torch.float16]
    dtypes += [torch.bfloat16, torch.float64, torch.float8_e4m3fn, torch.complex64]
    return [torch.tensor([0, 1, 1, 0, 1]).to(dtype) for dtype in dtypes]


def _large_and_small() -> Any:
    return {n: torch.arange(size) for n, size in enumerate([3, 1 << 14, 0, 1 << 18, 700, 1 << 12])}


def _checked() -> Any:
    return Checked(image=torch.arange(7.0))


def _wants_gradient() -> Any:
    return [torch.ones(9, requires_grad=True), torch.ones(4)]


X = torch.arange(2.0 * 3 * 4 * 4).reshape(2, 3, 4, 4)

BATCHES: dict[str, Callable[[], Any]] = {
    "a tensor": lambda: torch.arange(6),
    "a tuple": lambda: (X.clone(), torch.arange(2)),
    "a dict": lambda: {"x": X.clone(), "y": [torch.arange(2), "name", 3, None, 2.5]},
    "a namedtuple": lambda: Pair(X.clone(), Old(torch.arange(2), "b")),
    "a dataclass": lambda: Item(X.clone()),
    "parts": lambda: Both(X.clone(), torch.arange(2)),
    "an ordered dict": lambda: OrderedDict(b=torch.ones(2), a=torch.zeros(2)),
    "a dict that checks": _checked,
    "nothing": list,
    "no tensors": lambda: {"name": "a", "numbers": [1, 2.5, True]},
    "an array": lambda: [np.arange(6).reshape(2, 3), torch.arange(3)],
    "every dtype": _every_dtype,
    "a dtype without copies": lambda: [torch.arange(4, dtype=torch.uint8).view(SMALLEST)],
    "large and small": _large_and_small,
    "channels last": lambda: X.clone().to(memory_format=torch.channels_last),
    "transposed": lambda: X.clone().mT,
    "sliced": lambda: [X[:, 1:2], X[..., ::2]],
    "expanded": lambda: torch.arange(3.0).view(3, 1).expand(3, 4),
    "overlapping": lambda: X.flatten().as_strided((3, 3), (1, 1)),
    "without elements": lambda: [torch.empty(0), torch.empty(2, 0, 3, dtype=torch.int8)],
    "without dimensions": lambda: (torch.tensor(3), torch.tensor(2.5)),
    "the same tensor twice": _twice,
    "a subclass": lambda: [torch.arange(5.0).as_subclass(Image), torch.ones(2)],
    "only a subclass": lambda: torch.arange(5.0).as_subclass(Image),
    "a gradient": _wants_gradient,
    "sparse": lambda: [torch.eye(3).to_sparse(), torch.ones(2)],
    "nested": lambda: [_nested(), torch.ones(2)],
    "an object that moves itself": lambda: [Moves(X.clone()), torch.ones(2)],
    "an object that stays": lambda: [Holder(X.clone()), torch.ones(2)],
}
"""What a collate function may return, made anew by each call."""


def same(one: Any, other: Any) -> None:
    """Asserts that two batches are alike: classes, structure, order, dtypes, every element."""
    assert type(one) is type(other)
    if isinstance(one, Tensor):
        assert (one.dtype, one.layout, one.requires_grad) == (
            other.dtype,
            other.layout,
            other.requires_grad,
        )
        assert _elements(one) == _elements(other)
    elif isinstance(one, np.ndarray):
        assert one.dtype == other.dtype
        np.testing.assert_array_equal(one, other)
    elif isinstance(one, Mapping):
        assert list(one) == list(other)
        _all_same(list(one.values()), list(other.values()))
    elif isinstance(one, (list, tuple)):
        _all_same(one, other)
    elif hasattr(one, "__dict__"):
        same(vars(one), vars(other))
    else:
        assert one == other


def _all_same(one: Sequence[Any], other: Sequence[Any]) -> None:
    assert len(one) == len(other)
    for mine, theirs in zip(one, other, strict=True):
        same(mine, theirs)


def _elements(tensor: Tensor) -> Any:
    """Its shape and its bytes."""
    tensor = tensor.detach()
    if tensor.is_nested:
        return [_elements(part) for part in tensor.unbind()]
    if tensor.layout != torch.strided:
        tensor = tensor.to_dense()
    if not tensor.is_contiguous():
        tensor = tensor.contiguous()
    return tuple(tensor.shape), ctypes.string_at(tensor.data_ptr(), tensor.nbytes)


# -- one process on both sides --------------------------------------------------------------------


def memory(*, each: int = 1, pages: int = 1024) -> Shared:
    """Memory of one worker: `each` slabs of so many pages."""
    return Shared(Shape(1, each, pages * PAGE))


def crossed(shared: Shared, make: Callable[[], Any], taken: int = 0) -> bytes:
    """What a worker's queue carries of the batch that `make` returns in it.

    Args:
        shared: Has a free slab.
        make: The collate function.
        taken: Bytes of the slab that something else has.
    """
    slab = shared.take(0)
    assert slab is not None
    slab.take(taken)
    with filling(slab):
        value = make()
    return bytes(ForkingPickler.dumps(packed(value, slab, shared)))


def received(queued: bytes) -> Any:
    """What the pass gets: `Sent`, or the value that was sent the ordinary way."""
    with wanted():
        return pickle.loads(queued)


def sent(make: Callable[[], Any], *, pages: int = 1024, taken: int = 0) -> Any:
    """Of a batch of such a worker, what the pass gets."""
    shared = memory(pages=pages)
    return received(crossed(shared, make, taken))


def own(found: Any) -> Any:
    """A batch that was received, on the memory of its slab."""
    return found.value(found.recipe.views(found.memory)) if isinstance(found, Sent) else found


def lies_in(shared: Shared, tensor: Tensor) -> bool:
    """Whether a tensor's memory is in that, mapped into this process."""
    start = torch.frombuffer(shared._bytes, dtype=torch.uint8).data_ptr()
    return 0 <= tensor.data_ptr() - start < len(shared._bytes)


# -- datasets, at module level for workers that are spawned ----------------------------------------


def _sample(index: int) -> Tensor:
    """So large that two of them are stacked straight into a slab."""
    return torch.full((MEDIUM,), index % 251, dtype=torch.uint8)


SAMPLES: dict[str, Callable[[int], Any]] = {
    "tuples": lambda n: (_sample(n), n),
    "dicts": lambda n: {"x": _sample(n), "name": f"sample {n}", "weight": n / 2},
    "namedtuples": lambda n: Pair(_sample(n), Old(n, torch.tensor(n))),
    "numbers": lambda n: n,
    "nested": lambda n: {"views": [(_sample(n), n), (_sample(n + 1), -n)], "z": torch.ones(2)},
    "arrays": lambda n: (np.full((3, 5), n), np.float32(n)),
}
"""Samples that `default_collate` takes."""


class Items(Dataset[Any]):
    """Samples of a kind.

    Args:
        count: How many.
        kind: A key of SAMPLES.
        fail: Which one raises.
    """

    def __init__(self, count: int, kind: str = "tuples", fail: int | None = None) -> None:
        self._count, self._kind, self._fail = count, kind, fail

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> Any:
        if index == self._fail:
            raise KeyError(f"sample {index} is broken")
        return SAMPLES[self._kind](index)


def items(count: int = 8, kind: str = "tuples", **options: Any) -> DataLoader[Any]:
    """Batches of two samples, of two workers."""
    fail = options.pop("fail", None)
    return DataLoader(Items(count, kind, fail), **{"batch_size": 2, "num_workers": 2, **options})


class Stream(IterableDataset[Any]):
    """Each worker has samples of its own, and more than the one before it."""

    def __init__(self, count: int, kind: str = "tuples") -> None:
        self._count, self._kind = count, kind

    def __iter__(self) -> Iterator[Any]:
        info = torch.utils.data.get_worker_info()
        first, count = (0, self._count) if info is None else (1000 * info.id, self._count + info.id)
        return (SAMPLES[self._kind](first + n) for n in range(count))


def stacked(samples: Sequence[Any]) -> Any:
    """A collate function that makes its tensors itself."""
    images = torch.stack([sample[0] for sample in samples])
    return {"images": images, "labels": torch.tensor([sample[1] for sample in samples])}


def moved(samples: Sequence[Any]) -> Any:
    """One that calls `default_collate`, and hides the result in an object."""
    images, labels = default_collate(list(samples))
    return [Moves(images), labels, images.as_subclass(Image), images[:, ::2]]


# -- what is left behind ---------------------------------------------------------------------------


class Traces(NamedTuple):
    """What a process has of shared memory.

    Attributes:
        descriptors: How many of all kinds.
        mapped: How many mappings of ours.
        named: What /dev/shm holds.
        children: How many live processes it has started.
    """

    descriptors: int
    mapped: int
    named: frozenset[str]
    children: int

    @classmethod
    def now(cls) -> Traces:
        maps = Path("/proc/self/maps").read_text(encoding="utf-8")
        return cls(
            sum(1 for _ in Path("/proc/self/fd").iterdir()),
            maps.count("memfd:streamloader"),
            frozenset(path.name for path in Path("/dev/shm").iterdir()),
            len(torch.multiprocessing.active_children()),
        )
