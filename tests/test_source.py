"""The loader thread keeps order, carries errors, ends when told to."""

import gc
import itertools
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import pytest
import torch
from typing_extensions import override

from streamloader import source as module
from streamloader.batch import Batch
from streamloader.source import End, Source

SECONDS = 10.0
"""How long a test waits for what must come."""


def pack(number: int, value: Any, closed: Callable[[], bool]) -> Batch | None:
    return None if closed() else Batch(number, value)


Start = Callable[..., Source]


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts a source over an iterator whose first batch has been pulled; ends it afterwards."""
    sources: list[Source] = []

    def started(iterator: Iterator[Any], *, permits: int = 10**6, **changes: Any) -> Source:
        arguments: dict[str, Any] = {
            "pack": pack,
            "changed": threading.Condition(),
            "state": nullcontext(),
            **changes,
        }
        source = Source(iterator, [next(iterator)], permits=permits, **arguments)
        sources.append(source)
        return source

    yield started
    for source in sources:
        source.close()
        assert not source.alive


def item(source: Source) -> Batch | End:
    """The next item, waited for."""
    with source._changed:
        assert source._changed.wait_for(lambda: source.peek() is not None, SECONDS)
    found = source.take(lambda _: True)
    assert found is not None
    return found


def value(source: Source) -> Any:
    batch = item(source)
    assert isinstance(batch, Batch)
    return batch.value


def end(source: Source) -> BaseException | None:
    last = item(source)
    assert isinstance(last, End)
    return last.error


def gone(source: Source) -> None:
    source.join(SECONDS)
    assert not source.alive


class Gate:
    """An iterator that lets its caller through one by one."""

    def __init__(self) -> None:
        self.inside = threading.Event()
        self.open = threading.Semaphore(0)
        self.count = itertools.count()

    def __iter__(self) -> "Gate":
        return self

    def __next__(self) -> int:
        number = next(self.count)
        if number:
            self.inside.set()
            assert self.open.acquire(timeout=SECONDS)
            self.inside.clear()
        return number


# -- order -------------------------------------------------------------------------------------


def test_batches_come_in_order_and_then_the_end(start: Start) -> None:
    source = start(iter("abc"))

    batches = [item(source) for _ in range(3)]

    assert [(b.number, b.value) for b in batches if isinstance(b, Batch)] == [
        (0, "a"),
        (1, "b"),
        (2, "c"),
    ]
    assert end(source) is None
    gone(source)


def test_the_first_item_stays_until_it_is_taken(start: Start) -> None:
    source = start(iter("ab"))
    gone(source)

    first = source.peek()

    assert first is source.peek() is item(source)
    assert source.peek() is not first


def test_before_anything_came_there_is_no_first_item(start: Start) -> None:
    source = start(iter("ab"), permits=0)

    assert source.peek() is None
    assert source.take(lambda _: True) is None


def test_a_batch_is_taken_only_if_it_is_wanted(start: Start) -> None:
    source = start(iter("ab"))
    gone(source)
    first = source.peek()
    asked: list[int] = []

    def later(batch: Batch) -> bool:
        asked.append(batch.number)
        return batch.number > 0

    assert source.take(later) is None
    assert source.peek() is first
    assert value(source) == "a"
    assert isinstance(source.take(later), Batch)
    assert asked == [0, 1]


def test_the_end_is_taken_whatever_is_wanted(start: Start) -> None:
    source = start(iter("a"))
    gone(source)
    assert value(source) == "a"

    assert isinstance(source.take(lambda _: False), End)


def test_draining_gives_the_batches_that_nobody_took(start: Start) -> None:
    source = start(iter("abc"))
    gone(source)
    assert value(source) == "a"

    assert [batch.value for batch in source.drain()] == ["b", "c"]
    assert source.peek() is None
    assert source.drain() == []


# -- permits -----------------------------------------------------------------------------------


@pytest.mark.parametrize("permits", [1, 3])
def test_no_more_is_pulled_than_permitted(start: Start, permits: int) -> None:
    pulled: list[int] = []

    def numbers() -> Iterator[int]:
        for number in range(100):
            pulled.append(number)
            yield number

    source = start(numbers(), permits=permits)
    assert [value(source) for _ in range(permits)] == list(range(permits))
    assert pulled == list(range(permits))

    source.permit(permits + 2)
    assert [value(source) for _ in range(2)] == [permits, permits + 1]
    assert pulled == list(range(permits + 2))
    assert source.alive


# -- errors ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt, SystemExit, GeneratorExit])
def test_an_error_arrives_after_the_batches_before_it(
    start: Start, kind: type[BaseException]
) -> None:
    error = kind("broken")

    def broken() -> Iterator[int]:
        yield from range(2)
        raise error

    source = start(broken())

    assert [value(source), value(source)] == [0, 1]
    assert end(source) is error
    assert error.__traceback__ is not None
    gone(source)


def test_an_error_while_packing_is_an_error_of_that_batch(start: Start) -> None:
    def refuse(number: int, value: Any, closed: Callable[[], bool]) -> Batch | None:
        if number == 1:
            raise TypeError("cannot be packed")
        return pack(number, value, closed)

    source = start(iter(range(3)), pack=refuse)

    assert value(source) == 0
    assert str(end(source)) == "cannot be packed"


def test_an_error_while_entering_the_callers_state_arrives(start: Start) -> None:
    class Missing(AbstractContextManager[None]):
        @override
        def __enter__(self) -> None:
            raise RuntimeError("no such device")

        @override
        def __exit__(self, *_: object) -> None:
            pass

    assert str(end(start(iter(range(3)), state=Missing()))) == "no such device"


def test_an_end_raises_its_error_once_and_keeps_no_hold_of_it() -> None:
    error = ValueError("broken")
    last = End(error)

    with pytest.raises(ValueError, match=r"^broken$") as caught:
        last.finish()

    assert caught.value is error
    assert last.error is None
    last.finish()


def test_the_end_of_an_exhausted_source_raises_nothing() -> None:
    last = End()

    last.finish()

    assert last.error is None


# -- closing -----------------------------------------------------------------------------------


def test_after_close_nothing_more_is_pulled_or_packed(start: Start) -> None:
    gate = Gate()
    source = start(gate, pack=lambda number, value, _: Batch(number, value))
    assert value(source) == 0
    assert gate.inside.wait(SECONDS)

    source.stop()
    gate.open.release()
    gone(source)

    assert source.peek() is None
    assert next(gate.count) == 2


def test_close_waits_no_longer_than_it_says_for_a_source_that_hangs(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "JOIN_SECONDS", 0.01)
    gate = Gate()
    source = start(gate)
    assert gate.inside.wait(SECONDS)

    source.close()
    assert source.closed
    assert source.alive
    source.close()

    gate.open.release()
    gone(source)


def test_close_ends_a_thread_that_waits_for_a_permit(start: Start) -> None:
    source = start(iter(range(3)), permits=1)
    assert value(source) == 0

    source.close()

    assert not source.alive


def test_close_ends_a_thread_that_packs(start: Start) -> None:
    packing = threading.Event()
    changed = threading.Condition()

    def slow(number: int, value: Any, closed: Callable[[], bool]) -> Batch | None:
        packing.set()
        with changed:
            assert changed.wait_for(closed, SECONDS)
        return pack(number, value, closed)

    source = start(iter(range(3)), pack=slow, changed=changed)
    assert packing.wait(SECONDS)

    source.close()

    assert not source.alive
    assert source.peek() is None


def test_a_source_may_close_the_pass_from_its_own_thread(start: Start) -> None:
    sources: list[Source] = []
    began = threading.Event()

    def suicidal() -> Iterator[int]:
        yield 0
        assert began.wait(SECONDS)
        sources[0].close()  # as a finaliser that runs in this thread would
        yield 1

    source = start(suicidal())
    sources.append(source)
    began.set()
    gone(source)

    assert value(source) == 0
    assert source.peek() is None


def test_at_exit_every_thread_in_our_hands_ends(start: Start) -> None:
    sources = [start(iter(range(3)), permits=1) for _ in range(3)]

    module._stop_all()

    assert [source.alive for source in sources] == [False] * 3


# -- what the thread keeps and has -------------------------------------------------------------


class Watched(threading.Condition):
    """Tells when the loader thread has nothing to do but to wait."""

    def __init__(self) -> None:
        super().__init__()
        self.waiting = threading.Event()

    @override
    def wait(self, timeout: float | None = None) -> bool:
        if threading.current_thread() is not threading.main_thread():
            self.waiting.set()
        return super().wait(timeout)


def test_a_batch_that_was_taken_is_not_kept_alive_by_the_thread(start: Start) -> None:
    class Thing:
        pass

    changed = Watched()
    source = start((Thing() for _ in range(10)), permits=2, changed=changed)
    assert changed.waiting.wait(SECONDS)
    things = [weakref.ref(value(source)) for _ in range(2)]
    gc.collect()

    assert [thing() for thing in things] == [None, None]


def test_the_thread_drops_the_iterator_when_it_ends(start: Start) -> None:
    gate = Gate()
    alive = weakref.ref(gate)
    source = start(gate, permits=1)
    assert source.reads(gate)
    assert not source.reads(iter(()))

    source.close()
    assert not source.reads(gate)
    del gate
    gc.collect()

    assert alive() is None


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("inference", [True, False])
def test_the_thread_has_the_callers_grad_and_inference_mode(
    start: Start, *, grad: bool, inference: bool
) -> None:
    def modes() -> Iterator[tuple[bool, bool]]:
        while True:
            yield torch.is_grad_enabled(), torch.is_inference_mode_enabled()

    with torch.inference_mode(inference), torch.set_grad_enabled(grad):
        source = start(modes(), permits=2)
    value(source)

    assert value(source) == (grad, inference)


def test_the_callers_device_is_entered_in_the_thread_and_left(start: Start) -> None:
    entered: list[tuple[str, threading.Thread]] = []

    @contextmanager
    def state() -> Iterator[None]:
        entered.append(("in", threading.current_thread()))
        yield
        entered.append(("out", threading.current_thread()))

    source = start(iter(range(2)), state=state())
    gone(source)

    assert [where for where, _ in entered] == ["in", "out"]
    assert {thread for _, thread in entered} == {source._thread}
    assert source._thread.name == "streamloader"
    assert source._thread.daemon


# -- wait --------------------------------------------------------------------------------------


def test_a_wait_that_is_over_takes_no_time(start: Start) -> None:
    source = start(iter(range(2)), permits=1)

    assert 0 <= source.wait(lambda: True, None) < SECONDS


def test_a_wait_ends_at_its_timeout(start: Start) -> None:
    source = start(iter(range(2)), permits=1)
    value(source)

    assert 0.005 <= source.wait(lambda: False, 0.01) < SECONDS


def test_a_wait_ends_when_an_item_comes(start: Start) -> None:
    gate = Gate()
    source = start(gate)
    assert value(source) == 0
    assert gate.inside.wait(SECONDS)

    gate.open.release()
    seconds = source.wait(lambda: source.peek() is not None, SECONDS)

    assert seconds < SECONDS
    assert value(source) == 1
    source.stop()
    gate.open.release()
    gone(source)
