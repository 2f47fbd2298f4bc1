import dataclasses
import itertools
import json
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import imagenet_shards
from benchmarks._options import Machine
from benchmarks._timing import Span
from tests.benchmarks.test_report import OPTIONS
from tests.benchmarks.test_shards import _write as write_shard


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    threads, benchmark = torch.get_num_threads(), torch.backends.cudnn.benchmark
    on_term = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, on_term)
    torch.set_num_threads(threads)
    torch.backends.cudnn.benchmark = benchmark


@pytest.mark.slow
def test_a_run_on_the_cpu_measures_all_and_says_what_it_cannot(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, picture = tmp_path / "run.json", tmp_path / "run.png"
    settings = "--device cpu --model small --batch-size 4 --workers 1 --blocks 2 --steps 3 --late 3"
    files = ["--late-ms", "1", "--json", str(data), "--plot", str(picture)]
    imagenet_shards.main([*settings.split(), *files])
    assert capsys.readouterr().out.endswith("overlap needs an accelerator.\n")
    found = json.loads(data.read_text(encoding="utf-8"))
    assert [row["loader"] for row in found["rows"]] == ["plain", "pinned", "stream", "ceiling"]
    assert len(found["blocks"]) == 2 * 4 + 2
    assert all(block["images"] == 12 for block in found["blocks"])
    assert {name: len(times) for name, times in found["step_ms"].items()}["stream"] == 2
    assert picture.stat().st_size > 0


@pytest.mark.slow
@pytest.mark.parametrize("augment", ["gpu", "gpu-full", "gpu-cut"])
def test_the_device_augments(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], augment: str
) -> None:
    data, settings = tmp_path / "run.json", "--device cpu --model small --batch-size 4 --workers 1"
    arguments = [*settings.split(), "--blocks", "2", "--augment", augment, "--json", str(data)]
    arguments += ["--loaders", "plain,pinned,stream,timm,alone", "--block-seconds", "0.1"]
    if augment != "gpu-full":
        write_shard(tmp_path / "0.tar")
        arguments += ["--source", "shards", "--shards", str(tmp_path)]
    imagenet_shards.main(arguments)
    out = capsys.readouterr().out
    assert f", --augment {augment}, workers: 1" in out
    assert re.search(r"\ntimm +it normalises by itself, and takes images of one size", out)
    assert re.search(r"1 worker gives [\d,]+ img/s alone \([\d,]+ each\)", out)
    found = json.loads(data.read_text(encoding="utf-8"))
    loaders = [row["loader"] for row in found["rows"]]
    assert loaders == ["plain", "pinned", "stream", "alone", "ceiling"]


@pytest.mark.slow
def test_a_sweep_is_a_run_for_each_number_of_workers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data, picture = tmp_path / "run.json", tmp_path / "run.png"
    settings = "--device cpu --model small --batch-size 4 --workers 1,2 --blocks 1,2 --steps 3"
    files = ["--loaders", "stream,torchtnt,alone", "--json", str(data), "--plot", str(picture)]
    imagenet_shards.main([*settings.split(), *files])
    assert "\ntorchtnt: needs a CUDA device\n" in capsys.readouterr().out
    found = json.loads(data.read_text(encoding="utf-8"))
    assert found["workers"] == [1, 2]
    assert [len(run["blocks"]) for run in found["sweep"]] == [1 * 3 + 2, 2 * 3 + 2]
    assert picture.stat().st_size > 0


@pytest.mark.slow
@pytest.mark.parametrize("done", [1, 5])
def test_an_interrupted_run_reports_the_rounds_that_are_complete(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], done: int
) -> None:
    block, count = imagenet_shards._block, itertools.count(1)

    def interrupted(*arguments: Any) -> Any:
        if next(count) > done:
            signal.raise_signal(signal.SIGTERM)
        return block(*arguments)

    monkeypatch.setattr(imagenet_shards, "_block", interrupted)
    settings = "--device cpu --model small --batch-size 4 --blocks 9,9 --steps 2"
    arguments = [*settings.split(), "--workers", "1,2", "--loaders", "plain,pinned"]
    if done == 1:
        with pytest.raises(KeyboardInterrupt):
            imagenet_shards.main(arguments)
        return
    imagenet_shards.main(arguments)
    out = capsys.readouterr().out
    assert "1 blocks of 2 steps" in out
    assert "workers: 2" not in out


def test_blocks_of_shards_are_of_whole_rounds_of_the_workers() -> None:
    by_time = dataclasses.replace(OPTIONS, source="shards", steps=None, block_seconds=5.0)
    assert imagenet_shards._span(by_time) == Span(None, 5.0, every=14, least=3 * 14)
    by_steps = dataclasses.replace(by_time, steps=20, block_seconds=None)
    assert imagenet_shards._span(by_steps) == Span(20, None, every=14)
    assert imagenet_shards._span(OPTIONS) == Span(168, None)


@pytest.mark.parametrize(("workers", "threads"), [(1, 7), (6, 2), (14, 1)])
def test_each_run_on_the_cpu_leaves_cpus_to_its_workers(
    monkeypatch: pytest.MonkeyPatch, workers: int, threads: int
) -> None:
    monkeypatch.setattr(imagenet_shards, "machine", lambda: Machine(None, 8))
    found: list[int] = []
    monkeypatch.setattr(torch, "set_num_threads", found.append)
    options = dataclasses.replace(OPTIONS, device="cpu", workers=workers, loaders=("ceiling",))
    monkeypatch.setattr(imagenet_shards, "_completed", lambda _, options: options)
    monkeypatch.setattr(imagenet_shards, "run", lambda _: ({}, []))
    bench = imagenet_shards.prepare(
        dataclasses.replace(options, model="small", image_size=8, batch_size=2)
    )
    found.clear()
    imagenet_shards.measured(bench, options)
    assert found == [threads]
