"""What the trials of races.py are run on, and how they count what is wrong.

Every element of batch n holds n's own value. What is wrong is counted on the device, and read by
the host when all is done: a loop that waited for its answers would hide what is looked for.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor

__all__ = [
    "POISON",
    "ROWS",
    "Count",
    "Hidden",
    "Refilled",
    "Setting",
    "Tally",
    "busy",
    "forms",
    "value",
]

ROWS = 4
"""Images in a batch."""

POISON = 255
"""No batch's value."""

CYCLES_PER_MS = 1.7e6
"""Of the GPU's clock, within a fifth for an H200."""

Form: TypeAlias = tuple[torch.Size, torch.dtype]
Wrap: TypeAlias = Callable[[Iterable[Any], Callable[[Tensor], Tensor] | None], Iterable[Any]]


def value(number: int) -> int:
    """What every element of batch `number` holds: neither 0, as fresh memory is, nor POISON."""
    return 1 + number % 250


def busy(device: torch.device, milliseconds: float) -> None:
    """Queues a kernel on the current stream that takes about so long."""
    if device.type == "cuda":
        torch.cuda._sleep(int(milliseconds * CYCLES_PER_MS))  # noqa: SLF001  # nothing public does


@dataclass(frozen=True)
class Count:
    """What a trial found.

    Attributes:
        wrong: Batches with a wrong element, that came twice, or that never came.
        of: Batches that there were.
        saw: The first few of them, in words.
    """

    wrong: int
    of: int
    saw: str = ""


@dataclass(frozen=True)
class Setting:
    """What a trial is run on.

    Attributes:
        wrap: The contestant: from a source and a transform of the images to device batches.
        device: Where it hands them out.
        pinned: Whether its source is in pinned memory.
        count: Batches; a multiple of four.
        side: Pixels of an image's side: at 416 a batch has 2 MB, so no small-block pool takes it.
        milliseconds: How long the step before each read takes the device.
    """

    wrap: Wrap
    device: torch.device
    pinned: bool = True
    count: int = 40
    side: int = 416
    milliseconds: float = 4

    def busy(self) -> None:
        """The step before the read."""
        busy(self.device, self.milliseconds)

    def pair(
        self,
        number: int,
        *,
        rows: int = ROWS,
        dtype: torch.dtype = torch.uint8,
        pinned: bool | None = None,
    ) -> list[Tensor]:
        """Images "rows 3 side side" and labels "rows" of batch `number`, in host memory."""
        images = torch.full((rows, 3, self.side, self.side), value(number), dtype=dtype)
        batch = [images, torch.full((rows,), value(number))]
        pin = (self.pinned if pinned is None else pinned) and self.device.type == "cuda"
        return [tensor.pin_memory() for tensor in batch] if pin else batch

    def pairs(self, dtype: torch.dtype = torch.uint8) -> list[tuple[Tensor, ...]]:
        """All batches, each in memory of its own."""
        return [tuple(self.pair(number, dtype=dtype)) for number in range(self.count)]

    def streams(self, count: int) -> list[AbstractContextManager[object]]:
        """So many side streams, each to be entered any number of times."""
        if self.device.type != "cuda":
            return [nullcontext()] * count
        return [torch.cuda.stream(torch.cuda.Stream(self.device)) for _ in range(count)]

    def poison(self, forms: Sequence[Form]) -> None:
        """Asks for memory of these forms on the current stream, and fills what it gets."""
        held = []
        for shape, dtype in forms:
            filler = math.nan if dtype.is_floating_point else POISON
            held += [torch.full(shape, filler, dtype=dtype, device=self.device) for _ in range(2)]


def forms(*tensors: Tensor) -> list[Form]:
    """What is to be poisoned once `tensors` are gone."""
    return [(tensor.shape, tensor.dtype) for tensor in tensors]


@dataclass
class Tally:
    """Counts wrong elements on the device, a look for each batch, and asks for them at the end.

    Args:
        device: Where.
    """

    device: torch.device
    wrong: list[Tensor] = field(default_factory=list)

    @property
    def due(self) -> int:
        """The number of the batch that is looked at next. `enumerate` would keep hold of it."""
        return len(self.wrong)

    def look(self, *tensors: Tensor, expected: float | None = None) -> None:
        """Queues the look at a batch: its elements should all be `expected`, or its value."""
        wanted = value(self.due) if expected is None else expected
        self.wrong.append(torch.stack([(tensor != wanted).sum() for tensor in tensors]).sum())

    def count(self, of: int) -> Count:
        """Waits for the device, and says what was wrong of so many looks that were due."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        found = [int(wrong) for wrong in self.wrong]
        bad = [number for number, elements in enumerate(found) if elements or number >= of]
        lacking = max(of - len(found), 0)
        said = [f"{found[number]} elements of batch {number}" for number in bad[:3]]
        said += ["..."] if len(bad) > 3 else []
        said += [f"{lacking} never came"] if lacking else []
        return Count(len(bad) + lacking, of, ", ".join(said))


class Refilled:
    """A source that fills the same host memory for every batch.

    Args:
        setting: How many batches there are, and where.
        pin: Whether that memory is pinned; only for a CUDA device it can be.
    """

    def __init__(self, setting: Setting, *, pin: bool) -> None:
        self._count = setting.count
        self._buffers = setting.pair(0, pinned=pin)

    def __iter__(self) -> Iterator[tuple[Tensor, ...]]:
        for number in range(self._count):
            for buffer in self._buffers:
                buffer.fill_(value(number))
            yield tuple(self._buffers)


class Hidden:
    """A batch that moves itself and keeps its tensors in a closure.

    Args:
        tensors: What it keeps.
    """

    def __init__(self, *tensors: Tensor) -> None:
        self.ask: Callable[[], tuple[Tensor, ...]] = lambda: tensors

    def __deepcopy__(self, memo: dict[int, Any]) -> Hidden:
        return Hidden(*(tensor.clone() for tensor in self.ask()))

    def to(self, device: torch.device, *, non_blocking: bool = False) -> Hidden:
        """One on `device`."""
        return Hidden(*(tensor.to(device, non_blocking=non_blocking) for tensor in self.ask()))
