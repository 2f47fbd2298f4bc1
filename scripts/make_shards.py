"""Write WebDataset shards of JPEGs with ImageNet's statistics, from a seed alone.

    Settings                           the arguments, validated
    odd_ones, plan -> Sample           what each shard holds: pure
    leaves, pink, synthesise           a canvas from nothing: dead leaves with 1/f texture
    canvases, view, encode             a canvas (or a photograph) to one image's bytes
    whole, write_shard, write_shards   shards, under their names only when complete
    claim, describe, make, main        all of it, then the index

The folder gets `parameters.json` (first), the shards, and `index.json` (last; with the keys of the
odd samples). An interrupted command can be repeated: shards that are there are kept. The bytes
depend on the arguments and the versions of numpy and Pillow, not on the number of workers.

Sides and the odd ones (grey, progressive, CMYK, PNG) are ImageNet's. How many of its JPEGs have
full colour (4:4:4) and how many halved (4:2:0) is assumed, half of each, and so are qualities: they
make 0.5 to 0.6 byte per pixel, as ImageNet has, whose entropy decoding is most of what an image
costs. Photographs that are smooth, or larger than their pixels deserve, give smaller files.
"""

import argparse
import contextlib
import dataclasses
import io
import itertools
import json
import multiprocessing
import os
import signal
import sys
import tarfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any, BinaryIO, Literal

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw, ImageFilter
from tqdm import tqdm

FORMAT = 1  # raise it when equal arguments no longer give equal bytes
SHARD = "shard-{:06d}.tar"
CLASSES = 1000
# Width and height in pixels, and share; the rest has both from 300 to 640. The mean is 0.2 MP.
SIZES = (
    ((500, 375), 0.34), ((375, 500), 0.14), ((500, 333), 0.12), ((333, 500), 0.06),
    ((640, 480), 0.10), ((480, 640), 0.02), ((500, 400), 0.04), ((500, 500), 0.02),
)  # fmt: skip
# Both are assumed: see the top.
QUALITIES = ((95, 0.10), (96, 0.20), (97, 0.20), (98, 0.25), (99, 0.25))  # Pillow's, and share
SHARE_444 = 0.5
Kind = Literal["plain", "grey", "progressive", "cmyk", "png"]
# CMYK and PNG (under a JPEG's name) as in ImageNet's training set; the others are round numbers.
ODD: dict[Kind, float] = {"grey": 0.01, "progressive": 2e-3, "cmyk": 22 / 1.28e6, "png": 1 / 1.28e6}
ODD_FROM = 24  # images: a smaller set may have no odd ones

CANVAS = 1280  # pixels a side
REUSE = 25  # images cut from one canvas
# Tuned on photographs: a byte takes as long to decode, and there are 0.5 per pixel as in ImageNet.
LARGEST_LEAF = 420.0  # pixels of radius
# The next three differ from canvas to canvas, evenly over their logarithms.
SMALLEST_LEAF = (8.0, 70.0)  # pixels of radius: how busy the canvas is
TEXTURE = (2.0, 30.0)  # grey levels, root mean square over a typical leaf
BLUR = (0.4, 4.0)  # pixels of radius: few photographs are sharp to the pixel
STEP = (0.8192, 0.6710, 0.5497)  # Roberts' R3 sequence: by chance, a small set's mean would stray
Floats = npt.NDArray[np.floating[Any]]


@dataclasses.dataclass(frozen=True)
class Settings:
    """What to write, and how.

    Raises:
        ValueError: an argument breaks its rule; the message names it, the rule and the value.
    """

    out: Path
    images: int
    seed: int
    photos: Path | None = None  # a folder of pictures to cut from, instead of procedural canvases
    shard_size: int = 400  # samples per shard, the last one excepted: 400 are about 40 MB
    workers: int = 1

    def __post_init__(self) -> None:
        for name, least in (("images", 1), ("seed", 0), ("shard_size", 1), ("workers", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} must be >= {least}, got {getattr(self, name)}")
        if self.out.exists() and not self.out.is_dir():
            raise ValueError(f"out must be a folder or a new name, got the file {self.out}")
        if self.photos is not None and not self.pictures():
            raise ValueError(f"photos must be a folder with .jpg or .png files, got {self.photos}")

    def pictures(self) -> list[Path]:
        """The photographs, by name; none for procedural canvases."""
        files = self.photos.glob("*") if self.photos else ()
        return sorted(p for p in files if p.suffix.lower() in {".jpg", ".jpeg", ".png"})

    def parameters(self) -> dict[str, Any]:
        """All that the bytes depend on; photographs count by their sizes in bytes, by name."""
        fields = {name: getattr(self, name) for name in ("images", "seed", "shard_size")}
        return {"format": FORMAT, **fields, "photos": [p.stat().st_size for p in self.pictures()]}


@dataclasses.dataclass(frozen=True, slots=True)
class Sample:
    """One sample, before it has pixels."""

    key: str
    label: int
    width: int
    height: int
    quality: int
    subsampling: str  # "4:2:0" or "4:4:4"
    kind: Kind


def odd_ones(images: int) -> dict[Kind, int]:
    """How many of `images` are of each odd kind: by share, but at least one from ODD_FROM on."""
    return {kind: max(int(images >= ODD_FROM), round(images * p)) for kind, p in ODD.items()}


def plan(images: int, seed: int, shard_size: int) -> list[tuple[Sample, ...]]:
    """Decides each shard's samples, without touching a pixel; keys rise through all shards."""
    rng = np.random.default_rng(seed)
    labels = rng.integers(CLASSES, size=images).tolist()
    sides = rng.integers(300, 641, size=(images, 2))
    slots = np.searchsorted(np.cumsum([share for _, share in SIZES]), rng.random(images))
    for i, (size, _) in enumerate(SIZES):
        sides[slots == i] = size
    qualities = rng.choice([q for q, _ in QUALITIES], images, p=[p for _, p in QUALITIES]).tolist()
    full = rng.random(images) < SHARE_444
    kinds = np.array(["plain"] * images, dtype=object)
    odd = [kind for kind, count in odd_ones(images).items() for _ in range(count)]
    kinds[rng.choice(images, len(odd), replace=False)] = odd
    samples = []
    for i, (kind, (width, height)) in enumerate(zip(kinds, sides.tolist(), strict=True)):
        # Halving makes no sense without two chroma planes: not in grey, nor in CMYK.
        chroma = "4:4:4" if full[i] or kind in {"grey", "cmyk", "png"} else "4:2:0"
        samples.append(Sample(f"{i:08d}", labels[i], width, height, qualities[i], chroma, kind))
    return [tuple(samples[i : i + shard_size]) for i in range(0, images, shard_size)]


def leaves(rng: np.random.Generator, least: float, corners: int = 16) -> npt.NDArray[np.int32]:
    """The number of the leaf seen at each pixel, shape (CANVAS, CANVAS), each hiding older ones.

    Radii run from `least` to LARGEST_LEAF pixels with density r^-3. Under that law a picture looks
    alike at every scale, as photographs do: their amplitude spectra fall as 1/f.
    """
    # A disc's mean area under this law, of which the squeeze below leaves about two thirds.
    area = 2 * np.pi * least**2 * np.log(LARGEST_LEAF / least) * 2 / 3
    n = int(3 * CANVAS**2 / area)  # cover the canvas three times: few holes are left
    u = rng.random((n, 1))
    radius = ((1 - u) / least**2 + u / LARGEST_LEAF**2) ** -0.5
    ragged = rng.uniform(0, 0.5, (n, 1)) ** 2 * rng.standard_normal((n, corners))
    spoke = radius * (1 + ragged) * np.exp(2j * np.pi * np.arange(corners) / corners)
    squeezed = spoke.real + 1j * spoke.imag * rng.uniform(0.3, 1.0, (n, 1))
    outline = squeezed * np.exp(2j * np.pi * rng.random((n, 1)))
    centre = rng.uniform(-0.1 * CANVAS, 1.1 * CANVAS, (n, 1, 2))
    points = np.stack([outline.real, outline.imag], axis=-1) + centre
    draw = ImageDraw.Draw(picture := Image.new("I", (CANVAS, CANVAS)))
    for number, polygon in enumerate(points.reshape(n, -1).tolist()):
        draw.polygon(polygon, fill=number)
    return np.asarray(picture)


def pink(rng: np.random.Generator) -> Floats:
    """Periodic noise of amplitude 1/f^1.1, mean 0 and deviation 1, shape (CANVAS, CANVAS)."""
    white = rng.standard_normal((CANVAS, CANVAS), dtype=np.float32)
    f = np.hypot(np.fft.fftfreq(CANVAS)[:, None], np.fft.rfftfreq(CANVAS))
    f[0, 0] = np.inf
    noise = np.asarray(np.fft.irfft2(np.fft.rfft2(white) / f**1.1), np.float32)
    return noise / float(noise.std())


def synthesise(rng: np.random.Generator, texture: Floats, mood: Floats) -> Image.Image:
    """Paints an RGB canvas; `mood` (three from 0 to 1) is the place in the ranges of constants."""
    low, high = np.log([SMALLEST_LEAF, TEXTURE, BLUR]).T
    smallest, depth, blur = np.exp(low + mood * (high - low)).tolist()
    leaf = leaves(rng, smallest)
    n = int(leaf.max()) + 1
    # `pink` noise is periodic: rolled, one field serves many canvases.
    noise = np.roll(texture, rng.integers(CANVAS, size=2), axis=(0, 1))

    def plane(mean: float, spread: float, detail: Floats) -> Image.Image:
        level = rng.normal(mean, spread, n).astype(np.float32)
        return Image.fromarray((level[leaf] + detail).clip(0, 255).astype(np.uint8))

    luma = plane(115, 40, depth * rng.lognormal(0, 0.8, n).astype(np.float32)[leaf] * noise)
    chroma = [plane(128, 12, levels * noise.T) for levels in (2.5, -2.5)]
    canvas = Image.merge("YCbCr", [luma, *chroma]).convert("RGB")
    return canvas.filter(ImageFilter.GaussianBlur(blur))


def canvases(rng: np.random.Generator, photos: list[Path]) -> Iterator[Image.Image]:
    """RGB pictures to cut from, each REUSE times: of `photos` if there are any, or procedural."""
    texture, start = None if photos else pink(rng), rng.random(3)
    for number in itertools.count():
        if texture is None:
            with Image.open(photos[rng.integers(len(photos))]) as photo:
                photo.draft("RGB", (CANVAS, CANVAS))  # shrinks a camera's original while decoding
                canvas = photo.convert("RGB")
        else:
            canvas = synthesise(rng, texture, (start + number * np.array(STEP)) % 1)
        yield from itertools.repeat(canvas, REUSE)


def view(rng: np.random.Generator, canvas: Image.Image, width: int, height: int) -> Image.Image:
    """Cuts a random large box, scales it to width x height pixels, mirrors and recolours it."""
    zoom = min(canvas.width / width, canvas.height / height) * rng.uniform(0.55, 1)
    x, y = rng.uniform(0, (canvas.width - width * zoom, canvas.height - height * zoom))
    box = (x, y, min(x + width * zoom, canvas.width), min(y + height * zoom, canvas.height))
    cut = canvas.resize((width, height), Image.Resampling.LANCZOS, box=box)
    if rng.random() < 0.5:
        cut = cut.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    table = 255 * rng.uniform(0.85, 1.15, (3, 1)) * np.linspace(0, 1, 256) ** rng.uniform(0.8, 1.25)
    return cut.point(table.clip(0, 255).astype(int).ravel().tolist())


def encode(picture: Image.Image, sample: Sample) -> bytes:
    """An RGB picture's bytes, in the way of the sample's kind."""
    file = io.BytesIO()
    if sample.kind == "png":
        picture.convert("RGBA").save(file, "PNG", compress_level=1)
        return file.getvalue()
    mode = {"grey": "L", "cmyk": "CMYK"}.get(sample.kind, "RGB")
    options = {"subsampling": sample.subsampling, "progressive": sample.kind == "progressive"}
    picture.convert(mode).save(file, "JPEG", quality=sample.quality, **options)
    return file.getvalue()


@contextlib.contextmanager
def whole(path: Path) -> Iterator[BinaryIO]:
    """Opens a file that takes its name only once it is complete."""
    part = path.with_name(path.name + ".part")
    with part.open("wb") as file:
        yield file
    part.replace(path)


def write_shard(settings: Settings, number: int, samples: tuple[Sample, ...]) -> int:
    """Writes a shard, unless an earlier run did; returns the number of its samples."""
    if (path := settings.out / SHARD.format(number)).exists():
        return len(samples)
    # Of a spawned sequence, so that a shard's numbers are none of the plan's.
    rng = np.random.default_rng(np.random.SeedSequence(settings.seed, spawn_key=(number,)))
    with whole(path) as file, tarfile.open(fileobj=file, mode="w") as tar:
        for sample, canvas in zip(samples, canvases(rng, settings.pictures()), strict=False):
            picture = view(rng, canvas, sample.width, sample.height)
            files = {"jpg": encode(picture, sample), "cls": b"%d" % sample.label}
            for suffix, content in files.items():
                entry = tarfile.TarInfo(f"{sample.key}.{suffix}")  # fixed time, owner and mode
                entry.size = len(content)
                tar.addfile(entry, io.BytesIO(content))
    return len(samples)


def write_shards(settings: Settings, shards: list[tuple[Sample, ...]]) -> Iterator[int]:
    """Yields the number of samples of each shard when it is done; each is one task of a pool."""
    if settings.workers == 1:
        yield from (write_shard(settings, *task) for task in enumerate(shards))
        return
    # Unlike multiprocessing.Pool, this one raises when a worker is killed. Ctrl-C is for the
    # parent: the shards in hand are finished, the others dropped.
    spawn, deaf = multiprocessing.get_context("spawn"), (signal.SIGINT, signal.SIG_IGN)
    with ProcessPoolExecutor(settings.workers, spawn, signal.signal, deaf) as pool:
        try:
            tasks = [pool.submit(write_shard, settings, *task) for task in enumerate(shards)]
            yield from (task.result() for task in as_completed(tasks))
        finally:
            pool.shutdown(cancel_futures=True)


def claim(settings: Settings) -> None:
    """Makes the folder, and notes the parameters in it so that no other run mixes in.

    Raises:
        ValueError: it holds shards of other parameters, or of unknown ones.
    """
    note, wanted = settings.out / "parameters.json", settings.parameters()
    settings.out.mkdir(parents=True, exist_ok=True)
    found = json.loads(note.read_text()) if note.exists() else None
    if found is None and not any(settings.out.glob("shard-*.tar")):
        with whole(note) as file:
            file.write(json.dumps(wanted).encode())
    elif found != wanted:
        raise ValueError(
            f"out must be new or hold shards made with {wanted}, got {settings.out} with {found}: "
            "remove that folder or choose another"
        )


def describe(settings: Settings, shards: list[tuple[Sample, ...]]) -> dict[str, Any]:
    """The index: what was written (sides in pixels), and the keys of the odd ones."""
    samples = [sample for shard in shards for sample in shard]
    listing: list[dict[str, Any]] = []
    for number, shard in enumerate(shards):
        path = settings.out / SHARD.format(number)
        with tarfile.open(path) as tar:
            image_bytes = sum(file.size for file in tar if file.name.endswith(".jpg"))
        entry = {"samples": len(shard), "bytes": path.stat().st_size, "image_bytes": image_bytes}
        listing.append({"name": path.name, **entry})
    return {
        "parameters": settings.parameters(),
        "samples": len(samples),
        "bytes": sum(shard["bytes"] for shard in listing),
        "mean_image_bytes": sum(shard["image_bytes"] for shard in listing) / len(samples),
        "mean_sides": np.mean([(s.width, s.height) for s in samples], axis=0).round().tolist(),
        "odd": {kind: [s.key for s in samples if s.kind == kind] for kind in ODD},
        "shards": listing,
    }


def make(settings: Settings) -> str:
    """Writes what is missing of the shards, then the index; returns a summary."""
    start = time.monotonic()
    claim(settings)
    shards = plan(settings.images, settings.seed, settings.shard_size)
    path = settings.out / "index.json"
    if path.exists() and len([*settings.out.glob("shard-*.tar")]) == len(shards):
        return f"{settings.out} is complete already ({settings.images} images): nothing to do"
    with tqdm(total=settings.images, unit="img") as bar:
        for samples in write_shards(settings, shards):
            bar.update(samples)
    index = describe(settings, shards)
    with whole(path) as file:
        file.write(json.dumps(index, indent=1).encode())
    odd = ", ".join(f"{len(keys)} {kind}" for kind, keys in index["odd"].items())
    return (
        f"{settings.images} images ({odd}) in {len(shards)} shards, {index['bytes']} bytes, mean "
        f"{index['mean_image_bytes'] / 1000:.1f} KB and {index['mean_sides']} pixels, "
        f"{time.monotonic() - start:.1f} s"
    )


def main() -> None:
    """The command line; a bad argument exits with 2."""
    parser = argparse.ArgumentParser(description="WebDataset shards with ImageNet's statistics")
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--images", type=int, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--photos", type=Path, help="folder of pictures to cut from")
    parser.add_argument("--shard-size", type=int, default=400, help="samples per shard")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="processes")
    try:
        sys.stdout.write(make(Settings(**vars(parser.parse_args()))) + "\n")
    except ValueError as error:
        parser.error(str(error))


if __name__ == "__main__":
    main()
