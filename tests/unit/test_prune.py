from __future__ import annotations

import json

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from executor.errors import InvalidConfig
from executor.prune import prune

CONFIG = {
    "architectures": ["Qwen2ForCausalLM"],
    "vocab_size": 4,
    "num_hidden_layers": 4,
    "max_window_layers": 2,
    "layer_types": ["full", "full", "sliding", "sliding"],
    "eos_token_id": [1, 2, 3, 0],
}


@pytest.fixture
def source(tmp_path):
    directory = tmp_path / "source"
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps(CONFIG))
    (directory / "tokenizer.json").write_text('{"model": {"vocab": {}}}')
    (directory / "pytorch_model.bin").write_bytes(b"pickle")
    layers = {
        f"model.layers.{i}.{name}.weight": np.full((2, 3), 10 * i + j, np.float16)
        for i in range(4)
        for j, name in enumerate(("mlp.up_proj", "mlp.experts.2.down_proj"))
    }
    first = {name: values for name, values in layers.items() if ".layers.0." in name or ".layers.1." in name}
    rest = {name: values for name, values in layers.items() if name not in first}
    save_file(first | {"model.norm.weight": np.arange(3, dtype=np.float64)}, directory / "a.safetensors")
    save_file(rest | {"model.flags": np.array([1], np.int8)}, directory / "b.safetensors")
    shards = {"weight_map": dict.fromkeys(first, "a.safetensors") | dict.fromkeys(rest, "b.safetensors")}
    (directory / "model.safetensors.index.json").write_text(json.dumps(shards))
    return directory


def test_chosen_layers_are_kept_and_numbered_anew(source, tmp_path):
    destination = prune(source, tmp_path / "draft", [0, 3])
    assert destination == tmp_path / "draft"
    found = load_file(destination / "model.safetensors")
    assert {name: values.flat[0] for name, values in found.items()} == {
        "model.layers.0.mlp.up_proj.weight": 0,
        "model.layers.0.mlp.experts.2.down_proj.weight": 1,
        "model.layers.1.mlp.up_proj.weight": 30,
        "model.layers.1.mlp.experts.2.down_proj.weight": 31,
        "model.norm.weight": 0,
        "model.flags": 1,
    }
    assert found["model.norm.weight"].dtype == np.float64


def test_the_config_follows(source, tmp_path):
    prune(source, tmp_path / "draft", [0, 1, 3])
    assert json.loads((tmp_path / "draft" / "config.json").read_text()) == CONFIG | {
        "num_hidden_layers": 3,
        "max_window_layers": 2,
        "layer_types": ["full", "full", "sliding"],
    }


def test_other_files_are_copied_and_other_weights_are_not(source, tmp_path):
    prune(source, tmp_path / "draft", [2])
    assert {file.name for file in (tmp_path / "draft").iterdir()} == {
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    }


@pytest.mark.parametrize(
    ("layers", "named"),
    [([], "empty"), ([4], "layer 4"), ([-1, 0], "layer -1"), ([2, 1], "try 1,2"), ([1, 1], "try 1")],
)
def test_bad_layers_are_refused(source, tmp_path, layers, named):
    with pytest.raises(InvalidConfig, match=named) as raised:
        prune(source, tmp_path / "draft", layers)
    assert raised.value.field == "layers"
    assert not (tmp_path / "draft").exists()


def test_an_existing_destination_is_refused(source, tmp_path):
    (tmp_path / "draft").mkdir()
    with pytest.raises(InvalidConfig, match="exists") as raised:
        prune(source, tmp_path / "draft", [0])
    assert raised.value.field == "destination"


def test_a_source_without_safetensors_is_refused(source, tmp_path):
    for file in source.glob("*.safetensors"):
        file.unlink()
    with pytest.raises(InvalidConfig, match="safetensors only") as raised:
        prune(source, tmp_path / "draft", [0])
    assert raised.value.field == "source"


def test_a_cut_shard_is_refused_and_leaves_nothing(source, tmp_path):
    shard = source / "b.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(InvalidConfig, match=r"b\.safetensors"):
        prune(source, tmp_path / "draft", [0])
    assert {file.name for file in tmp_path.iterdir()} == {"source"}


def test_a_source_without_a_layer_count_is_refused(source, tmp_path):
    (source / "config.json").write_text(
        json.dumps({k: v for k, v in CONFIG.items() if k != "num_hidden_layers"})
    )
    with pytest.raises(InvalidConfig, match="num_hidden_layers"):
        prune(source, tmp_path / "draft", [0])
