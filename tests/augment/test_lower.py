"""Which transforms share a pass, and what constants they have."""

from typing import Any

import pytest
import torch

from streamloader import augment
from streamloader.augment import program
from streamloader.augment.program import Program

JITTER = augment.ColorJitter(0.4, 0.4, 0.4, 0.1)
FLIP, ERASE = augment.RandomHorizontalFlip(), augment.RandomErasing()
NORMALIZE, SCALED = augment.Normalize(0.5, 0.25), augment.ToDtype(torch.float32, scale=True)


def lowered(*transforms: Any, dtype: torch.dtype = torch.uint8) -> Program:
    return augment.Compose(transforms).program(dtype)


@pytest.mark.parametrize(
    "transforms",
    [
        (augment.RandomResizedCrop(9), FLIP, JITTER, SCALED, NORMALIZE, ERASE),
        (augment.Resize(9), augment.CenterCrop(8), NORMALIZE),
        (augment.RandomCrop(9, padding=4), FLIP, NORMALIZE),
        (SCALED, augment.RandomResizedCrop(9), NORMALIZE, FLIP),  # a flip commutes with colours
        (augment.RandomCrop(9), augment.Resize(8)),
        (SCALED,),
    ],
)
def test_these_take_one_pass(transforms: tuple[Any, ...]) -> None:
    (only,) = lowered(*transforms).passes
    assert only.places == tuple(range(len(transforms)))


@pytest.mark.parametrize(
    ("transforms", "places"),
    [
        ((augment.Resize(9), augment.RandomResizedCrop(8), FLIP), ((0,), (1, 2))),
        ((NORMALIZE, augment.RandomCrop(9)), ((0,), (1,))),
        ((ERASE, FLIP), ((0,), (1,))),
        ((JITTER, JITTER, NORMALIZE), ((0,), (1, 2))),  # a pass knows one mean
        ((augment.CenterCrop(9), augment.Resize(8)), ((0,), (1,))),
    ],
)
def test_these_take_two(transforms: tuple[Any, ...], places: tuple[Any, ...]) -> None:
    assert tuple(part.places for part in lowered(*transforms).passes) == places


def test_imagenet_with_jitter() -> None:
    made = lowered(augment.RandomResizedCrop(9), FLIP, JITTER, SCALED, NORMALIZE, ERASE)

    assert made == Program(
        unit=255.0,
        passes=(
            program.Pass(
                places=(0, 1, 2, 3, 4, 5),
                resample=program.Resample(0),
                ops=(
                    program.Jitter(12, (True, True, True, True)),
                    program.Normalize((0.5,), (0.25,)),
                    program.Erase(20, (0.0,)),
                ),
            ),
        ),
        columns=made.columns,
        starts=(0, 0, 12, 20, 20, 20),
        dtype=torch.float32,
        memory_format=torch.contiguous_format,
    )
    assert made.columns[0] == "view0.top"
    assert made.columns[12] == "2.ColorJitter.brightness"
    assert made.columns[20:] == tuple(
        f"5.RandomErasing.{name}" for name in ("top", "left", "height", "width")
    )


def test_columns_and_passes_are_alike_for_every_dtype() -> None:
    recipe = augment.Compose([augment.Resize(9), augment.ToDtype(torch.float16), JITTER, FLIP])
    programs = [recipe.program(dtype) for dtype in (torch.uint8, torch.float16, torch.float64)]

    assert len({made.columns for made in programs}) == 1
    assert len({tuple(part.places for part in made.passes) for made in programs}) == 1


@pytest.mark.parametrize(
    ("before", "dtype", "fill"),
    [
        ([], torch.uint8, 0.2),
        ([], torch.float32, 51),
        ([SCALED], torch.uint8, 51),
        ([augment.ToDtype(torch.uint8, scale=True)], torch.float32, 0.2),
    ],
)
def test_a_fill_is_in_the_units_of_the_dtype_by_then(
    before: list[Any], dtype: torch.dtype, fill: float
) -> None:
    crop = augment.RandomCrop(9, padding=1, fill=51)
    part = lowered(*before, crop, dtype=dtype).passes[-1]

    assert part.resample is not None
    assert list(part.resample.fill) == pytest.approx([fill])


def test_a_later_crop_keeps_the_fill_and_the_way_of_resizing() -> None:
    made = lowered(
        augment.Resize(9, "nearest"), augment.RandomCrop(9, padding=1, fill=51), FLIP
    ).passes[0]

    assert made.resample == program.Resample(0, "nearest", antialias=True, fill=(0.2,))


def test_jitter_of_nothing_has_columns_and_no_operation() -> None:
    made = lowered(augment.ColorJitter(), NORMALIZE)

    assert made.passes[0].ops == (program.Normalize((0.5,), (0.25,)),)
    assert len(made.columns) == 8


def test_other_dtypes_are_refused() -> None:
    with pytest.raises(TypeError, match=r"^the images' dtype must be torch.uint8 or a floating"):
        lowered(FLIP, dtype=torch.int32)


def test_a_program_is_made_once() -> None:
    assert lowered(FLIP, NORMALIZE) is lowered(FLIP, NORMALIZE)
