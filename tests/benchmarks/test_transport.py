import json
from pathlib import Path

import pytest
import torch

from benchmarks.transport import Case, Cost, Images, Many, cases, main, measured, ratios, table


def costs() -> dict[str, dict[str, Cost]]:
    """Of two rounds: the stream is four times as fast, at a fifth of the CPU time."""
    plain, stream = Cost([8.0, 4.0], [5.0, 10.0]), Cost([2.0, 1.0], [1.0, 2.0], 1.0)
    return {"summed": {"plain": plain, "stream": stream}}


def test_ratios_are_of_passes_that_are_neighbours() -> None:
    assert ratios(costs()) == pytest.approx({"summed: rate": 4, "summed: main CPU": 0.2})


def test_a_table_has_a_line_for_each_case_and_loader() -> None:
    head, *lines = table(costs()).split("\n")
    assert [line.split()[:2] for line in lines] == [["summed,", "plain"], ["summed,", "stream"]]
    assert {len(line) for line in lines} == {len(head)}


def test_a_batch_adds_up_to_what_the_dataset_says() -> None:
    images, many = Images(2, 64, (3, 4, 4)), Many(2, 5)
    assert (len(images), len(many)) == (128, 2)
    batch = torch.stack([images[index] for index in range(64, 128)])
    assert int(batch.view(-1).view(torch.int64).sum()) == images.total
    assert sum(int(tensor.sum()) for tensor in many[1].values()) == many.total


@pytest.mark.slow
def test_a_batch_that_adds_up_to_something_else_is_an_error() -> None:
    case = next(iter(cases(64, (3, 4, 4), 2, 5)))
    wrong = Case(case.name, case.batch_size, case.batches, case.make, lambda _: 1)
    with pytest.raises(ValueError, match=r"^summed: a batch adds up to 1, not to "):
        measured(wrong, 1)


@pytest.mark.slow
def test_it_runs_and_writes_its_ratios(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, threads = tmp_path / "ratios.json", torch.get_num_threads()
    main(["--quick", "--rounds", "1", "--json", str(path)])
    torch.set_num_threads(threads)
    found = json.loads(path.read_text(encoding="utf-8"))["ratios"]
    names = {f"{case}: {what}" for case in ("summed", "unread", "small") for what in _WHAT}
    assert set(found) == names
    assert all(value > 0 for value in found.values())
    assert capsys.readouterr().out.count("stream") == 3


_WHAT = ("rate", "main CPU")


def test_no_rounds_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["--rounds", "0"])
    assert "--rounds must be at least 1, got 0" in capsys.readouterr().err
