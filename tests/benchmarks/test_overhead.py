import pytest

from benchmarks.overhead import Case, Spread, against_targets, case, spread, table


def test_a_spread_is_in_milliseconds() -> None:
    found = spread([number / 1000 for number in range(101)])
    assert (found.p10, found.p50, found.p90) == pytest.approx((10, 50, 90))


def example(thread: float, launched: float, launches: float) -> Case:
    both = [Spread(value, value, value) for value in (thread, launched, launches)]
    return Case("tiny", 1.0, 10, both[0], 0.1, both[1], both[2])


def test_what_misses_its_target_is_said_to() -> None:
    lines = against_targets(example(0.4, 0.2, 0.5))
    assert ["OVER" in line for line in lines] == [False, True, False]


def test_all_lines_of_the_table_are_of_one_width() -> None:
    assert len({len(line) for line in table([example(0.4, 0.2, 0.5)])}) == 1


@pytest.mark.slow
def test_it_tells_batches_that_were_launched_from_those_that_are_launched_now() -> None:
    found = case("tiny", 1, None, rounds=20, device="cpu")
    assert found.rounds > 1
    assert 0 < found.launched.p50 < found.launches.p50
