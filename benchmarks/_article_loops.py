"""The loops of the ladder: each a generator that has trained one batch when it yields.

    one_stream      copy, stage, step: all in the order of the current stream
    article         the article's pipelined loop, as described, or mended
    by_hand         what one writes who knows the rules: copy and stage on one stream of their own
    streamed        StreamLoader
    whole           both halves as one graph
    resident        no copy and no stage: the ceiling

NOTE [The article's loop]
~~~~~~~~~~~~~~~~~~~~~~~~~
Inputs and labels are copied on the default stream, the augmentation's inputs on its own; stage and
step have a stream each. As it is, nobody waits for what the default stream copies, and only the
stage's result is recorded as used by the step's stream. From pageable memory the first hardly
shows, as such a copy keeps the host until it is nearly done. The second could give memory away from
which labels are still read, and labels of no class end the process; so inputs and labels are kept
until they have been read, which costs an event a step. All the rest is as it was.

Mended, the copies are waited for, all that another stream reads is recorded there, and a copy waits
for the step before the last: else nothing keeps the host from running ahead, and memory with it.
"""

from __future__ import annotations

import itertools
import time
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from benchmarks import _article_feed
from benchmarks._article_feed import Pair
from benchmarks._article_graphs import Both, Stage, TrainStep
from benchmarks._article_lanes import Lane, synchronize
from streamloader import StreamLoader, on

__all__ = [
    "Form",
    "Loop",
    "Taken",
    "Work",
    "article",
    "by_hand",
    "closed",
    "one_stream",
    "resident",
    "streamed",
    "take",
    "whole",
]


class Form(NamedTuple):
    """The two halves, in one of their forms.

    Attributes:
        stage: Called without gradients.
        step: Returns its loss.
        both: The two as one, of a host batch; None where that is not captured.
        fixed: Whether the stage returns the same memory each time, as a graph does.
    """

    stage: Stage
    step: TrainStep
    both: Both | None = None
    fixed: bool = False

    def staged(self, images: Tensor) -> Tensor:
        """Of the caller's own, for who looks ahead."""
        result = self.stage(images)
        return result.clone() if self.fixed else result


@dataclass(frozen=True)
class Work:
    """What a loop works on.

    Attributes:
        device: Where.
        pageable: The pool in ordinary memory.
        pinned: In pinned memory.
        resident: A batch that has been through the stage.
    """

    device: torch.device
    pageable: Sequence[Pair]
    pinned: Sequence[Pair]
    resident: Pair


class Taken(NamedTuple):
    """A step that was taken.

    Attributes:
        loss: Of it.
        staged: What the stage made of the images.
        labels: The batch's.
        lane: Where these three are ready; None is the current stream.
    """

    loss: Tensor
    staged: Tensor
    labels: Tensor
    lane: Lane | None = None


Loop: TypeAlias = Callable[[Work, Form], Iterator[Taken]]


def _staged(form: Form, images: Tensor) -> Tensor:
    with torch.no_grad():
        return form.stage(images)


def one_stream(*, pinned: bool) -> Loop:
    """Copy, stage and step in the order of the current stream."""

    def loop(work: Work, form: Form) -> Iterator[Taken]:
        for host in _article_feed.loader(work.pinned if pinned else work.pageable):
            images, labels = _sent(host, work.device)
            staged = _staged(form, images)
            yield Taken(form.step(staged, labels), staged, labels)

    return loop


def _sent(host: Iterable[Tensor], device: torch.device) -> list[Tensor]:
    return [tensor.to(device, non_blocking=True) for tensor in host]


def article(*, with_stage: bool, mended: bool) -> Loop:
    """The article's pipelined loop: see the NOTE.

    Args:
        with_stage: Whether inputs are copied on the stage's stream.
        mended: And from pinned memory.
    """
    run = _mended if mended else _as_described

    def loop(work: Work, form: Form) -> Iterator[Taken]:
        copying, staging = Lane.current(work.device), Lane.new(work.device)
        lanes = (staging if with_stage else copying, copying, staging, Lane.new(work.device))
        return run(work, form, lanes)

    return loop


Lanes: TypeAlias = tuple[Lane, Lane, Lane, Lane]
"""Where inputs are copied, labels are copied, the stage runs, the step runs."""


def _as_described(work: Work, form: Form, lanes: Lanes) -> Iterator[Taken]:
    with_inputs, with_labels, staging, stepping = lanes
    unread: deque[tuple[torch.cuda.Event | None, list[Tensor]]] = deque()
    previous: list[Tensor] = []
    for host_images, host_labels in _article_feed.loader(work.pageable):
        with with_inputs.on():
            images = host_images.to(work.device, non_blocking=True)
        with with_labels.on():
            labels = host_labels.to(work.device, non_blocking=True)
        stepping.wait(staging)
        with staging.on():
            staged = _staged(form, images)
            stepping.reads(staged)
        if previous:
            with stepping.on():
                loss = form.step(previous[1], previous[2])
            unread.append((stepping.mark(), previous))
            while unread and ((mark := unread[0][0]) is None or mark.query()):
                unread.popleft()
            yield Taken(loss, previous[1], previous[2], stepping)
        previous = [images, staged, labels]


def _mended(work: Work, form: Form, lanes: Lanes) -> Iterator[Taken]:
    with_inputs, with_labels, staging, stepping = lanes
    previous: Pair | None = None
    for host_images, host_labels in _article_feed.loader(work.pinned):
        with_inputs.wait(stepping)  # for the step before the last: this one's comes below
        with_labels.wait(stepping)
        stepping.wait(staging)  # for what is due, not for what comes now
        stepping.wait(with_labels)
        with with_inputs.on():
            images = host_images.to(work.device, non_blocking=True)
        with with_labels.on():
            labels = host_labels.to(work.device, non_blocking=True)
        staging.wait(with_inputs)
        staging.reads(images)
        with staging.on():
            staged = _staged(form, images)
        stepping.reads(staged, labels)
        if previous:
            with stepping.on():
                loss = form.step(*previous)
            yield Taken(loss, previous[0], previous[1], stepping)
        previous = staged, labels


def by_hand(work: Work, form: Form) -> Iterator[Taken]:
    """Batch i + 1 is copied and staged on a stream of its own while step i runs.

    Nothing but the stage reads the images, which are its own stream's. `ahead` waits for the step
    before the last: that is depth 1, and bounds the memory.
    """
    ahead, current = Lane.new(work.device), Lane.current(work.device)
    previous: Pair | None = None
    for host in _article_feed.loader(work.pinned):
        current.wait(ahead)  # for the batch before this one, which is due
        ahead.wait(current)
        with ahead.on():
            images, labels = _sent(host, work.device)
            staged = _staged(form, images)
        current.reads(staged, labels)
        if previous:
            yield Taken(form.step(*previous), *previous)
        previous = staged, labels


def streamed(depth: int) -> Loop:
    """StreamLoader, `depth` batches ahead."""

    def loop(work: Work, form: Form) -> Iterator[Taken]:
        # All rungs draw from the same generator, in the same order: that they differ would show.
        warnings.filterwarnings("ignore", "transform .* draws from torch's generators")
        source = _article_feed.loader(work.pinned)
        transform = on(0, form.staged)
        with StreamLoader(
            source, work.device, transform=transform, prefetch_batches=depth
        ) as loader:
            for staged, labels in loader:
                yield Taken(form.step(staged, labels), staged, labels)

    return loop


def whole(work: Work, form: Form) -> Iterator[Taken]:
    """One launch a batch, after the copy into the graph's own memory."""
    assert form.both is not None
    for images, labels in _article_feed.loader(work.pinned):
        loss, staged = form.both(images, labels)
        yield Taken(loss, staged, labels)


def resident(work: Work, form: Form) -> Iterator[Taken]:
    """The step alone, on one batch that has been staged."""
    for _ in itertools.count():
        yield Taken(form.step(*work.resident), *work.resident)


# -- driving them -------------------------------------------------------------------------------


def take(run: Iterator[Taken], steps: int, device: torch.device) -> float:
    """Seconds of so many steps, from one wait for the device to the next."""
    synchronize(device)
    start = time.perf_counter()
    for _ in itertools.islice(run, steps):
        pass
    synchronize(device)
    return time.perf_counter() - start


def closed(run: Iterator[Taken], device: torch.device) -> None:
    """Ends a loop, when the device has done what it queued: till then its memory is in use."""
    synchronize(device)
    close: Callable[[], None] | None = getattr(run, "close", None)
    if close is not None:
        close()
