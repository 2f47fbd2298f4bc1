"""What a transform is: a callable, `on` one part of the batch, or one that plans on the host."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeAlias, runtime_checkable

from torch import Tensor

from streamloader import tree
from streamloader.context import Context

__all__ = ["Planned", "Tabled", "Transform", "explain", "note", "on", "planned", "seeds"]

Transform: TypeAlias = Callable[[Any], Any]


@runtime_checkable
class Planned(Protocol):
    """A transform that decides on the host what it does on the device.

    The loader plans the first transform before the batch is copied, in the loader thread, and the
    table travels with the batch's small tensors. It is a matter of shapes and of the context alone,
    so the same batches come whatever the depth, the thread or the number of workers.
    """

    def plan(self, batch: Any, context: Context) -> Tensor:
        """What is to be done with a batch: a CPU tensor, of which only its `run` knows the meaning.

        Args:
            batch: On the host if this is the first transform. Only shapes and dtypes may be read.
            context: What randomness may depend on.
        """

    def run(self, batch: Any, table: Tensor) -> Any:
        """Does it, on the device, where both are."""


class Tabled(NamedTuple):
    """A batch and the table of what is to be done with it: they travel together."""

    batch: Any
    table: Tensor


@dataclass(frozen=True)
class on:  # noqa: N801  # reads as a word: on("image", augment)
    """A transform that applies a function to one part of the batch.

        StreamLoader(loader, transform=on(0, normalize))          # of (images, labels)
        StreamLoader(loader, transform=on("image", normalize))    # of {"image": ..., "label": ...}

    Args:
        key: A mapping's key, a field's name, or an index.
        function: Called with that part; what it returns takes its place.
    """

    key: Any
    function: Transform

    def __call__(self, batch: Any) -> Any:
        """The batch, a new container of the same class, with that part replaced."""
        return tree.with_part(batch, self.key, self.function(tree.part(batch, self.key)))

    def planned(self) -> Planned | None:
        """The same, as what plans; None if the function does not."""
        inner = planned(self.function)
        return None if inner is None else _PlannedPart(self.key, inner)


@dataclass(frozen=True)
class _PlannedPart:
    """A planned transform of one part of the batch."""

    key: Any
    part: Planned

    def plan(self, batch: Any, context: Context) -> Tensor:
        return self.part.plan(tree.part(batch, self.key), context)

    def run(self, batch: Any, table: Tensor) -> Any:
        return tree.with_part(batch, self.key, self.part.run(tree.part(batch, self.key), table))


def seeds(transforms: Sequence[Transform]) -> bool:
    """Whether some of them may draw from torch's generators: those that do not plan."""
    return None in map(planned, transforms)


def planned(transform: Transform) -> Planned | None:
    """`transform` as what plans; None if it does not."""
    known: Any = transform  # a callable with methods more, as far as a type checker can tell
    if isinstance(known, on):
        return known.planned()
    return known if isinstance(known, Planned) else None


def explain(error: Exception, transform: Transform, value: Any) -> None:
    """Adds to `error` which transform raised it, and on what."""
    text = f"raised by transform {_name(transform)} on the batch {tree.describe(value)}"
    if not isinstance(value, Tensor) and not isinstance(transform, on):
        text += (
            "; a transform gets the whole batch: to give it one part, wrap it, as in "
            f"transform=on({_first_key(value)!r}, {_name(transform)})"
        )
    note(error, text)


def note(error: Exception, text: str) -> None:
    """Adds `text` to what is shown of `error`."""
    if hasattr(error, "add_note"):
        error.add_note(text)
    elif error.args and isinstance(error.args[0], str):  # Python 3.10
        error.args = (f"{error.args[0]}\n{text}", *error.args[1:])


def _name(transform: Transform) -> str:
    return getattr(transform, "__qualname__", None) or repr(transform)


def _first_key(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return next((field.name for field in dataclasses.fields(value)), 0)
    return next(iter(value), 0) if isinstance(value, Mapping) else 0
