"""Who is on the board of races.py: StreamLoader, the loops that people write, and their packages.

Each is used as its documentation says; `about` names which. The loops are written anew from their
published descriptions. A contestant's iterator never holds what it has handed out, unless the loop
that it stands for does, since that would hide what is looked for. Packages are imported only when
they are asked for.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, TypeAlias

import torch

from streamloader import StreamLoader, on

__all__ = ["CONTESTANTS", "Contestant", "Transform", "absent", "missing"]

Transform: TypeAlias = Callable[[torch.Tensor], torch.Tensor]
Wrap: TypeAlias = Callable[
    [Iterable[Any], torch.device, int, "Transform | None"],
    Iterable[Any],
]

NO_TRANSFORM = "runs no transform"
NOTHING: Mapping[str, str] = MappingProxyType({})


@dataclass(frozen=True)
class Contestant:
    """One row of the board.

    Attributes:
        wrap: From a source of host batches (images, labels) that can be iterated over again, a
            device, a depth, and a transform of the images, to batches on the device, pass by pass.
        about: How it is used, and who says so.
        depth: How many batches ahead it is, if it does not let one choose.
        pinned: Whether its source is in pinned memory, as `DataLoader(pin_memory=True)` gives it.
        lacks: Of what a trial may need ("transform", "opaque"), what it does not do, and why.
        beyond: Trials, by name, that its documentation excludes, and how. They are run and shown;
            they are no fault of its.
        apart: Whether its step runs on a stream of its own, not on the default one.
        packages: Modules it is imported from, with what to `pip install`.
        anywhere: Whether it runs without CUDA.
    """

    wrap: Wrap
    about: str
    depth: int | None = None
    pinned: bool = True
    lacks: Mapping[str, str] = field(default_factory=dict)
    beyond: Mapping[str, str] = field(default_factory=dict)
    apart: bool = False
    packages: Mapping[str, str] = field(default_factory=dict)
    anywhere: bool = False


def missing(contestant: Contestant, device: torch.device) -> str | None:
    """Why `contestant` cannot run here; None if it can."""
    if device.type != "cuda" and not contestant.anywhere:
        return "needs a CUDA device"
    reasons = (absent(module, package) for module, package in contestant.packages.items())
    return next((reason for reason in reasons if reason), None)


_PROVIDERS = {"pkg_resources": '"setuptools<82"', "yaml": "pyyaml"}
"""What to install for modules of other names, which a peer needs without saying so."""


def absent(module: str, package: str) -> str | None:
    """Why a module cannot be imported, and what to install; None if it can."""
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as error:
        lacking = str(error.name).partition(".")[0]
        own = lacking == module.partition(".")[0]
        return f"not installed: pip install {package if own else _PROVIDERS.get(lacking, lacking)}"
    except (ImportError, AttributeError, OSError, RuntimeError) as error:
        return f"cannot be imported: {error}"
    return None


@dataclass(frozen=True)
class Passes:
    """Batches that begin anew at each `iter()`, lazily, as a `DataLoader`'s do."""

    begin: Callable[[], Iterator[Any]]

    def __iter__(self) -> Iterator[Any]:
        return self.begin()


# -- ours, and none -----------------------------------------------------------------------------


def _stream(
    source: Iterable[Any], device: torch.device, depth: int, transform: Transform | None
) -> Iterable[Any]:
    staged = None if transform is None else on(0, transform)
    return StreamLoader(source, device, transform=staged, prefetch_batches=depth)


def _plain(
    source: Iterable[Any], device: torch.device, _depth: int, transform: Transform | None
) -> Iterable[Any]:
    def begin() -> Iterator[Any]:
        return (_finish(_sent(batch, device), transform) for batch in source)

    return Passes(begin)


def _sent(batch: Any, device: torch.device) -> Any:
    if hasattr(batch, "to"):
        return batch.to(device, non_blocking=True)
    return tuple(tensor.to(device, non_blocking=True) for tensor in batch)


def _finish(batch: Any, transform: Transform | None) -> Any:
    return batch if transform is None else (transform(batch[0]), *batch[1:])


# -- the article's loops ------------------------------------------------------------------------
# What they are faulted for, in short: a stream that reads what another copies does not wait for it,
# and memory is marked as used by another stream for the transform's result alone.


def _encoder(
    source: Iterable[Any], device: torch.device, _depth: int, transform: Transform | None
) -> Iterable[Any]:
    encode = torch.clone if transform is None else transform
    copying, encoding = torch.cuda.default_stream(device), torch.cuda.Stream(device)

    def begin() -> Iterator[Any]:
        features, labels = None, None
        for inputs, targets in source:
            with torch.cuda.stream(copying):
                inputs = inputs.to(device, non_blocking=True)  # noqa: PLW2901  # as the loop does
                targets = targets.to(device, non_blocking=True)  # noqa: PLW2901
            torch.cuda.current_stream(device).wait_stream(encoding)
            with torch.cuda.stream(encoding), torch.no_grad():
                encoded = encode(inputs)
            if features is not None:
                yield features, labels
            features, labels = encoded, targets
            features.record_stream(torch.cuda.current_stream(device))
        torch.cuda.current_stream(device).wait_stream(encoding)
        if features is not None:
            yield features, labels

    return Passes(begin)


def _augmentation(
    source: Iterable[Any], device: torch.device, _depth: int, transform: Transform | None
) -> Iterable[Any]:
    augment = torch.clone if transform is None else transform
    augmenting = torch.cuda.Stream(device)

    def begin() -> Iterator[Any]:
        transformed, labels = None, None
        for inputs, targets in source:
            targets = targets.to(device, non_blocking=True)  # noqa: PLW2901  # as the loop does
            torch.cuda.current_stream(device).wait_stream(augmenting)
            with torch.cuda.stream(augmenting), torch.no_grad():
                inputs = inputs.to(device, non_blocking=True)  # noqa: PLW2901
                augmented = augment(inputs)
            if transformed is not None:
                yield transformed, labels
            transformed, labels = augmented, targets
            transformed.record_stream(torch.cuda.current_stream(device))
        torch.cuda.current_stream(device).wait_stream(augmenting)
        if transformed is not None:
            yield transformed, labels

    return Passes(begin)


# -- what people use ----------------------------------------------------------------------------


def _apex(
    source: Iterable[Any], device: torch.device, _depth: int, _transform: Transform | None
) -> Iterable[Any]:
    def begin() -> Iterator[Any]:
        copying = torch.cuda.Stream(device)  # the example makes a prefetcher for each epoch
        batches = iter(source)

        def preload() -> list[Any]:
            with torch.cuda.stream(copying):
                return [_sent(batch, device) for batch in _next(batches)]

        ahead = preload()
        while ahead:
            current = torch.cuda.current_stream(device)
            current.wait_stream(copying)
            _record(ahead[0], current)
            due, ahead = ahead, preload()
            yield due.pop()

    return Passes(begin)


def _record(batch: Iterable[torch.Tensor], stream: torch.cuda.Stream) -> None:
    for tensor in batch:
        tensor.record_stream(stream)


def _next(batches: Iterator[Any]) -> list[Any]:
    """The next batch, alone in a list, which is empty at the end."""
    for batch in batches:
        return [batch]
    return []


def _timm(
    source: Iterable[Any], device: torch.device, _depth: int, _transform: Transform | None
) -> Iterable[Any]:
    # These normalise an image to the values that it has.
    mean, std = (0.0, 0.0, 0.0), (1 / 255, 1 / 255, 1 / 255)
    peer: Any = importlib.import_module("timm.data.loader")
    loader: Iterable[Any] = peer.PrefetchLoader(source, mean=mean, std=std, device=device)
    return loader


def _torchtnt(
    source: Iterable[Any], device: torch.device, depth: int, _transform: Transform | None
) -> Iterable[Any]:
    peer: Any = importlib.import_module("torchtnt.utils.data")
    loader: Iterable[Any] = peer.CudaDataPrefetcher(source, device, max(depth, 1))
    return loader


def _spdl(
    source: Iterable[Any], _device: torch.device, depth: int, _transform: Transform | None
) -> Iterable[Any]:
    send = importlib.import_module("spdl.io").transfer_tensor_h2d
    builder: Any = importlib.import_module("spdl.pipeline").PipelineBuilder

    def begin() -> Iterator[Any]:
        made = builder().add_source(source).pipe(send).add_sink(max(depth, 1))
        pipeline = made.build(num_threads=1)
        with pipeline.auto_stop():
            batches = iter(pipeline)
            while held := _next(batches):
                yield held.pop()

    return Passes(begin)


# -- all of them --------------------------------------------------------------------------------

ARTICLE = {"opaque": "its transform takes a tensor"}

CONTESTANTS = {
    "stream": Contestant(_stream, "StreamLoader(source)", anywhere=True),
    "plain": Contestant(
        _plain, ".to(device, non_blocking=True) on the step's stream", depth=0, anywhere=True
    ),
    "encoder": Contestant(
        _encoder,
        "the frozen-encoder loop of 'Pipelining AI/ML Training Workloads with CUDA Streams' "
        "(Towards Data Science, 2025), written anew; from pageable memory, as there",
        depth=1,
        pinned=False,
        lacks=ARTICLE,
        apart=True,
    ),
    "encoder-pinned": Contestant(
        _encoder, "the same from pinned memory", depth=1, lacks=ARTICLE, apart=True
    ),
    "augment": Contestant(
        _augmentation,
        "the same article's augmentation loop, written anew; from pageable memory, as there",
        depth=1,
        pinned=False,
        lacks=ARTICLE,
    ),
    "augment-pinned": Contestant(
        _augmentation, "the same from pinned memory", depth=1, lacks=ARTICLE
    ),
    "apex-style": Contestant(
        _apex,
        "as the data_prefetcher of Apex's ImageNet example, written anew: a side stream, "
        "wait_stream, record_stream on images and labels",
        depth=1,
        lacks={"transform": NO_TRANSFORM, "opaque": "it records tensors"},
    ),
    "timm": Contestant(
        _timm,
        "timm.data.loader.PrefetchLoader by its docstring: batches are consumed on the stream that "
        "is current when the iterator is advanced. It hands out float32, four times the source's "
        "bytes",
        depth=1,
        lacks={"transform": "it only normalises", "opaque": "it takes (images, labels)"},
        beyond={
            "switched": "batches must be consumed on the stream that is current when the iterator "
            "is advanced, and here it is advanced on another before a batch has been read"
        },
        packages={"timm.data.loader": "timm"},
    ),
    "torchtnt": Contestant(
        _torchtnt,
        "torchtnt.utils.data.CudaDataPrefetcher by its docstring: from a pinned loader",
        lacks={"transform": NO_TRANSFORM},
        packages={"torchtnt.utils.data": "torchtnt"},
    ),
    "spdl": Contestant(
        _spdl,
        "spdl.io.transfer_tensor_h2d by its docstring, in a background thread: a stage of a "
        "spdl.pipeline.Pipeline with one thread and a sink of the depth",
        lacks={"transform": NO_TRANSFORM, "opaque": "it moves tensors only"},
        packages={"spdl.io": "spdl", "spdl.pipeline": "spdl"},
    ),
}
"""The rows of the board, in their order."""
