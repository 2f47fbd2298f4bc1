import dataclasses
import json
from typing import Any

from benchmarks._options import Options
from benchmarks._report import Run, as_data, report, table, verdict
from benchmarks._summary import Estimate, Row, rows
from benchmarks._timing import Block

OPTIONS = Options(
    source="memory",
    shards=None,
    augment="cpu",
    loaders=("pinned", "stream", "ceiling"),
    model="resnet50",
    step="eager",
    device="cuda",
    batch_size=256,
    image_size=224,
    workers=14,
    prefetch_factor=4,
    prefetch_batches=2,
    blocks=2,
    block_seconds=None,
    steps=168,
    late=0,
    late_ms=None,
    seed=0,
    json=None,
    plot=None,
)
MACHINE: dict[str, Any] = {"device": "A GPU", "cpus": 16, "torch": "2.11.0"}


def row(
    loader: str, share: float | None, source_ms: float | None = None, rate: float = 1000.0
) -> Row:
    one = Estimate(rate, rate - 10, rate + 10, 0.98)
    return Row(
        loader=loader,
        rate=one,
        total_rate=rate - 1,
        share=None if share is None else Estimate(share, share - 0.001, share + 0.001, 0.98),
        step_ms=100.0,
        next_ms=5.0,
        source_ms=source_ms,
        device_ms=source_ms,
        next_us=(10.0, 20.0, 30.0),
        thread_cpu_ms=90.0,
        other_cpu_ms=1.0,
        peak_mb=None,
        alone_mb=1234.5,
    )


def block(loader: str, number: int | None, rate: float) -> Block:
    spans = dict.fromkeys(("next_seconds", "next_p10", "next_p50", "next_p90", "next_max"), 0.001)
    return Block(
        loader=loader,
        round=number,
        steps=10,
        images=100,
        seconds=100 / rate,
        cpu_seconds=1.0,
        thread_cpu_seconds=0.5,
        step_seconds=(0.1, 0.2),
        peak_bytes=None,
        source_seconds=None,
        device_seconds=None,
        **spans,
    )


def judged(*found: Row, source: str = "memory") -> str:
    return verdict(Run(dataclasses.replace(OPTIONS, source=source), found, []))


def blocks(first: float, last: float) -> list[Block]:
    rates = {"pinned": 80.0, "stream": 99.0, "ceiling": 100.0}
    timed = [block(name, number, rate) for number in range(2) for name, rate in rates.items()]
    return [block("ceiling", None, first), *timed, block("ceiling", None, last)]


def text(measured: list[Block], options: Options = OPTIONS) -> str:
    found = rows(measured, "ceiling", dict.fromkeys(OPTIONS.loaders))
    return report(Run(options, found, measured), MACHINE)


def test_all_lines_of_the_table_are_of_one_width() -> None:
    lines = table([row("stream", 0.99, 0.1), row("ceiling", None)])
    assert len(lines) == 3
    assert len(set(map(len, lines))) == 1


def test_the_sum_over_all_blocks_is_beside_the_median() -> None:
    head, line = table([row("stream", 0.99)])
    assert head.split()[:4] == ["loader", "img/s", "in", "all"]
    assert line.split()[:3] == ["stream", "1,000", "999"]


def test_the_report_compares_with_each_other_loader_in_pairs() -> None:
    assert "stream / pinned: 1.2375 [1.2375, 1.2375]" in text(blocks(100, 100))


def test_ceilings_that_agree_are_said_to() -> None:
    assert "The first and the last ceiling, 100 and 100 img/s, agree" in text(blocks(100, 100.4))


def test_ceilings_that_differ_are_said_to() -> None:
    assert "DIFFER by 3.0%, more than 1 %" in text(blocks(100, 103))


def test_the_report_says_how_much_an_interval_holds() -> None:
    assert "hold the true one in 50.0% of runs" in text(blocks(100, 100))


def test_on_the_cpu_the_report_ends_with_what_it_cannot_show() -> None:
    cpu = dataclasses.replace(OPTIONS, device="cpu")
    assert text(blocks(100, 100), cpu).endswith("overlap needs an accelerator.")
    assert "accelerator" not in text(blocks(100, 100))


def test_late_batches_are_in_the_title() -> None:
    late = dataclasses.replace(OPTIONS, late=10, late_ms=110.0)
    assert "every 10th 110.0 ms late" in text(blocks(100, 100), late)


def test_at_the_ceiling_the_step_bounds_it() -> None:
    found = judged(row("pinned", 0.8), row("stream", 0.993, 0.1), row("ceiling", None))
    assert found == "The step bounds it: stream runs at 0.993 of the ceiling."


def test_where_batches_are_waited_for_the_source_bounds_it() -> None:
    found = judged(row("stream", 0.7, 25.0), row("ceiling", None))
    assert found.startswith("The source bounds it: stream runs at 0.700 of the ceiling, and 25.0%")


def test_what_no_wait_explains_runs_beside_the_step() -> None:
    found = judged(row("stream", 0.9, 0.5), row("ceiling", None))
    assert found.startswith("What runs beside the step bounds it: stream runs at 0.900")


def test_without_the_stream_the_fastest_is_judged() -> None:
    found = judged(row("plain", 0.7), row("pinned", 0.8), row("ceiling", None))
    assert found == "pinned runs at 0.800 of the ceiling, and 5.0% of its time is spent in next()."


def test_the_ceiling_alone_is_no_comparison() -> None:
    assert judged(row("ceiling", None)) == "Only the ceiling was measured."


def test_the_data_hold_every_block_and_are_json() -> None:
    measured = blocks(100, 101)
    found = rows(measured, "ceiling", dict.fromkeys(OPTIONS.loaders))
    data = json.loads(json.dumps(as_data(Run(OPTIONS, found, measured), MACHINE)))
    assert len(data["blocks"]) == len(measured)
    assert data["machine"] == MACHINE
    assert data["options"]["batch_size"] == 256
    assert set(data["stream_over"]) == {"pinned"}
    assert data["step_ms"]["stream"] == [100.0, 200.0]


def test_a_loader_that_is_absent_is_a_row_that_says_so() -> None:
    lines = table([row("stream", 0.99), row("ceiling", None)], {"timm": "not installed: pip"})
    assert lines[-1] == "timm     not installed: pip"


def test_blocks_that_end_by_time_are_in_the_title() -> None:
    timed = dataclasses.replace(OPTIONS, steps=None, block_seconds=2.5)
    assert "2 blocks of 2.5 s each" in text(blocks(100, 100), timed)


def test_workers_that_give_less_than_the_step_takes_bound_it() -> None:
    rows_ = (
        row("stream", 0.80, rate=3800.0),
        row("alone", 0.82, rate=3920.0),
        row("ceiling", None, rate=4700.0),
    )
    assert judged(*rows_, source="shards") == (
        "The workers bound it: 14 workers give 3,920 img/s alone (280 each), the step takes 4,700; "
        "stream runs at 3,800, 0.969 of what they give. If rates add, 17 workers would keep up, on "
        "as many free CPUs."
    )
    assert judged(*rows_).startswith("The workers bound it: 14 workers give 3,920 img/s alone")


def test_workers_that_give_enough_are_said_to() -> None:
    found = judged(row("stream", 0.993), row("alone", 1.2, rate=1200.0), row("ceiling", None))
    assert found.endswith("0.993 of the ceiling. 14 workers give 1,200 img/s alone (86 each).")
    found = judged(row("stream", 0.9, 0.5), row("alone", 1.2, rate=1200.0), row("ceiling", None))
    assert found.startswith("What runs beside the step bounds it: stream runs at 0.900")


def test_workers_that_give_more_than_is_used_do_not_bound_it() -> None:
    found = judged(row("stream", 0.6, 0.5), row("alone", 0.9, rate=2000.0), row("ceiling", None))
    assert found.startswith("What runs beside the step bounds it: stream runs at 0.600")
