"""A model evaluated with this package says what it says with torchvision's pipeline."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torchvision.models import resnet18
from torchvision.transforms import v2

from streamloader import augment
from streamloader.context import Context

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
TOLERANCE = 1e-3
"""Of logits of some units: both pipelines compute in float32, and add in another order."""


def photographs(count: int, height: int, width: int) -> Tensor:
    """Smooth, with some noise: float32 in 0..1."""
    made = torch.Generator().manual_seed(0)
    rough = torch.rand(count, 3, 6, 8, generator=made)
    smooth = torch.nn.functional.interpolate(rough, (height, width), mode="bicubic")
    return (smooth + 0.1 * torch.rand(smooth.shape, generator=made)).clamp(0, 1)


def logits_of(device: str, count: int, size: tuple[int, int], edges: tuple[int, int]) -> Any:
    """Logits with this package, with torchvision, and how far apart different images' are."""
    short, edge = edges
    torch.manual_seed(0)
    model = resnet18(num_classes=100).to(device).eval()
    batch = photographs(count, *size).to(device)
    steps = [augment.Resize(short), augment.CenterCrop(edge), augment.Normalize(MEAN, STD)]
    recipe = augment.Compose(steps)
    ours = recipe.run(batch, recipe.plan(batch, Context(0, 0, 0, 0)).to(device))
    theirs = v2.Compose([v2.Resize(short), v2.CenterCrop(edge), v2.Normalize(MEAN, STD)])(batch)
    with torch.inference_mode():
        return model(ours), model(theirs)


def assert_alike(mine: Tensor, theirs: Tensor) -> None:
    apart = (theirs - theirs.roll(1, 0)).abs().max()
    assert apart > 100 * TOLERANCE  # else it would say nothing
    torch.testing.assert_close(mine, theirs, rtol=0, atol=TOLERANCE)


def test_logits_are_those_of_torchvisions_pipeline() -> None:
    assert_alike(*logits_of("cpu", 4, (75, 100), (73, 64)))


@pytest.mark.slow
def test_of_images_of_a_usual_size_too() -> None:
    assert_alike(*logits_of("cpu", 2, (375, 500), (256, 224)))


def test_uint8_images_are_rounded_once() -> None:
    """v2 rounds uint8 after the resize, this package never: up to half a level apart."""
    batch = (photographs(4, 75, 100) * 255).round().to(torch.uint8)
    steps = [augment.Resize(73), augment.CenterCrop(64), augment.Normalize(MEAN, STD)]
    recipe = augment.Compose(steps)
    ours = recipe.run(batch, recipe.plan(batch, Context(0, 0, 0, 0)))
    scaled = [v2.ToDtype(torch.float32, scale=True), v2.Normalize(MEAN, STD)]
    theirs = v2.Compose([v2.Resize(73), v2.CenterCrop(64), *scaled])(batch)
    assert (ours - theirs).abs().max() <= 1 / 255 / min(STD)
