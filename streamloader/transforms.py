"""What a transform is: a callable, `on` one part of the batch, one that plans, or a `Stage`."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.nn import ModuleList
from typing_extensions import override

from streamloader import tree
from streamloader.context import Context, rank

__all__ = [
    "Planned",
    "Stage",
    "Tabled",
    "Transform",
    "explain",
    "listed",
    "note",
    "on",
    "planned",
    "seeds",
    "staged",
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

    Raises:
        TypeError: `function` cannot be called.
    """

    key: Any
    function: Transform

    def __post_init__(self) -> None:
        if not callable(self.function):
            raise TypeError(f"function must be a callable (part -> part), got {self.function!r}")

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


@dataclass(frozen=True)
class Stage:
    """A transform, and how it is run: for those who need more than a callable.

        StreamLoader(loader, transform=[augment, Stage(encoder, autocast=torch.bfloat16)])
        StreamLoader(loader, transform=Stage(on("image", encoder), name="encoder"))

    Args:
        fn: `batch -> batch`, of any structure and length. A module is run as it is: who wants it in
            eval mode, on the device, or frozen makes it so before. It may be graphed or compiled;
            what a CUDA graph writes is copied out of it: `lambda batch: graphed(batch).clone()`.
        name: What profilers (torch's, NVTX) and errors call it, with the batch's number. None is
            the function's name or the object's class.
        priority: Of its stream, as of `torch.Stream`: 0 or below, and a lower number goes first. A
            device that knows no such number takes its lowest.
        autocast: `torch.bfloat16` or `torch.float16`, under which `fn` runs; None is as it stands,
            and never the caller's autocast. Casts of weights are not cached: they would outlive
            the call, made on this stream and without gradients.
        after_step: Whether `fn` reads what the step writes: a teacher that follows the weights, a
            module that is trained. Then it runs, and all transforms behind it, when its batch is
            asked for: on batch i after step i-1 and before step i, as in a plain loop. That is
            right, and overlaps nothing; transforms before it still run ahead. The steps are what
            was submitted to the stream that took the batch before, and to the one that asks.

    Raises:
        TypeError: `fn` cannot be called, `name` is no text, or `priority` no whole number.
        ValueError: `priority` is above 0, or `autocast` is another dtype.
    """

    fn: Transform
    name: str | None = None
    priority: int = 0
    autocast: torch.dtype | None = None
    after_step: bool = False

    def __post_init__(self) -> None:
        if not callable(self.fn):
            raise TypeError(f"fn must be a callable (batch -> batch), got {self.fn!r}")
        if not isinstance(self.name, str | None):
            raise TypeError(f"name must be a text, got {self.name!r}")
        if isinstance(self.priority, bool) or not isinstance(self.priority, int):
            raise TypeError(f"priority must be a whole number, got {self.priority!r}")
        if self.priority > 0:
            raise ValueError(f"priority must be at most 0, the default, got {self.priority}")
        if self.autocast not in (None, torch.bfloat16, torch.float16):
            raise ValueError(
                f"autocast must be torch.bfloat16, torch.float16 or None, got {self.autocast!r}"
            )

    @property
    def label(self) -> str:
        """Its name, or its callable's."""
        return self.name or _name(self.fn)


def listed(transform: Any) -> tuple[Transform | Stage, ...]:
    """`transform` as what it stands for, in order; a callable container, as `Sequential`, is one.

    Raises:
        TypeError: It is neither a callable, nor a `Stage`, nor a list of them.
    """
    if transform is None:
        return ()
    several = isinstance(transform, (list, tuple, ModuleList))  # the last can be called, and fails
    given = tuple(transform) if several else (transform,)
    if all(callable(each) or isinstance(each, Stage) for each in given):
        return given
    raise TypeError(
        f"transform must be a callable (batch -> batch), a Stage, or a list of them, got "
        f"{transform!r}"
    )


def staged(transforms: Sequence[Transform | Stage]) -> list[Stage]:
    """Each as a `Stage`, with a stream of its own.

    There is one rule for all, plain callables too: batch i+1 is in the first while batch i is in
    the second, and to name one or to give it a priority moves no other. What gains nothing from
    that (some kernels of a few microseconds) is one callable: `augment.Compose`, `nn.Sequential`,
    `lambda batch: second(first(batch))`. That saves an event and a wait.
    """
    return [each if isinstance(each, Stage) else Stage(each) for each in transforms]


def seeds(transforms: Sequence[Transform | Stage]) -> bool:
    """Whether some of them may draw from torch's generators: those that do not plan."""
    return any(planned(stage.fn) is None for stage in staged(transforms))


def planned(transform: Transform) -> Planned | None:
    """`transform` as what plans; None if it does not."""
    if isinstance(transform, on):
        inner = planned(transform.function)
        return None if inner is None else _PlannedPart(transform.key, inner)
    return transform if isinstance(transform, Planned) else None


def explain(error: Exception, stage: Stage, number: int, value: Any) -> None:
    """Adds to `error` which transform raised it, and on which batch."""
    text = f"raised by transform {stage.label} on batch {number}, {tree.describe(value)}"
    if not isinstance(value, Tensor) and not isinstance(stage.fn, on):
        text += (
            "; a transform gets the whole batch: to give it one part, wrap it, as in "
            f"transform=on({_first_key(value)!r}, {_name(stage.fn)})"
        )
    note(error, text)


def note(error: Exception, text: str) -> None:
    """Adds `text` to what is shown of `error`."""
    if hasattr(error, "add_note"):
        error.add_note(text)
    elif error.args and isinstance(error.args[0], str):  # Python 3.10
        error.args = (f"{error.args[0]}\n{text}", *error.args[1:])


def _name(transform: Transform) -> str:
    """A function's name, or an object's class."""
    if isinstance(transform, on):
        return f"on({transform.key!r}, {_name(transform.function)})"
    if isinstance(transform, functools.partial):
        return _name(transform.func)
    return getattr(transform, "__name__", None) or type(transform).__name__


def _first_key(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        return next((field.name for field in dataclasses.fields(value)), 0)
    return next(iter(value), 0) if isinstance(value, Mapping) else 0
