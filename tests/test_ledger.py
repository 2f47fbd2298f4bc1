"""What the ledger keeps: hosts, places, sizes. What it reports is in test_checker.py."""

from __future__ import annotations

import gc
import threading

import torch

from streamloader.ledger import CheckedStream, Ledger, place


def ledger() -> Ledger:
    stream = CheckedStream("default")
    return Ledger(lambda: stream, None)


def test_memory_is_known_by_its_storage_for_as_long_as_that_lives() -> None:
    book, tensor = ledger(), torch.ones(4)
    memory = book.memory(tensor)
    assert book.memory(tensor[1:]) is memory
    assert memory.nbytes == 16

    part = tensor[1:]
    del tensor
    gc.collect()
    assert book.memory(part) is memory


def test_where_memory_is_stays_as_it_was_first_known() -> None:
    book, tensor, other = ledger(), torch.ones(4), torch.ones(4)
    assert book.memory(tensor).on_device is None
    assert book.on_host(tensor).on_device is False
    assert book.on_device(tensor).on_device is False
    assert book.on_device(other).on_device is True
    assert book.on_host(other).on_device is True
    assert book.peak == 16


def test_peak_is_the_most_at_one_time() -> None:
    book = ledger()
    tensors = [torch.ones(4), torch.ones(2)]
    for tensor in tensors:
        book.on_device(tensor)
    del tensor, tensors
    book.on_device(torch.ones(1))
    assert book.peak == 24


def test_the_same_report_is_made_once() -> None:
    book = ledger()
    for text in ("a", "b", "a"):
        book.report(text)
    assert book.reports == ["a", "b"]


def test_each_thread_is_a_host_of_its_name() -> None:
    book, seen = ledger(), []
    thread = threading.Thread(target=lambda: seen.append(book.host), name="other")
    thread.start()
    thread.join(10)
    assert str(seen[0]) == "thread 'other'"
    assert book.host is book.host is not seen[0]


def test_a_host_that_waited_comes_to_when_it_looked_for_something() -> None:
    host = ledger().host
    host.waited()
    assert host.clock.time == 0
    host.due = 3.0
    host.waited()
    host.waited()
    assert host.clock.time == 3


def test_a_place_is_where_a_test_stands_not_torch_nor_the_checker() -> None:
    assert place().startswith("tests/test_ledger.py:")
    assert place().endswith(" in test_a_place_is_where_a_test_stands_not_torch_nor_the_checker")
