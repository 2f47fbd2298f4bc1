"""The loader thread: pulls batches from the source, packs them, keeps their order.

The thread launches nothing on the device (rule 7) and runs little Python. What it has packed waits
in a queue, with the end of the source, or the error that ended it, as the last item; so an error
arrives after the batches before it.
"""

from __future__ import annotations

import atexit
import itertools
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, TypeAlias

import torch

from streamloader.batch import Batch

__all__ = ["JOIN_SECONDS", "End", "Pack", "Source"]

Pack: TypeAlias = Callable[[int, Any, Callable[[], bool]], Batch | None]

JOIN_SECONDS = 1.0
"""How long leaving a loop waits for the loader thread, which may be inside the source."""

_live: weakref.WeakSet[Source] = weakref.WeakSet()


class End:
    """The last item of a source.

    Args:
        error: What ended it, None when it was exhausted.
    """

    def __init__(self, error: BaseException | None = None) -> None:
        self.error = error

    def finish(self) -> None:
        """Raises the error, if there is one, and keeps no hold of it: it holds its frames."""
        error, self.error = self.error, None
        if error is not None:
            try:
                raise error
            finally:
                del error


class Source:
    """A pass over the source, in a thread.

    Args:
        iterator: The pass. Only the thread touches it, and drops it.
        first: What it yielded first, alone in a list that is emptied.
        pack: Makes a batch of its number and what the source yielded; None when what it is given
            last, whether the pass is closed, became true meanwhile.
        permits: How many batches may be pulled before `permit` says more.
        changed: Notified whenever a wait of either side may be over.
        state: Entered in the thread: the caller's device and stream.
    """

    def __init__(
        self,
        iterator: Iterator[Any],
        first: list[Any],
        pack: Pack,
        *,
        permits: int,
        changed: threading.Condition,
        state: AbstractContextManager[object],
    ) -> None:
        self.closed = False
        self._deadline = 0.0
        self._identity = id(iterator)
        self._items: deque[Batch | End] = deque()
        self._permits = permits
        self._changed = changed
        self._thread = threading.Thread(
            target=self._run,
            args=(iterator, first, pack, _taken_over(state)),
            name="streamloader",
            daemon=True,
        )
        _live.add(self)
        self._thread.start()

    @property
    def alive(self) -> bool:
        """Whether its thread may still be inside the source."""
        return self._thread.is_alive()

    def reads(self, iterator: object) -> bool:
        """Whether its thread may be reading from this very iterator."""
        return self.alive and self._identity == id(iterator)

    def peek(self) -> Batch | End | None:
        """The next item, left where it is; None if it has not come yet."""
        with self._changed:
            return self._items[0] if self._items else None

    def take(self, wanted: Callable[[Batch], bool]) -> Batch | End | None:
        """The next item, if it has come and is an end or a batch that is `wanted`."""
        with self._changed:
            if not self._items:
                return None
            item = self._items[0]
            if isinstance(item, Batch) and not wanted(item):
                return None
            return self._items.popleft()

    def drain(self) -> list[Batch]:
        """All batches that have come and were not taken."""
        with self._changed:
            items = [item for item in self._items if isinstance(item, Batch)]
            self._items.clear()
            return items

    def permit(self, count: int) -> None:
        """Batches up to number `count` - 1 may be pulled."""
        with self._changed:
            self._permits = count
            self._changed.notify_all()

    def wait(self, over: Callable[[], bool], timeout: float | None) -> float:
        """Waits until `over()`, something changed or `timeout` seconds passed.

        Returns:
            The seconds it took.
        """
        start = time.perf_counter()
        with self._changed:
            if not (self.closed or over()):
                self._changed.wait(timeout)
        return time.perf_counter() - start

    def close(self) -> None:
        """Ends the pass: no batch is pulled any more. Idempotent, and may be called anywhere.

        Waits for the thread, but no longer than JOIN_SECONDS from when it was first told to end.
        """
        self.stop()
        self.join(max(self._deadline - time.monotonic(), 0))

    def stop(self) -> None:
        """Tells the thread to end, and waits for nothing."""
        with self._changed:
            if not self.closed:
                self.closed = True
                self._deadline = time.monotonic() + JOIN_SECONDS
            self._changed.notify_all()

    def join(self, timeout: float | None = None) -> None:
        """Waits for the thread to have left the source."""
        if self._thread is not threading.current_thread():  # a finaliser can run in any thread
            self._thread.join(timeout)

    def _run(
        self,
        iterator: Iterator[Any],
        first: list[Any],
        pack: Pack,
        state: AbstractContextManager[object],
    ) -> None:
        try:
            with state:
                self._pull(iterator, first, pack)
        except BaseException as error:  # noqa: BLE001  # whatever it is, the caller gets it
            self._put(End(error))

    def _pull(self, iterator: Iterator[Any], first: list[Any], pack: Pack) -> None:
        for number in itertools.count():  # pragma: no branch
            if not self._permitted(number):
                return
            try:
                value = next(iterator) if number else first.pop()
            except StopIteration:
                self._put(End())
                return
            batch = None if self.closed else pack(number, value, lambda: self.closed)
            if batch is None:
                return
            self._put(batch)
            del value, batch  # a worker's shared memory, say; the caller's from here on

    def _permitted(self, number: int) -> bool:
        with self._changed:
            while number >= self._permits and not self.closed:
                self._changed.wait()
            return not self.closed

    def _put(self, item: Batch | End) -> None:
        with self._changed:
            self._items.append(item)
            self._changed.notify_all()


def _taken_over(state: AbstractContextManager[object]) -> AbstractContextManager[object]:
    """`state` and the calling thread's grad and inference mode, for another thread to enter."""
    grad, inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()

    @contextmanager
    def entered() -> Iterator[None]:
        with state, torch.inference_mode(inference), torch.set_grad_enabled(grad):
            yield

    return entered()


# A forked child has the objects, but none of their threads.
if hasattr(os, "register_at_fork"):  # pragma: no branch
    os.register_at_fork(after_in_child=_live.clear)


@atexit.register
def _stop_all() -> None:
    """At exit, threads that are in our hands end before the interpreter does.

    One that stays inside the source for longer is left there, as any daemon thread is.
    """
    for source in list(_live):
        source.stop()
    for source in list(_live):
        source.close()
