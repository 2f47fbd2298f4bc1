"""Public failure cases, group C: workers that die, that are stuck, that a helper thread starts."""

from __future__ import annotations

import textwrap
import threading
from typing import Any

import pytest
from torch import Tensor
from torch.utils.data import DataLoader

from streamloader import StreamLoader
from tests.loaders import batches, ids, printed

PRELUDE = """
import multiprocessing, os, signal, threading, time, torch
from torch.utils.data import DataLoader
from streamloader import StreamLoader

class Numbers:
    def __len__(self): return 100_000
    def __getitem__(self, index): return torch.tensor(index)

class Stuck(Numbers):
    def __getitem__(self, index):
        if index >= 4:
            time.sleep(60)
        return torch.tensor(index)
"""


def outcome(text: str) -> str:
    """What a program prints that begins with `PRELUDE`."""
    return printed(PRELUDE + textwrap.dedent(text))


@pytest.mark.slow
def test_c04_one_of_two_workers_killed_is_an_error_and_closing_is_quick() -> None:
    """With torch's signal handler, as users have it: it raises in the main thread."""
    assert (
        outcome(
            """
            loader = StreamLoader(DataLoader(Numbers(), batch_size=2, num_workers=2))
            iterator = iter(loader)
            next(iterator)
            start = time.monotonic()
            try:
                os.kill(multiprocessing.active_children()[0].pid, signal.SIGKILL)
                for _ in iterator:
                    pass
            except (RuntimeError, OSError, EOFError):
                print("an error", time.monotonic() - start < 30)
            start = time.monotonic()
            del iterator
            loader.close()
            print(time.monotonic() - start < 8)
            for thread in threading.enumerate():
                if thread.name == "streamloader":
                    thread.join(10)  # torch looks after its workers every 5 s
            print("streamloader" in [thread.name for thread in threading.enumerate()])
            """
        )
        == "an error True\nTrue\nFalse\n"
    )


@pytest.mark.slow
def test_c04_a_stuck_workers_timeout_reaches_the_caller_after_the_batches_before_it() -> None:
    assert (
        outcome(
            """
            loader = StreamLoader(DataLoader(Stuck(), batch_size=2, num_workers=1, timeout=1))
            got = []
            try:
                for batch in loader:
                    got.append(batch.tolist())
            except RuntimeError as error:
                print(str(error), got)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                for worker in multiprocessing.active_children():
                    worker.kill()  # or torch waits 5 s for each, wrapped or not
            loader.close()
            print("streamloader" in [thread.name for thread in threading.enumerate()])
            """
        )
        == "DataLoader timed out after 1 seconds [[0, 1], [2, 3]]\nFalse\n"
    )


@pytest.mark.slow
@pytest.mark.parametrize("depth", [0, 2])
def test_c07_30_passes_in_helper_threads_with_workers(depth: int) -> None:
    dataset: Any = batches(6)
    plain: DataLoader[Tensor] = DataLoader(dataset, batch_size=None, num_workers=2)
    got: list[list[int]] = []
    before = set(threading.enumerate())

    def read() -> None:
        got.append(ids(StreamLoader(plain, prefetch_batches=depth)))

    for _ in range(30):
        thread = threading.Thread(target=read)
        thread.start()
        thread.join(30)
    assert got == [[0, 1, 2, 3, 4, 5]] * 30
    # What a multiprocessing queue has ends by itself, wrapped or not.
    started = set(threading.enumerate()) - before
    assert [thread for thread in started if thread.name != "QueueFeederThread"] == []
