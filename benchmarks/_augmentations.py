"""Who is in augment.py, and what each does: the same three recipes, written for each package.

Each is used as its documentation says, with one difference: batches are on the device already, and
what comes out is bfloat16, channels_last. What a package draws it draws anew for each batch.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, TypeAlias

import torch
from torch import Tensor

from benchmarks import _augment_compiled as compiled
from benchmarks._contestants import absent
from streamloader import augment
from streamloader.augment import batches
from streamloader.context import Context

__all__ = ["CONTESTANTS", "RECIPES", "Contestant", "Images", "Run", "boxes", "planned"]

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
JITTER = (0.4, 0.4, 0.4, 0.1)
RECIPES = ("crop", "jitter", "evaluation")
TABLES = 8
"""So many plans go round; the others draw for each batch."""


@dataclass(frozen=True)
class Images:
    """What is augmented: uint8 batches of one size, in turns.

    Attributes:
        batches: (N, 3, H, W) each, on the device.
        edge: Of what comes out, in pixels.
        short: What the shorter edge is resized to for evaluation.
    """

    batches: tuple[Tensor, ...]
    edge: int = 224
    short: int = 256

    @classmethod
    def made(cls, device: torch.device, count: int, size: tuple[int, int], edge: int) -> Images:
        """Two batches of noise: a batch is larger than an L2 cache, two in turns all the more."""
        torch.manual_seed(0)
        shape = (count, 3, *size)
        made = [torch.randint(0, 256, shape, dtype=torch.uint8, device=device) for _ in range(2)]
        return cls(tuple(made), edge, edge * 8 // 7)

    @property
    def device(self) -> torch.device:
        """Where they are."""
        return self.batches[0].device

    def of(self, number: int) -> Tensor:
        """The batch for a repetition."""
        return self.batches[number % len(self.batches)]


Run: TypeAlias = Callable[[int], Any]
"""Augments the batch of a repetition."""


@dataclass(frozen=True)
class Contestant:
    """Someone who augments.

    Attributes:
        make: From a recipe's name and images to what is timed.
        about: How it is used, and what is not the same.
        packages: Modules it needs, with what to `pip install`.
    """

    make: Callable[[str, Images], Run]
    about: str
    packages: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))

    @property
    def lacks(self) -> str | None:
        """Why it cannot run here; None if it can."""
        reasons = (absent(module, package) for module, package in self.packages.items())
        return next((reason for reason in reasons if reason), None)


# -- this package -------------------------------------------------------------------------------


def ours(recipe: str, images: Images) -> augment.Compose:
    """The recipe in this package."""
    edge = images.edge
    moves: list[Any] = [augment.RandomResizedCrop(edge), augment.RandomHorizontalFlip()]
    if recipe == "jitter":
        moves.append(augment.ColorJitter(*JITTER))
    if recipe == "evaluation":
        moves = [augment.Resize(images.short), augment.CenterCrop(edge)]
    values = [augment.Normalize(MEAN, STD), augment.ToDtype(torch.bfloat16)]
    return augment.Compose([*moves, *values], memory_format=torch.channels_last)


def planned(recipe: str, images: Images, number: int) -> Tensor:
    """The plan of a repetition, on the host."""
    layout = batches.layout(images.of(number))
    return ours(recipe, images).plan(layout, Context(0, 0, number, 0))


def boxes(recipe: str, images: Images) -> float:
    """How many pixels a batch's crops have, on the average of the plans that go round."""
    columns = ours(recipe, images).columns
    high, wide = columns.index("view0.height"), columns.index("view0.width")
    tables = [planned(recipe, images, number).double() for number in range(TABLES)]
    return sum(float((table[:, high] * table[:, wide]).sum()) for table in tables) / TABLES


def _stream(recipe: str, images: Images) -> Run:
    transform = ours(recipe, images)
    tables = [planned(recipe, images, n).to(images.device) for n in range(TABLES)]
    return lambda number: transform.run(images.of(number), tables[number % TABLES])


def _compiled(make: Callable[..., Tensor]) -> Callable[[str, Images], Run]:
    def prepare(recipe: str, images: Images) -> Run:
        columns = ours(recipe, images).columns
        tables = [planned(recipe, images, n).to(images.device) for n in range(TABLES)]
        place = {name.rpartition(".")[2]: at for at, name in enumerate(columns)}
        options = {} if images.device.type == "cuda" else {"backend": "eager"}
        function = torch.compile(make, fullgraph=True, dynamic=False, **options)  # type: ignore[call-overload]

        def run(number: int) -> Any:
            table = tables[number % TABLES]
            return function(
                images.of(number), table, place, images.edge, jitters=recipe == "jitter"
            )

        return run

    return prepare


# -- others -------------------------------------------------------------------------------------


def _torchvision(recipe: str, images: Images) -> Any:
    from torchvision.transforms import v2  # noqa: PLC0415  # only where it is asked for

    moves: list[Any] = [v2.RandomResizedCrop(images.edge), v2.RandomHorizontalFlip()]
    if recipe == "jitter":
        moves.append(v2.ColorJitter(*JITTER))
    if recipe == "evaluation":
        moves = [v2.Resize(images.short), v2.CenterCrop(images.edge)]
    return v2.Compose([*moves, v2.ToDtype(torch.float32, scale=True), v2.Normalize(MEAN, STD)])


def _finished(values: Tensor) -> Tensor:
    return values.to(torch.bfloat16, memory_format=torch.channels_last)


def _batched(recipe: str, images: Images) -> Run:
    transform = _torchvision(recipe, images)
    return lambda number: _finished(transform(images.of(number)))


def _per_sample(recipe: str, images: Images) -> Run:
    transform = _torchvision(recipe, images)
    return lambda number: _finished(torch.stack([transform(image) for image in images.of(number)]))


def _kornia(recipe: str, images: Images) -> Run:
    from kornia import augmentation as k  # type: ignore[import-not-found]  # noqa: PLC0415

    edge = (images.edge, images.edge)
    moves = [k.RandomResizedCrop(edge), k.RandomHorizontalFlip()]
    if recipe == "jitter":
        moves.append(k.ColorJitter(*JITTER, p=1.0))
    if recipe == "evaluation":
        resize = k.Resize(images.short, side="short", antialias=True)
        moves = [resize, k.CenterCrop(edge)]
    normalize = k.Normalize(torch.tensor(MEAN), torch.tensor(STD))
    transform = k.AugmentationSequential(*moves, normalize, data_keys=["input"])
    transform.to(images.device)

    def run(number: int) -> Tensor:
        with torch.no_grad():
            return _finished(transform(images.of(number).float() / 255))

    return run


# -- the limit ----------------------------------------------------------------------------------


def _copy(*, whole: bool) -> Callable[[str, Images], Run]:
    """As many bytes in and out, in one copy from device to device."""

    def prepare(recipe: str, images: Images) -> Run:
        batch = images.of(0)
        pixels = batch[:, 0].numel() if whole else boxes(recipe, images)
        out = len(batch) * images.edge**2 * torch.bfloat16.itemsize
        nbytes = round(3 * (pixels + out) / 2)
        sources = [torch.zeros(nbytes, dtype=torch.uint8, device=batch.device) for _ in range(2)]
        target = torch.empty_like(sources[0])
        return lambda number: target.copy_(sources[number % 2])

    return prepare


TORCHVISION = MappingProxyType({"torchvision": "torchvision"})

CONTESTANTS: dict[str, Contestant] = {
    "copy": Contestant(_copy(whole=False), "a copy of the crops' bytes in and the output's out"),
    "copy-whole": Contestant(_copy(whole=True), "likewise, of whole images' bytes in"),
    "streamloader": Contestant(_stream, "plans made beforehand, on the device"),
    "torchvision": Contestant(_batched, "v2 on the batch: one draw for all of it", TORCHVISION),
    "per-sample": Contestant(_per_sample, "v2 on each image, then stack", TORCHVISION),
    "kornia": Contestant(
        _kornia,
        "AugmentationSequential on floats, as its documentation has it",
        MappingProxyType({"kornia": "kornia"}),
    ),
    "compile": Contestant(
        _compiled(compiled.sampled),
        "torch.compile of plain torch for the whole batch, our plans; four pixels, NO ANTIALIAS",
    ),
    "compile-aa": Contestant(
        _compiled(compiled.weighed),
        "the same with antialias: two matrix products in bfloat16 for an image",
    ),
}


@contextlib.contextmanager
def tiled(rows: int, columns: int, warps: int) -> Any:
    """Within it, kernels have other tiles."""
    from streamloader.augment import fused  # noqa: PLC0415  # it imports Triton

    before = fused.TILE, fused.WARPS
    fused.TILE, fused.WARPS = (rows, columns), warps
    try:
        yield
    finally:
        fused.TILE, fused.WARPS = before
