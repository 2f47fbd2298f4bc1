"""What the randomness of a batch depends on: nothing but its seed, epoch, index and rank. Pure."""

from __future__ import annotations

import hashlib
import os
from typing import NamedTuple

import torch

__all__ = ["Context", "rank"]


class Context(NamedTuple):
    """Which batch this is, and for which transform.

    Attributes:
        seed: The loader's.
        epoch: The pass, from 0, or what `set_epoch` said.
        number: The batch's place in the pass, from 0.
        rank: This process among those that train together.
        stage: The transform's place among the loader's, from 0.
        apart: Whether nothing else draws from torch's generators meanwhile, so that they can be
            seeded for the transform and restored.
    """

    seed: int
    epoch: int
    number: int
    rank: int
    stage: int = 0
    apart: bool = True

    def key(self) -> int:
        """A seed for one transform on one batch: 63 bits, unrelated for contexts that differ.

        A hash, because generators seeded with neighbouring numbers can start alike.
        """
        words = ",".join(map(str, (self.seed, self.epoch, self.number, self.rank, self.stage)))
        digest = hashlib.blake2b(words.encode(), digest_size=8).digest()
        return int.from_bytes(digest, "big") >> 1


def rank() -> int:
    """This process's rank: the process group's, else the variable RANK, else 0."""
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank()
    number = os.environ.get("RANK", "")
    return int(number) if number.isdecimal() else 0
