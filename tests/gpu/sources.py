"""Sources, batches and work that the tests on a real accelerator share."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

__all__ = [
    "MIB",
    "ROWS",
    "SOURCES",
    "Numbers",
    "Rows",
    "busy",
    "fill",
    "listed",
    "nothing_waits",
    "workers",
]

MIB = 1 << 20
ROWS = 2 * MIB  # bytes of an image batch in most tests


def busy(milliseconds: float = 20) -> None:
    """Queues work that takes about so long on the current stream."""
    torch.cuda._sleep(int(milliseconds * 1.7e6))


@contextmanager
def nothing_waits() -> Iterator[None]:
    """In it, torch raises an error where this thread would wait for the device."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def fill(number: int, nbytes: int = ROWS) -> Tensor:
    """So many bytes that all hold the number, modulo 251."""
    return torch.full((nbytes,), number % 251, dtype=torch.uint8)


def pair(number: int) -> tuple[Tensor, Tensor]:
    """Images and labels that all hold the batch's number."""
    return fill(number).view(4, -1), torch.full((4,), number)


def listed(count: int) -> list[tuple[Tensor, Tensor]]:
    return [pair(number) for number in range(count)]


def one_buffer(count: int) -> Iterator[tuple[Tensor, Tensor]]:
    """A source that fills the same memory for every batch."""
    images, labels = pair(0)
    for number in range(count):
        images.fill_(number % 251)
        labels.fill_(number)
        yield images, labels


def one_pinned_buffer(count: int) -> Iterator[tuple[Tensor, Tensor]]:
    images, labels = (tensor.pin_memory() for tensor in pair(0))
    for number in range(count):
        images.fill_(number % 251)
        labels.fill_(number)
        yield images, labels


class Rows(Dataset[Tensor]):
    """`fill(0)`, `fill(1)`, ..."""

    def __init__(self, count: int, nbytes: int) -> None:
        self.count, self.nbytes = count, nbytes

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Tensor:
        return fill(index, self.nbytes)


class Numbers(Dataset[tuple[Tensor, Tensor]]):
    """An image and a label for each row of `pair(0)`, `pair(1)`, ..."""

    def __init__(self, count: int, nbytes: int = ROWS // 4) -> None:
        self.count, self.nbytes = count, nbytes

    def __len__(self) -> int:
        return 4 * self.count

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        number = index // 4
        return fill(number, self.nbytes), torch.tensor(number)


def workers(count: int, *, pin_memory: bool = False) -> DataLoader[Any]:
    return DataLoader(Numbers(count), batch_size=4, num_workers=2, pin_memory=pin_memory)


SOURCES: dict[str, Callable[[int], Any]] = {
    "a list": listed,
    "one buffer": one_buffer,
    "one pinned buffer": one_pinned_buffer,
    "workers": workers,
    "pinned by the loader": lambda count: workers(count, pin_memory=True),
}
