"""The record that travels: one batch, from the source to the caller."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from streamloader.device import Event
from streamloader.layout import EMPTY, Layout, Spec
from streamloader.sent import Sent

__all__ = ["GONE", "Batch", "Dress"]

GONE = torch.empty(0, device="cpu")
"""Stands in a batch's structure for a tensor whose bytes were packed away."""


class Dress(NamedTuple):
    """What a tensor is beside its elements, which travel apart as bytes.

    Attributes:
        kind: Its class.
        attributes: What a subclass keeps beside its elements.
        requires_grad: Whether it wants a gradient.
    """

    kind: type[Tensor]
    attributes: dict[str, Any]
    requires_grad: bool

    @classmethod
    def of(cls, tensor: Tensor) -> Dress | None:
        """None for nearly all tensors, which are nothing beside their elements."""
        if type(tensor) is Tensor and not tensor.requires_grad:
            return None
        return cls(type(tensor), dict(vars(tensor)), tensor.requires_grad)

    def put_on(self, tensor: Tensor) -> Tensor:
        """`tensor`, a fresh one with the same elements, as the one it was taken from."""
        dressed = tensor if type(tensor) is self.kind else tensor.as_subclass(self.kind)
        vars(dressed).update(self.attributes)
        return dressed.requires_grad_(self.requires_grad)


@dataclass(slots=True)
class Batch:
    """One batch.

    Attributes:
        number: Its place in the pass, from 0.
        value: Its structure, as the source made it, without the tensors that were packed away
            wherever a container does without; a `Sent` that is whole, until it is launched.
        leaves: What its leaves are by now, in order: GONE where a tensor was packed away.
        specs: The tensors that travel, in the order of their GONEs.
        dresses: What they are beside their bytes.
        layout: What is sent how.
        slab: The pinned memory it was packed into, until its copy is launched.
        sent: How it came out of its worker, if in a slab of shared memory, until it is launched.
        direct: Pinned tensors sent from where they lie, by number, until their copy is launched.
        made: Completes when tensors that were on the device already have been written.
        opaque: Whether it has objects that only their own `.to` can move, at hand-over.
        shared: Whether it came through shared memory.
        nbytes: Bytes of its tensors that come from the host.
        memory: The device tensors that whoever takes it next will read.
        ready: Completes when `memory` has been written.
        late: Tables that were sent on their own, each with the event that completes its copy.
    """

    number: int
    value: Any
    leaves: list[Any] = field(default_factory=list)
    specs: tuple[Spec, ...] = ()
    dresses: list[Dress | None] = field(default_factory=list)
    layout: Layout = EMPTY
    slab: Tensor | None = None
    sent: Sent | None = None
    direct: dict[int, Tensor] = field(default_factory=dict)
    made: Event | None = None
    opaque: bool = False
    shared: bool = False
    nbytes: int = 0
    memory: list[Tensor] = field(default_factory=list)
    ready: Event | None = None
    late: list[tuple[Event, Tensor]] = field(default_factory=list)
