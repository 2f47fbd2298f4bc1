"""Vector clocks, and memory that remembers who used it last."""

from __future__ import annotations

import pytest

from streamloader.clocks import Access, Clock, Memory, Point


def read(end: float = 0.0, *, host: Point | None = None, stream: Point | None = None) -> Access:
    return Access("read", "here", end, host, stream)


def written(*, host: Point | None = None, stream: Point | None = None) -> Access:
    return Access("written", "there", 0.0, host, stream)


def test_joining_is_the_maximum_of_each_actors_ticks_and_of_the_times() -> None:
    clock = Clock({"a": 1, "b": 5}, 2.0)

    joined = clock.join(Clock({"a": 3, "c": 1}, 7.0), Clock({"b": 4}, 1.0))

    assert joined is clock
    assert clock == Clock({"a": 3, "b": 5, "c": 1}, 7.0)


def test_an_order_takes_no_time() -> None:
    clock = Clock({"a": 1}, 2.0)
    clock.order(Clock({"a": 3}, 7.0))
    assert clock == Clock({"a": 3}, 2.0)


def test_a_clock_knows_its_own_ticks_and_none_that_come_later() -> None:
    clock, earlier = Clock(), Clock()
    first = clock.tick("a")
    earlier.join(clock)
    second = clock.tick("a")

    assert (first, second) == (Point("a", 1), Point("a", 2))
    assert clock.knows(first)
    assert clock.knows(second)
    assert earlier.knows(first)
    assert not earlier.knows(second)
    assert not Clock().knows(first)


@pytest.mark.parametrize(
    ("on_device", "actor"), [(True, "stream"), (False, "host"), (None, "host")]
)
def test_an_access_is_whose_work_the_memorys_place_says(*, on_device: bool, actor: str) -> None:
    both = read(host=Point("host", 1), stream=Point("stream", 1))
    assert both.point(on_device).actor == actor


@pytest.mark.parametrize("on_device", [True, False, None])
def test_an_access_that_is_one_actors_is_always_that_ones(*, on_device: bool | None) -> None:
    assert read(host=Point("host", 1)).point(on_device).actor == "host"
    assert read(stream=Point("stream", 1)).point(on_device).actor == "stream"


def test_an_access_says_who_did_what_where() -> None:
    assert str(written(stream=Point("stream 'copy'", 1))) == "written by stream 'copy' at there"
    assert str(read(host=Point("thread 'x'", 1))) == "read by thread 'x' at here"


def test_a_write_conflicts_with_all_that_came_since_the_last_and_a_read_with_that_one() -> None:
    memory = Memory(8, "here", "copy")
    assert memory.conflicts("written") == memory.conflicts("read") == []
    write = written(stream=Point("a", 1))
    reads = [read(stream=Point("a", 2)), read(stream=Point("b", 1))]
    for access in (write, *reads):
        memory.note(access)

    assert memory.conflicts("read") == [write]
    assert memory.conflicts("written") == [*reads, write]


def test_of_each_actors_reads_the_last_is_kept_and_a_write_forgets_them() -> None:
    memory = Memory(8, "here", "copy")
    for tick in (1, 2, 3):
        memory.note(read(stream=Point("a", tick)))
    assert memory.accesses() == [read(stream=Point("a", 3))]

    write = written(stream=Point("a", 4))
    memory.note(write)
    assert memory.accesses() == [write]


def test_what_a_clock_does_not_know_is_unordered() -> None:
    memory = Memory(8, "here", "copy", on_device=True)
    accesses = [read(stream=Point("a", 1)), read(stream=Point("b", 2))]
    assert memory.unordered(accesses, Clock({"a": 1, "b": 1})) == accesses[1:]
