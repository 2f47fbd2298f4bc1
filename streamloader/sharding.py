"""Which shards there are, which worker of which rank reads which, and how many batches they make.

    Shard, find              folder, index, glob, braces or list: the shards
    Seat, order, deal, split who reads what, and how much of it
    place                    this process's rank
    Reading                  what is read and how; how many batches that makes

All but `find` and `place` is pure.
"""

from __future__ import annotations

import contextlib
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
import webdataset
from webdataset.shardlists import expand_urls

__all__ = ["Reading", "Seat", "Shard", "Urls", "deal", "find", "key", "order", "place", "split"]

Urls: TypeAlias = "str | os.PathLike[str] | Iterable[str | os.PathLike[str]]"
T = TypeVar("T")

SUFFIXES = (".tar", ".tar.gz", ".tgz", ".tar.bz2", ".tar.xz")
"""Which of a folder's files are shards, if it has no index; in upper case too."""

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
    text = os.fspath(urls)
    if not text:
        return []  # rather than the current folder
    if os.path.isdir(text):  # noqa: PTH112  # Path.is_dir raises for a long list of addresses
        index = Path(text, "index.json")
        return _indexed(str(index)) if index.exists() else _in_folder(Path(text))
    if text.endswith(".json"):
        return _indexed(text)
    return [shard for url in expand_urls(text) for shard in _globbed(url)]


def _in_folder(folder: Path) -> list[Shard]:
    return _sorted(path for path in folder.iterdir() if path.name.lower().endswith(SUFFIXES))


def _is_address(url: str) -> bool:
    return re.match(r"\w+:", url) is not None


def _globbed(url: str) -> list[Shard]:
    if _is_address(url) or not re.search(r"[*?[]", url):  # an address may have a `?`
        return [Shard(url)]
    path = Path(url)
    return _sorted(Path(path.anchor).glob(str(path.relative_to(path.anchor))))


def _sorted(paths: Iterable[str | Path]) -> list[Shard]:
    return [Shard(path) for path in sorted(map(str, paths))]


def _indexed(url: str) -> list[Shard]:
    try:
        index = json.loads(_content(url))
        listing, name, count = index.get("shardlist"), "url", "nsamples"  # webdataset's own
        if listing is None:
            listing, name, count = index["shards"], "name", "samples"
        return [Shard(_beside(url, entry[name]), int(entry[count])) for entry in listing]
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{url} must be an index as scripts/make_shards.py or webdataset writes it, with the "
            f"name and the samples of each of its shards: {error!r}"
        ) from error


def _content(url: str) -> bytes:
    if not _is_address(url):
        return Path(url).read_bytes()
    with contextlib.closing(webdataset.gopen(url)) as file:
        content: bytes = file.read()
    return content


def _beside(index: str, name: str) -> str:
    """The shard that an index calls `name`: relative to the index, if it is."""
    if _is_address(name):
        return name
    if _is_address(index):
        return index[: index.rindex("/") + 1] + name
    return str(Path(index).parent / name)


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


def split(batches: int, samples: Sequence[int]) -> list[int]:
    """How many of `batches` are made by workers with so many `samples`: in proportion to them.

    What is left over by rounding down goes to those that it took most from, the first first.
    """
    samples = samples if any(samples) else [1] * len(samples)
    total = sum(samples)
    shares = [batches * count // total for count in samples]
    lost = sorted(range(len(samples)), key=lambda i: -(batches * samples[i] % total))
    for i in lost[: batches - sum(shares)]:
        shares[i] += 1
    return shares


def _samples(weights: Sequence[int], seat: Seat) -> list[int]:
    """How many each worker of a rank has, of shards with so many."""
    own = weights[seat.rank :: seat.world]
    return [sum(own[worker :: seat.workers]) for worker in range(seat.workers)]


def place() -> tuple[int, int]:
    """This process's rank and how many there are: the process group's, else RANK, WORLD_SIZE.

    Raises:
        ValueError: The variables do not fit each other.
    """
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return torch.distributed.get_rank(), torch.distributed.get_world_size()
    if ("RANK" in os.environ) != ("WORLD_SIZE" in os.environ):
        found, lacks = sorted(("RANK", "WORLD_SIZE"), key=lambda name: name not in os.environ)
        raise ValueError(
            f"RANK and WORLD_SIZE must both be set, or neither, got {found}={os.environ[found]} "
            f"and no {lacks}"
        )
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
    deliver: str = "squares"

    def __post_init__(self) -> None:
        if isinstance(self.shuffle, bool):
            raise ValueError(
                f"shuffle must be a number of samples to draw the next from, got {self.shuffle}: "
                f"give 1000 or leave it out to shuffle, 0 to keep the order; what does not train "
                f"is not shuffled"
            )
        for name, least in (("batch_size", 1), ("size", 1), ("shuffle", 0), ("length", 1)):
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"{name} must be at least {least}, got {value}")
        if self.deliver not in ("squares", "crops", "whole"):
            raise ValueError(f'deliver must be "squares", "crops" or "whole", got {self.deliver!r}')
        if self.deliver == "crops" and not self.train:
            raise ValueError(
                'deliver="crops" are cut at random, to train, got train=False: deliver="whole" and '
                "augment.Resize and CenterCrop evaluate"
            )

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

    def hand(self, seat: Seat) -> list[Shard]:
        """The shards that the worker of `seat` reads, in this order."""
        return deal(self._ordered(seat.epoch), seat)

    def _ordered(self, epoch: int) -> Sequence[Shard]:
        if not self.train:
            return self.shards
        return [self.shards[i] for i in order(len(self.shards), self.seed, epoch)]

    def quota(self, seat: Seat) -> int | None:
        """How many batches a worker makes in an epoch of training; None is what it can."""
        batches = self.batches(seat)
        if batches is None:
            return None
        return split(batches, _samples(self._weighed(seat.epoch), seat))[seat.worker]

    def repeated(self, seat: Seat) -> float:
        """The share of an epoch's samples that come once more, in place of others.

        That is what all workers of all ranks read beyond their samples' part of the epoch. Of
        `seat`, its epoch, world and workers count.
        """
        batches = self.batches(seat)
        if batches is None:
            return 0.0
        weights = self._weighed(seat.epoch)
        hands = [_samples(weights, seat._replace(rank=rank)) for rank in range(seat.world)]
        part = (self._known(self.length) or 0) / max(sum(weights), 1)
        beyond = sum(
            max(share * self.batch_size - count * part, 0.0)
            for hand in hands
            for share, count in zip(split(batches, hand), hand, strict=True)
        )
        return beyond / (batches * self.batch_size * seat.world)

    def _weighed(self, epoch: int) -> list[int]:
        """The samples of each shard, in an epoch's order; all have 1 if some are not known."""
        known = bool(self._known(None))
        return [(shard.samples or 0) if known else 1 for shard in self._ordered(epoch)]

    def _known(self, length: int | None) -> int | None:
        """`length`, or else what the index says, or else None."""
        if length is not None:
            return length
        counts = [shard.samples for shard in self.shards if shard.samples is not None]
        return sum(counts) if len(counts) == len(self.shards) else None

    def _train_batches(self, world: int) -> int | None:
        length = self._known(self.length)
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
