"""The training step that is fed: a model, and one of three ways to take a step with it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks._require import require

__all__ = [
    "IMAGE_MEAN",
    "IMAGE_SIZES",
    "IMAGE_STD",
    "STEPS",
    "Normalize",
    "Step",
    "eager",
    "graphed",
    "model",
    "with_item",
]

Step: TypeAlias = Callable[[Tensor, Tensor], Any]
"""Takes transformed images and labels that are on the device."""

IMAGE_SIZES = {"resnet101": 224, "resnet50": 224, "resnet18": 224, "small": 32}
"""The models, and the image size in pixels that each is benchmarked at."""

STEPS = ("eager", "graph", "item")
"""A plain step; all of it as one CUDA graph; a plain one that reads its loss each time."""

IMAGE_MEAN = (0.485, 0.456, 0.406)
IMAGE_STD = (0.229, 0.224, 0.225)

SMALL_DEPTH = 60
SMALL_WIDTH = 128


class Normalize:
    """uint8 images as normalised `dtype`, channels_last. The transform of every loader.

    Args:
        device: Where images are.
        dtype: What to cast to.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        mean = torch.tensor(IMAGE_MEAN, device=device) * 255
        std = torch.tensor(IMAGE_STD, device=device) * 255
        self._dtype = dtype
        self._mean = mean.view(1, 3, 1, 1).to(dtype)
        self._scale = (1 / std).view(1, 3, 1, 1).to(dtype)

    def __call__(self, images: Tensor) -> Tensor:
        """`images`, "b 3 h w" of 0 to 255, in memory of their own."""
        cast = images.to(self._dtype, memory_format=torch.channels_last)
        return cast.sub_(self._mean).mul_(self._scale)


def model(name: str, image_size: int) -> nn.Module:
    """A fresh model of `IMAGE_SIZES`, on the CPU."""
    if name == "small":
        return _small(image_size)
    return require("torchvision.models").get_model(name, weights=None)  # type: ignore[no-any-return]


def _small(image_size: int) -> nn.Module:
    """Many layers that each are next to nothing for a GPU: Python and launches bound its step."""
    cells = (image_size // 4) ** 2
    layers: list[nn.Module] = [nn.Conv2d(3, 16, 4, stride=4), nn.ReLU(), nn.Flatten()]
    layers += [nn.Linear(16 * cells, SMALL_WIDTH), nn.ReLU()]
    for _ in range(SMALL_DEPTH):
        layers += [nn.Linear(SMALL_WIDTH, SMALL_WIDTH), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(SMALL_WIDTH, 1000))


def eager(net: nn.Module, device: torch.device, dtype: torch.dtype) -> Step:
    """A normal training step with SGD and momentum, under autocast unless `dtype` is float32.

    Args:
        net: Moved to `device`, channels_last.
        device: Where to train.
        dtype: Of the images.

    Returns:
        A step that returns its loss, unread.
    """
    net.to(device, memory_format=torch.channels_last).train()  # type: ignore[call-overload]
    # Small enough that random labels neither diverge nor are learnt at once: arithmetic on
    # infinities or zeros can run at another speed.
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3, momentum=0.9)
    mixed = dtype is not torch.float32

    def step(images: Tensor, labels: Tensor) -> Tensor:
        optimizer.zero_grad(set_to_none=True)
        # No cache: each weight is cast once a step anyway, and a graph must not keep a cast.
        with torch.autocast(device.type, dtype, enabled=mixed, cache_enabled=False):
            loss = functional.cross_entropy(net(images), labels)
        loss.backward()
        optimizer.step()
        return loss.detach()

    return step


def with_item(step: Step) -> Step:
    """`step`, reading its loss each time as many loops do: nothing runs ahead of the device."""

    def read(images: Tensor, labels: Tensor) -> None:
        step(images, labels).item()

    return read


def graphed(step: Step, images: Tensor, labels: Tensor) -> Step:
    """All of `step`, forward to optimizer, as one CUDA graph.

    Args:
        step: Has run on such batches before.
        images: The graph reads this very tensor.
        labels: And this one.

    Returns:
        A step that copies its batch into these two, unless it is given these very tensors.
    """
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step(images, labels)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    # Other threads, a DataLoader's pinning one say, may allocate meanwhile.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        step(images, labels)

    def replay(new_images: Tensor, new_labels: Tensor) -> None:
        if new_images is not images:
            images.copy_(new_images)
            labels.copy_(new_labels)
        graph.replay()

    return replay
