"""Workers that rest while it is not their loader's turn.

NOTE [Frozen workers]
~~~~~~~~~~~~~~~~~~~~~
All loaders stay open for the whole run, and the workers of one whose block is over go on to fill
its queues. Where decoding takes all CPUs that would last for seconds, and the next loader's block
would pay for it. So a loader's worker processes are stopped (SIGSTOP) when its block ends and go on
(SIGCONT) when its next begins, which thereby continues the one before with just what was in hand
then: the workers have gained nothing by the pause, and there is nothing to drain but once, when the
loader is opened. The threads of the loader itself, which pin or copy batches, are not stopped: what
the workers had sent by then they prepare, so those that have such threads (pinned, stream, the
peers) may begin a block with a few batches readier than `plain`. Where there is no such signal
(Windows) workers are left alone.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from typing import TypeAlias

__all__ = ["Workers", "born_in"]

Send: TypeAlias = Callable[[int, int], None]


class Workers:
    """A loader's worker processes.

    Args:
        pids: Theirs.
        send: Sends a signal to one.
    """

    def __init__(self, pids: Sequence[int], send: Send = os.kill) -> None:
        self._pids = tuple(pids)
        self._send = send

    def stop(self) -> None:
        """None of them runs until `go_on`."""
        self._signal("SIGSTOP")

    def go_on(self) -> None:
        """All run; do this before they are to end, as a stopped process does not."""
        self._signal("SIGCONT")

    def _signal(self, name: str) -> None:
        number: int | None = getattr(signal, name, None)
        if number is None:
            return
        for pid in self._pids:
            with contextlib.suppress(ProcessLookupError):  # it has ended, which others report
                self._send(pid, number)


@contextlib.contextmanager
def born_in() -> Iterator[list[int]]:
    """A list that has, after the block, the ids of the child processes that were started in it."""
    before = {child.pid for child in multiprocessing.active_children()}
    pids: list[int] = []
    yield pids
    after = [child.pid for child in multiprocessing.active_children()]
    pids += [pid for pid in after if pid is not None and pid not in before]
