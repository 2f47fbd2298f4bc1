"""A batch on its way out of a worker: its tensors in a slab, the rest of it pickled.

    worker    value ──► tensors into the slab, `Recipe`: where each lies
                    ──► payload: the value, pickled, with a number in place of each tensor
    queue     Sent: the slab's number, recipe, payload
    here      Sent ──► the slab's memory, and the value with whatever is to stand for its tensors

Which tensors share a block is the layout's own matter: a block is sent to the device from where it
lies. What is more than its bytes (a tensor of another class, or that wants a gradient), what is
inside an object with a `.to` of its own, and what no longer fits stays in the payload, and crosses
as torch sends it.
"""

from __future__ import annotations

import contextlib
import functools
import io
import pickle
import threading
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.reduction import ForkingPickler
from typing import Any, NamedTuple

import torch
from torch import Tensor
from typing_extensions import override

from streamloader import tree
from streamloader.carve import carve, contiguous, cuts
from streamloader.layout import Block, Layout, Place, Spec, dense, plain, runs
from streamloader.shared import Shared, Slab, part

LITTLE = 1 << 15
"""Bytes of a pickled batch that may be unpickled where the caller waits for it: some 0.1 ms."""

__all__ = ["Recipe", "Sent", "packed", "wanted"]


class Recipe(NamedTuple):
    """What lies where in a slab.

    Attributes:
        specs: The tensors.
        layout: Their blocks; `slab` is 0, since they need no other memory.
        used: Bytes of the slab.
        nbytes: Bytes of the tensors.
    """

    specs: tuple[Spec, ...]
    layout: Layout
    used: int
    nbytes: int

    def views(self, memory: Tensor) -> list[Tensor]:
        """The tensors in a slab's memory, each with a version counter of its own."""
        return carve(self._blocks(memory), self.layout.cuts)

    def copies(self, memory: Tensor) -> list[Tensor]:
        """Likewise, but in memory of their own: the slab is free for another batch."""
        return carve([block.clone() for block in self._blocks(memory)], self.layout.cuts)

    def _blocks(self, memory: Tensor) -> list[Tensor]:
        return [part(memory, block.offset or 0, block.nbytes) for block in self.layout.blocks]


class Sent:
    """A batch that came out of a worker in a slab.

    Args:
        recipe: What lies where.
        memory: The slab, a uint8 tensor.
        payload: Its value; it can be unpickled once.
        shared: What the slab is part of.
        number: The slab's number.

    Attributes:
        left_out: Bytes of what did not fit.
        checked: Whether others than Python's containers see what stands for the tensors, or sets
            and keys, in which nobody looks for tensors: so that it must be they.
        whole: Whether it can be made where the caller waits for it: it is not checked, these are
            all its tensors, nothing in it has a `.to`, and there is little else.
    """

    __slots__ = ("_payload", "checked", "left_out", "memory", "number", "recipe", "shared", "whole")

    def __init__(
        self, recipe: Recipe, memory: Tensor, payload: Payload, shared: Shared, number: int
    ) -> None:
        self.recipe, self.memory, self._payload = recipe, memory, payload
        self.shared, self.number = shared, number
        self.left_out, self.checked = payload.left_out, payload.checked
        self.whole = payload.whole

    @property
    def pinned(self) -> bool:
        """Whether its slab is: NOTE [Shared slabs], 5."""
        return self.shared.pinned(self.number)

    def value(self, standing: Sequence[Tensor]) -> Any:
        """The batch, once, with `standing` in place of its tensors, in the recipe's order."""
        payload, self._payload = self._payload, _OPENED
        found = [*standing, *payload.others]
        return _Unpickler(io.BytesIO(payload.pickled), found.__getitem__).load()


class Payload(NamedTuple):
    """A batch's value, but for what is in the slab.

    Attributes:
        pickled: It, with numbers in place of tensors and of `others`, which follow those.
        others: Memory of other tensors. Only the queue sends it: the worker keeps a descriptor of
            each until it has been unpickled here, and may be gone before the batch is opened.
        checked: See `Sent`.
        whole: Likewise.
        left_out: Likewise.
    """

    pickled: bytes
    others: list[torch.UntypedStorage]
    checked: bool
    whole: bool
    left_out: int


_OPENED = Payload(b"", [], checked=False, whole=False, left_out=0)


class _InQueue:
    """A `Sent` in the worker, which is one when it is unpickled: a plain object to torch."""

    def __init__(self, *arguments: Any) -> None:
        self._arguments = arguments

    @override
    def __reduce__(self) -> tuple[Any, ...]:
        return _received, self._arguments


def packed(value: Any, slab: Slab, shared: Shared) -> Any:
    """`value` with its tensors in `slab`, for the worker's queue.

    Those that are in it already, since they were made there, stay where they are.
    """
    leaves = tree.leaves(value)
    tensors = {id(leaf): leaf for leaf in leaves if _travels(leaf)}
    if not tensors:
        return value
    recipe, there = _placed(list(tensors.values()), slab)
    file = io.BytesIO()
    numbers = {id(tensor): number for number, tensor in enumerate(there)}
    pickler = _Pickler(file, numbers)
    pickler.dump(value)
    fit = sum(tensor.nbytes for tensor in there)
    left_out = sum(tensor.nbytes for tensor in tensors.values()) - fit
    pickled = file.getvalue()
    checked = pickler.checked or _hides(value)
    whole = not checked and all(id(leaf) in numbers for leaf in leaves) and len(pickled) < LITTLE
    payload = Payload(pickled, pickler.others, checked, whole, left_out)
    shared.send(slab.number)
    return _InQueue((shared.owner, shared.key), slab.number, recipe, payload)


def _hides(value: Any) -> bool:
    """Whether it has sets, or keys in which a tensor can be, in Python's own containers."""
    kind = type(value)
    if kind in (set, frozenset) or (kind is dict and not _KEYS.issuperset(map(type, value))):
        return True
    inner = value.values() if kind is dict else value if kind in (list, tuple) else ()
    return not _SIMPLE.issuperset(map(type, inner)) and any(map(_hides, inner))


_KEYS = frozenset({bool, bytes, float, int, str, type(None)})
"""Classes of nearly all keys."""

_SIMPLE = _KEYS | {Tensor}
"""Most of what is in a batch."""


def _travels(leaf: Any) -> bool:
    return type(leaf) is Tensor and plain(leaf) and not leaf.requires_grad


def _placed(tensors: list[Tensor], slab: Slab) -> tuple[bytes, list[Tensor]]:
    """A pickled recipe, and the tensors that are in it: all that fit."""
    specs = tuple(map(_spec, tensors))
    alone, others = runs(specs)
    blocks: list[Block] = []
    places: dict[int, Place] = {}
    for group in [*([number] for number in alone), others]:
        stays = group is not others  # those must lie together
        put = {n: _put(tensors[n], specs[n], slab, stays=stays) for n in group}
        starts = {n: start for n, start in put.items() if start is not None}
        if starts:
            first = min(starts.values())
            end = max(start + specs[n].nbytes for n, start in starts.items())
            blocks.append(Block(end - first, first, len(places), shared=True))
            places |= {n: Place(len(blocks) - 1, start - first) for n, start in starts.items()}
    there = tuple(specs[n] for n in places)
    return _pickled(there, tuple(blocks), tuple(places.values()), slab.used), [
        tensors[n] for n in places
    ]


def _put(tensor: Tensor, spec: Spec, slab: Slab, *, stays: bool) -> int | None:
    """Where it lies in the slab, in bytes; None if it does not fit.

    It is copied there, unless it is there and `stays`.
    """
    start = slab.offset(tensor) if stays and _dense(tensor) else None
    if start is None:
        start = slab.take(spec.nbytes)
        if start is not None:
            slab.write(start, tensor if _dense(tensor) else tensor.contiguous())
    return start


def _spec(tensor: Tensor) -> Spec:
    shape = tuple(tensor.shape)
    stride = tensor.stride() if _dense(tensor) else contiguous(shape)
    return Spec(shape, stride, tensor.dtype, tensor.nbytes, pinned=False)


def _dense(tensor: Tensor) -> bool:
    return dense(tensor.shape, tensor.stride())


@functools.lru_cache(maxsize=64)
def _pickled(
    specs: tuple[Spec, ...], blocks: tuple[Block, ...], places: tuple[Place, ...], used: int
) -> bytes:
    return pickle.dumps((specs, blocks, places, used))


@functools.lru_cache(maxsize=64)
def _recipe(pickled: bytes) -> Recipe:
    specs, blocks, places, used = pickle.loads(pickled)  # a worker of this process made it
    layout = Layout(blocks, places, 0, cuts(specs, places))
    return Recipe(specs, layout, used, sum(spec.nbytes for spec in specs))


@contextlib.contextmanager
def wanted() -> Iterator[None]:
    """In it, batches that this thread gets out of a queue are `Sent`; else they are their value."""
    before = _wanted()  # a sampler that iterates over a loader is within
    _thread.wanted = True
    try:
        yield
    finally:
        _thread.wanted = before


def _wanted() -> bool:
    return getattr(_thread, "wanted", False)


_thread = threading.local()


def _received(key: tuple[int, int], number: int, recipe: bytes, payload: Payload) -> Any:
    """Unpickles a batch, in the process that owns the slab. Its value may be anybody's.

    Raises:
        RuntimeError: This is another process, or it has closed the loader.
    """
    shared = Shared.find(*key)
    if shared is None:
        raise RuntimeError(
            "this batch lies in memory of a StreamLoader that was closed, or that belongs to "
            "another process: iterate over the StreamLoader where it was made"
        )
    sent = Sent(_recipe(recipe), shared.received(number), payload, shared, number)
    if _wanted():
        return sent
    make = sent.recipe.copies if sent.pinned else sent.recipe.views
    return sent.value(make(sent.memory))


class _Pickler(ForkingPickler):
    """As torch sends a batch, but for the tensors in the slab, and for memory of others."""

    def __init__(self, file: io.BytesIO, numbers: dict[int, int]) -> None:
        super().__init__(file)
        self._numbers = numbers
        self.others: list[torch.UntypedStorage] = []
        self.checked = False

    @override
    def reducer_override(self, thing: Any) -> Any:
        number = self._numbers.get(id(thing))
        if number is None and isinstance(thing, torch.UntypedStorage):
            number = len(self._numbers) + len(self.others)
            self.others.append(thing)
        if number is not None:
            return _standing, (number,)
        self.checked = self.checked or thing is not _standing
        return NotImplemented


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: io.BytesIO, standing: Callable[[int], Any]) -> None:
        super().__init__(file)
        self._standing = standing

    @override
    def find_class(self, module: str, name: str, /) -> Any:
        found = super().find_class(module, name)
        return self._standing if found is _standing else found


def _standing(number: int) -> Any:
    """In a pickled batch: what stands for its tensor of that number, or memory of another."""
    raise NotImplementedError(number)
