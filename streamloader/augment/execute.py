"""Who runs a program: Triton on CUDA, plain torch elsewhere. They agree but for rounding."""

from __future__ import annotations

import functools
import importlib.util
import warnings
from collections.abc import Sequence

import torch
from torch import Tensor

from streamloader.augment import reference
from streamloader.augment.layout import Layout
from streamloader.augment.program import Program
from streamloader.augment.ragged import Images

__all__ = ["run"]


def run(program: Program, images: Images, table: Tensor, sizes: Sequence[Layout]) -> Tensor:
    """The images that come out.

    Args:
        program: What is done.
        images: (N, C, H, W), (C, H, W), or ragged; of the dtype that the program is for.
        table: float32, (N, columns), on the images' device.
        sizes: Of the images as they come in, and after each pass.

    Returns:
        (N, C, H', W') or (C, H', W'), in the program's dtype and memory format. Gradients pass
        through plain torch alone, which then runs on CUDA too.
    """
    gradients = torch.is_grad_enabled() and isinstance(images, Tensor) and images.requires_grad
    if images.is_cuda and not gradients and _has_triton():
        from streamloader.augment import fused  # noqa: PLC0415  # it imports Triton

        return fused.run(program, images, table, sizes)
    return reference.run(program, images, table)


@functools.lru_cache(maxsize=1)
def _has_triton() -> bool:
    found = importlib.util.find_spec("triton") is not None
    if not found:
        warnings.warn(
            "augmentation on this GPU goes one image at a time, slowly, because Triton is not "
            "installed: pip install triton",
            stacklevel=2,
        )
    return found
