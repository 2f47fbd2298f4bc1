"""Images of different sizes, packed one after another: workers decode, the device does the rest.

elements   | image 0, row by row      | image 1    | image 2                 |   one tensor
places       offset and strides, height and width of each: a row an image,       another,
known        and the same on the host for good                                   an array
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import default_collate, get_worker_info
from typing_extensions import override

from streamloader import shared as shared_memory
from streamloader import tree
from streamloader.augment.draws import Ints
from streamloader.augment.layout import Layout

__all__ = ["Images", "RaggedImages", "collate"]


@dataclass(frozen=True, eq=False, repr=False)
class RaggedImages(tree.Parts):
    """A batch of images of different sizes, which a recipe turns into (N, C, H, W).

    `pack` and `collate` make one, on the host. It travels as two tensors: the images, however many,
    are one copy, and `places` goes with the batch's small tensors (up to 341 images). Nobody waits
    for the device to learn a size.

    Attributes:
        elements: One-dimensional, uint8 or floating point: all images.
        places: int64, (N, 6), on the same device: of each image the offset of its first element in
            `elements`, its strides of channel, row and column in elements, its height and width.
        known: The same numbers, a NumPy array on the host.
        channels: Of every image.

    Raises:
        TypeError: `elements` is of another dtype.
        ValueError: A shape is another.
    """

    elements: Tensor
    places: Tensor
    known: Ints
    channels: int

    def __post_init__(self) -> None:
        dtype = self.elements.dtype
        if not (dtype.is_floating_point or dtype == torch.uint8):
            raise TypeError(f"images must be uint8 or floating point, got {dtype}")
        shapes = tuple(self.places.shape), self.known.shape
        if self.elements.ndim != 1 or shapes != ((len(self.known), 6),) * 2:
            raise ValueError(
                "elements must be of one dimension, places and known (N, 6), got "
                f"{tuple(self.elements.shape)}, {shapes[0]} and {shapes[1]}"
            )

    @classmethod
    def pack(cls, images: Sequence[Any]) -> RaggedImages:
        """Copies images into one piece of memory, in a worker memory that it shares.

        Args:
            images: At least one, all of one dtype and number of channels: tensors (C, H, W) on the
                CPU, or NumPy arrays (H, W, C). An image whose memory is pixel after pixel, which a
                tensor's may be too (that of decoders: `image.permute(2, 0, 1)` of (H, W, C)), stays
                so; strides alone say what is what.

        Raises:
            TypeError: One is neither, or is of another dtype.
            ValueError: There is none, one has another shape, no pixel or other channels.
        """
        if not images:
            raise ValueError("images must hold at least one, got none")
        views = [_channels_first(image) for image in images]
        first = views[0]
        for view in views:
            _check(view, first)
        elements = _memory(sum(view.numel() for view in views), first.dtype)
        known = np.empty((len(views), 6), np.int64)
        start = 0
        for row, view in zip(known, views, strict=True):
            copy = _laid_out(elements[start : start + view.numel()], view)
            copy.copy_(view)
            row[:] = (start, *copy.stride(), *copy.shape[1:])
            start += view.numel()
        return cls(elements, torch.from_numpy(known.copy()), known, len(first))

    @property
    def layout(self) -> Layout:
        """The images' sizes, from the host."""
        return Layout(self.channels, self.known[:, 4], self.known[:, 5])

    @property
    def reach(self) -> int:
        """The most elements that an image has from its first to its last."""
        last = (self.known[:, 4:] - 1) * self.known[:, 2:4]
        steps = last.sum(axis=1) + (self.channels - 1) * self.known[:, 1]
        return 1 + int(steps.max(initial=-1))

    @property
    def dtype(self) -> torch.dtype:
        """Of the elements."""
        return self.elements.dtype

    @property
    def device(self) -> torch.device:
        """Where the elements are."""
        return self.elements.device

    @property
    def is_cuda(self) -> bool:
        """Whether they are on a CUDA device."""
        return self.elements.is_cuda

    def __len__(self) -> int:
        return len(self.known)

    def __getitem__(self, index: int) -> Tensor:
        """One image, (C, H, W), a view: whoever writes to it writes to this batch.

        Raises:
            IndexError: There is no such image.
            TypeError: `index` is no whole number.
        """
        offset, *strides, height, width = self.known[operator.index(index)].tolist()
        start = self.elements.storage_offset() + offset
        return self.elements.as_strided((self.channels, height, width), strides, start)

    def __iter__(self) -> Iterator[Tensor]:
        return (self[index] for index in range(len(self)))

    @override
    def __repr__(self) -> str:
        heights, widths = self.known[:, 4], self.known[:, 5]
        sizes = "none"
        if len(self):
            sizes = f"{heights.min()}x{widths.min()} to {heights.max()}x{widths.max()}"
        dtype = str(self.dtype).removeprefix("torch.")
        return (
            f"RaggedImages({len(self)} images, {self.channels} channels, {sizes}, {dtype}, "
            f"device='{self.device}')"
        )

    def to(self, device: Any, *, non_blocking: bool = False) -> RaggedImages:
        """The batch on another device; itself if it is there.

        Raises:
            TypeError: `device` is a dtype: a recipe with `ToDtype` converts.
        """
        if isinstance(device, torch.dtype):
            raise TypeError(f"device must be a device, got {device}: augment.ToDtype converts")
        return self._moved(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> RaggedImages:
        """The batch in pinned memory: what `DataLoader(pin_memory=True)` calls."""
        return self._moved(Tensor.pin_memory)

    def _moved(self, move: Callable[[Tensor], Tensor]) -> RaggedImages:
        moved: RaggedImages = tree.replace(move, self)
        return moved


Images: TypeAlias = Tensor | RaggedImages
"""A batch of images, of one size or of several; (C, H, W) is one image without a batch."""


def collate(samples: Sequence[Any]) -> Any:
    """A `DataLoader`'s `collate_fn`: images become `RaggedImages`, the rest is `default_collate`'s.

        DataLoader(dataset, batch_size=256, num_workers=8, collate_fn=augment.collate)

    Args:
        samples: Images (see `RaggedImages.pack`), or tuples, lists or mappings of which the same
            part is one in each sample: the first that is an array of three dimensions.

    Returns:
        `RaggedImages`, or a list, namedtuple or dict with them in that place.

    Raises:
        TypeError: There is no image, or it is of another kind than the first.
        ValueError: Images do not fit each other.
    """
    first = samples[0]
    if _is_image(first):
        return RaggedImages.pack(samples)
    mapped = isinstance(first, Mapping)
    keys: list[Any] = list(first) if mapped else [*range(len(first) if _is_row(first) else 0)]
    found = next((key for key in keys if _is_image(first[key])), None)
    if found is None:
        raise TypeError(
            "samples must hold an image, a tensor (C, H, W) or a NumPy array (H, W, C), got "
            f"{tree.describe(first)}"
        )
    parts = {}
    for key in keys:
        column = [sample[key] for sample in samples]
        parts[key] = RaggedImages.pack(column) if key == found else default_collate(column)
    if mapped:
        return parts
    named = hasattr(first, "_fields")
    return type(first)(*parts.values()) if named else list(parts.values())


def _is_row(sample: Any) -> bool:
    return isinstance(sample, (tuple, list))


def _is_image(part: Any) -> bool:
    return isinstance(part, (Tensor, np.ndarray)) and part.ndim == 3


def _channels_first(image: Any) -> Tensor:
    """(C, H, W), a view.

    Raises:
        TypeError: It is no array.
        ValueError: It has not three dimensions, or no pixel.
    """
    if not isinstance(image, (Tensor, np.ndarray)):
        raise TypeError(
            "images must be tensors (C, H, W) or NumPy arrays (H, W, C), got "
            f"{type(image).__name__}: np.asarray makes one of Pillow's"
        )
    if image.ndim != 3 or 0 in image.shape:
        raise ValueError(
            "images must have three dimensions, and pixels, got one of the shape "
            f"{tuple(image.shape)}"
        )
    if isinstance(image, Tensor):
        return image.detach().as_subclass(torch.Tensor)
    if not image.flags.writeable or min(image.strides) < 0:
        image = image.copy()  # torch has no arrays that cannot be written, nor negative strides
    return torch.from_numpy(image).permute(2, 0, 1)


def _check(view: Tensor, first: Tensor) -> None:
    """Refuses an image that does not go with the first.

    Raises:
        TypeError: Its dtype is another, or it is not on the CPU.
        ValueError: It has other channels.
    """
    if view.device.type != "cpu":
        raise TypeError(f"images must be on the CPU to be packed, got one on {view.device}")
    if view.dtype != first.dtype:
        raise TypeError(f"images must be of one dtype, got {first.dtype} and {view.dtype}")
    if len(view) != len(first):
        raise ValueError(
            f"images must have the same number of channels, got {len(first)} and {len(view)}: "
            "convert them to RGB; a tensor is (C, H, W), and permute(2, 0, 1) makes it of (H, W, C)"
        )


def _laid_out(memory: Tensor, like: Tensor) -> Tensor:
    """`memory` as an image whose dimensions lie in it in the order of another's, without gaps."""
    strides = like.stride()
    order = sorted(range(3), key=lambda axis: -strides[axis])
    packed = memory.view([like.shape[axis] for axis in order])
    return packed.permute([order.index(axis) for axis in range(3)])


def _memory(count: int, dtype: torch.dtype) -> Tensor:
    """So many elements, and in a worker in shared memory, or they would be copied to it later."""
    slab = shared_memory.empty((count,), dtype)
    if slab is not None:
        return slab
    if get_worker_info() is None:
        return torch.empty(count, dtype=dtype)
    shared = torch.UntypedStorage._new_shared(count * dtype.itemsize)  # noqa: SLF001  # no other way
    return torch.empty(0, dtype=dtype).set_(shared, 0, (count,), (1,))
