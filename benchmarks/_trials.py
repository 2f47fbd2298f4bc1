"""The trials of races.py: loops that a wrong batch shows in. The GPU tests run the same.

Each loop only queues work, most of it behind a kernel that does nothing for some milliseconds, so
that Python is far ahead of the device. Memory that a loop lets go of is asked for again at once and
filled with what no batch holds. On the CPU the same code runs in program order.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from benchmarks._setting import ROWS, Count, Hidden, Refilled, Setting, Tally, forms, value

__all__ = ["TRIALS", "Trial"]


# -- what is read when --------------------------------------------------------------------------


def late(setting: Setting) -> Count:
    """Reads that are queued behind a long step, of batches that are dropped at once."""
    tally = Tally(setting.device)
    for images, labels in setting.wrap(setting.pairs(), None):
        _read(setting, tally, [images, labels])
        released = forms(images, labels)
        del images, labels
        setting.poison(released)
    return tally.count(setting.count)


def _read(setting: Setting, tally: Tally, batch: list[Tensor]) -> None:
    setting.busy()
    tally.look(*batch)


def backward(setting: Setting) -> Count:
    """Batches that only autograd keeps, until a backward pass that runs late."""
    tally = Tally(setting.device)
    weight = torch.ones(3, setting.side, setting.side, device=setting.device, requires_grad=True)
    for images, _ in setting.wrap(setting.pairs(torch.float32), None):
        loss, released = (images * weight).sum(), forms(images)
        del images
        setting.poison(released)
        setting.busy()
        (gradient,) = torch.autograd.grad(loss, weight)
        del loss
        setting.poison(released)
        tally.look(gradient, expected=ROWS * value(tally.due))
    return tally.count(setting.count)


def accumulated(setting: Setting) -> Count:
    """Four batches kept for one backward pass over all of them, and dropped right after it."""
    tally, together = Tally(setting.device), 4
    weight = torch.ones(3, setting.side, setting.side, device=setting.device, requires_grad=True)
    kept: list[Tensor] = []
    losses: list[Tensor] = []
    for images, _ in setting.wrap(setting.pairs(torch.float32), None):
        kept.append(images)
        losses.append((images * weight).sum())
        released = forms(images)
        del images
        if len(kept) == together:
            setting.busy()
            (gradient,) = torch.autograd.grad(torch.stack(losses).sum(), weight)
            kept.clear()
            losses.clear()
            setting.poison(released)
            first = together * tally.due
            tally.look(gradient, expected=ROWS * sum(map(value, range(first, first + together))))
    return tally.count(setting.count // together)


def kept(setting: Setting) -> Count:
    """`list(loader)`, looked at when it is complete."""
    tally = Tally(setting.device)
    batches = list(setting.wrap(setting.pairs(), None))
    setting.busy()
    for images, labels in batches:
        tally.look(images, labels)
    return tally.count(setting.count)


def views(setting: Setting) -> Count:
    """A part of each batch kept, the batch dropped, the parts looked at in the end."""
    tally, parts = Tally(setting.device), []
    for images, labels in setting.wrap(setting.pairs(), None):
        setting.busy()
        parts.append((images[1:, :, 8:, ::2], labels[1:]))
        released = forms(images, labels)
        del images, labels
        setting.poison(released)
    for part in parts:
        tally.look(*part)
    return tally.count(setting.count)


def sizes(setting: Setting) -> Count:
    """As `late`, with another number of images in each batch."""
    rows = [1 + number * 5 % 7 for number in range(setting.count)]
    source = [tuple(setting.pair(number, rows=count)) for number, count in enumerate(rows)]
    tally = Tally(setting.device)
    for images, labels in setting.wrap(source, None):
        _read(setting, tally, [images, labels])
        released = forms(images, labels)
        del images, labels
        setting.poison(released)
    return tally.count(setting.count)


# -- on which stream ----------------------------------------------------------------------------


def side(setting: Setting) -> Count:
    """As `late`, the whole loop on a side stream."""
    (stream,) = setting.streams(1)
    with stream:
        return late(setting)


def switched(setting: Setting) -> Count:
    """As `late`, on two side streams by turns, each batch read on the one it was taken on."""
    tally = Tally(setting.device)
    batches = iter(setting.wrap(setting.pairs(), None))
    streams = itertools.cycle(setting.streams(2))
    while True:
        with next(streams):
            batch = next(batches, None)
            if batch is None:
                return tally.count(setting.count)
            _read(setting, tally, list(batch))
            released = forms(*batch)
            del batch
            setting.poison(released)


# -- from which source --------------------------------------------------------------------------


def _refilled(setting: Setting, *, pin: bool) -> Count:
    tally = Tally(setting.device)
    for images, labels in setting.wrap(Refilled(setting, pin=pin), None):
        setting.busy()
        tally.look(images, labels)
        del images, labels
    return tally.count(setting.count)


def refilled(setting: Setting) -> Count:
    """A source that fills one buffer again and again, in ordinary memory."""
    return _refilled(setting, pin=False)


def refilled_pinned(setting: Setting) -> Count:
    """The same in pinned memory, from which a copy returns before it has read it."""
    return _refilled(setting, pin=True)


def opaque(setting: Setting) -> Count:
    """As `late`, of objects that move themselves and hide their tensors in a closure."""
    tally = Tally(setting.device)
    source = [Hidden(*batch) for batch in setting.pairs()]
    for hidden in setting.wrap(source, None):
        _read(setting, tally, list(hidden.ask()))
        released = forms(*hidden.ask())
        del hidden
        setting.poison(released)
    return tally.count(setting.count)


def early(setting: Setting) -> Count:
    """As `late`, of what a transform made that drops its input and what is between at once."""

    def double(images: Tensor) -> Tensor:
        wide = images.float()
        del images
        doubled = wide * 2
        del wide
        return doubled

    tally = Tally(setting.device)
    for images, labels in setting.wrap(setting.pairs(), double):
        setting.busy()
        tally.look(images / 2, labels)
        released = forms(images, labels)
        del images, labels
        setting.poison(released)
    return tally.count(setting.count)


# -- all of them --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Trial:
    """One column of the board.

    Attributes:
        run: Runs it.
        needs: What a contestant must do for it: "transform", "opaque", or nothing.
        beyond: Whether it asks for what nobody but StreamLoader promises.
    """

    run: Callable[[Setting], Any]
    needs: str | None = None
    beyond: bool = False

    @property
    def about(self) -> str:
        """What it does, in a line."""
        return str(self.run.__doc__).partition("\n")[0]


TRIALS: dict[str, Trial] = {
    "late": Trial(late),
    "backward": Trial(backward),
    "accumul.": Trial(accumulated),
    "kept": Trial(kept),
    "views": Trial(views),
    "sizes": Trial(sizes),
    "side": Trial(side),
    "switched": Trial(switched),
    "refilled": Trial(refilled, beyond=True),
    "ref.pin": Trial(refilled_pinned, beyond=True),
    "early": Trial(early, needs="transform"),
    "opaque": Trial(opaque, needs="opaque"),
}
"""The columns that count wrong batches, in their order."""
