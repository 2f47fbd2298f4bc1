"""The seam between the loader and a device, and which device to use.

seam.py           Device: the eighteen verbs, all that the rest of the package knows of a device
accelerator.py    CUDA, ROCm, XPU: streams, events, pinned slabs; the only file with device types
streamless.py     the CPU, and MPS: everything happens when it is called
../testing.py     a public fake that runs late what a device would run late
"""

from __future__ import annotations

import functools
import os
import warnings
from typing import TypeAlias

import torch

from streamloader.device.accelerator import Accelerator
from streamloader.device.seam import POLL_SECONDS, Device, Event, RefusedError, Stream
from streamloader.device.streamless import Streamless

__all__ = [
    "POLL_SECONDS",
    "Device",
    "DeviceLike",
    "Event",
    "RefusedError",
    "Stream",
    "check",
    "resolve",
]

DeviceLike: TypeAlias = torch.device | str | int | Device


def check(device: DeviceLike | None) -> torch.device | Device | None:
    """What the user asked for, checked without touching the device.

    Raises:
        ValueError: `device` is not a device, or is one that this machine does not have.
    """
    if device is None or isinstance(device, Device):
        return device
    try:
        wanted = torch.device(device)
    except (RuntimeError, TypeError, ValueError, OverflowError) as error:
        raise ValueError(
            f"device must be a torch.device, its name or its index, got {device!r}: {error}"
        ) from None
    if wanted.type == "cpu":
        return torch.device("cpu")
    found = torch.accelerator.current_accelerator(check_available=True)
    if found is None or found.type != wanted.type:
        raise ValueError(
            f"device must be one that this machine has, got {device!r}: there is "
            + (f"only {found.type!r} beside 'cpu'" if found else "only 'cpu'")
        )
    count = torch.accelerator.device_count()
    if (wanted.index or 0) >= count:
        raise ValueError(
            f"device must have an index below {count}, the number of devices visible here, "
            f"got {device!r}"
        )
    return wanted


def resolve(device: torch.device | Device | None) -> Device:
    """The device to use; call it on the thread that will use it.

    None is the accelerator where one is available, else the CPU. An accelerator without an index
    is the calling thread's current one.
    """
    if isinstance(device, Device):
        return device
    if device is None:
        found = torch.accelerator.current_accelerator(check_available=True)
        device = found or torch.device("cpu")
    if device.type == "cpu":
        return Streamless(torch.device("cpu"))
    index = _index(device)
    if device.type == "mps":
        return Streamless(torch.device("mps", index))
    _warn_of_rank(index, os.environ.get("LOCAL_RANK", ""), torch.accelerator.device_count())
    return Accelerator(torch.device(device.type, index))


def _index(device: torch.device) -> int:
    given: int | None = device.index  # torch's annotation leaves None out
    return torch.accelerator.current_device_index() if given is None else given


@functools.cache
def _warn_of_rank(index: int, rank: str, count: int) -> None:
    """Cached, so that a process hears of it once, however many loaders it has."""
    if rank.isdecimal() and int(rank) != index and int(rank) < count:
        warnings.warn(
            f"StreamLoader moves batches to device {index} although LOCAL_RANK is {rank}, so every "
            f"rank may be using device {index}: call torch.accelerator.set_device_index({rank}) "
            f"before the first batch, or pass device=",
            stacklevel=2,
        )
