"""Tensors over the bytes of arenas, without a copy. The only place where shared memory becomes a tensor.

Takes spans that were cut from an arena by a checked descriptor; knows no descriptor and no slot.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import numpy as np
import torch

from ipc.cuda_memory import DeviceSpan

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch import Tensor

    from ipc.messages import TensorDtype

DTYPES: dict[TensorDtype, torch.dtype] = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "fp64": torch.float64,
    "int32": torch.int32,
    "int64": torch.int64,
    "uint8": torch.uint8,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}


def tensor_over(span: memoryview | DeviceSpan, dtype: TensorDtype, shape: Sequence[int]) -> Tensor:
    """A dense tensor of the span's first bytes, on the span's device. It keeps the span's memory mapped.

    Over memory that another lane exported it must not be written to.
    """
    flat = _device(span) if isinstance(span, DeviceSpan) else _host(span)
    return flat.view(DTYPES[dtype]).view(tuple(shape))


def _device(span: DeviceSpan) -> Tensor:
    if hasattr(span, "__cuda_array_interface__"):
        return torch.as_tensor(span, device=f"cuda:{span.ordinal}")
    return torch.from_numpy(np.asarray(span))


def _host(span: memoryview) -> Tensor:
    if not span.readonly:
        return torch.frombuffer(span, dtype=torch.uint8)
    # Torch warns of memory that it cannot write to, and has no other notion of it.
    address = np.frombuffer(span, dtype=np.uint8).ctypes.data
    array = (ctypes.c_uint8 * len(span)).from_address(address)
    array.span = span  # type: ignore[attr-defined]  # what keeps the memory mapped
    return torch.frombuffer(array, dtype=torch.uint8)
