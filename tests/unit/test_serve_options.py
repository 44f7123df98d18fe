"""What `speclane serve` refuses before it loads anything, and what it reads vLLM's options as."""

from __future__ import annotations

import logging
import socket
from typing import TYPE_CHECKING

import pytest

from executor.cli.run import run
from executor.cli.speculative_config import speculative_config
from executor.errors import InvalidConfig

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path


@pytest.fixture(autouse=True)
def own_logging() -> Iterator[None]:
    """Commands configure the executor's logger; give it back as it was."""
    log = logging.getLogger("speclane")
    before = log.handlers, log.propagate, log.level
    yield
    log.handlers, log.propagate = before[:2]
    log.setLevel(before[2])


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What is said of arguments that must be refused, in one line."""
    assert run(["serve", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    return err.removeprefix("speclane: error: ")


@pytest.mark.parametrize(
    ("text", "says"),
    [("prot = 1", "no option 'prot' here, only"), ("port = ", "is no TOML"), ("[port]\nx = 1", "is a table")],
)
def test_a_file_that_cannot_be(tmp_path: Path, capsys, text, says):
    file = tmp_path / "speclane.toml"
    file.write_text(text)
    error = refused(capsys, "--config", str(file))
    assert error.startswith("--config")
    assert says in error


def test_a_file_that_is_not_there(capsys):
    assert "No such file" in refused(capsys, "--config", "/no/such/file")


def test_a_file_gives_a_value_that_cannot_be(tmp_path: Path, capsys):
    file = tmp_path / "speclane.toml"
    file.write_text("port = 70000\nengine = 'toy'")
    assert refused(capsys, "--config", str(file)).startswith("--port must be from 0 to 65535, got 70000")
    # What the command line says is above it.
    assert refused(capsys, "--config", str(file), "--port", "-1").startswith(
        "--port must be from 0 to 65535, got -1"
    )


def test_an_address_that_is_taken_is_told_before_anything_is_loaded(capsys):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        error = refused(capsys, "--target", "/no/such/model", "--port", port)
    assert error.startswith(f"--port {port} of 127.0.0.1: Address already in use; try")


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("--port", "70000"), "--port must be from 0 to 65535, got 70000; try 8000"),
        (("--max-queue", "-1"), "--max-queue must be from 0 to"),
        (("--max-body", "1"), "--max-body must be from 1024 to"),
        (("--max-sequences", "0"), "--max-sequences must be a whole number from 1 to 1024, got 0; try 8"),
        (("--request-timeout", "0"), "--request-timeout must be a positive number of seconds"),
        (("--api-key", " "), "--api-key must be plain text"),
        (("--cors-origin", "here"), "--cors-origin 'here' is no origin; try http://localhost:3000"),
        (("--host", "nowhere.invalid"), "--host nowhere.invalid:"),
        (("--speculative-config", "{"), "--speculative-config is no JSON"),
    ],
)
def test_options_that_cannot_be_name_one_that_can(capsys, arguments, says):
    assert says in refused(capsys, "--engine", "toy", *arguments)


@pytest.mark.parametrize(
    ("text", "chosen"),
    [
        ('{"method": "ngram", "num_speculative_tokens": 3}', ("ngram", 3)),
        ('{"model": "[ngram]", "num_speculative_tokens": 3, "prompt_lookup_max": 4}', ("ngram", 3)),
        ('{"model": "/a/b", "num_speculative_tokens": 7, "quantization": null}', ("/a/b", 7)),
        ('{"method": "draft_model", "model": "org/x", "draft_tensor_parallel_size": 1}', ("org/x", None)),
    ],
)
def test_vllms_speculative_config(text, chosen):
    read = speculative_config(text)
    assert (read["speculator"], read.get("num_speculative_tokens")) == chosen


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("[]", "must be an object"),
        ("{}", "neither method nor model"),
        ('{"method": "medusa"}', "method 'medusa' is not one of ngram"),
        ('{"method": "draft_model"}', "draft_model needs a model"),
        ('{"method": "ngram", "tree": 1}', "'tree'"),
        ('{"method": "ngram", "prompt_lookup_max": 9}', "prompt_lookup_max 9 cannot be chosen"),
        ('{"model": "x", "draft_tensor_parallel_size": 2}', "draft_tensor_parallel_size 2"),
    ],
)
def test_vllms_speculative_config_that_cannot_be_done(text, says):
    with pytest.raises(InvalidConfig, match="try") as refusal:
        speculative_config(text)
    assert says in str(refusal.value)
