from typing import Any

import pytest

from benchmarks._options import Machine, Options, _parser, resolved

GPU = Machine("cuda", 16)
CPU = Machine(None, 2)


def options(here: Machine, *arguments: str) -> Options:
    given: dict[str, Any] = vars(_parser().parse_args(arguments))
    (found,) = resolved(given, here)
    return found


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


def test_several_numbers_of_workers_are_several_runs() -> None:
    given: dict[str, Any] = vars(_parser().parse_args(["--workers", "4,8,14", "--blocks", "2,2,5"]))
    assert [(run.workers, run.blocks) for run in resolved(given, GPU)] == [(4, 2), (8, 2), (14, 5)]


def test_a_number_of_blocks_is_for_all_runs() -> None:
    given: dict[str, Any] = vars(_parser().parse_args(["--workers", "4,8", "--blocks", "3"]))
    assert [run.blocks for run in resolved(given, GPU)] == [3, 3]


def test_blocks_that_do_not_go_with_workers_are_named() -> None:
    with pytest.raises(ValueError, match=r"^--blocks must be .* of --workers 4,8, got 1,2,3$"):
        options(GPU, "--workers", "4,8", "--blocks", "1,2,3")


def test_a_number_of_workers_that_comes_twice_is_an_error() -> None:
    with pytest.raises(ValueError, match=r"^--workers must be different numbers, got 4,4$"):
        options(GPU, "--workers", "4,4")


def test_peers_and_the_workers_alone_are_measured_on_shards() -> None:
    found = options(GPU, "--source", "shards", "--shards", "there")
    assert found.loaders == ("plain", "pinned", "stream", "timm", "torchtnt", "alone", "ceiling")
    assert options(GPU).loaders == ("plain", "pinned", "stream", "ceiling")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--source shards", r"^--source shards needs --shards DIR, .*scripts/make_shards.py"),
        ("--shards there", r"^--shards needs --source shards, got memory$"),
        ("--source shards --shards there --late 2", r"^--late needs --source memory, got shards$"),
        ("--augment gpu-cut", r"^--augment gpu-cut needs --source shards, got memory$"),
        ("--block-seconds 0", r"^--block-seconds must be above 0, got 0$"),
    ],
)
def test_what_a_source_needs_is_named(arguments: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        options(GPU, *arguments.split())


def test_a_sweep_can_measure_less_with_fewer_workers() -> None:
    arguments = ["--workers", "4,14,8", "--sweep-loaders", "stream"]
    given: dict[str, Any] = vars(_parser().parse_args(arguments))
    found = {run.workers: len(run.loaders) for run in resolved(given, GPU)}
    assert found == {4: 2, 14: 4, 8: 2}


def test_an_unknown_loader_of_a_sweep_is_named() -> None:
    with pytest.raises(ValueError, match=r"^--sweep-loaders must be among plain, .*, got 'fast'$"):
        options(GPU, "--workers", "4,8", "--sweep-loaders", "fast")
