import dataclasses
import json
from typing import Any

import pytest

from benchmarks._report import Run
from benchmarks._sweep import _bound, as_data, report
from tests.benchmarks.test_report import OPTIONS, row


def run(workers: int, stream: float, alone: float, source: str = "shards") -> Run:
    options = dataclasses.replace(OPTIONS, workers=workers, source=source)
    found = [
        row("stream", stream / 1000, rate=stream),
        row("alone", alone / 1000, rate=alone),
        row("ceiling", None, rate=1000.0),
    ]
    return Run(options, found, [], {"timm": "not installed: pip install timm"})


def test_a_sweep_is_a_line_for_each_number_of_workers() -> None:
    title, head, four, eight, missing, *verdicts = report([run(4, 480, 500), run(8, 995, 1100)])
    assert title.startswith("img/s of each loader")
    assert head.split() == [
        *("workers", "alone", "img/s", "each", "stream", "ceiling", "bound", "by"),
    ]
    assert four.split() == ["4", "500", "125", "480", "(0.480)", "1,000", "the", "workers"]
    assert eight.split()[:4] == ["8", "1,100", "138", "995"]
    assert len({len(line) for line in (head, four, eight)}) == 1
    assert missing == "timm: not installed: pip install timm"
    assert verdicts[0].startswith("workers: 4. The workers bound it: 4 workers give 500 img/s")
    assert verdicts[1].startswith("workers: 8. The step bounds it")


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        (run(4, 995, 1100), "the step"),
        (run(4, 480, 500), "the workers"),
        (run(4, 480, 500, "memory"), "the workers"),
        (run(4, 900, 1100), "see below"),
        (run(4, 480, 900), "see below"),
        (Run(OPTIONS, [row("ceiling", None)], []), "-"),
    ],
)
def test_what_bounds_a_run_is_a_word(found: Run, expected: str) -> None:
    assert _bound(found) == expected


def test_the_data_of_a_sweep_hold_those_of_each_run() -> None:
    runs: list[dict[str, Any]] = [{"options": {"workers": 4}}, {"options": {"workers": 8}}]
    assert json.loads(json.dumps(as_data(runs)))["workers"] == [4, 8]
