import multiprocessing
import signal

import pytest

from benchmarks._freeze import Workers, born_in


def test_all_workers_are_stopped_and_go_on() -> None:
    sent: list[tuple[int, int]] = []
    workers = Workers([11, 12], lambda pid, number: sent.append((pid, number)))
    workers.stop()
    workers.go_on()
    stop, go_on = signal.SIGSTOP, signal.SIGCONT
    assert sent == [(11, stop), (12, stop), (11, go_on), (12, go_on)]


def test_a_worker_that_has_ended_is_no_error() -> None:
    def gone(pid: int, _: int) -> None:
        raise ProcessLookupError(pid)

    Workers([11], gone).stop()


def test_where_there_is_no_such_signal_workers_are_left_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delattr(signal, "SIGSTOP")
    sent: list[int] = []
    Workers([11], lambda pid, _: sent.append(pid)).stop()
    assert not sent


def test_only_children_that_were_started_inside_count() -> None:
    wait = multiprocessing.Event()
    before = multiprocessing.Process(target=wait.wait, daemon=True)
    inside = multiprocessing.Process(target=wait.wait, daemon=True)
    before.start()
    with born_in() as pids:
        inside.start()
    assert pids == [inside.pid]
    wait.set()
    before.join()
    inside.join()
