"""The command line of imagenet_shards.py, and what it means on this machine."""

from __future__ import annotations

import argparse
import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks._loaders import RECIPES
from benchmarks._models import IMAGE_SIZES, STEPS
from benchmarks._recipes import AUGMENT
from benchmarks._shards import SOURCES

__all__ = [
    "ALONE",
    "CEILING",
    "LOADERS",
    "Machine",
    "Options",
    "describe",
    "machine",
    "parse",
    "resolved",
]

ALONE = "alone"
CEILING = "ceiling"

LOADERS = {
    "memory": ("plain", "pinned", "stream"),
    "shards": ("plain", "pinned", "stream", "timm", "torchtnt", ALONE),
}
"""What is measured of each source if nobody says, beside the ceiling."""


@dataclass(frozen=True)
class Machine:
    """What the defaults depend on.

    Attributes:
        accelerator: The type of the accelerator, None without one.
        cpus: How many this process may use.
    """

    accelerator: str | None
    cpus: int


@dataclass(frozen=True)
class Options:
    """One run's settings, none of them open.

    Attributes:
        source: A key of `_shards.SOURCES`.
        shards: Where they are: a folder, an `index.json` or a pattern; None for other sources.
        augment: Who augments: one of `_recipes.AUGMENT`.
        loaders: Keys of `_loaders.RECIPES`, the ceiling always among them.
        model: A key of `_models.IMAGE_SIZES`.
        step: One of `_models.STEPS`.
        device: As torch names it.
        batch_size: Images in a batch.
        image_size: Their width and height in pixels.
        workers: Processes of each loader's DataLoader.
        prefetch_factor: Batches that each of them has in hand.
        prefetch_batches: StreamLoader's.
        blocks: Timed blocks of each loader.
        block_seconds: What a block lasts, at least; None is what the pace says.
        steps: Steps in a block; of shards, rounded up to a multiple of the workers. None for those
            that end by time, which shards' blocks do, as rates there may differ several times; and
            until `_timing.steps_in_block` knows the step's.
        late: Every how manyth batch comes late; 0 is none.
        late_ms: By how much; None until the step's time is known, which it is twice of.
        seed: Of images, weights, and the order of the blocks.
        json: Where to write every block's values.
        plot: Where to write the picture.
    """

    source: str
    shards: str | None
    augment: str
    loaders: tuple[str, ...]
    model: str
    step: str
    device: str
    batch_size: int
    image_size: int
    workers: int
    prefetch_factor: int
    prefetch_batches: int
    blocks: int
    block_seconds: float | None
    steps: int | None
    late: int
    late_ms: float | None
    seed: int
    json: Path | None
    plot: Path | None

    @property
    def in_workers(self) -> int:
        """How many batches the workers can have in hand."""
        return self.workers * self.prefetch_factor

    @property
    def overlaps(self) -> bool:
        """Whether the device works beside the CPU."""
        return not self.device.startswith("cpu")


def machine() -> Machine:
    """This one."""
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    usable = getattr(os, "sched_getaffinity", None)
    cpus = len(usable(0)) if usable else os.cpu_count() or 1
    return Machine(found.type if found else None, cpus)


def describe(device: torch.device) -> dict[str, Any]:
    """What it ran on."""
    on_cuda = device.type == "cuda"
    return {
        "device": torch.cuda.get_device_name(device) if on_cuda else device.type.upper(),
        "cpus": machine().cpus,
        "torch": torch.__version__,
        "cuda": torch.version.cuda if on_cuda else None,
        "python": platform.python_version(),
    }


def parse(arguments: Sequence[str] | None) -> tuple[Options, ...]:
    """The settings of each run that the command line and this machine give; exits on a bad one."""
    parser = _parser()
    given = vars(parser.parse_args(arguments))
    try:
        return resolved(given, machine())
    except ValueError as error:
        parser.error(str(error))


def resolved(given: dict[str, Any], here: Machine) -> tuple[Options, ...]:
    """The settings of each run, one for each number of workers.

    With a default in place of every None that the machine or the model decides.

    Raises:
        ValueError: Two of them do not go together, or a number is too small.
    """
    device = given["device"] or here.accelerator or "cpu"
    overlaps = not device.startswith("cpu")
    model = given["model"] or ("resnet50" if overlaps else "resnet18")
    defaults = {
        "device": device,
        "model": model,
        "batch_size": 256 if overlaps else 16,
        "image_size": IMAGE_SIZES[model] if overlaps else min(IMAGE_SIZES[model], 64),
        "workers": (max(min(14, here.cpus - 2), 1),),
        "loaders": ",".join(LOADERS[given["source"]]),
    }
    values = given | {name: value for name, value in defaults.items() if given[name] is None}
    values["loaders"] = _loaders(values["loaders"])
    few = values.pop("sweep_loaders")
    most = max(values["workers"])
    runs = [
        values | {"workers": workers, "blocks": blocks}
        for workers, blocks in _paired(values["workers"], values["blocks"])
    ]
    for run in runs:
        if few is not None and run["workers"] != most:
            run["loaders"] = _loaders(few, "--sweep-loaders")
    for run in runs:
        _check(run)
    return tuple(Options(**run) for run in runs)


def _paired(workers: tuple[int, ...], blocks: tuple[int, ...]) -> list[tuple[int, int]]:
    if len(set(workers)) != len(workers):
        raise ValueError(f"--workers must be different numbers, got {_listed(workers)}")
    if len(blocks) == 1:
        return [(number, blocks[0]) for number in workers]
    if len(blocks) != len(workers):
        raise ValueError(
            f"--blocks must be one number, or one for each of --workers {_listed(workers)}, got "
            f"{_listed(blocks)}"
        )
    return list(zip(workers, blocks, strict=True))


def _listed(numbers: tuple[int, ...]) -> str:
    return ",".join(map(str, numbers))


def _loaders(text: str, option: str = "--loaders") -> tuple[str, ...]:
    names = dict.fromkeys(name.strip() for name in text.split(",") if name.strip())
    unknown = [name for name in names if name not in RECIPES]
    if unknown:
        raise ValueError(f"{option} must be among {', '.join(RECIPES)}, got {unknown[0]!r}")
    return (*(name for name in names if name != CEILING), CEILING)


def _check(values: dict[str, Any]) -> None:
    if values["step"] == "graph" and not values["device"].startswith("cuda"):
        raise ValueError(f"--step graph needs a CUDA device, got {values['device']}")
    _check_source(values)
    smallest = {"batch_size": 2, "late": 0, "seed": 0, "prefetch_batches": 0}
    for name, value in values.items():
        least = smallest.get(name, 1)
        if isinstance(value, int) and value < least:
            raise ValueError(f"--{name.replace('_', '-')} must be at least {least}, got {value}")


def _check_source(values: dict[str, Any]) -> None:
    on_shards = values["source"] == "shards"
    if on_shards and not values["shards"]:
        raise ValueError(
            "--source shards needs --shards DIR, with shards in it; to make some: "
            "scripts/make_shards.py --out DIR --images 20000 --seed 0"
        )
    if values["shards"] and not on_shards:
        raise ValueError(f"--shards needs --source shards, got {values['source']}")
    if values["augment"] == "gpu-cut" and not on_shards:
        raise ValueError(f"--augment gpu-cut needs --source shards, got {values['source']}")
    if on_shards and values["late"]:
        raise ValueError("--late needs --source memory, got shards")
    if values["block_seconds"] is not None and values["block_seconds"] <= 0:
        raise ValueError(f"--block-seconds must be above 0, got {values['block_seconds']:g}")


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(word) for word in text.split(","))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description="How near to the ceiling do loaders feed a training step? The ceiling is the "
        "same step on one batch that stays on the device."
    )
    add = parser.add_argument
    add("--source", choices=SOURCES, default="memory", help="where batches come from")
    add("--shards", metavar="DIR", help="their folder, index.json or brace pattern")
    who = "cpu: workers crop, resize, flip; gpu: the device does; gpu-jitter: and changes colours; "
    who += "gpu-full: and makes grey, erases; "
    who += "gpu-cut: workers cut the crop's box out of an image, no more; default: cpu"
    add("--augment", choices=AUGMENT, default="cpu", help=who)
    add("--loaders", metavar="A,B", help=f"of {','.join(RECIPES)}; default: the source's")
    few = "of a sweep's runs but the one with the most workers; default: as --loaders"
    add("--sweep-loaders", metavar="A,B", help=few)
    add("--model", choices=IMAGE_SIZES, help="default: resnet50, on the CPU resnet18")
    add("--step", choices=STEPS, default="eager", help="default: %(default)s")
    add("--device", help="default: the accelerator, else the CPU")
    add("--batch-size", type=int, metavar="N", help="default: 256, on the CPU 16")
    add("--image-size", type=int, metavar="PX", help="default: the model's, on the CPU at most 64")
    many = "default: all CPUs but two, at most 14; several, as 2,4,8: a run of each"
    add("--workers", type=_numbers, metavar="N", help=many)
    add("--prefetch-factor", type=int, default=4, metavar="N", help="the DataLoader's; default: 4")
    add("--prefetch-batches", type=int, default=2, metavar="N", help="StreamLoader's; default: 2")
    many = "timed blocks of each loader; default: 7; several: for each of --workers"
    add("--blocks", type=_numbers, default=(7,), metavar="N", help=many)
    add("--block-seconds", type=float, metavar="S", help="default: 5, on the CPU 0.5; or more")
    whole = "in a block; default: many, of shards by time; of shards rounded up to all workers"
    add("--steps", type=int, metavar="N", help=whole)
    add("--late", type=int, default=0, metavar="N", help="every Nth batch comes late; default: no")
    add("--late-ms", type=float, metavar="MS", help="by how much; default: twice the step's time")
    add("--seed", type=int, default=0, metavar="N", help="default: 0")
    add("--json", type=Path, metavar="FILE", help="write every block's values")
    add("--plot", type=Path, metavar="FILE", help="draw shares of the ceiling and step times")
    return parser
