from __future__ import annotations

import dataclasses
import io
import itertools
import json
import os
from pathlib import Path

import pytest
import torch

from streamloader import sharding
from streamloader.sharding import Reading, Seat, Shard, deal, find, order, split

GRID = [(1, 1), (1, 4), (2, 1), (2, 3), (3, 2), (4, 4)]


def seats(world: int, workers: int, epoch: int = 0) -> list[Seat]:
    pairs = itertools.product(range(world), range(workers))
    return [Seat(epoch, rank, world, worker, workers) for rank, worker in pairs]


def reading(
    shards: list[Shard], *, batch_size: int = 4, train: bool = True, length: int | None = None
) -> Reading:
    return Reading(tuple(shards), batch_size, 32, train, 0, 10, length, strict=False)


def counted(*counts: int | None) -> list[Shard]:
    return [Shard(f"{number}.tar", count) for number, count in enumerate(counts)]


# -- which shards


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for number in (2, 0, 1):
        (tmp_path / f"train-{number:06d}.tar").touch()
    (tmp_path / "parameters.json").write_text("{}")
    return tmp_path


def named(folder: Path, *numbers: int) -> list[Shard]:
    return [Shard(str(folder / f"train-{number:06d}.tar")) for number in numbers]


def test_a_folder_is_its_tars_by_name(folder: Path) -> None:
    assert find(folder) == find(str(folder)) == named(folder, 0, 1, 2)


def test_a_folder_with_an_index_is_what_that_says(folder: Path) -> None:
    entry = {"name": "train-000001.tar", "samples": 7, "bytes": 1}
    index = folder / "index.json"
    index.write_text(json.dumps({"shards": [entry], "samples": 7}))
    assert find(folder) == find(index) == [Shard(str(folder / "train-000001.tar"), 7)]


def test_a_glob_is_sorted(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert find(f"{folder}/train-*.tar") == named(folder, 0, 1, 2)
    assert find(f"{folder}/train-00000[12].tar") == named(folder, 1, 2)
    monkeypatch.chdir(folder)
    assert find("*2.tar") == [Shard("train-000002.tar")]


def test_braces_are_expanded_whether_the_files_are_there_or_not(folder: Path) -> None:
    assert find(f"{folder}/train-{{000000..000003}}.tar") == named(folder, 0, 1, 2, 3)


def test_a_list_is_taken_in_its_order_and_each_of_it_expanded(folder: Path) -> None:
    paths: list[str | Path] = [
        folder / "train-000002.tar",
        f"{folder}/train-{{000000..000001}}.tar",
    ]
    assert find(paths) == named(folder, 2, 0, 1)


@pytest.mark.parametrize("url", ["https://host/a.tar?v=[1]*", "pipe:cat *.tar"])
def test_an_address_is_no_glob(url: str) -> None:
    assert find(url) == [Shard(url)]


def test_a_long_list_of_addresses_is_no_file_name() -> None:
    urls = [f"pipe:cat a-rather-long-name-{number:06d}.tar" for number in range(9)]
    assert find("::".join(urls)) == [Shard(url) for url in urls]


def test_no_name_is_not_the_current_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    assert find("") == []


def test_a_folder_is_its_compressed_tars_too(tmp_path: Path) -> None:
    names = ["0.TAR", "1.tar.gz", "2.tgz", "3.tar.bz2", "4.tar.xz"]
    for name in (*names, "5.gz", "6.tar.part", "7.txt"):
        (tmp_path / name).touch()
    assert find(tmp_path) == [Shard(str(tmp_path / name)) for name in names]


def test_an_index_of_webdatasets_own_is_read(tmp_path: Path) -> None:
    shards = [{"url": "a.tar", "nsamples": 7}, {"url": "https://host/b.tar", "nsamples": 8}]
    text = json.dumps({"__kind__": "wids-shard-index-v1", "shardlist": shards})
    (tmp_path / "index.json").write_text(text)
    assert find(tmp_path) == [Shard(str(tmp_path / "a.tar"), 7), Shard("https://host/b.tar", 8)]


def test_an_index_may_be_at_an_address(monkeypatch: pytest.MonkeyPatch) -> None:
    text = json.dumps({"shards": [{"name": "a.tar", "samples": 7}]}).encode()
    monkeypatch.setattr("webdataset.gopen", {"https://h/d/i.json": io.BytesIO(text)}.get)
    assert find("https://h/d/i.json") == [Shard("https://h/d/a.tar", 7)]


@pytest.mark.parametrize("text", ["{}", "[]", '{"shards": [{"name": "a.tar"}]}', "no json"])
def test_an_index_that_is_none_is_an_error_with_its_name(tmp_path: Path, text: str) -> None:
    (tmp_path / "index.json").write_text(text)
    with pytest.raises(
        ValueError, match=rf"^{tmp_path}/index.json must be an index as scripts/make"
    ):
        find(tmp_path)


# -- who reads what


@pytest.mark.parametrize(("world", "workers"), GRID)
@pytest.mark.parametrize("count", [16, 17, 40])
def test_each_shard_is_dealt_to_one_worker_of_one_rank(
    count: int, world: int, workers: int
) -> None:
    hands = [deal(range(count), seat) for seat in seats(world, workers)]
    assert sorted(itertools.chain.from_iterable(hands)) == list(range(count))
    assert min(map(len, hands)) >= 1


def test_the_order_depends_on_seed_and_epoch_and_leaves_nothing_out() -> None:
    assert order(20, 1, 2) == order(20, 1, 2)
    assert len({tuple(order(20, seed, epoch)) for seed in (0, 1) for epoch in (0, 1)}) == 4
    assert sorted(order(20, 1, 2)) == list(range(20))


@pytest.mark.parametrize("workers", [1, 2, 3, 5])
@pytest.mark.parametrize("batches", [0, 1, 4, 15])
@pytest.mark.parametrize("samples", [0, 7])
def test_equal_shares_add_up_and_differ_by_one_at_most(
    batches: int, workers: int, samples: int
) -> None:
    shares = split(batches, [samples] * workers)
    assert sum(shares) == batches
    assert max(shares) - min(shares) <= 1


def test_shares_are_in_proportion_to_samples() -> None:
    assert split(41, [400, 10]) == [40, 1]
    assert split(8, [30, 0, 10]) == [6, 0, 2]
    assert split(4, [10, 25, 15]) == [1, 2, 1]


def test_shards_of_unknown_size_count_alike() -> None:
    unknown = reading(counted(*[None] * 5), length=400)  # 3 shards and 2, of 80 samples
    assert [unknown.quota(seat) for seat in seats(1, 2)] == [60, 40]
    assert reading(counted(9, None)).quota(seats(1, 2)[0]) is None


def test_an_indexed_epoch_of_unequal_shards_reads_nearly_all() -> None:
    uneven = reading(counted(400, 10), batch_size=10)
    quotas = [uneven.quota(seat) for seat in seats(1, 2)]
    held = [sum(shard.samples or 0 for shard in uneven.hand(seat)) for seat in seats(1, 2)]
    assert sorted(zip(held, quotas, strict=True)) == [(10, 1), (400, 40)]
    assert uneven.repeated(seats(1, 2)[0]) == 0


def test_samples_that_come_again_in_place_of_others_are_counted() -> None:
    assert reading(counted(*[40] * 4)).repeated(seats(2, 2)[0]) == 0
    # Three shards and two, each rank has half of the batches: 100 of what are 120 and 80.
    assert reading(counted(*[40] * 5)).repeated(seats(2, 1)[0]) == pytest.approx(20 / 200)
    # A longer epoch has everything twice, and that is as it should be.
    assert reading(counted(*[40] * 4), length=320).repeated(seats(2, 2)[0]) == 0
    assert reading(counted(9, None)).repeated(seats(1, 1)[0]) == 0


@pytest.mark.parametrize("shuffle", [True, False])
def test_shuffle_is_a_number_and_no_dataloaders(*, shuffle: bool) -> None:
    message = rf"^shuffle must be a number of samples to draw the next from, got {shuffle}: give 10"
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(reading(counted(9)), shuffle=shuffle)


def test_the_place_is_of_the_environment_or_the_only_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert sharding.place() == (0, 1)
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("WORLD_SIZE", "4")
    assert sharding.place() == (2, 4)


def test_the_place_is_of_the_process_group_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "2")
    monkeypatch.setenv("WORLD_SIZE", "4")
    where = f"file://{tmp_path}/store"
    torch.distributed.init_process_group("gloo", init_method=where, rank=0, world_size=1)
    try:
        assert sharding.place() == (0, 1)
    finally:
        torch.distributed.destroy_process_group()


def test_a_rank_outside_the_world_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "1")
    with pytest.raises(ValueError, match=r"^RANK must be from 0 to WORLD_SIZE - 1, got 1 of 1$"):
        sharding.place()


@pytest.mark.parametrize(("found", "lacks"), [("RANK", "WORLD_SIZE"), ("WORLD_SIZE", "RANK")])
def test_half_a_place_is_an_error(monkeypatch: pytest.MonkeyPatch, found: str, lacks: str) -> None:
    monkeypatch.setenv(found, "1")
    monkeypatch.delenv(lacks, raising=False)
    message = f"^RANK and WORLD_SIZE must both be set, or neither, got {found}=1 and no {lacks}$"
    with pytest.raises(ValueError, match=message):
        sharding.place()


# -- how many batches


def test_every_rank_trains_on_the_same_number_of_full_batches() -> None:
    uneven = reading(counted(10, 1, 30, 9))  # 50 samples: 6 batches of 4 for each of 2 ranks
    assert {uneven.batches(seat) for seat in seats(2, 2)} == {6}


def test_a_given_length_is_that_of_a_training_epoch_over_all_ranks() -> None:
    assert reading(counted(10, 10), length=16).batches(seats(2, 1)[0]) == 2
    assert reading(counted(None, None), length=17).batches(seats(1, 1)[0]) == 4


def test_training_batches_are_unknown_without_a_length_on_one_rank() -> None:
    assert reading(counted(10, None)).batches(seats(1, 1)[0]) is None


def test_training_without_a_length_on_several_ranks_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"^length must be given, .* to train on 2 ranks: all"):
        reading(counted(10, None)).batches(seats(2, 1)[0])


def test_a_length_without_a_batch_for_each_rank_is_an_error() -> None:
    with pytest.raises(
        ValueError, match=r"^length must be at least 8, a batch for each of 2 rank\(s\), got 7$"
    ):
        reading(counted(4, 3)).batches(seats(2, 1)[0])


def test_test_batches_are_counted_worker_by_worker() -> None:
    known = reading(counted(5, 4, 3, 9), train=False)
    assert known.batches(seats(1, 1)[0]) == 6  # 21 samples
    assert known.batches(seats(1, 2)[0]) == 2 + 4  # 8 and 13
    assert [known.batches(seat) for seat in seats(2, 1)] == [2, 4]


def test_a_given_length_is_that_of_a_test_epoch_for_one_worker_alone() -> None:
    given = reading(counted(None, None), train=False, length=9)
    assert given.batches(seats(1, 1)[0]) == 3
    assert given.batches(seats(1, 2)[0]) is None  # who knows how it is divided
    assert given.batches(seats(2, 1)[0]) is None


@pytest.mark.parametrize(("world", "workers"), [(1, 3), (3, 1), (2, 2)])
def test_fewer_shards_than_workers_is_an_error_that_says_how_many(world: int, workers: int) -> None:
    message = (
        rf"^urls must name at least {world * workers} shard\(s\), one for each of {workers} "
        rf"worker\(s\) on each of {world} rank\(s\), got 2: write smaller shards, or use fewer"
    )
    for train in (True, False):
        with pytest.raises(ValueError, match=message):
            reading(counted(10, 10), train=train).batches(seats(world, workers)[0])


@pytest.mark.parametrize(
    ("batch_size", "length", "message"),
    [(0, None, "batch_size must be at least 1, got 0"), (1, 0, "length must be at least 1, got 0")],
)
def test_fields_are_checked(batch_size: int, length: int | None, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{message}$"):
        reading(counted(1), batch_size=batch_size, length=length)


def test_keys_are_unlike_even_for_neighbours() -> None:
    words = itertools.product(("a", "b"), range(4), range(4))
    assert len({sharding.key(*word) for word in words}) == 32
    assert sharding.key(1, 2) == sharding.key(1, 2) < 2**64


def test_paths_may_be_of_any_kind(folder: Path) -> None:
    class Address(os.PathLike[str]):
        def __fspath__(self) -> str:
            return str(folder)

    assert find(Address()) == named(folder, 0, 1, 2)
