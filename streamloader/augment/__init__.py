"""Per-sample augmentation of batches of images, with torchvision v2's names and arguments.

    plan(batch, context) ──► table ──► run(batch, table)
    on the host              a row     on the batch's device,
    sizes alone, pure        a sample  draws nothing

    program(dtype) ──► passes: resample (crops, resize, flips, in one), then the pixels' operations
    pure               that fuse

Decide, then do: where a batch is cropped and how it is jittered is decided from its context (seed,
epoch, number, rank) and its images' sizes, and is a table that can be looked at and replayed.
docs/augment.md shows how, and what each transform does.

    compose.py    transforms in a row, as one: `Compose`
    recipe.py     what it and each transform can do: plan, run, be called
    crops.py      crops
    geometry.py   flips, resize
    color.py      jitter, grey
    values.py     normalise, other dtypes
    erase.py      random erasing
    mix.py        two samples as one: MixUp, CutMix, a choice of them
    mixing.py     what those can do: plan, run, be called
    preview.py    a grid of a batch's images, to look at
    step.py       what a transform tells of itself; how to add one
    checks.py     arguments; pure
    lower.py      transforms to a program: what fuses; pure
    program.py    the program, which executors run; pure
    view.py       crops, resize and flips as one, and when they are; pure
    plans.py      the table; pure
    draws.py      random numbers from a key and a place; pure
    layout.py     the sizes of a batch's images; pure
    ragged.py     images of different sizes, as a batch
    batches.py    which part of a batch holds the images
    labels.py     which holds the labels
    execute.py    who runs a program: one of the next two
    reference.py  the executor in plain torch: the definition
    fused.py      the executor in Triton: a kernel a pass
    kernels.py    the kernel; kernel_views.py, kernel_ops.py: its parts
    taps.py       which pixels a resized one is made of; pure
    noise.py      random pixels, from a key and a place too

Where it differs from torchvision, and why:

    each image has draws of its own, where v2 draws once for a batch
    `Normalize` scales uint8 to 0..1, where v2 refuses it
    a chain is float32 from end to end and rounded once, to the nearest, where v2's uint8 is cut off
        after each step, its greys too: up to a level after one step, more after several
    float64 images are computed in float32 as well
    ranges that fall are errors, where v2 warns; `inplace=True` and paddings of other modes are too
    an edge that v2's formula makes 0 pixels long is 1
    `tv_tensors.Image` comes out as a plain tensor; boxes, masks and such are refused
"""

from __future__ import annotations

try:
    import numpy  # noqa: F401, ICN001
except ImportError as error:
    raise ImportError(
        'streamloader.augment plans with NumPy: pip install "streamloader[augment]"'
    ) from error

from streamloader.augment.color import ColorJitter, RandomGrayscale
from streamloader.augment.compose import Compose
from streamloader.augment.crops import CenterCrop, RandomCrop, RandomResizedCrop
from streamloader.augment.erase import RandomErasing
from streamloader.augment.geometry import RandomHorizontalFlip, RandomVerticalFlip, Resize
from streamloader.augment.layout import Layout
from streamloader.augment.mix import CutMix, MixUp, RandomChoice
from streamloader.augment.preview import preview
from streamloader.augment.ragged import RaggedImages, collate
from streamloader.augment.values import Normalize, ToDtype

__all__ = [
    "CenterCrop",
    "ColorJitter",
    "Compose",
    "CutMix",
    "Layout",
    "MixUp",
    "Normalize",
    "RaggedImages",
    "RandomChoice",
    "RandomCrop",
    "RandomErasing",
    "RandomGrayscale",
    "RandomHorizontalFlip",
    "RandomResizedCrop",
    "RandomVerticalFlip",
    "Resize",
    "ToDtype",
    "collate",
    "preview",
]
