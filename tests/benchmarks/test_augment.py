import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks import _augment_compiled as compiled
from benchmarks import augment as bench
from benchmarks._augment_timing import Cost, block, cost
from benchmarks._augmentations import (
    CONTESTANTS,
    RECIPES,
    Contestant,
    Images,
    boxes,
    ours,
    planned,
    tiled,
)
from streamloader import augment
from streamloader.augment import fused

CPU = torch.device("cpu")


def images(count: int = 3) -> Images:
    return Images.made(CPU, count, (30, 41), 14)


@pytest.mark.parametrize("recipe", RECIPES)
def test_all_make_a_batch_of_one_kind(recipe: str) -> None:
    for name in ("streamloader", "torchvision", "per-sample"):
        out = CONTESTANTS[name].make(recipe, images())(0)
        assert (tuple(out.shape), out.dtype) == ((3, 3, 14, 14), torch.bfloat16)
        assert out.is_contiguous(memory_format=torch.channels_last)


def carried_out(make: Any, recipe: str) -> tuple[Tensor, Tensor]:
    """What plain torch for the whole batch makes of a plan, and what the package does."""
    found, transform = images(), ours(recipe, images())
    table = planned(recipe, found, 0)
    place = {name.rpartition(".")[2]: at for at, name in enumerate(transform.columns)}
    got = make(found.of(0), table, place, 14, jitters=recipe == "jitter")
    return got, transform.run(found.of(0), table)


@pytest.mark.parametrize("recipe", RECIPES)
def test_what_is_compiled_does_the_same_work(recipe: str) -> None:
    got, wanted = carried_out(compiled.weighed, recipe)
    assert got.is_contiguous(memory_format=torch.channels_last)
    apart = (got.float() - wanted.float()).abs()  # bfloat16 weights, and hues of near greys
    assert apart.mean() < 0.02


def test_without_antialias_too() -> None:
    found = Images(images().batches, edge=45, short=45)  # no crop is larger: nothing to average
    transform = augment.Compose(
        [
            augment.RandomResizedCrop(45),
            augment.RandomHorizontalFlip(),
            ours("crop", found).transforms[-2],
        ]
    )
    table = planned("crop", found, 0)
    place = {name.rpartition(".")[2]: at for at, name in enumerate(transform.columns)}
    got = compiled.sampled(found.of(0), table, place, 45, jitters=False)
    wanted = transform.run(found.of(0), table)
    torch.testing.assert_close(got.float(), wanted, atol=0.02, rtol=0.01)


def test_the_limit_moves_the_bytes_of_the_crops_and_the_output() -> None:
    pixels = boxes("crop", images())
    assert 0.1 * 3 * 30 * 41 < pixels < 3 * 30 * 41
    assert boxes("evaluation", images()) == 3 * 30 * 41
    assert CONTESTANTS["copy"].make("crop", images())(0).nbytes == round(
        3 * (pixels + 3 * 14 * 14 * 2) / 2
    )


def test_a_block_is_as_many_repetitions_as_its_cost_says() -> None:
    numbers: list[int] = []
    known = cost(numbers.append, CPU)
    assert (known.launches, known.device_ms, known.waits) == (None, None, None)
    numbers.clear()
    assert block(numbers.append, Cost(None, None, 0.1, None, 5, 0.0), CPU) >= 0
    assert numbers == [0, 1, 2, 3, 4]


def test_tiles_are_put_back() -> None:
    before = fused.TILE, fused.WARPS
    with tiled(8, 64, 2):
        assert (fused.TILE, fused.WARPS) == ((8, 64), 2)
    assert before == (fused.TILE, fused.WARPS)


def test_it_prints_as_it_goes_and_writes_what_it_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any) -> Any:
        raise ValueError("no such thing\nat all")

    monkeypatch.setitem(CONTESTANTS, "compile", Contestant(broken, ""))
    monkeypatch.setitem(CONTESTANTS, "kornia", Contestant(broken, "", {"no_such_module": "it"}))
    file = tmp_path / "found.json"
    only = "crop,copy,streamloader,compile,kornia"
    bench.main(["--device", "cpu", "--quick", "--only", only, "--json", str(file)])
    printed = capsys.readouterr().out
    assert "compile: raised ValueError: no such thing\n" in printed
    assert "kornia: not installed: pip install it" in printed
    found = json.loads(file.read_text(encoding="utf-8"))
    rows = {row["name"]: row for row in found["results"]["crop"]}
    assert list(rows) == ["copy", "streamloader", "kornia", "compile"]
    assert len(rows["streamloader"]["blocks"]) == 3
    assert rows["copy"]["against"] == [1, 1, 1]
    assert found["plan_ms"]["crop"] > 0


def test_tiles_are_compared_with_one_another(capsys: pytest.CaptureFixture[str]) -> None:
    tiles = ["--tiles", "16x32,8x8", "--warps", "2,4"]
    bench.main(["--device", "cpu", "--quick", "--only", "evaluation", *tiles])
    printed = capsys.readouterr().out
    assert re.findall(r"^(\d+x\d+, \d warps) ", printed, re.MULTILINE) == [
        "16x32, 2 warps", "16x32, 4 warps", "8x8, 2 warps", "8x8, 4 warps",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--only", "crop,nobody"], "--only takes crop, .*; got nobody"),
        (["--device", "cpu", "--tiles", "7x8"], "--tiles takes powers of two, got '7x8'"),
        (["--device", "cpu", "--tiles", "8"], "--tiles takes ROWSxCOLUMNS, got '8'"),
        (["--device", "mps"], "--device must be cuda, and torch finds none for 'mps'"),
    ],
)
def test_wrong_arguments_are_told(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        bench.main(arguments)
    assert re.search(message, capsys.readouterr().err)
