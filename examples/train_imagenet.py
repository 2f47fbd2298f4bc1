"""Trains a ResNet on ImageNet-style shards: on one GPU, on several with torchrun, or on the CPU.

    python examples/train_imagenet.py --train shards/train --val shards/val
    torchrun --nproc-per-node 8 examples/train_imagenet.py --train shards/train --val shards/val

The shards are WebDataset tars with a `.jpg` and a `.cls` per sample; `scripts/make_shards.py` makes
some. Workers decode, crop and flip. `StreamLoader` copies the bytes and normalises them on the GPU
ahead of the step. With `--steps 3 --epochs 1` it is over before it has begun: for a trial. After
each epoch there is a checkpoint, from which `--resume checkpoint.pt` goes on.
"""

import argparse
import itertools
import math
import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD
from torch.optim.lr_scheduler import LambdaLR
from torchvision import models

from streamloader import StreamLoader, on, shards


def start() -> tuple[torch.device, int, int]:
    """This process's device, its rank and the number of ranks; without torchrun it is alone."""
    device = torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")
    if device.type != "cpu":
        device = torch.device(device.type, int(os.environ.get("LOCAL_RANK", "0")))
        torch.accelerator.set_device_index(device.index or 0)
    if not dist.is_torchelastic_launched():
        return device, 0, 1
    dist.init_process_group()
    return device, dist.get_rank(), dist.get_world_size()


def normalizer(device: torch.device) -> Callable[[Tensor], Tensor]:
    """Images to floats of mean 0, on the device: uint8 is a quarter of the bytes to copy."""
    mean = torch.tensor([0.485, 0.456, 0.406], device=device).view(3, 1, 1) * 255
    deviation = torch.tensor([0.229, 0.224, 0.225], device=device).view(3, 1, 1) * 255
    return lambda images: images.contiguous(memory_format=torch.channels_last).sub(mean) / deviation


def loaders(
    args: argparse.Namespace, device: torch.device
) -> tuple[StreamLoader[Any], StreamLoader[Any]]:
    """For training and for validation. Both keep their workers, side by side."""
    common: dict[str, Any] = {"batch_size": args.batch_size, "size": args.image_size}
    train = shards.loader(
        args.train,
        num_workers=args.workers,
        persistent_workers=args.workers > 0,
        length=args.length,
        seed=args.seed,
        **common,
    )
    val = shards.loader(
        args.val,
        train=False,
        num_workers=args.val_workers,
        persistent_workers=args.val_workers > 0,
        **common,
    )
    transform = on(0, normalizer(device))
    return (
        StreamLoader(train, device, transform=transform),
        StreamLoader(val, device, transform=transform),
    )


def forward(model: nn.Module, images: Tensor) -> Tensor:
    """The scores, (N, classes), computed in bfloat16."""
    with torch.autocast(images.device.type, dtype=torch.bfloat16):
        scores: Tensor = model(images)
    return scores.float()


def warmup_then_cosine(warmup: int, total: int) -> Callable[[int], float]:
    """The learning rate at each step, as a share of its highest."""

    def share(step: int) -> float:
        if step < warmup:
            return (step + 1) / warmup
        return 0.5 + 0.5 * math.cos(math.pi * (step - warmup) / max(total - warmup, 1))

    return share


def train_epoch(
    model: nn.Module, batches: Iterable[Any], optimizer: SGD, schedule: LambdaLR, smoothing: float
) -> float:
    """One epoch; returns the mean loss of this rank's batches."""
    model.train()
    losses = []
    for images, labels in batches:
        loss = cross_entropy(forward(model, images), labels, label_smoothing=smoothing)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        losses.append(loss.detach())  # not .item(), which waits for the GPU at every step
    return torch.stack(losses).mean().item()


@torch.no_grad()
def accuracy(model: nn.Module, batches: Iterable[Any], device: torch.device) -> float:
    """The share of images, over all ranks, whose label has the highest score.

    Ranks may have different numbers of batches, so they meet after the loop and not in it: `model`
    is the one within DistributedDataParallel, whose own forward pass would.
    """
    model.eval()
    if dist.is_initialized():
        for buffer in model.buffers():  # the last batch's share of batch norms' means differs
            dist.broadcast(buffer, 0)
    right_and_all = torch.zeros(2, dtype=torch.int64, device=device)
    for images, labels in batches:
        right_and_all[0] += (forward(model, images).argmax(1) == labels).sum()
        right_and_all[1] += len(labels)
    if dist.is_initialized():
        dist.all_reduce(right_and_all)
    right, count = right_and_all.tolist()
    return float(right / count)


def resume(path: Path, device: torch.device, **parts: Any) -> int:
    """Sets `parts` to what they were in a checkpoint; returns the number of the next epoch."""
    state = torch.load(path, map_location=device)
    for name, part in parts.items():
        part.load_state_dict(state[name])
    return int(state["epoch"]) + 1


def save(path: Path, **state: Any) -> None:
    """Writes a checkpoint, whose file is whole at every time."""
    part = path.with_name(path.name + ".part")
    torch.save(state, part)
    part.replace(path)


def run(args: argparse.Namespace) -> None:
    """Trains, validates and saves, epoch by epoch."""
    device, rank, world = start()
    torch.manual_seed(args.seed)
    model = models.get_model(args.model, num_classes=args.classes)
    model.to(device, memory_format=torch.channels_last)
    wrapped = DistributedDataParallel(model) if world > 1 else model
    train, val = loaders(args, device)

    steps = min(args.steps or len(train), len(train))
    peak = args.rate * args.batch_size * world / 256
    optimizer = SGD(model.parameters(), peak, momentum=0.9, nesterov=True, weight_decay=args.decay)
    shares = warmup_then_cosine(args.warmup_epochs * steps, args.epochs * steps)
    schedule = LambdaLR(optimizer, shares)
    parts = {"model": model, "optimizer": optimizer, "schedule": schedule}
    first = resume(args.resume, device, **parts) if args.resume else 0

    for epoch in range(first, args.epochs):
        begin = time.perf_counter()
        train.set_epoch(epoch)
        loss = train_epoch(
            wrapped, itertools.islice(train, steps), optimizer, schedule, args.label_smoothing
        )
        seconds = time.perf_counter() - begin
        right = accuracy(model, itertools.islice(val, args.steps), device)
        if rank == 0:
            speed = steps * args.batch_size * world / seconds
            print(f"epoch {epoch}: loss {loss:.3f}, accuracy {right:.2%}, {speed:.0f} images/s")
            print(train.stats)  # what was waited for: the source, or the device
            print(f"skipped: {train.skipped} in training, {val.skipped} in validation (this rank)")
            state = {name: part.state_dict() for name, part in parts.items()}
            save(args.checkpoint, epoch=epoch, **state)
    if dist.is_initialized():
        dist.destroy_process_group()


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description="ResNet training on ImageNet-style shards")
    add = parser.add_argument
    add("--train", required=True, help="shards: a folder, an index.json, a glob, a brace pattern")
    add("--val", required=True, help="likewise")
    add("--length", type=int, help="training samples, where the shards have no index.json")
    add("--model", default="resnet50", help="torchvision's name; default: %(default)s")
    add("--classes", type=int, default=1000)
    add("--image-size", type=int, default=224, help="pixels; default: %(default)s")
    add("--batch-size", type=int, default=256, help="of each rank; default: %(default)s")
    add("--workers", type=int, default=8, help="for training, of each rank; default: %(default)s")
    add("--val-workers", type=int, default=4, help="likewise; default: %(default)s")
    add("--epochs", type=int, default=90)
    add("--warmup-epochs", type=int, default=5)
    add("--steps", type=int, help="stop each epoch, and each validation, after so many batches")
    add("--rate", type=float, default=0.1, help="highest learning rate for a batch of 256 images")
    add("--decay", type=float, default=1e-4, help="weight decay")
    add("--label-smoothing", type=float, default=0.1)
    add("--seed", type=int, default=0)
    add("--checkpoint", type=Path, default=Path("checkpoint.pt"), help="default: %(default)s")
    add("--resume", type=Path, metavar="FILE", help="a checkpoint to go on from")
    run(parser.parse_args())


if __name__ == "__main__":
    main()
