"""The examples run, as a reader runs them: for three steps, on the CPU."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.slow


def run(folder: Path, *command: object) -> str:
    """What `python COMMAND...` prints, run in `folder` without an accelerator."""
    environment = os.environ | {
        "PYTHONPATH": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        environment.pop(name, None)
    done = subprocess.run(
        [sys.executable, *map(str, command)],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def shards(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """24 images in 4 shards."""
    folder = tmp_path_factory.mktemp("shards")
    options = ("--images", 24, "--seed", 0, "--shard-size", 6, "--workers", 1)
    run(folder, ROOT / "scripts/make_shards.py", "--out", folder, *options)
    return folder


def train_imagenet(shards: Path, epochs: int = 1) -> list[object]:
    sizes = ("--model", "resnet18", "--image-size", 64, "--batch-size", 4)
    workers = ("--workers", 1, "--val-workers", 1)
    ends = ("--epochs", epochs, "--steps", 3)
    sets = ("--train", shards, "--val", shards)
    return [ROOT / "examples/train_imagenet.py", *sets, *sizes, *workers, *ends]


EPOCH = (
    r"epoch 0: loss \d\.\d{3}, accuracy \d+\.\d\d%, \d+ images/s\nepoch: 3 batches.*, .*\n.*\n"
    r"skipped: 0 in training, 0 in validation \(this rank\)\n"
)


def test_train_imagenet_trains_validates_and_saves(shards: Path, tmp_path: Path) -> None:
    assert re.fullmatch(EPOCH, run(tmp_path, *train_imagenet(shards)))
    saved = torch.load(tmp_path / "checkpoint.pt")
    assert saved.keys() == {"epoch", "model", "optimizer", "schedule"}
    assert saved["model"]["bn1.num_batches_tracked"] == 3
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint.pt"]

    again = run(tmp_path, *train_imagenet(shards, epochs=2), "--resume", "checkpoint.pt")
    assert re.fullmatch(EPOCH.replace("epoch 0", "epoch 1"), again)
    saved = torch.load(tmp_path / "checkpoint.pt")
    assert saved["epoch"] == 1
    assert saved["model"]["bn1.num_batches_tracked"] == saved["schedule"]["last_epoch"] == 6


def test_two_ranks_train_and_one_of_them_reports(shards: Path, tmp_path: Path) -> None:
    launch = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2)
    assert re.fullmatch(EPOCH, run(tmp_path, *launch, *train_imagenet(shards)))
    assert (tmp_path / "checkpoint.pt").exists()


def test_cifar_laptop_learns_the_same_with_both_loops(tmp_path: Path) -> None:
    printed = run(tmp_path, ROOT / "examples/cifar_laptop.py", "--epochs", 1, "--steps", 3)
    accuracies = re.findall(r"^(\w+): accuracy (\S+%) after \d+\.\d s$", printed, re.MULTILINE)
    assert [name for name, _ in accuracies] == ["plain", "streamloader"]
    assert accuracies[0][1] == accuracies[1][1]
