"""What a transform may return, and which memory that is.

Anything but None, of any structure. What was on the device stays there, beside it may be tensors on
the CPU, and its memory is returned for one batch alone: batches are made ahead, and are the
caller's to keep and to change.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from streamloader import tree
from streamloader.device import Device

__all__ = ["Fresh", "OverwrittenError", "check", "memory", "ordinary", "tensors", "within"]


class OverwrittenError(RuntimeError):
    """Batches that were not handed over yet may be wrong by now."""


def tensors(value: Any, who: str) -> list[Tensor]:
    """Those that the containers of a batch show.

    Raises:
        TypeError: It is None.
    """
    if value is None:
        raise TypeError(
            f"{who} returned None: it must return the batch, also one that it changed in place"
        )
    return [leaf for leaf in tree.leaves(value) if isinstance(leaf, Tensor)]


def check(found: Sequence[Tensor], given: Any, device: Device, who: str) -> None:
    """That a batch is where it ought to be.

    Args:
        found: Its tensors.
        given: What it was made of.
        device: Where it ought to be.
        who: Returned it, as in "transform f on batch 3".

    Raises:
        ValueError: Some of it is on another accelerator, or all of it has come back to the CPU.
    """
    here = device.device
    places = {tensor.device for tensor in found} - {here}
    if device.host or not places:
        return
    if places != {_CPU}:
        raise ValueError(
            f"{who} returned a tensor on {min(map(str, places - {_CPU}))}: the batch must stay on "
            f"{here}; nothing orders what other devices do"
        )
    back = all(tensor.device == _CPU for tensor in found)
    if back and here in {getattr(leaf, "device", None) for leaf in tree.leaves(given)}:
        raise ValueError(
            f"{who} returned a batch on the CPU: it must stay on {here}, at least a part of it. "
            f"Take out .cpu() and the like, or do it in your loop"
        )


_CPU = torch.device("cpu")


def ordinary(value: Any) -> Any:
    """The value, with copies for tensors of an inference mode that is over: autograd wants none."""
    return tree.replace(
        lambda leaf: leaf.clone() if isinstance(leaf, Tensor) and leaf.is_inference() else leaf,
        value,
    )


class Fresh:
    """Whether one transform returns other memory for each batch of a pass.

    A callable that replays a CUDA graph returns the same each time, and writes to it, whoever reads
    it. No version counter tells of that. But the storage is the same one, and alive, and so is the
    place in it, which parts of a table that stays have each their own. A constant cannot be told
    from it, nor would it be the caller's to change: it is refused likewise.

    Args:
        device: Whose memory.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self.begin()

    def begin(self) -> None:
        """A pass begins: batches of the one before are over, but for those that were kept."""
        self._returned: dict[tuple[int, Any], weakref.ref[torch.UntypedStorage]] = {}
        self._room = _ROOM

    def check(self, found: Sequence[Tensor], given: Sequence[Tensor], who: str) -> None:
        """To be called with what is returned for each batch.

        Args:
            found: Its tensors.
            given: Those of what it was made of, which it may have.
            who: Returned it, as in "transform f on batch 3".

        Raises:
            OverwrittenError: Some of it was returned before, for another batch.
        """
        passed = {_key(tensor.untyped_storage()) for tensor in given}
        made = {}
        for part in _here(found, self._device):
            storage = part.untyped_storage()
            key = _key(storage)
            if key not in passed and part.nbytes:
                made[key, part.storage_offset()] = weakref.ref(storage)
        if any(_alive(self._returned.get(place)) for place in made):
            raise OverwrittenError(
                f"{who} returned memory that it has returned for an earlier batch, and may have "
                f"overwritten by now: batches are made ahead, and are the caller's. A CUDA graph "
                f"writes to one place each time: copy what it returns, as in "
                f"transform=lambda batch: graphed(batch).clone(). So it is with a mask, or with "
                f"what a cache holds: copy it, or add it in your loop"
            )
        self._returned.update(made)
        if len(self._returned) > self._room:
            self._forget()

    def _forget(self) -> None:
        """Forgets memory that has died; seldom, and so for next to nothing a batch."""
        alive = {place: held for place, held in self._returned.items() if held() is not None}
        self._returned, self._room = alive, _ROOM + 2 * len(alive)


_ROOM = 100
"""Places that are remembered before those whose memory has died are looked for."""


def _alive(held: weakref.ref[torch.UntypedStorage] | None) -> bool:
    return held is not None and held() is not None


def _key(storage: torch.UntypedStorage) -> int:
    return storage._cdata  # type: ignore[no-any-return]  # noqa: SLF001  # no public identity


def memory(value: Any, device: Device) -> list[Tensor]:
    """Every tensor on the device that can be reached from `value`."""
    return _here(tree.reachable(value), device)


def _here(found: Sequence[Tensor], device: Device) -> list[Tensor]:
    here, kind = device.device, device.device.type
    parts = [part for tensor in found for part in within(tensor)]
    # The first is asked for speed: a type's name is made anew each time.
    return [part for part in parts if part.device == here or part.device.type == kind]


def within(tensor: Tensor) -> list[Tensor]:
    """The tensors that a tensor is made of, each with memory of its own."""
    if hasattr(tensor, "__tensor_flatten__"):
        names, _ = tensor.__tensor_flatten__()
        return [part for name in names for part in within(getattr(tensor, name))]
    names = ("values",) if tensor.is_nested else _SPARSE.get(tensor.layout, ())
    return [getattr(tensor, name)() for name in names] if names else [tensor]


_SPARSE = {
    torch.sparse_coo: ("_indices", "_values"),
    torch.sparse_csr: ("crow_indices", "col_indices", "values"),
    torch.sparse_bsr: ("crow_indices", "col_indices", "values"),
    torch.sparse_csc: ("ccol_indices", "row_indices", "values"),
    torch.sparse_bsc: ("ccol_indices", "row_indices", "values"),
}
