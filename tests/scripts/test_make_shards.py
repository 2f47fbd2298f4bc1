"""`scripts/make_shards.py`: what it plans, what it writes, and what it refuses."""

import collections
import importlib.util
import io
import json
import re
import subprocess
import sys
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

SCRIPT = Path(__file__).parents[2] / "scripts" / "make_shards.py"


def load() -> Any:
    """A fresh copy of the script as a module: a test may change its constants."""
    spec = importlib.util.spec_from_file_location("make_shards", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


script = load()


def make(out: Path, images: int = 24, seed: int = 0, **settings: Any) -> str:
    """Runs the script in this process."""
    report = script.make(script.Settings(out, images, seed, **{"shard_size": 12, **settings}))
    assert isinstance(report, str)
    return report


def run(*arguments: object) -> subprocess.CompletedProcess[str]:
    """Runs the script as a user does."""
    command = [sys.executable, str(SCRIPT), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def entries(folder: Path) -> dict[str, bytes]:
    """All files of all shards, in order."""
    found: dict[str, bytes] = {}
    for path in sorted(folder.glob("shard-*.tar")):
        with tarfile.open(path) as tar:
            for entry in tar:
                file = tar.extractfile(entry)
                assert file is not None
                found[entry.name] = file.read()
    return found


def picture(files: dict[str, bytes], key: str) -> Image.Image:
    image = Image.open(io.BytesIO(files[f"{key}.jpg"]))
    image.load()
    return image


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """24 procedural images in two shards."""
    out = tmp_path_factory.mktemp("made") / "new" / "folder"
    make(out)
    return out


# The plan


def test_the_plan_has_imagenets_sides() -> None:
    samples = [sample for shard in script.plan(20_000, 1, 400) for sample in shard]
    sides = np.array([(sample.width, sample.height) for sample in samples])
    assert sides.min() >= 300
    assert sides.max() <= 640
    assert sides.mean(axis=0) == pytest.approx([479, 429], abs=5)
    assert sides.prod(axis=1).mean() == pytest.approx(205_000, rel=0.02)
    for size, share in script.SIZES:
        assert (sides == size).all(axis=1).mean() == pytest.approx(share, abs=0.015)


def test_the_plan_has_the_shares_it_names() -> None:
    samples = [sample for shard in script.plan(20_000, 1, 400) for sample in shard]
    plain = [sample for sample in samples if sample.kind == "plain"]
    full = sum(sample.subsampling == "4:4:4" for sample in plain) / len(plain)
    assert full == pytest.approx(script.SHARE_444, abs=0.01)
    qualities = collections.Counter(sample.quality for sample in samples)
    shares = {quality: count / len(samples) for quality, count in qualities.items()}
    assert shares == pytest.approx(dict(script.QUALITIES), abs=0.015)
    labels = collections.Counter(sample.label for sample in samples)
    assert sorted(labels) == list(range(1000))
    assert max(labels.values()) < 60


def test_keys_rise_through_all_shards_and_the_last_shard_is_short() -> None:
    shards = script.plan(25, 0, 10)
    assert [len(shard) for shard in shards] == [10, 10, 5]
    assert [s.key for shard in shards for s in shard] == [f"{i:08d}" for i in range(25)]


@pytest.mark.parametrize("images", [1, 23, 24, 1000, 20_000])
def test_the_plan_has_as_many_odd_ones_as_announced(images: int) -> None:
    kinds = collections.Counter(s.kind for shard in script.plan(images, 2, 100) for s in shard)
    odd = script.odd_ones(images)
    assert {kind: kinds[kind] for kind in odd} == odd
    assert kinds["plain"] == images - sum(odd.values())


def test_odd_ones_are_at_least_one_of_each_kind_and_imagenets_own_number_at_its_size() -> None:
    assert script.odd_ones(23) == {"grey": 0, "progressive": 0, "cmyk": 0, "png": 0}
    assert script.odd_ones(24) == {"grey": 1, "progressive": 1, "cmyk": 1, "png": 1}
    assert script.odd_ones(1_281_167) == {"grey": 12812, "progressive": 2562, "cmyk": 22, "png": 1}


# The bytes


@pytest.mark.slow
def test_the_number_of_workers_does_not_change_a_byte(made: Path, tmp_path: Path) -> None:
    flags = ("--images", 24, "--seed", 0, "--shard-size", 12, "--workers", 2)
    done = run("--out", tmp_path, *flags)
    assert done.returncode == 0, done.stderr
    assert contents(tmp_path) == contents(made)


@pytest.mark.slow
def test_another_seed_gives_other_images_and_labels(made: Path, tmp_path: Path) -> None:
    make(tmp_path, seed=1)
    one, other = entries(made), entries(tmp_path)
    assert one.keys() == other.keys()
    assert all(one[name] != other[name] for name in one if name.endswith(".jpg"))
    assert any(one[name] != other[name] for name in one if name.endswith(".cls"))


@pytest.mark.slow
def test_shards_do_not_repeat_each_other(made: Path) -> None:
    images = [content for name, content in entries(made).items() if name.endswith(".jpg")]
    assert len(set(images)) == 24


@pytest.mark.slow
def test_samples_are_as_planned(made: Path) -> None:
    files = entries(made)
    samples = [sample for shard in script.plan(24, 0, 12) for sample in shard]
    assert list(files) == [f"{s.key}.{suffix}" for s in samples for suffix in ("jpg", "cls")]
    for sample in samples:
        assert picture(files, sample.key).size == (sample.width, sample.height)
        assert files[f"{sample.key}.cls"] == str(sample.label).encode()


def test_odd_ones_are_where_the_index_says(made: Path) -> None:
    files, odd = entries(made), json.loads((made / "index.json").read_text())["odd"]
    assert {kind: len(keys) for kind, keys in odd.items()} == script.odd_ones(24)
    found: dict[str, list[str]] = {kind: [] for kind in odd}
    for name in files:
        if name.endswith(".jpg"):
            image = picture(files, name.removesuffix(".jpg"))
            kind = "png" if image.format == "PNG" else {"L": "grey", "CMYK": "cmyk"}.get(image.mode)
            kind = "progressive" if "progressive" in image.info else kind
            if kind:
                found[kind].append(name.removesuffix(".jpg"))
    assert found == odd


def test_chroma_is_subsampled_as_planned(made: Path) -> None:
    files = entries(made)
    for sample in (sample for shard in script.plan(24, 0, 12) for sample in shard):
        if sample.kind in {"plain", "progressive"}:
            layers = [layer[1:3] for layer in picture(files, sample.key).layer]  # type: ignore[attr-defined]
            luma = (1, 1) if sample.subsampling == "4:4:4" else (2, 2)
            assert layers == [luma, (1, 1), (1, 1)]


def test_entries_carry_neither_time_nor_owner(made: Path) -> None:
    for path in made.glob("shard-*.tar"):
        with tarfile.open(path) as tar:
            for e in tar:
                assert (e.mtime, e.uid, e.gid, e.uname, e.gname, e.mode) == (0, 0, 0, "", "", 0o644)


@pytest.mark.slow
def test_an_image_takes_about_half_a_byte_per_pixel(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(script, "REUSE", 1)
    rng = np.random.default_rng(0)
    samples = script.plan(16, 0, 16)[0]
    supply = script.canvases(rng, [])
    size = sum(
        len(script.encode(script.view(rng, next(supply), s.width, s.height), s)) for s in samples
    )
    assert size / sum(s.width * s.height for s in samples) == pytest.approx(0.5, abs=0.08)


def test_photographs_are_cut_even_if_smaller_than_the_images(tmp_path: Path) -> None:
    photos = tmp_path / "photos"
    photos.mkdir()
    for name, colour in (("a.jpg", (250, 0, 0)), ("b.png", (0, 0, 250))):
        Image.new("RGB", (90, 60), colour).save(photos / name)
    (photos / "notes.txt").write_text("not a picture")
    make(tmp_path / "out", images=8, shard_size=1, photos=photos)
    files = entries(tmp_path / "out")
    colours = {np.asarray(picture(files, f"{i:08d}")).mean(axis=(0, 1)).argmax() for i in range(8)}
    assert colours == {0, 2}


# The folder


def test_the_index_adds_up(made: Path) -> None:
    index = json.loads((made / "index.json").read_text())
    files = entries(made)
    images = [len(content) for name, content in files.items() if name.endswith(".jpg")]
    assert index["parameters"] == json.loads((made / "parameters.json").read_text())
    assert index["parameters"]["seed"] == 0
    assert index["samples"] == 24
    assert index["mean_image_bytes"] == pytest.approx(sum(images) / 24)
    assert [(s["name"], s["samples"]) for s in index["shards"]] == [
        ("shard-000000.tar", 12),
        ("shard-000001.tar", 12),
    ]
    assert [s["bytes"] for s in index["shards"]] == [
        (made / s["name"]).stat().st_size for s in index["shards"]
    ]
    assert index["bytes"] == sum(s["bytes"] for s in index["shards"])


def test_the_summary_names_images_odd_ones_bytes_sides_and_seconds(tmp_path: Path) -> None:
    assert re.fullmatch(
        r"2 images \(0 grey, 0 progressive, 0 cmyk, 0 png\) in 1 shards, \d+ bytes, "
        r"mean \d+\.\d KB and \[\d+\.0, \d+\.0\] pixels, \d+\.\d s",
        make(tmp_path, images=2),
    )


@pytest.mark.slow
def test_an_interrupted_run_leaves_no_half_shard_and_can_be_repeated(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = 15  # images until the interruption, in the second shard

    def encode(*arguments: Any) -> bytes:
        nonlocal left
        left -= 1
        if left < 0:
            raise KeyboardInterrupt
        return plain(*arguments)  # type: ignore[no-any-return]

    plain = script.encode
    with monkeypatch.context() as patch:
        patch.setattr(script, "encode", encode)
        with pytest.raises(KeyboardInterrupt):
            make(tmp_path)
    assert set(contents(tmp_path)) == {
        "parameters.json",
        "shard-000000.tar",
        "shard-000001.tar.part",
    }
    kept = (tmp_path / "shard-000000.tar").stat().st_mtime_ns
    make(tmp_path)
    assert contents(tmp_path) == contents(made)
    assert (tmp_path / "shard-000000.tar").stat().st_mtime_ns == kept


def test_a_complete_folder_is_left_alone(made: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in made.iterdir()}
    assert make(made) == f"{made} is complete already (24 images): nothing to do"
    assert {path: path.stat().st_mtime_ns for path in made.iterdir()} == before


def test_a_lost_shard_is_made_again(made: Path, tmp_path: Path) -> None:
    for name, content in contents(made).items():
        (tmp_path / name).write_bytes(content)
    (tmp_path / "shard-000001.tar").unlink()
    make(tmp_path)
    assert contents(tmp_path) == contents(made)


@pytest.mark.parametrize("change", [{"images": 25}, {"seed": 7}, {"shard_size": 24}])
def test_a_folder_of_other_parameters_is_refused(made: Path, change: dict[str, int]) -> None:
    ((name, value),) = change.items()
    rule = (
        rf"^out must be new or hold shards made with {{.*'{name}': {value},.*}}, "
        rf"got {re.escape(str(made))} with {{'format': 1, 'images': 24, 'seed': 0, "
        r"'shard_size': 12, 'photos': \[\]}: remove that folder or choose another$"
    )
    with pytest.raises(ValueError, match=rule):
        make(made, **change)


def test_a_folder_of_unknown_shards_is_refused(tmp_path: Path) -> None:
    (tmp_path / "shard-000000.tar").touch()
    with pytest.raises(ValueError, match=r"^out must be new or .* with None: remove that folder"):
        make(tmp_path)
    assert set(contents(tmp_path)) == {"shard-000000.tar"}


# The arguments


@pytest.mark.parametrize(
    ("name", "value", "least"),
    [("images", 0, 1), ("seed", -1, 0), ("shard_size", 0, 1), ("workers", -2, 1)],
)
def test_numbers_that_are_too_small_are_refused(name: str, value: int, least: int) -> None:
    with pytest.raises(ValueError, match=f"^{name} must be >= {least}, got {value}$"):
        script.Settings(**{"out": Path("new"), "images": 1, "seed": 0, name: value})


def test_a_file_cannot_be_the_folder(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(
        ValueError, match=rf"^out must be a folder or a new name, got the file {file}$"
    ):
        make(file)


def test_a_folder_without_photographs_is_refused(tmp_path: Path) -> None:
    rule = rf"^photos must be a folder with \.jpg or \.png files, got {tmp_path}$"
    with pytest.raises(ValueError, match=rule):
        make(tmp_path / "out", photos=tmp_path)


def test_the_command_line_reports_a_bad_argument_and_exits_with_2(tmp_path: Path) -> None:
    done = run("--out", tmp_path, "--images", 0, "--seed", 0)
    assert done.returncode == 2
    assert done.stderr.endswith("error: images must be >= 1, got 0\n")
