from typing import Any

import pytest

from benchmarks._options import Machine, Options, _parser, resolved

GPU = Machine("cuda", 16)
CPU = Machine(None, 2)


def options(here: Machine, *arguments: str) -> Options:
    given: dict[str, Any] = vars(_parser().parse_args(arguments))
    return resolved(given, here)


def test_on_a_gpu_it_is_resnet50_as_people_train_it() -> None:
    found = options(GPU)
    assert (found.device, found.model, found.batch_size, found.image_size) == (
        "cuda",
        "resnet50",
        256,
        224,
    )
    assert (found.workers, found.in_workers, found.overlaps) == (14, 56, True)


def test_on_the_cpu_it_is_small_enough() -> None:
    found = options(CPU)
    assert (found.device, found.model, found.batch_size, found.image_size) == (
        "cpu",
        "resnet18",
        16,
        64,
    )
    assert (found.workers, found.overlaps) == (1, False)


def test_the_cpu_can_be_asked_for_beside_a_gpu() -> None:
    assert options(GPU, "--device", "cpu").model == "resnet18"


def test_the_small_model_has_small_images() -> None:
    assert options(GPU, "--model", "small").image_size == 32


def test_what_is_given_stays() -> None:
    found = options(GPU, "--workers", "3", "--batch-size", "8", "--image-size", "96")
    assert (found.workers, found.batch_size, found.image_size) == (3, 8, 96)


def test_the_ceiling_is_always_measured() -> None:
    assert options(GPU, "--loaders", "plain, stream").loaders == ("plain", "stream", "ceiling")
    assert options(GPU, "--loaders", "ceiling,plain").loaders == ("plain", "ceiling")


def test_an_unknown_loader_is_named() -> None:
    with pytest.raises(ValueError, match=r"^--loaders must be among plain, .*, got 'fast'$"):
        options(GPU, "--loaders", "plain,fast")


def test_a_graph_needs_cuda() -> None:
    with pytest.raises(ValueError, match=r"^--step graph needs a CUDA device, got cpu$"):
        options(CPU, "--step", "graph")


@pytest.mark.parametrize(
    ("name", "value", "least"),
    [("--blocks", 0, 1), ("--steps", 0, 1), ("--workers", 0, 1), ("--late", -1, 0)],
)
def test_a_number_that_is_too_small_is_named(name: str, value: int, least: int) -> None:
    with pytest.raises(ValueError, match=rf"^{name} must be at least {least}, got {value}$"):
        options(GPU, name, str(value))
