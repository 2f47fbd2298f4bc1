"""Weights against torch's own."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from streamloader.augment.taps import taps

edges = st.one_of(st.integers(1, 40), st.integers(1, 8000))
modes = st.sampled_from(["bilinear", "bicubic", "nearest", "nearest-exact"])


@pytest.mark.slow
@settings(max_examples=300)
@given(old=edges, new=edges, mode=modes, antialias=st.booleans())
def test_a_line_is_resized_as_torch_does_it(
    old: int, new: int, mode: str, *, antialias: bool
) -> None:
    nearest = mode.startswith("nearest")  # torch rounds by the dtype to choose between two
    dtype = torch.float32 if nearest else torch.float64
    line = torch.rand(old, dtype=dtype, generator=torch.Generator().manual_seed(0))
    made = taps(torch.arange(new), old, new, mode, antialias=antialias)

    theirs = functional.interpolate(
        line.expand(1, 1, 2, old),
        (2, new),
        mode=mode,
        align_corners=None if nearest else False,
        antialias=antialias and not nearest,
    )[0, 0, 0]
    ours = (line[made.pixels] * made.weights).sum(1)
    wrong = (ours - theirs).abs()
    if mode == "nearest-exact":  # torch's compiler decides between two that are as near
        source = (torch.arange(new).double() + 0.5) * old / new
        wrong[(source - source.round()).abs() < 1e-6 * old] = 0
    # Without antialias torch rounds a pixel's place to float32.
    smooth = antialias or nearest
    assert wrong.max() <= (1e-9 if smooth else old * 2.0**-22)


@given(old=edges, new=edges, mode=modes, antialias=st.booleans())
def test_weights_sum_to_one_and_pixels_are_there(
    old: int, new: int, mode: str, *, antialias: bool
) -> None:
    pixels, weights = taps(torch.arange(new), old, new, mode, antialias=antialias)

    assert pixels.shape == weights.shape
    assert len(pixels) == new
    assert pixels.min() >= 0
    assert pixels.max() < old
    assert (weights.sum(1) - 1).abs().max() < 1e-12


@pytest.mark.xfail(strict=True, reason="torch's antialiased resize on the CPU, to a width of 1")
def test_torch_resizes_columns_of_one_pixel() -> None:
    column = torch.tensor([0.0, 1.0]).view(1, 1, 2, 1)
    made = functional.interpolate(column, (3, 1), mode="bilinear", antialias=True)

    assert made.flatten().tolist() == [0, 0.5, 1]
