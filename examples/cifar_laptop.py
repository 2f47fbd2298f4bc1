"""A small network on small pictures, with the plain loop and with streamloader: a minute, anywhere.

    python examples/cifar_laptop.py

The data are made here, of CIFAR's shape: nothing is downloaded. Each class is a grating of a
direction and a colour of its own, at a random place, under noise. On a CPU both loops take equally
long, as there is nothing to overlap; they learn the same.
"""

import argparse
import itertools
import math
import time
from collections.abc import Callable, Iterable
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, TensorDataset

from streamloader import StreamLoader, on

CLASSES, SIZE = 10, 32
Batches: TypeAlias = Iterable[tuple[Tensor, Tensor]]


def made(count: int, seed: int) -> TensorDataset:
    """Pictures, uint8 (count, 3, 32, 32), and their classes."""
    rng = torch.Generator().manual_seed(seed)
    labels = torch.randint(CLASSES, (count,), generator=rng)
    angle = (labels * math.pi / CLASSES).view(-1, 1, 1, 1)
    rows, columns = torch.meshgrid(torch.arange(SIZE), torch.arange(SIZE), indexing="ij")
    place = torch.rand(count, 1, 1, 1, generator=rng) * 2 * math.pi
    wave = (0.8 * (rows * angle.sin() + columns * angle.cos()) + place).sin()
    colour = 0.5 + 0.5 * (2 * angle + torch.tensor([0.0, 2.1, 4.2]).view(3, 1, 1)).cos()
    noise = torch.randn(count, 3, SIZE, SIZE, generator=rng)
    pictures = 128 + 40 * wave * colour + 100 * noise
    return TensorDataset(pictures.clamp(0, 255).to(torch.uint8), labels)


def normalize(images: Tensor) -> Tensor:
    """Bytes to floats of about mean 0 and deviation 1."""
    return images.float().sub_(128).div_(64)


def network() -> nn.Module:
    """Three convolutions, each at half the size of the one before."""
    layers: list[nn.Module] = []
    for before, after in itertools.pairwise((3, 32, 64, 128)):
        layers += [nn.Conv2d(before, after, 3, 2, 1), nn.BatchNorm2d(after), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, CLASSES))


def plain(loader: Batches, device: torch.device) -> Batches:
    """What one writes without streamloader: copy, normalise, train; copy, normalise, train."""
    for images, labels in loader:
        yield normalize(images.to(device)), labels.to(device)


def fit(name: str, start: Callable[[], Batches], args: argparse.Namespace, device: Any) -> None:
    """Trains on the passes that `start()` starts; prints the accuracy, and how long it took."""
    torch.manual_seed(0)
    model = network().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    begin = time.perf_counter()
    for _ in range(args.epochs):
        for images, labels in itertools.islice(start(), args.steps):
            loss = cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    images, labels = made(2_000, seed=1).tensors
    with torch.no_grad():
        right = model.eval()(normalize(images.to(device))).argmax(1).cpu() == labels
    seconds = time.perf_counter() - begin
    print(f"{name}: accuracy {right.float().mean():.1%} after {seconds:.1f} s")


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="A small network on small pictures")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--steps", type=int, help="stop each epoch after so many")
    args = parser.parse_args()
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")

    loader = DataLoader(made(10_000, seed=0), batch_size=100, shuffle=True)
    fit("plain", lambda: plain(loader, device), args, device)

    stream = StreamLoader(loader, device, transform=on(0, normalize))  # the one line
    fit("streamloader", lambda: stream, args, device)
    print(stream.stats)


if __name__ == "__main__":
    main()
