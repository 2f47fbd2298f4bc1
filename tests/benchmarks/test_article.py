import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import article
from benchmarks._article_cell import made
from benchmarks._article_options import BUDGET, parse, plan, seconds_for
from benchmarks._article_rungs import GRAPHS
from benchmarks._article_timing import run_rounds


@pytest.fixture(autouse=True)
def threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """The benchmark settles these for its process."""
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    monkeypatch.setattr("signal.signal", lambda *_: None)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", torch.backends.cudnn.benchmark)


SMALL = ["--device", "cpu", "--batch-sizes", "2", "--rounds", "2"]


@pytest.mark.slow
def test_it_prints_as_it_goes_and_writes_what_it_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "found.json"
    article.main([*SMALL, "--experiment", "augment", "--json", str(file)])
    printed = capsys.readouterr().out
    assert "augment, batch 2: round 2 of 2" in printed
    assert f"5 one graph: {GRAPHS}" in printed
    assert "2 rounds. The best of one stream: " in printed
    found = json.loads(file.read_text(encoding="utf-8"))
    (result,) = found["results"]
    assert len(result["blocks"]) == 2 * len(result["rows"])
    assert (found["failed"], found["interrupted"]) == ({}, False)


@pytest.mark.slow
def test_all_of_it_runs_on_the_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    picture = tmp_path / "article.svg"
    article.main(["--device", "cpu", "--quick", "--profile", "--plot", str(picture)])
    printed = capsys.readouterr().out
    assert printed.count("3 rounds. The best of one stream: ") == 5
    assert re.search(r"^4 StreamLoader, depth 2 .* -$", printed, re.MULTILINE)
    assert picture.exists()


@pytest.mark.slow
def test_interrupted_it_reports_the_rounds_that_are_complete(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    rounds = run_rounds

    def cut(*arguments: Any) -> Any:
        yield next(rounds(*arguments))
        raise KeyboardInterrupt

    monkeypatch.setattr(article, "run_rounds", cut)
    article.main([*SMALL, "--experiment", "equal"])
    printed = capsys.readouterr().out
    assert "1 rounds. The best of one stream" in printed
    assert "Interrupted: what was complete is above." in printed


@pytest.mark.slow
def test_a_size_that_fails_does_not_end_the_others(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    make = made

    def picky(experiment: str, size: int, *rest: Any) -> Any:
        if size == 4:
            raise RuntimeError("no memory")
        return make(experiment, size, *rest)

    monkeypatch.setattr(article, "made", picky)
    arguments = [
        "--device",
        "cpu",
        "--batch-sizes",
        "4,2",
        "--rounds",
        "1",
        "--experiment",
        "equal",
    ]
    with pytest.raises(SystemExit, match=r"^equal, batch 4: RuntimeError: no memory$"):
        article.main(arguments)
    assert "1 rounds. The best" in capsys.readouterr().out


def test_a_run_of_the_usual_sizes_fits_its_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks._article_options._device", torch.device)
    assert seconds_for(parse([])) < BUDGET
    assert seconds_for(parse(["--quick"])) < 90
    assert plan(parse(["--experiment", "equal"])) == [("equal", 2), ("equal", 8)]
    assert ("augment", 512) in plan(parse([]))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--batch-sizes", "8,x"], "--batch-sizes takes whole numbers above zero, got 'x'"),
        (["--rounds", "0"], "--rounds takes whole numbers above zero, got '0'"),
        (["--experiment", "nothing"], "invalid choice: 'nothing'"),
        (["--device", "mps"], "--device must be cuda, and torch finds none for 'mps'"),
    ],
)
def test_wrong_arguments_are_told(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        article.main(["--device", "cpu", *arguments])
    assert message in capsys.readouterr().err
