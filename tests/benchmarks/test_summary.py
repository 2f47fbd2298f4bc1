import math
from typing import Any

import pytest

from benchmarks._summary import drift, estimate, ratios, rows, steady
from benchmarks._timing import Block


def block(loader: str, number: int | None, rate: float, **fields: float | None) -> Block:
    known: dict[str, Any] = {
        "next_seconds": 0.5,
        "next_p10": 0.01,
        "next_p50": 0.02,
        "next_p90": 0.03,
        "next_max": 0.04,
        "step_seconds": (),
        "cpu_seconds": 3.0,
        "thread_cpu_seconds": 2.0,
        "peak_bytes": None,
        "source_seconds": None,
        "device_seconds": None,
    }
    measured = known | fields
    return Block(loader, number, steps=10, images=100, seconds=100 / rate, **measured)


@pytest.mark.parametrize(
    ("count", "low", "high", "confidence"),
    [
        (3, 0, 2, 0.75),
        (5, 0, 4, 0.9375),
        (6, 0, 5, 0.96875),
        (7, 0, 6, 0.984375),
        (8, 0, 7, 0.9921875),
        (9, 1, 7, 0.9609375),
        (15, 3, 11, 0.96484375),
    ],
)
def test_an_interval_ends_at_the_order_statistics_of_the_sign_test(
    count: int, low: int, high: int, confidence: float
) -> None:
    found = estimate([float(value) for value in reversed(range(count))])
    assert (found.median, found.low, found.high) == ((count - 1) / 2, low, high)
    assert math.isclose(found.confidence, confidence)


def test_one_block_has_no_interval() -> None:
    found = estimate([4.0])
    assert (found.median, found.low, found.high, found.confidence) == (4.0, 4.0, 4.0, 0.0)


def test_ratios_pair_the_blocks_of_a_round() -> None:
    blocks = [
        block("ceiling", None, 50),
        block("a", 0, 90),
        block("ceiling", 0, 100),
        block("ceiling", 1, 200),
        block("a", 1, 160),
        block("ceiling", None, 50),
    ]
    assert ratios(blocks, "a", "ceiling") == pytest.approx([0.9, 0.8])


def test_a_slow_round_leaves_the_share_alone() -> None:
    blocks = [
        block(name, number, speed * share)
        for number, speed in enumerate([100, 50, 100])
        for name, share in (("a", 0.9), ("ceiling", 1.0))
    ]
    row, ceiling = rows(blocks, "ceiling", {"a": None, "ceiling": None})
    assert row.share is not None
    assert (row.share.low, row.share.high) == pytest.approx((0.9, 0.9))
    assert row.rate.low == pytest.approx(45)
    assert ceiling.share is None


def test_rows_leave_out_the_ceilings_at_both_ends() -> None:
    blocks = [block("ceiling", None, 1), block("ceiling", 0, 100), block("ceiling", None, 1)]
    (row,) = rows(blocks, "ceiling", {"ceiling": None})
    assert row.rate.median == pytest.approx(100)


def test_the_rate_in_all_is_that_of_all_images_and_seconds() -> None:
    blocks = [block("ceiling", None, 1), block("ceiling", 0, 100), block("ceiling", 1, 50)]
    (row,) = rows(blocks, "ceiling", {"ceiling": None})  # 1 and 2 seconds
    assert row.total_rate == pytest.approx(200 / 3)


def test_a_row_is_per_batch() -> None:
    measured = block("a", 0, 100, source_seconds=0.2, device_seconds=0.1, peak_bytes=7e6)
    row, _ = rows([measured, block("ceiling", 0, 100)], "ceiling", {"a": 3_000_000, "ceiling": 0})
    assert row.step_ms == pytest.approx(100)
    assert row.next_ms == pytest.approx(50)
    assert row.source_ms == pytest.approx(20)
    assert row.device_ms == pytest.approx(10)
    assert row.next_us == pytest.approx((10_000, 20_000, 30_000))
    assert (row.thread_cpu_ms, row.other_cpu_ms) == pytest.approx((200, 100))
    assert (row.peak_mb, row.alone_mb) == pytest.approx((7, 3))


def test_what_a_loader_does_not_account_for_stays_unknown() -> None:
    row, _ = rows(
        [block("a", 0, 100), block("ceiling", 0, 100)], "ceiling", {"a": None, "ceiling": 0}
    )
    assert (row.source_ms, row.device_ms, row.peak_mb, row.alone_mb) == (None, None, None, None)


def test_the_ends_show_whether_the_machine_drifted() -> None:
    blocks = [block("ceiling", None, 100), block("a", 0, 1), block("ceiling", None, 102)]
    assert drift(blocks) == pytest.approx((100, 102))
    assert steady(100, 100.9)
    assert not steady(100, 98.9)
