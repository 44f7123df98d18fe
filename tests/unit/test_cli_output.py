"""What commands say, without processes: refusals, log lines, help and tables."""

from __future__ import annotations

import io
import logging
import os
import subprocess
import sys
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import typer

from executor.cli import bench_decode, bench_invariance, decode_table, report
from executor.cli.app import app
from executor.cli.output import log_to_stderr, progress_shown
from executor.cli.run import run
from executor.config import Config
from executor.request import Acceptance, Completion
from executor.stats import Stats
from executor.transport import TransportInfo

if TYPE_CHECKING:
    from collections.abc import Iterator

TOY = ("--engine", "toy", "--target", "vocabulary=256")
PROMPT = ("generate", *TOY, "--prompt", "hi")


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (("generat",), ("generat",)),
        (("--bogus",), ("--bogus", "--help")),
        (("generate", "--promt", "x"), ("--promt", "--prompt")),
        (("generate", *TOY), ("prompt", "--prompt")),
        ((*PROMPT[:-1], ""), ("--prompt",)),
        ((*PROMPT, "--max-tokens", "0"), ("--max-tokens", "try 128")),
        ((*PROMPT, "--max-tokens", "many"), ("--max-tokens", "try --max-tokens 256")),
        ((*PROMPT, "--max-tokens"), ("--max-tokens",)),
        ((*PROMPT, "--temperature", "-1"), ("--temperature", "try 0.8")),
        ((*PROMPT, "--temperature", "nan"), ("--temperature", "try 0.8")),
        ((*PROMPT, "--top-p", "0"), ("--top-p", "try 0.95")),
        ((*PROMPT, "--top-k", "-1"), ("--top-k", "try 50")),
        ((*PROMPT, "--min-p", "2"), ("--min-p", "try 0.05")),
        ((*PROMPT, "--min-tokens", "300"), ("--min-tokens", "0 to 256 (--max-tokens)", "try 256")),
        ((*PROMPT, "--min-tokens", "9", "--max-tokens", "4"), ("--min-tokens", "try 4\n")),
        ((*PROMPT, "--seed", "-3"), ("--seed", "try 42")),
        ((*PROMPT, "--seed", "x"), ("--seed", "try --seed 42")),
        ((*PROMPT, "--stop", ""), ("--stop", "try")),
        ((*PROMPT, "--stop-token-id", "256"), ("--stop-token-id", "0 to 255")),
        ((*PROMPT, "--stop-token-id", "-1"), ("--stop-token-id", "try 2")),
        ((*PROMPT, "--logprobs", "21", "--json"), ("--logprobs", "try 5")),
        ((*PROMPT, "--logprobs", "2"), ("--logprobs", "--json")),
        ((*PROMPT, "--engine", "jax"), ("--engine", "try native")),
        ((*PROMPT, "--dtype", "int4"), ("--dtype", "try fp32")),
        ((*PROMPT, "--device", "tpu"), ("--device", "try auto")),
        ((*PROMPT, "--num-speculative-tokens", "0"), ("--num-speculative-tokens", "try 5")),
        ((*PROMPT, "--num-speculative-tokens", "33"), ("--num-speculative-tokens", "try 5")),
        (
            (*PROMPT, "--speculator", "off", "--num-speculative-tokens", "33"),
            ("--num-speculative-tokens", "try 5"),
        ),
        ((*PROMPT, "--speculator", ""), ("--speculator", "try ngram\n")),
        ((*PROMPT, "--target", ""), ("--target", "try vocabulary=256\n")),
        (("generate", "--prompt", "hi", "--target", ""), ("--target", "try smollm2-135m\n")),
        ((*PROMPT, "--speculator", "vocabulary=9"), ("--speculator", "try vocabulary=256\n")),
        ((*PROMPT, "--speculator", "vocabulary=256,agree=2"), ("--speculator", "agree", "try ngram, or")),
        ((*PROMPT, "--speculator", "foo"), ("--speculator", "'foo'", "try ngram, or vocabulary=256,agree")),
        ((*PROMPT, "--target", "vocabulary=0"), ("--target", "try vocabulary=256\n")),
        ((*PROMPT, "--target", "vocabulary=²"), ("--target", "try vocabulary=256\n")),
        ((*PROMPT, "--target", "/nonexistent"), ("--target", "try vocabulary=256\n")),
        ((*PROMPT, "--raw", "--system", "x"), ("--system contradicts --raw",)),
        ((*PROMPT, "--max-model-len", "1"), ("--max-model-len", "try 2048")),
        ((*PROMPT, "--max-model-len", "2"), ("--prompt", "shorten")),
        ((*PROMPT, "--threads", "0"), ("--threads", "try")),
        ((*PROMPT, "--load-timeout", "0"), ("--load-timeout", "try 600")),
        ((*PROMPT, "--draft-timeout", "-1"), ("--draft-timeout", "try 10")),
        ((*PROMPT, "--verify-timeout", "nan"), ("--verify-timeout", "try 120")),
        ((*PROMPT, "--stop-timeout", "0"), ("--stop-timeout", "try 3")),
        (
            (*PROMPT, "--hang-timeout", "2"),
            ("--hang-timeout 2 must not be below --draft-timeout 10; try 10",),
        ),
        ((*PROMPT, "--draft-timeout", "60"), ("--hang-timeout 30 must not be", "60; try 60")),
        (("generate", "--prompt", "hi", "--target", "/nowhere"), ("--target", "try smollm2-135m")),
        (("generate", "--prompt", "hi", "--target", "~nosuchuser/x"), ("--target", "try smollm2-135m")),
        (("generate", "--prompt", "hi", "--target", "x" * 300), ("--target", "too long", "try smollm2-135m")),
        (("generate", "--prompt", "hi", "--cache-dir", "/dev/null"), ("--cache-dir",)),
        ((*PROMPT, "--cache-dir", ""), ("--cache-dir", "try ./models")),
        ((*PROMPT, "--cache-dir", "~nosuchuser/x"), ("--cache-dir", "try ./models")),
        ((*PROMPT, "--device", "cuda:"), ("--device", "try auto")),
        ((*PROMPT, "--device", ""), ("--device", "try auto")),
        ((*PROMPT, "--engine", ""), ("--engine", "try native")),
        (("bench", "decode", *TOY, "--prompts", ""), ("--prompts", "copy_heavy.jsonl")),
        (("bench", "decode", *TOY, "--modes", ""), ("--modes", "try off,sequential")),
        (("bench", "invariance", "--target", ""), ("--target", "try smollm2-135m")),
        (("bench", "invariance", "--cache-dir", ""), ("--cache-dir", "try ./models")),
        (
            ("bench", "invariance", "--num-speculative-tokens", "50"),
            ("--num-speculative-tokens", "from 1 to 32", "try 5"),
        ),
        (("prune", "", "x", "--layers", "0"), ("SOURCE", "try smollm2-135m")),
        (("prune", "smollm2-135m", "", "--layers", "0"), ("DESTINATION", "try ./draft")),
        (("prune", "/nowhere", "x", "--layers", "0", "--cache-dir", ""), ("--cache-dir", "try ./models")),
        (("prune",), ("SOURCE", "--help")),
        (("prune", "/nowhere", "x", "--layers", "0"), ("SOURCE", "/nowhere")),
        (("prune", "/nowhere", "x", "--layers", "3-1"), ("--layers", "try 1-3")),
        (("bench",), ("--help",)),
        (("bench", "sleep"), ("sleep",)),
        (("bench", "overhead", "--batch", "0"), ("--batch", "try 8")),
        (("bench", "overhead", "--rounds", "1"), ("--rounds", "try 500")),
        (("bench", "overhead", "--num-speculative-tokens", "99"), ("--num-speculative-tokens", "try 5")),
        (("bench", "decode", *TOY, "--modes", "off,fast"), ("--modes", "'fast'", "try off,sequential")),
        (("bench", "decode", *TOY, "--prompts", "/nowhere"), ("--prompts", "/nowhere")),
        (("bench", "decode", "--batch"), ("--batch", "see speclane bench decode --help")),
        (("bench", "decode", "--limit", "x"), ("--limit", "try --limit 8")),
        (("bench", "invariance", "-K", "50"), ("-K", "see speclane bench invariance --help")),
        (("bench", "decode", *TOY, "--limit", "0"), ("--limit", "try 8")),
        (("bench", "decode", *TOY, "--repeat", "0"), ("--repeat", "try 3")),
        (("bench", "decode", *TOY, "--batch", "0"), ("--batch", "try 8")),
        (("bench", "decode", *TOY, "--new-tokens", "0"), ("--new-tokens", "try 64")),
        (("bench", "decode", *TOY, "--new-tokens", "4000"), ("--new-tokens", "context of 4096", "try")),
        (("bench", "decode", *TOY, "--temperature", "-1"), ("--temperature", "try 0.8")),
        (("bench", "decode", *TOY, "--speculator", "off"), ("--speculator off contradicts --modes",)),
    ],
)
@pytest.mark.usefixtures("own_logging")
def test_bad_input_is_one_line_and_status_2(
    arguments: tuple[str, ...], parts: tuple[str, ...], capsys, monkeypatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO()))
    assert run(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("speclane: error: ")
    assert err.count("\n") == 1
    for part in parts:
        assert part in err


@pytest.fixture
def own_logging() -> Iterator[None]:
    log = logging.getLogger("speclane")
    handlers, level, propagate = log.handlers, log.level, log.propagate
    yield
    log.handlers, log.propagate = handlers, propagate
    log.setLevel(level)


@pytest.mark.usefixtures("own_logging")
def test_log_lines(capsys) -> None:
    log = logging.getLogger("speclane")
    log_to_stderr(verbose=False)
    log.info("hidden")
    log.warning("lost %d", 1)
    with progress_shown():
        log.info("fetching")
    log.info("hidden again")
    log_to_stderr(verbose=True)
    log.info("seen")
    expected = "speclane: warning: lost 1\nspeclane: fetching\nspeclane: seen\n"
    assert capsys.readouterr() == ("", expected)


def finished(**stats: int) -> report.Run:
    completion = Completion([1, 2], [3], "x", "length", 7, Acceptance({(2, 0): 1}), None)
    counted = Stats(missed=stats["missed"], invalid=stats["invalid"])
    transport = TransportInfo("memfd", "no cuda_ipc: no GPU")
    return report.Run(completion, 1.0, 0.5, [], counted, stats["stale"], transport)


def test_the_way_of_tensors_is_told(capsys) -> None:
    done = finished(missed=0, invalid=0, stale=0)
    report.show(done)
    assert "tensors            by memfd (no cuda_ipc: no GPU)" in capsys.readouterr().err
    assert report.as_dict(done, Config())["transport"] == {"name": "memfd", "reason": "no cuda_ipc: no GPU"}
    report.show(replace(done, transport=TransportInfo("none", "")))
    assert "tensors" not in capsys.readouterr().err


def test_drafts_that_were_lost_are_told(capsys) -> None:
    report.show(finished(missed=2, invalid=0, stale=1))
    assert "lost drafts        2 missed, 1 stale" in capsys.readouterr().err
    report.show(finished(missed=0, invalid=0, stale=0))
    assert "lost" not in capsys.readouterr().err
    assert report.as_dict(finished(missed=0, invalid=3, stale=0), Config())["drafts"] == {
        "missed": 0,
        "invalid": 3,
        "stale": 0,
    }


def test_a_mode_is_slower_than_no_speculation_in_lanes_of_its_own_kind(caplog) -> None:
    rows = [
        {"mode": mode, "lanes": lanes, "batch": 1, "tok_s": speed, "method": f"{mode} {lanes}"}
        for lanes, mode, speed in (
            ("process", "off", 10.0),
            ("process", "auto", 9.0),
            ("inline", "off", 8.0),
            ("inline", "auto", 8.5),
        )
    ]
    bench_decode._warn({"batch": 1, "prompts": 1, "rows": rows, "promise_kept": True})
    assert caplog.messages == ["auto process is slower than no speculation: speedup 0.90"]


def test_brackets_of_a_path_are_no_markup(capsys) -> None:
    result = {"target": "/models/[big]", "dtype": "bf16", "threads": 1, "batch": 1, "context": 9, "rows": []}
    result |= {"acceptance": "coupled", "lanes": "process"}
    decode_table.show(result)
    bench_invariance._show(result)
    assert capsys.readouterr().out.count("/models/[big]") == 2


def commands(command=None, name: str = "speclane"):
    """All commands, by their full names."""
    command = command or typer.main.get_command(app)
    yield name, command
    for word, sub in getattr(command, "commands", {}).items():
        yield from commands(sub, f"{name} {word}")


@pytest.mark.parametrize("name", ["generate", "bench decode", "chaos"])
def test_help_shows_the_defaults_that_hold(name: str, capsys, monkeypatch) -> None:
    monkeypatch.setenv("COLUMNS", "250")
    assert run((*name.split(), "--help")) == 0
    lines = {line.split()[1]: line for line in capsys.readouterr().out.splitlines() if " --" in line}
    config = Config()
    for option, default in (
        ("--target", config.target),
        ("--num-speculative-tokens", str(config.num_speculative_tokens)),
        ("--max-model-len", "the target's"),
        ("--threads", "all cores"),
        ("--cache-dir", "$SPECLANE_CACHE, else ~/.cache"),
        *(
            (f"--{timeout}-timeout", f"{getattr(config.timeouts, timeout):g}")
            for timeout in ("load", "draft")
        ),
        *(
            (f"--{timeout}-timeout", f"{getattr(config.timeouts, timeout):g}")
            for timeout in ("hang", "verify")
        ),
    ):
        assert f"[default: ({default})]" in lines[option]
    assert "from 1 to 32" in lines["--num-speculative-tokens"]


def test_no_help_text_holds_what_rich_would_take_for_markup() -> None:
    for name, command in commands():
        for text in (command.help, *(getattr(parameter, "help", None) for parameter in command.params)):
            assert "[" not in (text or ""), name


def test_help_imports_nothing_heavy() -> None:
    code = (
        "import sys; from executor.cli.run import run; status = run(['generate', '--help']);"
        "heavy = {'numpy', 'gguf', 'zmq', 'tokenizers', 'jinja2', 'torch', 'huggingface_hub'};"
        "print(sorted(heavy & {*sys.modules}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "COLUMNS": "80"},
    )
    assert done.stdout.endswith("[]\n")
    assert done.stderr == ""
