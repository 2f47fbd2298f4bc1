"""What the ladder's blocks say, in tables and sentences."""

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from benchmarks._article_costs import Costs, Half, bound
from benchmarks._article_equal import Balance
from benchmarks._article_plot import LINES, draw
from benchmarks._article_profile import Busy, Profile, Span, busy, spans_of
from benchmarks._article_profile import report as profile_report
from benchmarks._article_report import claims, report, sentence
from benchmarks._article_rungs import EXPERIMENTS, ladder
from benchmarks._article_summary import Result, as_data, best_single, over, rows
from benchmarks._article_timing import Block, Pace, steps_in, worth

RATES = {"2 one stream": 100.0, "5 one graph": 150.0, "ceiling": 200.0}
COSTS = Costs(
    0.1,
    launches=True,
    stage={"eager": Half(1.0, 0.5), "graphed": Half(1.0, 0.1)},
    step={"eager": Half(2.0, 4.0), "graphed": Half(2.0, 0.1)},
    beside={"graphed": 2.5},
)


def result(
    experiment: str = "encoder",
    batch_size: int = 8,
    rates: Mapping[str, float] = RATES,
    costs: Costs = COSTS,
    balance: Balance | None = None,
) -> Result:
    """Three rounds, each 1 % faster than the one before; what is not named has 120 steps/s."""
    rungs = ladder(experiment)
    blocks = [
        Block(rung.name, number, 100, 100 / (rates.get(rung.name, 120.0) * (1 + number / 100)))
        for number in range(3)
        for rung in rungs
    ]
    return Result(experiment, batch_size, rungs, {"other": "not here"}, costs, blocks, balance)


def test_ratios_are_within_rounds_and_of_the_same_form() -> None:
    found = {row.rung.name: row for row in rows(result())}
    streamed, graphed = found["4 StreamLoader, depth 2"], found["5 one graph"]
    assert streamed.over is not None
    assert streamed.best is not None
    assert streamed.over.low == pytest.approx(1.2) == streamed.over.high
    assert streamed.best.median == pytest.approx(0.8)
    assert (graphed.over, found["ceiling"].best, found["ceiling"].share) == (None, None, None)
    assert best_single(result().blocks, result().rungs) == "5 one graph"
    assert over(result().blocks, "3 by hand", "nobody") == []


def test_bound_by_launches_where_the_host_takes_longer() -> None:
    assert bound(COSTS, "eager", stages=True) == "launches"
    assert bound(COSTS, "stage", stages=True) == "launches"
    assert bound(COSTS, "graphed", stages=True) == "GPU"
    assert bound(COSTS, "article", stages=True) == "-"
    assert not result().gpu_bound


def test_the_table_has_a_line_for_each_rung_and_the_articles_figures_are_anothers() -> None:
    lines = report(result())
    text = "\n".join(lines)
    for rung in ladder("encoder"):
        assert re.search(rf"^{re.escape(rung.name)} ", text, re.MULTILINE)
    streamed = next(line for line in lines if line.startswith("4 StreamLoader, depth 2"))
    assert re.split(r"\s{2,}", streamed)[1:] == [
        "121.2", "970", "1.200 [1.200, 1.200]", "0.800 [0.800, 0.800]", "0.600", "launches",
    ]  # fmt: skip
    assert "other: not here" in lines
    room = "at once, on two streams, nothing copied: 2.500 ms, 1.20 times the serial rate"
    assert f"    {room}" in lines
    assert lines[-1].startswith(
        "The article, on an NVIDIA A10G (g5.2xlarge, 8 vCPU): one stream 83"
    )
    assert "A10G" not in "\n".join(report(result(batch_size=16)))


def test_halves_that_are_not_equal_are_called_so() -> None:
    text = "\n".join(report(result("equal", balance=Balance(16, 1.0, 2.0))))
    assert "16 blocks make the encoder 0.50 of the step, 2.000 ms: NOT EQUAL within 10 %" in text
    assert "NOT EQUAL" not in "\n".join(report(result("equal", balance=Balance(16, 1.9, 2.0))))


def test_claims_say_whether_they_hold() -> None:
    found = claims([result(), result("augment", 32, {**RATES, "0 article, one stream": 70.0})])
    assert [line.partition(":")[0] for line in found] == [
        "holds", "holds", "DOES NOT HOLD", "not measured", "DOES NOT HOLD", "DOES NOT HOLD",
    ]  # fmt: skip
    assert "eager 1.200 [1.200, 1.200], graphed 0.800 [0.800, 0.800]" in found[0]
    assert found[2].endswith("1.71")
    assert claims([])[0].startswith("not measured: encoder, batch 8")


def test_the_sentence_says_up_to_where_it_pays() -> None:
    slow = {**RATES, "4 StreamLoader, depth 2": 101.0}
    both = [result(batch_size=128, rates=slow), result()]
    said = "encoder: StreamLoader over one stream, eager: 1.20 at 8, 1.01 at 128; "
    assert sentence(both, "encoder") == said + "up to batch 8 it pays."
    assert sentence(both[:1], "encoder") == (
        "encoder: StreamLoader over one stream, eager: 1.01 at 128; it pays at no size."
    )
    assert sentence(both, "augment") is None


def test_all_of_it_is_data() -> None:
    data = json.loads(json.dumps(as_data(result("equal", balance=Balance(3, 1.0, 1.0)))))
    assert data["balance"] == {"blocks": 3, "milliseconds": 1.0, "target": 1.0, "ratio": 1.0}
    assert len(data["blocks"]) == 3 * len(data["rows"])
    assert data["rows"][0]["over_best"]["confidence"] == 0.75


@pytest.mark.slow
def test_a_picture_of_all_experiments(tmp_path: Path) -> None:
    names = {rung.name for experiment in EXPERIMENTS for rung in ladder(experiment)}
    assert set(LINES) <= names
    results = [result(name, size) for name in EXPERIMENTS for size in (8, 32)]
    draw(tmp_path / "article.svg", "title", results)
    assert (tmp_path / "article.svg").stat().st_size > 10_000


# -- blocks and profiles ------------------------------------------------------------------------


def test_a_block_has_steps_for_its_seconds_and_not_too_few() -> None:
    pace = Pace(block_seconds=0.3)
    assert steps_in(0.001, pace) == 300
    assert steps_in(0.2, pace) == 10
    assert steps_in(0.0, pace) == 5000


def test_a_round_is_begun_if_it_ends_in_time_or_there_are_too_few() -> None:
    assert worth(now=50, start=0, deadline=1, done=2, least=3)
    assert worth(now=40, start=0, deadline=50, done=4, least=3)
    assert not worth(now=40, start=0, deadline=49, done=4, least=3)


def test_overlap_is_where_two_streams_run_something() -> None:
    spans = [Span(7, 0, 4), Span(7, 4, 6), Span(20, 5, 8), Span(7, 9, 10)]
    found = busy(spans)
    assert (found.busy, found.overlap) == pytest.approx((0.9, 0.1))
    assert found.streams == pytest.approx({7: 0.7, 20: 0.3})
    assert busy([]) == Busy(0.0, 0.0, {})


def test_a_trace_is_read_for_what_ran_on_the_gpu() -> None:
    kernel = {"cat": "kernel", "ts": 5.0, "dur": 2.0, "args": {"stream": 7}}
    events: list[dict[str, Any]] = [
        kernel,
        {"cat": "cpu_op", "ts": 1.0, "dur": 9.0},
        {"name": "metadata"},
    ]
    assert spans_of(events) == [Span(7, 5.0, 7.0)]


def test_profiles_are_a_table() -> None:
    known = Profile("a", 3.0, 1.0, 1.5, 0.5, 120.0, Busy(0.5, 0.25, {7: 0.5, 20: 0.25}))
    table = profile_report([known, Profile("b", 3.0, 1.0, 1.5, 0.5)])
    assert table[1] == ["a", "3.000", "1.000", "1.500", "0.500", "120", "50.0%", "25.0%", "50% 25%"]
    assert table[2][5:] == ["-"] * 4
