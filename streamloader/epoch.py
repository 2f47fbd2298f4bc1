"""One pass over the loader: a batch's whole way, on one screen.

    loader thread   pull 3 | pack 3        pull 4 | pack 4
    next(), i = 1   ask 1 | launch 3 | hand over 1       next(), i = 2   ask 2 | launch 4 | ...

The caller's `next()` launches every batch that is packed and admitted, and waits only for the one
that is due: for the source while it is not packed, for the device while it is not admitted. Nothing
else waits on the training thread (NOTE [Memory rules], window.py).
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from streamloader.batch import Batch
from streamloader.context import Context
from streamloader.device import POLL_SECONDS, Device
from streamloader.pack import size
from streamloader.region import Region
from streamloader.results import OverwrittenError
from streamloader.sent import wanted
from streamloader.slabs import Slabs
from streamloader.source import JOIN_SECONDS, End, Pack, Source
from streamloader.stages import Pipeline
from streamloader.stats import Meter
from streamloader.window import Window

__all__ = ["Epoch", "inline"]


def inline(
    iterator: Iterator[Any],
    pipeline: Pipeline,
    keep: Callable[[Any], Any],
    context: Context,
    meter: Meter,
) -> Iterator[Any]:
    """A pass without look-ahead: the caller's thread and stream do everything (rule 8).

    Args:
        iterator: The source's pass.
        pipeline: The device's legs; only `whole` is used.
        keep: Makes a batch the caller's own, see `pack.owned`.
        context: Of the first batch.
        meter: Counts.
    """
    for number in itertools.count():  # pragma: no branch
        start = time.perf_counter()
        held = list(itertools.islice(iterator, 1))
        meter.waited(source=time.perf_counter() - start)
        if not held:
            return
        meter.handed_over(size(held))
        start = time.perf_counter()
        held.append(pipeline.whole(keep(held.pop()), context._replace(number=number)))
        meter.launched(time.perf_counter() - start)
        yield held.pop()


class Epoch:
    """A pass with look-ahead.

    The source has been asked for its first batch already, on the caller's thread, so that what it
    starts (workers, seeds) starts there.

    Args:
        iterator: The source's pass.
        first: Its first batch, alone in a list that is emptied.
        pack: Packs host batches.
        pipeline: The device's legs.
        device: The seam.
        slabs: Pinned memory, taken over for the pass.
        window: How far ahead, taken over likewise.
        depth: `prefetch_batches`, at least 1.
        context: Of the first batch.
        meter: Counts.
        region: Shared memory that batches may come in.
    """

    def __init__(  # noqa: PLR0913  # the one place where all legs meet
        self,
        iterator: Iterator[Any],
        first: list[Any],
        *,
        pack: Pack,
        pipeline: Pipeline,
        device: Device,
        slabs: Slabs,
        window: Window,
        depth: int,
        context: Context,
        meter: Meter,
        region: Region | None = None,
    ) -> None:
        self.slabs, self.window = slabs, window
        self._region = region
        self._pipeline = pipeline
        self._device = device
        self._depth = depth
        self._context = context
        self._meter = meter
        self._inside = threading.Lock()
        self._before = window.asked
        self._launched: deque[Batch | End] = deque()
        self._ended = False
        pipeline.begin()
        state = device.inherit() if region is None else _both(device.inherit(), wanted())
        self.source = Source(iterator, first, pack, permits=0, changed=slabs.changed, state=state)

    def batches(self) -> Iterator[Any]:
        """The pass, batch by batch.

        Nothing is pulled before it is asked for: who closes the loader when the source is inside a
        pull should find this pass among the live ones.
        """
        self.source.permit(self._depth + 1)
        for number in itertools.count():  # pragma: no branch
            with self._inside:
                held = self._next(number)
            if not held:
                return
            yield held.pop()  # and keep no hold of it

    def _next(self, number: int) -> list[Any]:
        """The batch that is asked for, alone in a list, which is empty at the end."""
        asked = self.window.ask()
        item = self._due()
        if isinstance(item, End):
            item.finish()
            return []
        self.source.permit(number + self._depth + 2)
        self._meter.handed_over(item.nbytes, shared=item.shared)
        with self._submitting(item):
            return [self._pipeline.hand_over(item, self._of(number), asked)]

    def _due(self) -> Batch | End:
        """The batch that is due, launched, after launching whatever else can be.

        Raises:
            RuntimeError: The pass was closed.
        """
        while not self.source.closed:
            self.slabs.serve()
            self._launch_admitted()
            if self._launched:
                return self._launched.popleft()
            self._wait()
        raise RuntimeError("this pass ended because StreamLoader.close() was called during it")

    def _launch_admitted(self) -> None:
        while not self._ended:
            item = self.source.take(self._admitted)
            if item is None:
                return
            if isinstance(item, Batch):
                self._launch(item)
            else:
                self._end(item)

    def _admitted(self, batch: Batch) -> bool:
        return self.window.admits(self._before + batch.number)

    def _end(self, end: End) -> None:
        self._ended = True
        self._launched.append(end)

    def _launch(self, batch: Batch) -> None:
        try:
            with self._submitting(batch):
                self._submit(batch)
        except OverwrittenError as error:
            self._launched.clear()  # these are what was overwritten
            self._end(End(error))
        except Exception as error:  # noqa: BLE001  # the caller gets it when the batch is due
            self._end(End(error))
        else:
            self._launched.append(batch)

    def _submit(self, batch: Batch) -> None:
        sources = list(batch.direct.values())
        if batch.sent is not None and self._region is not None:
            self._region.ready(batch.sent, self._device)
            sources.append(batch.sent.memory)
        try:
            self._pipeline.send(batch)
        finally:
            self.slabs.lend(batch.ready, batch.slab, sources)
            batch.slab, batch.sent, batch.direct = None, None, {}
        self._pipeline.transform(batch, self._of(batch.number))

    @contextmanager
    def _submitting(self, batch: Batch) -> Iterator[None]:
        """Work of a batch is submitted: that takes time, and tables are lent for it."""
        start = time.perf_counter()
        try:
            with self._modes():
                yield
        finally:
            while batch.late:
                sent, table = batch.late.pop()
                self.slabs.lend(sent, None, [table])
            self._meter.launched(time.perf_counter() - start)

    def _modes(self) -> AbstractContextManager[object]:
        """A batch that is made in an inference mode of the caller's may be used after it."""
        within = torch.is_inference_mode_enabled() and not self._device.host
        return torch.inference_mode(mode=False) if within else nullcontext()

    def _wait(self) -> None:
        """Waits until something changed; for the device, which tells nobody, by looking again."""
        item, wanted = self.source.peek(), self.slabs.wanted
        on_device = item is not None or wanted
        seconds = self.source.wait(
            lambda: self.source.peek() is not item or self.slabs.wanted is not wanted,
            POLL_SECONDS if on_device or self.slabs.busy else None,
        )
        if on_device:
            self._meter.waited(device=seconds)
        else:
            self._meter.waited(source=seconds)

    def _of(self, number: int) -> Context:
        return self._context._replace(number=number)

    def close(self) -> bool:
        """Ends the pass. Idempotent; may be called from another thread than the caller's.

        Returns:
            Whether the slabs are all accounted for, so that the next pass may take them over.
        """
        self.source.close()
        if not self._inside.acquire(timeout=JOIN_SECONDS):
            return False  # the caller is inside next(), which will find the pass closed
        try:
            ended = not self.source.alive  # before draining: it can still pack until then
            for batch in self.source.drain():
                self.slabs.give_back(batch.slab)
            return ended
        finally:
            self._inside.release()


@contextmanager
def _both(
    one: AbstractContextManager[object], other: AbstractContextManager[object]
) -> Iterator[None]:
    with one, other:
        yield
