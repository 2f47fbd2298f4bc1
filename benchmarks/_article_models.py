"""The article's networks, at its sizes, and a step with what is trained.

    encoder     Conv2d 3->16 (k1), then eight of k2 s2 that double 16->4096; ReLU between
    decoder     its mirror of ConvTranspose2d, and a Conv2d 16->10 (k3) at the end
    classifier  the encoder, Flatten, Linear(4096, 10)

All in float32, as there, with SGD and cross entropy. The first weights are not torch's own, under
which a signal fades: after eight levels neither features nor loss would tell one batch from
another, and rungs could not be checked.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional
from typing_extensions import override

__all__ = ["FULL", "TINY", "Encoder", "Shape", "Step", "Trained", "classifier", "decoder"]

CLASSES = 10
RATE = 1e-5
"""Of SGD; small enough that thousands of steps on random labels diverge nowhere. (There: 1e-3.)"""


@dataclass(frozen=True)
class Shape:
    """How large the networks are.

    Attributes:
        side: Pixels of an image's side; `levels` halvings make one of it.
        levels: Convolutions of stride 2.
        width: Channels at full size; each level doubles them.
    """

    side: int
    levels: int
    width: int

    @property
    def deepest(self) -> int:
        """Channels of the features, which are one pixel."""
        return self.width << self.levels


FULL = Shape(256, 8, 16)
"""The article's."""

TINY = Shape(16, 4, 4)
"""To see on the CPU that all runs."""

BLOCKS_AFTER = 3
"""The level after which an encoder may be made longer: there 128 channels of 32x32 at full size,
so that at a small batch a block's kernel has fewer tiles than the GPU has multiprocessors."""


class Encoder(nn.Module):
    """Images "b 3 side side" to features "b deepest 1 1".

    Args:
        shape: How large.
        most: Up to so many blocks can be added, to make it as slow as something else is.
    """

    def __init__(self, shape: Shape, most: int = 0) -> None:
        super().__init__()
        widths = [shape.width * 2**level for level in range(shape.levels + 1)]
        layers: list[nn.Module] = [nn.Conv2d(3, shape.width, 1)]
        for narrow, wide in itertools.pairwise(widths):
            layers += [nn.ReLU(), nn.Conv2d(narrow, wide, 2, stride=2)]
        split = 1 + 2 * BLOCKS_AFTER
        self.before, self.after = nn.Sequential(*layers[:split]), nn.Sequential(*layers[split:])
        middle = widths[BLOCKS_AFTER]
        made = [nn.Conv2d(middle, middle, 3, padding=1) for _ in range(most)]
        self.blocks = nn.ModuleList(made)
        self._made = tuple(made)  # to be sliced in no time: a ModuleList's slice is a new one
        _kept(self.before, self.after)
        for block in made:  # next to nothing is added, whatever their number
            nn.init.normal_(block.weight, std=0.1 / (9 * middle))
        self.used = 0
        """How many of the blocks are run."""

    @override
    def forward(self, images: Tensor) -> Tensor:
        """The features."""
        middle: Tensor = self.before(images)
        for block in self._made[: self.used]:
            middle = middle + functional.relu(block(middle))
        features: Tensor = self.after(middle)
        return features

    def frozen(self) -> Encoder:
        """Itself, in eval mode, and no weight asks for gradients."""
        return self.eval().requires_grad_(requires_grad=False)


def decoder(shape: Shape) -> nn.Module:
    """Features to logits "b 10 side side"."""
    widths = [shape.width * 2**level for level in range(shape.levels, -1, -1)]
    layers: list[nn.Module] = []
    for wide, narrow in itertools.pairwise(widths):
        layers += [nn.ConvTranspose2d(wide, narrow, 2, stride=2), nn.ReLU()]
    return _kept(nn.Sequential(*layers, nn.Conv2d(shape.width, CLASSES, 3, padding=1)))


def _kept(*parts: nn.Module) -> nn.Module:
    """The first of the parts; the weights of all keep a signal as large as it is."""
    for part in parts:
        for layer in part.modules():
            if isinstance(layer, nn.Conv2d | nn.ConvTranspose2d):
                inputs = layer.in_channels  # an output pixel of a k2 s2 transpose has one of each
                reach = 1 if isinstance(layer, nn.ConvTranspose2d) else layer.kernel_size[0] ** 2
                nn.init.normal_(layer.weight, std=(2 / (inputs * reach)) ** 0.5)
    return parts[0]


def classifier(shape: Shape) -> nn.Module:
    """Images to logits "b 10"."""
    encoder = Encoder(shape)
    first = encoder.before[0]
    assert isinstance(first, nn.Conv2d)
    with torch.no_grad():
        first.weight.div_(255)  # the article augments bytes, and leaves them as large as they are
    return nn.Sequential(encoder, nn.Flatten(), nn.Linear(shape.deepest, CLASSES))


class Step:
    """A plain training step: forward, backward, SGD.

    Args:
        net: What is trained, on the device.
    """

    def __init__(self, net: nn.Module) -> None:
        self._net = net.train()
        self._optimizer = torch.optim.SGD(net.parameters(), lr=RATE)

    def __call__(self, batch: Tensor, labels: Tensor) -> Tensor:
        """The loss, unread, and without what autograd kept: a graph must not meet an old one."""
        self._optimizer.zero_grad(set_to_none=True)
        loss = functional.cross_entropy(self._net(batch), labels)
        loss.backward()
        self._optimizer.step()
        return loss.detach()


class Trained:
    """What is trained, and the way back to its first weights.

    All rungs of a size train one network, by turns: each would else need weights, gradients and
    captured graphs of its own.

    Args:
        net: On the device.
    """

    def __init__(self, net: nn.Module) -> None:
        self.net = net
        self.step = Step(net)
        self._first = [weight.detach().clone() for weight in net.parameters()]

    def reset(self) -> None:
        """The first weights, in place: captured graphs read these very tensors."""
        with torch.no_grad():
            for weight, first in zip(self.net.parameters(), self._first, strict=True):
                weight.copy_(first)

    def moved(self) -> Tensor:
        """How far the weights are from the first ones, a scalar on the device."""
        pairs = zip(self.net.parameters(), self._first, strict=True)
        return torch.stack([(now.detach() - first).abs().sum() for now, first in pairs]).sum()
