"""What is counted, and how it is printed."""

import dataclasses
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from streamloader.stats import Counts, Meter, Stats


@pytest.mark.parametrize("record", [Counts(), Stats()])
def test_a_record_cannot_be_changed(record: Any) -> None:
    name = dataclasses.fields(record)[0].name

    with pytest.raises(dataclasses.FrozenInstanceError, match=f"^cannot assign to field '{name}'$"):
        setattr(record, name, 3)


def test_a_meter_has_what_the_record_has() -> None:
    def names(kind: Any) -> list[tuple[str, Any]]:
        return [(field.name, field.default) for field in dataclasses.fields(kind)]

    assert names(Meter) == [("total", None), *names(Counts)]


def test_counts_are_those_made_so_far() -> None:
    meter = Meter()
    meter.handed_over(20)
    meter.waited(source=0.5, device=0.25)
    meter.launched(0.125)

    before = meter.counts()
    meter.handed_over(10)

    assert before == Counts(1, 20, 0.5, 0.25, 0.125)
    assert meter.counts() == Counts(2, 30, 0.5, 0.25, 0.125)


def test_passes_add_up() -> None:
    total = Meter()
    first, second = Meter(total), Meter(total)

    first.handed_over(20, shared=True)
    first.waited(source=0.5)
    second.handed_over(30)
    second.handed_over(0, shared=True)
    first.waited(device=0.25)
    second.waited(source=1.0, device=2.0)
    first.launched(0.5)
    second.launched(0.25)

    assert first.counts() == Counts(1, 20, 0.5, 0.25, 0.5, shared=1)
    assert second.counts() == Counts(2, 30, 1.0, 2.0, 0.25, shared=1)
    assert total.counts() == Counts(3, 50, 1.5, 2.25, 0.75, shared=2)


def test_counts_print_what_was_waited_for() -> None:
    assert str(Counts(3, 1_250_000, 0.5, 12.345, 0.75)) == (
        "3 batches, 1.2 MB; waited for the source 0.50 s, for the device 12.35 s; launched in "
        "0.75 s"
    )


def test_counts_print_what_came_through_shared_memory_if_anything_did() -> None:
    assert str(Counts(3, shared=2)).startswith("3 batches (2 through shared memory), 0.0 MB; ")


def test_stats_print_the_epoch_and_the_total() -> None:
    assert str(Stats(Counts(1), Counts(2))) == (
        "epoch: 1 batches, 0.0 MB; waited for the source 0.00 s, for the device 0.00 s; launched "
        "in 0.00 s\n"
        "total: 2 batches, 0.0 MB; waited for the source 0.00 s, for the device 0.00 s; launched "
        "in 0.00 s"
    )


def test_stats_can_be_pickled_and_compared() -> None:
    stats = Stats(Counts(1), Counts(2, 3))

    assert pickle.loads(pickle.dumps(stats)) == stats


def test_stats_need_no_torch() -> None:
    path = Path(__file__).parents[1] / "streamloader" / "stats.py"
    program = f"import runpy, sys; runpy.run_path({str(path)!r}); print('torch' in sys.modules)"

    assert subprocess.check_output([sys.executable, "-c", program], text=True) == "False\n"
