"""The safetensors file format as raw bytes: tensors are copied by name, dtype and shape, never interpreted.

Written from the format's own description: 8 bytes little-endian header length, a JSON header of
{name: {dtype, shape, data_offsets}}, then the data without gaps. It exists because the numpy binding knows no
bfloat16. It must not know what a model is.
"""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from pathlib import Path

_HEADER_LIMIT = 100_000_000
_COPY_BYTES = 1 << 22


class Tensor(NamedTuple):
    """One tensor to be written; `read` is called when its turn comes, so that only one is held in memory.

    dtype: the format's own name, for example "BF16" or "F32". nbytes: what the pieces of `read` add up to.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    read: Callable[[], Iterator[bytes]]


def read(path: Path) -> list[Tensor]:
    """The tensors of a file, in the order of their data. Raises ValueError if it is cut or malformed."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, _HEADER_LIMIT):
            raise ValueError(f"{path} is not a safetensors file, or only a part of one")
        try:
            header = json.loads(file.read(length))
            header.pop("__metadata__", None)
            found = [_entry(path, 8 + length, name, fields) for name, fields in header.items()]
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{path} has no valid safetensors header: {error}") from error
    found.sort(key=lambda pair: pair[0])
    end = 8 + length
    for begin, tensor in found:
        if begin != end:
            raise ValueError(f"{path} has a gap or an overlap before tensor {tensor.name}")
        end = begin + tensor.nbytes
    if end != size:
        raise ValueError(f"{path} has {size} bytes, its header says {end}")
    return [tensor for _, tensor in found]


def metadata(path: Path) -> dict[str, str]:
    """What a file says of itself. Raises OSError, or ValueError if it is no safetensors file."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        try:
            header = json.loads(file.read(min(length, _HEADER_LIMIT)))
            return {str(name): str(value) for name, value in header.get("__metadata__", {}).items()}
        except (AttributeError, ValueError) as error:
            raise ValueError(f"{path} has no valid safetensors header: {error}") from error


def write(path: Path, tensors: Sequence[Tensor]) -> None:
    """Write the tensors in this order and have them on disk on return. Raises OSError."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for tensor in tensors:
        offsets = [offset, offset + tensor.nbytes]
        header[tensor.name] = {"dtype": tensor.dtype, "shape": list(tensor.shape), "data_offsets": offsets}
        offset += tensor.nbytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors:
            written = sum(file.write(piece) for piece in tensor.read())
            if written != tensor.nbytes:
                raise ValueError(f"tensor {tensor.name} has {written} bytes, {tensor.nbytes} were announced")
        file.flush()
        os.fsync(file.fileno())


def _entry(path: Path, data: int, name: str, fields: dict[str, Any]) -> tuple[int, Tensor]:
    begin, end = (int(n) for n in fields["data_offsets"])
    shape = tuple(int(n) for n in fields["shape"])
    nbytes = end - begin
    if begin < 0 or nbytes < 0:
        raise ValueError(f"tensor {name} has offsets {begin}, {end}")

    def pieces() -> Iterator[bytes]:
        with path.open("rb") as file:
            file.seek(data + begin)
            left = nbytes
            while left and (piece := file.read(min(left, _COPY_BYTES))):
                yield piece
                left -= len(piece)

    return data + begin, Tensor(name, str(fields["dtype"]), shape, nbytes, pieces)
