"""From transforms to a program: what fuses into one pass, what has which columns. Pure."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from streamloader.augment import checks
from streamloader.augment.program import LEVELS, Erase, Op, Pass, Program, Resample
from streamloader.augment.step import Geometric, Step
from streamloader.augment.view import Fold, Motion, View

__all__ = ["lower"]


@dataclass
class _Draft:
    """A pass in the making."""

    places: list[int] = field(default_factory=list)
    fold: Fold = field(default_factory=Fold)
    resample: Resample | None = None
    ops: list[Op] = field(default_factory=list)

    def moves(self, motion: Motion) -> bool:
        """Whether that motion can be part of this pass: it happens before all of its operations."""
        only_flips = not (motion.crops or motion.pads or motion.resizes)
        anywhere = not any(isinstance(op, Erase) for op in self.ops)
        return self.fold.takes(motion) and (not self.ops or (only_flips and anywhere))

    def works(self, op: Op | None) -> bool:
        """Whether that operation can: a pass knows the mean at one point only."""
        return op is None or not (op.needs_mean and any(other.needs_mean for other in self.ops))

    def done(self) -> Pass:
        return Pass(tuple(self.places), self.resample, tuple(self.ops))


@functools.lru_cache(maxsize=256)
def lower(
    steps: tuple[Step, ...], dtype: torch.dtype, memory_format: torch.memory_format
) -> Program:
    """The program of a recipe for images of `dtype`. Passes and columns are alike for every dtype.

    Raises:
        TypeError: The dtype is neither uint8 nor floating point.
        ValueError: A transform cannot do its work on that dtype.
    """
    now = checks.dtype("the images' dtype", dtype)
    drafts, columns, starts = [_Draft()], list[str](), list[int]()
    for place, step in enumerate(steps):
        if isinstance(step, Geometric):
            if not drafts[-1].moves(step.motion):
                drafts.append(_Draft())
            starts.append(_move(drafts, step.motion, columns, now))
        else:
            start, op = len(columns), step.op(len(columns), now)
            if not drafts[-1].works(op):
                drafts.append(_Draft())
            drafts[-1].ops += [] if op is None else [op]
            columns += [f"{place}.{type(step).__name__}.{name}" for name in step.fields]
            starts.append(start)
            now = step.dtype_after(now)
        drafts[-1].places.append(place)
    passes = tuple(draft.done() for draft in drafts)
    return Program(_unit(dtype), passes, tuple(columns), tuple(starts), now, memory_format)


def _move(drafts: Sequence[_Draft], motion: Motion, columns: list[str], now: torch.dtype) -> int:
    """Adds a motion to the last draft, and to `columns` its view's, once; returns the first."""
    draft = drafts[-1]
    old = draft.resample
    if old is None:
        old = Resample(len(columns))
        columns += [f"view{len(drafts) - 1}.{part}" for part in View._fields]
    if motion.resizes:
        overshoots = motion.interpolation == "bicubic" and now == torch.uint8
        old = replace(
            old,
            interpolation=motion.interpolation,
            antialias=motion.antialias,
            clamp=overshoots,
        )
    if motion.pads:
        old = replace(old, fill=tuple(value / _unit(now) for value in motion.fill))
    draft.resample = old
    draft.fold = draft.fold.then(motion)
    return old.column


def _unit(dtype: torch.dtype) -> float:
    """What is 1.0 in images of that dtype."""
    return LEVELS if dtype == torch.uint8 else 1.0
