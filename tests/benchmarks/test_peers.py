import sys
import types
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from benchmarks._feeds import Setup
from benchmarks._models import Normalize
from benchmarks._peers import PEERS, absent, timm, torchtnt, unfit

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


class Prefetch:
    """A peer as far as it is called: hands batches on, and keeps its arguments."""

    made: "list[Prefetch]" = []  # noqa: RUF012

    def __init__(self, loader: Any, *arguments: Any, **named: Any) -> None:
        self.loader, self.arguments, self.named = loader, arguments, named
        self.made.append(self)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.loader)


@pytest.fixture
def _installed(monkeypatch: pytest.MonkeyPatch) -> None:
    Prefetch.made.clear()
    for name, found in PEERS.values():
        module = types.ModuleType(name)
        vars(module)[found] = Prefetch
        monkeypatch.setitem(sys.modules, name, module)
    for name in ("timm", "timm.data", "torchtnt", "torchtnt.utils"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))


def setup(device: torch.device = CPU) -> Setup:
    images = torch.zeros(2, 3, 4, 4, dtype=torch.uint8)
    source: Any = lambda *, pin_memory: [(images, pin_memory)] * 2  # noqa: E731
    transform = Normalize(CPU, torch.float32)
    return Setup(source, device, torch.float32, transform, 0, 8, (images, images))


def test_what_is_no_peer_is_always_there() -> None:
    assert absent("plain", CPU) is None


@pytest.mark.usefixtures("_installed")
def test_an_installed_peer_is_there() -> None:
    assert absent("timm", CPU) is None
    assert absent("torchtnt", CUDA) is None


def test_a_loader_that_normalises_has_no_place_for_a_recipe() -> None:
    assert unfit("timm", "cpu") is None
    assert unfit("timm", "gpu") == (
        "it normalises by itself, and takes images of one size: no recipe before that"
    )
    assert unfit("torchtnt", "gpu-cut") is None


@pytest.mark.usefixtures("_installed")
def test_torchtnt_needs_cuda() -> None:
    assert absent("torchtnt", CPU) == "needs a CUDA device"


@pytest.mark.parametrize("name", PEERS)
def test_a_peer_that_is_not_installed_says_what_to_do(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, PEERS[name][0], None)
    monkeypatch.setitem(PEERS, name, (f"no_such_{name}", "X"))
    assert absent(name, CUDA) == f"not installed: pip install no_such_{name}"


@pytest.mark.usefixtures("_installed")
def test_timm_normalises_itself_and_what_follows_makes_channels_last() -> None:
    feed = timm(setup())
    images, pinned = next(feed.batches)
    assert images.is_contiguous(memory_format=torch.channels_last)
    (peer,) = Prefetch.made
    assert set(peer.named) == {"mean", "std", "device", "img_dtype"}
    assert (pinned, feed.in_hand) == (False, 9)


@pytest.mark.usefixtures("_installed")
def test_torchtnt_is_followed_by_the_transform_and_goes_on_for_ever() -> None:
    feed = torchtnt(setup(CUDA))
    found = [next(feed.batches) for _ in range(5)]  # two a pass
    assert all(images.dtype is torch.float32 and pinned for images, pinned in found)
    (peer,) = Prefetch.made
    assert peer.arguments == (CUDA, 1)
