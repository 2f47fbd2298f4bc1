from __future__ import annotations

import bz2
import gzip
import lzma
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from streamloader.tars import ShardError, _Pushed, fields, read
from tests import archives

PAIRS = [("0.jpg", b"a"), ("0.cls", b"1"), ("1.jpg", b"b"), ("1.cls", b"2")]


def write(path: Path, files: list[tuple[str, bytes]]) -> str:
    return str(archives.write(path, files))


# -- one shard's samples


def test_files_of_one_key_are_one_sample_with_its_shard(tmp_path: Path) -> None:
    url = write(tmp_path / "a.tar", PAIRS)
    samples = list(read(url))
    assert [sample["__key__"] for sample in samples] == ["0", "1"]
    assert [sample["__url__"] for sample in samples] == [url, url]
    assert [sample["jpg"] for sample in samples] == [b"a", b"b"]


def test_a_sample_may_lack_files_and_extensions_are_in_lower_case(tmp_path: Path) -> None:
    url = write(tmp_path / "a.tar", [("0.JPG", b"a"), ("1.cls", b"2")])
    found = [{name for name in sample if not name.startswith("__")} for sample in read(url)]
    assert found == [{"jpg"}, {"cls"}]


def test_a_shard_without_files_has_no_samples(tmp_path: Path) -> None:
    assert list(read(write(tmp_path / "a.tar", []))) == []


@pytest.mark.parametrize("compress", [gzip.compress, bz2.compress, lzma.compress])
def test_a_compressed_shard_is_read_and_a_truncated_one_is_an_error(
    tmp_path: Path, compress: Callable[[bytes], bytes]
) -> None:
    rng = random.Random(0)
    files = [(f"{i}.{name}", rng.randbytes(20_000)) for i in range(12) for name in ("jpg", "cls")]
    packed = compress(Path(write(tmp_path / "a.tar", files)).read_bytes())
    path = tmp_path / "a.tar.gz"  # its content decides, not its name
    path.write_bytes(packed)
    assert len(list(read(str(path)))) == 12
    for length in (5, *range(len(packed) // 10, len(packed), len(packed) // 10), len(packed) - 1):
        path.write_bytes(packed[:length])
        with pytest.raises(ShardError, match=rf"^shard {path}: .+"):
            list(read(str(path)))


def test_a_compressed_shard_is_checked_to_its_end(tmp_path: Path) -> None:
    plain = Path(write(tmp_path / "a.tar", PAIRS)).read_bytes()
    path = tmp_path / "a.tar.gz"
    path.write_bytes(gzip.compress(plain + bytes(1 << 20))[:-1])
    with pytest.raises(ShardError, match=rf"^shard {path}: Compressed file ended before the end"):
        list(read(str(path)))


def test_a_compressed_shard_that_was_cut_before_is_an_error(tmp_path: Path) -> None:
    plain = Path(write(tmp_path / "a.tar", PAIRS)).read_bytes()
    path = tmp_path / "a.tar.gz"
    path.write_bytes(gzip.compress(plain[:3072]))
    with pytest.raises(ShardError, match=rf"^shard {path}: no end of archive @ byte 3072: trunc"):
        list(read(str(path)))


def test_what_is_given_back_is_read_before_the_rest(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"cdefg")
    for sizes, parts in (([1, 3, 9], ["a", "bcd", "efg"]), ([-1], ["abcdefg"]), ([2, -1], None)):
        with path.open("rb") as file:
            stream = _Pushed(b"ab", file)
            found = [stream.read(size).decode() for size in sizes]
        assert found == (parts or ["ab", "cdefg"])


@pytest.mark.parametrize("size", [0, 100, 1024, 1500, 4096], ids=str)
def test_a_truncated_shard_is_an_error_that_names_it(tmp_path: Path, size: int) -> None:
    path = Path(write(tmp_path / "a.tar", PAIRS))  # 512 bytes of header, 512 of content each
    path.write_bytes(path.read_bytes()[:size])
    with pytest.raises(ShardError, match=rf"^shard {path}: "):
        list(read(str(path)))


def test_the_last_sample_before_a_cut_is_held_back(tmp_path: Path) -> None:
    path = Path(write(tmp_path / "a.tar", PAIRS))
    path.write_bytes(path.read_bytes()[:3072])  # without the last .cls
    samples = read(str(path))
    assert next(samples)["__key__"] == "0"
    with pytest.raises(ShardError, match=r"no end of archive @ byte 3072: truncated, or a broken"):
        next(samples)


def test_a_missing_shard_is_an_error_that_names_it(tmp_path: Path) -> None:
    with pytest.raises(ShardError, match=rf"^shard {tmp_path}/gone.tar: \[Errno 2\] No such file"):
        list(read(f"{tmp_path}/gone.tar"))


def test_two_files_of_one_name_are_an_error(tmp_path: Path) -> None:
    url = write(tmp_path / "a.tar", [*PAIRS[:1], *PAIRS[:1]])
    with pytest.raises(ShardError, match=rf"^shard {url}: 0.jpg: duplicate file name in tar"):
        list(read(url))


# -- what is used of a sample


@pytest.mark.parametrize("name", ["jpg", "jpeg", "png"])
def test_an_image_has_one_of_three_names(name: str) -> None:
    assert fields({name: b"a", "cls": b"12", "txt": b"", "__key__": "0"}) == (b"a", 12)


@pytest.mark.parametrize(
    ("sample", "found"),
    [({"cls": b"1", "seg": b""}, ".cls, .seg"), ({"jpg": b"a"}, ".jpg"), ({}, "nothing")],
)
def test_what_lacks_an_image_or_a_label_is_an_error(sample: dict[str, bytes], found: str) -> None:
    with pytest.raises(ValueError, match=rf"^needs .jpg .* and .cls, has {found}$"):
        fields({**sample, "__key__": b"0"})


def test_a_label_is_a_whole_number() -> None:
    with pytest.raises(ValueError, match=r"^invalid literal for int\(\) .* b'cat'$"):
        fields({"jpg": b"a", "cls": b"cat"})
