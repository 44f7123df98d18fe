"""The command line without processes: how errors are told, and what is read from options and files."""

from __future__ import annotations

import hashlib
import io
import json
import logging
import os
import subprocess
import sys
from typing import TYPE_CHECKING

import pytest
import typer

from executor.bench import decode, overhead
from executor.bench.prompts import COPY_HEAVY, read_prompts
from executor.cli import bench_decode, bench_invariance, options, report
from executor.cli.app import app
from executor.cli.complaint import complaint
from executor.cli.output import log_to_stderr, progress_shown
from executor.cli.prune import parse_layers
from executor.cli.run import run
from executor.config import Config
from executor.errors import Closed, InvalidConfig, InvalidRequest, LaneFailed
from executor.request import Acceptance, Completion
from executor.sampling import SamplingParams
from executor.stats import Stats
from ipc.errors import WireError

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.mark.parametrize(
    ("error", "line", "status"),
    [
        (
            InvalidConfig("num_speculative_tokens", "num-speculative-tokens must be 1, got 0; try 5"),
            "--num-speculative-tokens must be 1, got 0; try 5",
            2,
        ),
        (
            InvalidRequest("min_tokens", "min_tokens must be from 0 to 9 (max_tokens); try 9"),
            "--min-tokens must be from 0 to 9 (--max-tokens); try 9",
            2,
        ),
        (
            InvalidConfig("hang_timeout", "hang-timeout 3 must not be below draft_timeout 9; try 9"),
            "--hang-timeout 3 must not be below --draft-timeout 9; try 9",
            2,
        ),
        (InvalidRequest("prompt", "the prompt is empty"), "--prompt: the prompt is empty", 2),
        (
            InvalidConfig("speculator", "vocabularies differ; use --speculator ngram"),
            "vocabularies differ; use --speculator ngram",
            2,
        ),
        (
            InvalidRequest("stop_token_ids", "token 9 is not in the vocabulary"),
            "--stop-token-id: token 9 is not in the vocabulary",
            2,
        ),
        (InvalidConfig("source", "source has\nno weights"), "SOURCE has no weights", 2),
        (InvalidConfig("XDG_RUNTIME_DIR", "set XDG_RUNTIME_DIR"), "set XDG_RUNTIME_DIR", 2),
        (LaneFailed("target", "killed by SIGKILL"), "target lane failed: killed by SIGKILL", 1),
        (Closed("the executor was closed"), "the executor was closed", 1),
        (WireError("socket path is too long"), "socket path is too long", 1),
        (KeyError("x"), "internal error: KeyError: 'x'", 1),
        (typer.BadParameter("no good."), "no good", 2),
    ],
)
def test_errors_are_one_line_that_speaks_of_options(error: Exception, line: str, status: int) -> None:
    told = complaint(error)
    assert (told.line.removeprefix("Invalid value: ").split("; see")[0], told.status) == (line, status)


def test_worker_output_is_shown_unless_it_repeats_the_error() -> None:
    assert complaint(LaneFailed("target", "killed by SIGABRT", "oops")).details == "oops"
    assert complaint(LaneFailed("target", "E: no", "Traceback …\nE: no")).details == ""
    assert complaint(LaneFailed("target", "F: no", "Traceback …\nE: no")).details == "Traceback …\nE: no"


GIVEN = {"speculator": "ngram", "engine": "toy", "target": None, "threads": None, "load_timeout": None}


def test_options_not_given_leave_the_defaults() -> None:
    assert options.config(GIVEN) == Config(engine="toy")
    assert options.sampling({"max_tokens": 9, "top_p": None}) == SamplingParams(max_tokens=9)


def test_options_given_are_taken() -> None:
    given = GIVEN | {"target": "vocabulary=9", "load_timeout": 7.0, "num_speculative_tokens": 3}
    config = options.config(given, max_sequences=2)
    assert (config.target, config.timeouts.load) == ("vocabulary=9", 7.0)
    assert (config.num_speculative_tokens, config.max_sequences) == (3, 2)
    params = options.sampling({"stop": ["a", "b"], "stop_token_id": [1, 2], "top_k": 0, "seed": 4})
    assert params == SamplingParams(stop=("a", "b"), stop_token_ids=(1, 2), top_k=0, seed=4)


@pytest.mark.parametrize("speculator", ["off", "ngram", "agree=1"])
def test_options_of_drafting_go_with_every_speculator(speculator: str) -> None:
    given = GIVEN | {"speculator": speculator, "num_speculative_tokens": 4, "draft_timeout": 1.5}
    config = options.config(given)
    assert (config.speculator, config.num_speculative_tokens, config.timeouts.draft) == (speculator, 4, 1.5)


def test_text_that_is_no_text_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="--stop is not valid UTF-8"):
        options.sampling({"stop": ["\udcff"]})


@pytest.mark.parametrize(
    ("text", "layers"), [("0", [0]), ("0-3,26-29", [0, 1, 2, 3, 26, 27, 28, 29]), (" 1, 3", [1, 3])]
)
def test_layers(text: str, layers: list[int]) -> None:
    assert parse_layers(text) == layers


@pytest.mark.parametrize("text", ["", "a", "1-", "-1", "3-1", "1,,2", "0-99999999", "²"])
def test_bad_layers(text: str) -> None:
    with pytest.raises(InvalidConfig, match="layers") as caught:
        parse_layers(text)
    assert caught.value.field == "layers"


def test_modes() -> None:
    assert decode.parse_modes("sequential, off") == ["sequential", "off"]
    with pytest.raises(InvalidConfig, match="modes names off twice; try off,sequential"):
        decode.parse_modes("off,off")
    for unknown in ("ahead", "", "outcomes", "auto", "Off"):
        with pytest.raises(
            InvalidConfig, match=f"modes has no '{unknown}', only off, sequential; try off,seq"
        ):
            decode.parse_modes(f"off,{unknown}")


def test_digest_tells_outputs_apart() -> None:
    outputs = [[[1, 2], [3]], [[1], [2, 3]], [[12], [3]], [[1, 2, 3]], [[1, 2], [3], []]]
    assert len({decode.digest(output) for output in outputs}) == len(outputs)
    assert decode.digest([[1, 2], [3]]) == hashlib.sha256(b"1,2\n3\n").hexdigest()


@pytest.mark.parametrize(
    ("values", "share", "expected"),
    [
        ([5.0], 0.5, 5.0),
        ([3, 1, 2], 0.5, 2),
        ([1, 2, 3, 4], 0.5, 2),
        (range(1, 101), 0.99, 99),
        ([1, 2], 1.0, 2),
    ],
)
def test_percentile(values: list[float], share: float, expected: float) -> None:
    assert overhead.percentile(values, share) == expected


def test_shipped_prompts() -> None:
    prompts = read_prompts(COPY_HEAVY)
    assert len(prompts) == 8
    assert len({prompt.question_id for prompt in prompts}) == 8
    assert read_prompts(COPY_HEAVY, 3) == prompts[:3]


def test_prompts_need_only_turns(tmp_path) -> None:
    file = tmp_path / "prompts.jsonl"
    lines = [{"turns": ["one", "more"]}, {"question_id": 81, "category": "writing", "turns": ["two"]}]
    file.write_text("\n\n".join(map(json.dumps, lines)))
    first, second = read_prompts(file)
    assert (first.question_id, first.category, first.text) == ("1", "", "one")
    assert (second.question_id, second.category, second.text) == ("81", "writing", "two")


@pytest.mark.parametrize(
    ("content", "complaint_"),
    [
        (b"", "has no prompts"),
        (b"\n\n", "has no prompts"),
        (b'{"turns": ["a"]}\n{', "line 2: not a question"),
        (b"[1]", "line 1: not a question"),
        (b"3", "line 1: not a question"),
        (b'{"turns": []}', "line 1: not a question"),
        (b'{"turns": "text"}', "line 1: not a question"),
        (b'{"turns": [""]}', "line 1: not a question"),
        (b'{"turns": {"0": "a"}}', "line 1: not a question"),
        (b"\xff", "cannot be read: it is not UTF-8 text"),
    ],
)
def test_bad_prompts(tmp_path, content: bytes, complaint_: str) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_bytes(content)
    with pytest.raises(InvalidConfig, match=complaint_) as caught:
        read_prompts(file)
    assert caught.value.field == "prompts"


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
        ((*PROMPT, "--target", ""), ("--target", "try smollm2-135m")),
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
        (("bench", "decode", *TOY, "--modes", "off,ahead"), ("--modes", "'ahead'", "try off,sequential")),
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
    return report.Run(
        completion, 1.0, 0.5, [], Stats(missed=stats["missed"], invalid=stats["invalid"]), stats["stale"]
    )


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


def test_brackets_of_a_path_are_no_markup(capsys) -> None:
    result = {"target": "/models/[big]", "dtype": "bf16", "threads": 1, "batch": 1, "context": 9, "rows": []}
    bench_decode._show(result)
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


def test_signal_in_a_destructor_is_not_lost() -> None:
    code = (
        "import signal, sys; from executor.cli import quitting\n"
        "class Fragile:\n"
        "    def __del__(self): signal.raise_signal(signal.SIGINT)\n"
        "quitting.on_signals()\n"
        "try:\n"
        "    Fragile()\n"
        "    signal.pause()\n"
        "except quitting.Quit as quit_:\n"
        "    quitting.settle()\n"
        "    sys.exit(quit_.status)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False, timeout=20)
    assert (done.returncode, done.stdout, done.stderr) == (130, b"", b"")
