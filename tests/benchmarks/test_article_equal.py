import pytest

from benchmarks._article_equal import Balance, balance


@pytest.mark.parametrize("target", [1.0, 2.0, 7.3])
def test_a_straight_line_is_found_in_three_measurements(target: float) -> None:
    asked = []

    def milliseconds(blocks: int) -> float:
        asked.append(blocks)
        return 0.2 + 0.02 * blocks

    found = balance(milliseconds, target, most=1000)
    assert found.equal
    assert abs(found.ratio - 1) <= 0.05
    assert len(asked) <= 3


def test_blocks_that_are_free_at_first_are_no_end() -> None:
    found = balance(lambda blocks: 0.3 + 0.05 * max(blocks - 8, 0), 1.0, most=100)
    assert found.equal


def test_what_cannot_be_reached_is_told() -> None:
    assert balance(lambda blocks: 1.0 + blocks, 50.0, most=16) == Balance(16, 17.0, 50.0)
    slower_anyhow = balance(lambda blocks: 3.0 + blocks, 1.0, most=16)
    assert (slower_anyhow.blocks, slower_anyhow.equal) == (0, False)


def test_it_ends_whatever_is_measured() -> None:
    noise = iter([1.0, 0.5, 0.7, 0.6, 0.4])
    assert balance(lambda _: next(noise), 5.0, most=64).blocks == 0
