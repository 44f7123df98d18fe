from __future__ import annotations

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from executor.safetensors_file import Tensor, read, write


def _tensor(name, values, dtype):
    return Tensor(name, dtype, values.shape, values.nbytes, lambda: iter([values.tobytes()]))


def test_the_library_reads_what_is_written(tmp_path):
    wide, empty = np.arange(6, dtype=np.float32).reshape(2, 3), np.zeros((0, 4), np.int8)
    write(tmp_path / "a.safetensors", [_tensor("wide", wide, "F32"), _tensor("empty", empty, "I8")])
    found = load_file(tmp_path / "a.safetensors")
    assert found.keys() == {"wide", "empty"}
    np.testing.assert_array_equal(found["wide"], wide)
    assert found["empty"].shape == (0, 4)


def test_what_the_library_writes_is_read(tmp_path):
    tensors = {"b": np.arange(5, dtype=np.float16), "a": np.arange(4, dtype=np.int64).reshape(2, 2)}
    save_file(tensors, tmp_path / "a.safetensors")
    found = {tensor.name: tensor for tensor in read(tmp_path / "a.safetensors")}
    assert {name: (t.dtype, t.shape) for name, t in found.items()} == {
        "a": ("I64", (2, 2)),
        "b": ("F16", (5,)),
    }
    assert {name: b"".join(t.read()) for name, t in found.items()} == {
        n: v.tobytes() for n, v in tensors.items()
    }


def test_a_copy_is_the_same(tmp_path):
    values = np.random.default_rng(1).integers(0, 255, (3, 1 << 21), np.uint8)
    write(tmp_path / "a.safetensors", [_tensor("large", values, "U8")])
    write(tmp_path / "b.safetensors", read(tmp_path / "a.safetensors"))
    assert (tmp_path / "a.safetensors").read_bytes() == (tmp_path / "b.safetensors").read_bytes()


@pytest.mark.parametrize("keep", [0, 4, 20, -1])
def test_a_cut_file_is_refused(tmp_path, keep):
    write(tmp_path / "a.safetensors", [_tensor("x", np.arange(6, dtype=np.float32), "F32")])
    whole = (tmp_path / "a.safetensors").read_bytes()
    (tmp_path / "a.safetensors").write_bytes(whole[:keep])
    with pytest.raises(ValueError, match=r"a\.safetensors"):
        read(tmp_path / "a.safetensors")


@pytest.mark.parametrize(
    "header",
    [
        b"no JSON at all",
        b"[]",
        b'{"x":{"dtype":"F32","shape":[1]}}',
        b'{"x":{"dtype":"F32","shape":[1],"data_offsets":[4,0]}}',
        b'{"x":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}}',
        b'{"x":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},"y":{"dtype":"F32","shape":[1],"data_offsets":[2,6]}}',
    ],
)
def test_a_bad_header_is_refused(tmp_path, header):
    (tmp_path / "a.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(8))
    with pytest.raises(ValueError, match=r"a\.safetensors"):
        read(tmp_path / "a.safetensors")


def test_too_few_bytes_are_noticed(tmp_path):
    with pytest.raises(ValueError, match="x has 2 bytes, 4 were announced"):
        write(tmp_path / "a.safetensors", [Tensor("x", "F32", (1,), 4, lambda: iter([b"ab"]))])
