"""Which shards there are, which worker of which rank reads which, and how many batches they make.

    Shard, find               folder, index, glob, braces or list: the shards
    Seat, order, deal, quota  who reads what, and how much of it
    place                     this process's rank
    Reading                   what is read and how; how many batches that makes

All but `find` and `place` is pure.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TypeAlias, TypeVar

import torch
from webdataset.shardlists import expand_urls

__all__ = ["Reading", "Seat", "Shard", "Urls", "deal", "find", "key", "order", "place", "quota"]

Urls: TypeAlias = "str | os.PathLike[str] | Iterable[str | os.PathLike[str]]"
T = TypeVar("T")

# -- which shards -------------------------------------------------------------------------------


class Shard(NamedTuple):
    """A tar file.

    Attributes:
        url: Its path or address.
        samples: How many it holds; None where no index says so.
    """

    url: str
    samples: int | None = None


def find(urls: Urls) -> list[Shard]:
    """The shards that `urls` stands for; see `shards.loader`.

    Raises:
        ValueError: An index is not one.
    """
    if not isinstance(urls, (str, os.PathLike)):
        return [shard for url in urls for shard in find(url)]
    path = Path(urls)
    if path.is_dir():
        index = path / "index.json"
        return _indexed(index) if index.exists() else _sorted(path.glob("*.tar"))
    if path.suffix == ".json":
        return _indexed(path)
    return [shard for url in expand_urls(os.fspath(urls)) for shard in _globbed(url)]


def _globbed(url: str) -> list[Shard]:
    if re.match(r"\w+:", url) or not re.search(r"[*?[]", url):  # an address may have a `?`
        return [Shard(url)]
    path = Path(url)
    return _sorted(Path(path.anchor).glob(str(path.relative_to(path.anchor))))


def _sorted(paths: Iterable[str | Path]) -> list[Shard]:
    return [Shard(path) for path in sorted(map(str, paths))]


def _indexed(path: Path) -> list[Shard]:
    try:
        listing = json.loads(path.read_text())["shards"]
        return [Shard(str(path.parent / entry["name"]), int(entry["samples"])) for entry in listing]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{path} must be an index as scripts/make_shards.py writes it, with the name and the "
            f"samples of each of its shards: {error!r}"
        ) from error


# -- who reads what -----------------------------------------------------------------------------


class Seat(NamedTuple):
    """Whose pass this is: a worker's of a rank's, in an epoch."""

    epoch: int
    rank: int
    world: int
    worker: int
    workers: int


def order(count: int, seed: int, epoch: int) -> list[int]:
    """The numbers below `count` as all ranks shuffle them in this epoch."""
    numbers = list(range(count))
    random.Random(key("shards", seed, epoch)).shuffle(numbers)
    return numbers


def deal(shards: Sequence[T], seat: Seat) -> list[T]:
    """The shards that one worker reads: each belongs to one worker of one rank."""
    return list(shards[seat.rank :: seat.world][seat.worker :: seat.workers])


def quota(batches: int, seat: Seat) -> int:
    """How many of a rank's `batches` one worker makes; the first workers make the odd ones."""
    return batches // seat.workers + (seat.worker < batches % seat.workers)


def place() -> tuple[int, int]:
    """This process's rank and how many there are: the process group's, else RANK, WORLD_SIZE.

    Raises:
        ValueError: The variables do not fit each other.
    """
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if not 0 <= rank < world:
        raise ValueError(f"RANK must be from 0 to WORLD_SIZE - 1, got {rank} of {world}")
    return rank, world


def key(*words: object) -> int:
    """A seed, unrelated for words that differ: neighbouring seeds can start alike."""
    digest = hashlib.blake2b(repr(words).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big")


@dataclass(frozen=True)
class Reading:
    """What is read, and how; `shards.loader` describes the fields.

    Raises:
        ValueError: A field breaks its rule.
    """

    shards: tuple[Shard, ...]
    batch_size: int
    size: int
    train: bool
    seed: int
    shuffle: int
    length: int | None
    strict: bool

    def __post_init__(self) -> None:
        for name, least in (("batch_size", 1), ("size", 1), ("shuffle", 0), ("length", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"{name} must be at least {least}, got {value}")

    def batches(self, seat: Seat) -> int | None:
        """How many the rank of `seat` gets in an epoch; None where that is not known before.

        Raises:
            ValueError: There is not a shard for each worker of each rank, nor a batch for each
                rank; or ranks train and nobody knows how long.
        """
        needed = seat.world * seat.workers
        if len(self.shards) < needed:
            raise ValueError(
                f"urls must name at least {needed} shard(s), one for each of {seat.workers} "
                f"worker(s) on each of {seat.world} rank(s), got {len(self.shards)}: write smaller "
                f"shards, or use fewer workers"
            )
        return self._train_batches(seat.world) if self.train else self._test_batches(seat)

    def _train_batches(self, world: int) -> int | None:
        counts = [shard.samples for shard in self.shards if shard.samples is not None]
        known = sum(counts) if len(counts) == len(self.shards) else None
        length = known if self.length is None else self.length
        if length is None and world > 1:
            raise ValueError(
                f"length must be given, or the shards' index.json, to train on {world} ranks: all "
                f"must make the same number of batches, or some would wait for others for ever"
            )
        if length is not None and length < self.batch_size * world:
            raise ValueError(
                f"length must be at least {self.batch_size * world}, a batch for each of {world} "
                f"rank(s), got {length}"
            )
        return None if length is None else length // (self.batch_size * world)

    def _test_batches(self, seat: Seat) -> int | None:
        total = 0
        for worker in range(seat.workers):
            counts = [shard.samples for shard in deal(self.shards, seat._replace(worker=worker))]
            if None not in counts:
                samples = sum(count for count in counts if count is not None)
            elif seat.world * seat.workers == 1 and self.length is not None:
                samples = self.length
            else:
                return None
            total += -(-samples // self.batch_size)
        return total
