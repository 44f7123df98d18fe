"""Whether a descriptor can be true, told from what its arena is known to be: before a tensor of it exists.

Pure: knows no memory. A descriptor comes from another process, so nothing in it is believed.
"""

from __future__ import annotations

from math import prod
from typing import TYPE_CHECKING, get_args

from ipc.errors import BadDescriptor
from ipc.messages import TensorDtype

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ipc.messages import ArenaExport, Descriptor

ALIGNMENT = 256
"""Every slot begins at a multiple of so many bytes: enough for any dtype and for vector loads of a GPU."""
MAX_DIMENSIONS = 8
_ITEM_BYTES: dict[TensorDtype, int] = {
    "bf16": 2,
    "fp16": 2,
    "fp32": 4,
    "fp64": 8,
    "int32": 4,
    "int64": 8,
    "uint8": 1,
}
assert set(_ITEM_BYTES) == set(get_args(TensorDtype)), "every dtype has a size"


def tensor_bytes(dtype: TensorDtype, shape: Sequence[int]) -> int:
    """What a dense tensor takes. Raises BadDescriptor for an unknown dtype, or a shape that cannot be."""
    if dtype not in _ITEM_BYTES:
        raise BadDescriptor(f"dtype {dtype!r} is none of {', '.join(_ITEM_BYTES)}")
    if len(shape) > MAX_DIMENSIONS or any(not isinstance(size, int) or size < 0 for size in shape):
        raise BadDescriptor(f"shape {list(shape)[: MAX_DIMENSIONS + 1]} cannot be")
    return _ITEM_BYTES[dtype] * prod(shape)


def check(descriptor: Descriptor, export: ArenaExport, newest: int = 0) -> None:
    """Raises BadDescriptor unless all of it can be true of an arena that was exported so.

    `newest`: the latest generation of this slot that was seen; an earlier one has been written over.
    """
    d = descriptor
    if (d.arena, d.epoch) != (export.arena, export.epoch):
        raise BadDescriptor(
            f"of arena {d.arena} in epoch {d.epoch}, but this is {export.arena} in {export.epoch}"
        )
    if not 0 <= d.slot < export.slots:
        raise BadDescriptor(f"slot {d.slot} of {export.slots}")
    if d.generation < max(1, newest):
        raise BadDescriptor(f"slot {d.slot}: generation {d.generation}, now {max(1, newest)}")
    if d.offset < 0 or d.offset % ALIGNMENT:
        raise BadDescriptor(f"offset {d.offset} is no multiple of {ALIGNMENT}")
    if d.nbytes <= 0 or d.offset + d.nbytes > export.nbytes:
        raise BadDescriptor(f"bytes {d.offset} to {d.offset + d.nbytes} of {export.nbytes}")
    if tensor_bytes(d.dtype, d.shape) != d.nbytes:
        raise BadDescriptor(f"{d.dtype} of shape {list(d.shape)} does not take {d.nbytes} bytes")
