from __future__ import annotations

import io
import random
import warnings
from typing import Any

import pytest
import torch
from PIL import Image
from torch import Tensor
from torchvision.transforms import v2

from streamloader import images

WIDTH, HEIGHT = 64, 48


def gradient(width: int = WIDTH, height: int = HEIGHT) -> Image.Image:
    """A smooth picture, unlike itself however it is turned."""
    across, down = Image.linear_gradient("L").rotate(90), Image.linear_gradient("L")
    return Image.merge("RGB", (across, down, across.point(lambda v: v // 2))).resize(
        (width, height)
    )


def encoded(image: Image.Image, kind: str = "JPEG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def pixels(image: Image.Image) -> Tensor:
    flat = torch.frombuffer(bytearray(image.convert("RGB").tobytes()), dtype=torch.uint8)
    return flat.view(image.height, image.width, 3).permute(2, 0, 1)


def pillows(data: bytes) -> Tensor:
    with Image.open(io.BytesIO(data)) as image:
        return pixels(image)


def apart(one: Tensor, other: Tensor) -> float:
    """The mean difference in levels."""
    assert one.shape == other.shape
    assert one.dtype == other.dtype == torch.uint8
    return float((one.float() - other.float()).abs().mean())


# -- decoding


@pytest.mark.parametrize(
    "options",
    [{"subsampling": "4:4:4"}, {"subsampling": "4:2:0"}, {"progressive": True}],
    ids=["444", "420", "progressive"],
)
def test_a_jpeg_is_what_pillow_makes_of_it(options: dict[str, Any]) -> None:
    data = encoded(gradient(), **options)
    assert apart(images.decode(data), pillows(data)) <= 1


@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
def test_grey_has_three_channels(kind: str) -> None:
    data = encoded(gradient().convert("L"), kind)
    image = images.decode(data)
    assert apart(image, pillows(data)) == 0
    assert torch.equal(image[0], image[2])


def test_j01_cmyk_is_close_to_pillows_rgb() -> None:
    data = encoded(gradient().convert("CMYK"), quality=95)
    assert apart(images.decode(data), pillows(data)) < 1
    assert apart(images.decode(data), pixels(gradient())) < 8


def test_j01_ycck_is_close_to_pillows_rgb() -> None:
    data = bytearray(encoded(gradient().convert("CMYK")))
    data[data.index(b"Adobe") + 11] = 2  # the transform, said to be YCCK
    assert apart(images.decode(bytes(data)), pillows(bytes(data))) < 1


@pytest.mark.parametrize("orientation", range(1, 9))
@pytest.mark.parametrize("kind", ["JPEG", "PNG"])
def test_j03_an_orientation_is_not_applied(orientation: int, kind: str) -> None:
    exif = Image.Exif()
    exif[0x112] = orientation
    data = encoded(gradient(), kind, exif=exif)
    assert images.decode(data).shape == (3, HEIGHT, WIDTH)
    assert apart(images.decode(data), pillows(data)) == 0


def test_j03_an_orientation_is_found_behind_other_segments_and_fillers() -> None:
    exif = Image.Exif()
    exif[0x112] = 6
    data = encoded(gradient(), exif=exif, comment=b"first")
    start, comment = data.index(b"\xff\xe1"), b"\xff\xfe\x00\x04ab"
    for between in (comment, b"\xff\xff", comment + b"\xff"):
        changed = data[:start] + between + data[start:]
        assert images.decode(changed).shape == (3, HEIGHT, WIDTH)


@pytest.mark.parametrize("kind", ["PNG", "WEBP", "GIF", "BMP"])
def test_j05_the_content_decides_which_decoder_reads_it(kind: str) -> None:
    data = encoded(gradient(), kind)
    assert apart(images.decode(data), pillows(data)) == 0


def test_j05_alpha_is_dropped() -> None:
    image = gradient()
    image.putalpha(image.getchannel("R"))
    assert apart(images.decode(encoded(image, "PNG")), pixels(gradient())) == 0


def test_palettes_are_looked_up_transparent_or_not() -> None:
    palette = gradient().quantize(16)
    expected = pixels(palette)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert apart(images.decode(encoded(palette, "PNG")), expected) == 0
        clear = encoded(palette, "PNG", transparency=bytes(range(16)))
        assert apart(images.decode(clear), expected) == 0


def test_j06_sixteen_bits_keep_their_scale() -> None:
    values = [number * 65535 // (WIDTH * HEIGHT - 1) for number in range(WIDTH * HEIGHT)]
    raw = b"".join(value.to_bytes(2, "little") for value in values)
    data = encoded(Image.frombytes("I;16", (WIDTH, HEIGHT), raw), "PNG")
    expected = torch.tensor(values).div(257).view(1, HEIGHT, WIDTH).expand(3, -1, -1)
    assert (images.decode(data).float() - expected).abs().max() <= 1


def test_j06_big_endian_sixteen_bits_too() -> None:
    values = [number * 65535 // (WIDTH * HEIGHT - 1) for number in range(WIDTH * HEIGHT)]
    raw = b"".join(value.to_bytes(2, "big") for value in values)
    data = encoded(Image.frombytes("I;16B", (WIDTH, HEIGHT), raw), "TIFF")
    with Image.open(io.BytesIO(data)) as image:
        assert image.mode == "I;16B"
    expected = torch.tensor(values).div(257).view(1, HEIGHT, WIDTH).expand(3, -1, -1)
    assert (images.decode(data).float() - expected).abs().max() <= 1


def test_a_jpeg_with_more_pixels_than_pillow_takes_is_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    data = bytearray(encoded(gradient()))
    sides = data.index(b"\xff\xc0") + 5
    data[sides : sides + 4] = (20_000).to_bytes(2, "big") * 2
    message = r"^no image can be decoded from its \d+ bytes: 20000 x 20000 pixels are more than PIL"
    with pytest.raises(ValueError, match=message):
        images.decode(bytes(data))
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", WIDTH * HEIGHT)
    assert images.decode(encoded(gradient())).shape == (3, HEIGHT, WIDTH)
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", None)
    images.without_exif(bytes(data))


def test_what_is_no_image_has_one_message_and_not_an_address_in_it() -> None:
    with pytest.raises(ValueError, match=r"^no image .* its 6 bytes: cannot identify image file$"):
        images.decode(b"<html>")


def test_j06_pixels_without_a_known_range_are_an_error() -> None:
    data = encoded(Image.new("F", (8, 8)), "TIFF")
    with pytest.raises(ValueError, match=r"^no image can be decoded from its .* mode F have no"):
        images.decode(data)


@pytest.mark.parametrize("size", [20, 60_000])
def test_j07_a_broken_exif_does_no_harm(size: int) -> None:
    exif = b"Exif\0\0" + random.Random(0).randbytes(size)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        image = images.decode(encoded(gradient(), exif=exif))
    assert apart(image, images.decode(encoded(gradient()))) == 0


BROKEN = {
    "empty": b"",
    "text": b"<html>404</html>",
    "random": b"\xff\xd8\xff" + random.Random(0).randbytes(500),
    "start": b"\xff\xd8",
    "half a JPEG": encoded(gradient())[:500],
    "half a PNG": encoded(gradient(), "PNG")[:100],
}


@pytest.mark.parametrize("data", BROKEN.values(), ids=BROKEN)
def test_j02_what_is_no_image_is_an_error(data: bytes) -> None:
    with pytest.raises(ValueError, match=f"^no image can be decoded from its {len(data)} bytes: "):
        images.decode(data)


def test_only_exif_is_cut_out() -> None:
    plain, with_exif = encoded(gradient()), encoded(gradient(), exif=b"Exif\0\0" + b"x" * 99)
    assert with_exif != plain
    assert images.without_exif(plain) == images.without_exif(with_exif) == plain


@pytest.mark.parametrize("length", range(2, 60))
def test_cutting_out_ends_wherever_the_data_does(length: int) -> None:
    images.without_exif(encoded(gradient(), exif=b"Exif\0\0" + b"x" * 20)[:length])


# -- cropping


def test_a_random_box_is_within_the_image_and_of_the_ranges_named() -> None:
    rng = random.Random(0)
    boxes = [images.random_box(400, 500, rng) for _ in range(2000)]
    areas = [box.height * box.width / 200_000 for box in boxes]
    ratios = [box.width / box.height for box in boxes]
    assert all(box.top >= 0 and box.top + box.height <= 400 for box in boxes)
    assert all(box.left >= 0 and box.left + box.width <= 500 for box in boxes)
    assert 0.079 < min(areas) < 0.1
    assert 0.9 < max(areas) <= 1
    assert 0.74 < min(ratios) < 0.76
    assert 1.32 < max(ratios) < 1.35


def test_random_boxes_are_distributed_as_torchvisions() -> None:
    rng, image = random.Random(0), torch.empty(3, 400, 500)
    torch.manual_seed(0)
    theirs = [v2.RandomResizedCrop(224).make_params([image]) for _ in range(3000)]
    ours = [images.random_box(400, 500, rng)._asdict() for _ in range(3000)]
    for name in ("top", "left", "height", "width"):
        means = [sum(box[name] for box in boxes) / 3000 for boxes in (ours, theirs)]
        assert means[0] == pytest.approx(means[1], abs=8)


@pytest.mark.parametrize(
    ("shape", "box"),
    [
        ((10, 1000), images.Box(0, 493, 10, 13)),
        ((1000, 10), images.Box(493, 0, 13, 10)),
        ((1, 1), images.Box(0, 0, 1, 1)),
    ],
)
def test_of_an_extreme_image_it_is_the_middle(shape: tuple[int, int], box: images.Box) -> None:
    class Large(random.Random):
        def uniform(self, a: float, b: float) -> float:  # noqa: ARG002
            return b

    assert images.random_box(*shape, Large(0)) == box


def test_a_crop_depends_on_its_generator_alone() -> None:
    image = images.decode(encoded(gradient()))
    first = images.training(image, 32, random.Random(1))
    assert torch.equal(first, images.training(image, 32, random.Random(1)))
    assert not torch.equal(first, images.training(image, 32, random.Random(2)))


def test_half_of_the_crops_are_flipped() -> None:
    image = images.decode(encoded(gradient()))  # brighter to the left
    crops = [images.training(image, 16, random.Random(seed)).float() for seed in range(300)]
    left = sum(bool(crop[0, :, :8].mean() > crop[0, :, 8:].mean()) for crop in crops)
    assert 120 < left < 180


@pytest.mark.parametrize("shape", [(48, 64), (64, 48), (300, 30), (32, 32), (7, 5)])
@pytest.mark.parametrize("size", [24, 32])
def test_pixels_are_torchvisions(shape: tuple[int, int], size: int) -> None:
    image = torch.randint(256, (3, *shape), dtype=torch.uint8)
    ours = images.evaluation(image, size)
    short = round(size * 256 / 224)
    theirs = v2.Compose([v2.Resize(short, antialias=True), v2.CenterCrop(size)])(image)
    assert ours.shape == (3, size, size)
    assert (ours.int() - theirs.int()).abs().max() <= 1
    rng = random.Random(0)
    box = images.random_box(*shape, rng)
    flip = rng.random() < 0.5
    crop = v2.functional.resized_crop(image, *box, size=[size, size], antialias=True)
    crop = crop.flip(-1) if flip else crop
    assert (images.training(image, size, random.Random(0)).int() - crop.int()).abs().max() <= 1


@pytest.mark.parametrize("shape", [(20, 1000), (1000, 20), (1, 3001), (3001, 1)])
def test_the_middle_of_a_slim_image_is_torchvisions(shape: tuple[int, int]) -> None:
    image = torch.randint(256, (3, *shape), dtype=torch.uint8)
    theirs = v2.Compose([v2.Resize(27, antialias=True), v2.CenterCrop(24)])(image)
    assert (images.evaluation(image, 24).int() - theirs.int()).abs().max() <= 1


def test_of_a_line_of_pixels_only_the_middle_is_resized(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[tuple[int, int]] = []
    plain = images._resize

    def resize(image: Tensor, size: tuple[int, int]) -> Tensor:
        sizes.append(size)
        return plain(image, size)

    monkeypatch.setattr(images, "_resize", resize)
    for shape in ((1, 3000), (3000, 1)):
        image = torch.zeros(3, *shape, dtype=torch.uint8)
        assert images.evaluation(image, 224).shape == (3, 224, 224)
    assert sizes == [(256, 16 * 256), (16 * 256, 256)]


def test_crops_are_contiguous_uint8() -> None:
    image = images.decode(encoded(gradient()))
    for crop in (images.training(image, 32, random.Random(0)), images.evaluation(image, 32)):
        assert crop.dtype == torch.uint8
        assert crop.is_contiguous()
