"""What a transform is: a callable, `on` one part of the batch, or one that plans on the host."""

from __future__ import annotations

import dataclasses
import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, TypeAlias

import torch
from torch import Tensor
from typing_extensions import override

from streamloader import tree
from streamloader.context import Context, rank

__all__ = [
    "Planned",
    "Tabled",
    "Transform",
    "explain",
    "note",
    "on",
    "planned",
    "seeds",
    "untraced",
]

Transform: TypeAlias = Callable[[Any], Any]


_places = itertools.count()


class Planned(ABC):
    """A transform that decides on the host what it does on the device: inherit from it.

    The loader plans the first transform before the batch is copied, and the table travels with the
    batch's small tensors (below 1 MiB: then a label that is kept keeps it too). Later transforms
    are planned when their input is known, and their tables sent on their own. A table is a matter
    of shapes and of the context alone, so the same batches come whatever the depth, the thread or
    the number of workers.
    """

    _calls: ClassVar[int] = 0
    _place: ClassVar[int | None] = None

    @abstractmethod
    def plan(self, batch: Any, context: Context) -> Tensor:
        """What is to be done with a batch, on the CPU; only `run` knows what it means.

        Called in the loader thread or in the caller's, at the same time perhaps. It draws from no
        generator but such as it keys by the context.

        Args:
            batch: On the host if this is the first transform. Only shapes and dtypes may be read.
            context: What randomness may depend on.
        """

    @abstractmethod
    def run(self, batch: Any, table: Tensor) -> Any:
        """Does it, where both are, and draws nothing."""

    def __call__(self, batch: Any) -> Any:
        """Plans and runs, outside of a loader.

        The draws depend on `torch.initial_seed()`, on the rank, on which object it is among those
        that this process has called, and on how often it was; on no generator's state.
        """
        return untraced(Planned._called)(self, batch)

    def _called(self, batch: Any) -> Any:
        """Plans in an epoch of its own, -1, which no loader has."""
        if self._place is None:
            object.__setattr__(self, "_place", next(_places))  # also where it is frozen
        context = Context(torch.initial_seed(), -1, self._calls, rank(), self._place or 0)
        object.__setattr__(self, "_calls", self._calls + 1)
        return self.run(batch, self.plan(batch, context))

    @override
    def __getstate__(self) -> dict[str, Any]:
        """A copy draws for itself."""
        hidden = ("_calls", "_place")
        return {name: value for name, value in vars(self).items() if name not in hidden}


def untraced(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function`, which torch.compile leaves as it is: NumPy would be traced for nothing."""
    tracing = torch.compiler.is_dynamo_compiling()
    return torch.compiler.disable(function) if tracing else function


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


@dataclass(frozen=True)
class _PlannedPart(Planned):
    """A planned transform of one part of the batch."""

    key: Any
    part: Planned

    @override
    def plan(self, batch: Any, context: Context) -> Tensor:
        return self.part.plan(tree.part(batch, self.key), context)

    @override
    def run(self, batch: Any, table: Tensor) -> Any:
        return tree.with_part(batch, self.key, self.part.run(tree.part(batch, self.key), table))


def seeds(transforms: Sequence[Transform]) -> bool:
    """Whether some of them may draw from torch's generators: those that do not plan."""
    return None in map(planned, transforms)


def planned(transform: Transform) -> Planned | None:
    """`transform` as what plans; None if it does not."""
    if isinstance(transform, on):
        inner = planned(transform.function)
        return None if inner is None else _PlannedPart(transform.key, inner)
    return transform if isinstance(transform, Planned) else None


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
