"""The ask window: asking for a batch is what lets older ones go.

NOTE [Memory rules]
~~~~~~~~~~~~~~~~~~~
What may be in flight, and who may write what when. Cited by number where a verb serves them.

1. A host slab is written, freed or unpinned only after the *host* has seen its copy complete; at
   close too (slabs.py). So it is with pinned tensors sent from where they lie, with the tables of
   transforms that plan late (`Pipeline._later`), and with slabs that workers write: those are given
   back when nothing here refers to them (NOTE [Shared slabs], shared.py).
2. Device memory comes from the caching allocator, on the stream that writes it. Every other stream
   that reads it is recorded on it (`Device.uses`) before the loader lets go of it, the caller's at
   hand-over: so whoever drops it last, the allocator gives it out again only after those reads
   (stages.py). A tensor handed out lies on its block's storage and is never a view (carve.py):
   views share a version counter, and editing labels in place would fail the images' backward pass.
3. `next()` first records `ask(i)` on the stream that took batch i-1 and, if it is another, on the
   current one. Memory for batch i is allocated only after the host has seen ask(i - depth)
   complete. So the caller is at most depth + 1 steps ahead of the device, and memory is bounded
   however fast Python runs. For depth 2:

       next(0)  ask 0   launch 0, 1, and 2 if ask 0 is complete: nothing of the caller's runs
       next(1)  ask 1   launch 3 once ask 1 is complete
       ...
       next(i)  ask i   batch i is due and needs ask(i-2): the device has come to step i-2, so the
                        copy of batch i has steps i-2 and i-1 to hide behind

4. Streams live as long as the loader. The allocator keeps memory by stream, and a stream for each
   epoch would strand it. An event is recorded once.
5. A source's host memory is not read after the next pull, unless a DataLoader made it for this
   batch alone (pack.py). What a source puts on the device itself is handed on as it is: it must not
   write that again.
6. A transform reads only state that nobody writes or frees meanwhile: a frozen encoder, not a
   teacher that the step updates. What the caller wrote before the pass it may read
   (`Pipeline.begin`). One that is to read what the step writes, `Stage(after_step=True)`, is
   launched with all that follow it when its batch is due: behind ask(i), so after step i-1, and
   step i waits for it by the hand-over (`Pipeline.hand_over`). What a transform has returned for
   one batch it returns for no other, since it may be in use by then (`results.Fresh`).
7. Only the caller's thread allocates, launches, waits and asks for events, in `next()`. Work keeps
   program order, and no thread of ours can break a graph capture of the caller's. (The loader
   thread plans, asks whether a tensor is pinned, and records an event behind what a source made on
   the device.)
8. `prefetch_batches=0` is the caller's thread and stream: no thread, no streams, no events.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

from streamloader.device import Device, Event, Stream

__all__ = ["Window"]


class Window:
    """Which batches may be launched now (rule 3).

    Batches are numbered on from pass to pass, so that a new one does not run ahead anew.

    Args:
        device: Where the asks are recorded.
        depth: `prefetch_batches`.
    """

    def __init__(self, device: Device, depth: int) -> None:
        self._device = device
        self._depth = depth
        self._taker: Stream | None = None
        self._asks: deque[tuple[int, list[Event]]] = deque()
        self._asked = 0
        self._seen = -1

    @property
    def asked(self) -> int:
        """How many batches have been asked for."""
        return self._asked

    def ask(self) -> Sequence[Event]:
        """The caller asks for one more: all its work on earlier batches is submitted.

        Returns:
            What completes when that work has run.
        """
        current = self._device.current()
        streams = [current]
        if self._taker is not None and self._taker != current:
            streams.append(self._taker)
        events = [self._device.record(stream) for stream in streams]
        self._asks.append((self._asked, events))
        self._asked += 1
        self._taker = current
        return events

    def admits(self, number: int) -> bool:
        """Whether memory for batch `number` may be allocated."""
        while self._asks and all(map(self._device.done, self._asks[0][1])):
            self._seen, _ = self._asks.popleft()
        return number - self._depth <= self._seen
