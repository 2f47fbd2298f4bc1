"""What the randomness of a batch depends on: nothing but its seed, epoch, index and rank. Pure."""

from __future__ import annotations

import hashlib
import os
from typing import NamedTuple

import torch

__all__ = ["Context", "rank"]


class Context(NamedTuple):
    """Which batch this is.

    Attributes:
        seed: The loader's; None where transforms draw unseeded.
        epoch: The pass, from 0, or what `set_epoch` said.
        number: The batch's place in the pass, from 0.
        rank: This process among those that train together.
    """

    seed: int | None
    epoch: int
    number: int
    rank: int

    def key(self, stage: int) -> int:
        """A seed for one transform on one batch: 63 bits, unrelated for contexts that differ.

        A hash, because generators seeded with neighbouring numbers can start alike.
        """
        words = ",".join(map(str, (*self, stage)))
        digest = hashlib.blake2b(words.encode(), digest_size=8).digest()
        return int.from_bytes(digest, "big") >> 1


def rank() -> int:
    """This process's rank: the process group's, else the variable RANK, else 0."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank()
    number = os.environ.get("RANK", "")
    return int(number) if number.isdecimal() else 0
