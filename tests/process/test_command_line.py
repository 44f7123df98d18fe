"""The command line as a user meets it: real processes, the toy engine, exit statuses, signals."""

from __future__ import annotations

import json
import os
import pty
import re
import signal
import subprocess
import sys
from contextlib import contextmanager
from typing import TYPE_CHECKING

import psutil
import pytest
import tokenizers

from executor.cli.run import run as command

if TYPE_CHECKING:
    from collections.abc import Iterator

COMMAND = (sys.executable, "-m", "executor")
TOY = ("--engine", "toy", "--target", "vocabulary=256")
DRAFT = ("--speculator", "vocabulary=256,agree=0.8")
SLOW = ("--engine", "toy", "--target", "vocabulary=256,step_ms=20", "--max-tokens", "4000")
SECONDS = 60


def run(*arguments: str, stdin: bytes | None = None) -> subprocess.CompletedProcess[str]:
    """Without stdin, /dev/null stands in for it."""
    done = subprocess.run(
        [*COMMAND, *arguments],
        capture_output=True,
        timeout=SECONDS,
        check=False,
        **({"stdin": subprocess.DEVNULL} if stdin is None else {"input": stdin}),
    )
    return subprocess.CompletedProcess(done.args, done.returncode, done.stdout.decode(), done.stderr.decode())


def generate_json(*arguments: str) -> dict:
    done = run("generate", *TOY, "--prompt", "hello", "--json", *arguments)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.count("\n") == 1
    return json.loads(done.stdout)


@contextmanager
def running(*arguments: str, **streams) -> Iterator[tuple[subprocess.Popen[bytes], list[psutil.Process]]]:
    """The command and, by its end, all processes it was seen to have; none of them may be left."""
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE} | streams
    with subprocess.Popen([*COMMAND, *arguments], stdin=subprocess.DEVNULL, **streams) as process:
        children: list[psutil.Process] = []
        try:
            yield process, children
        finally:
            process.kill()
    _, alive = psutil.wait_procs(children, timeout=2)
    assert alive == []


def workers_of(process: subprocess.Popen[bytes], count: int) -> list[psutil.Process]:
    """Waits until it has started so many workers; a child that is still to become one does not count."""
    while process.poll() is None:
        children = [child for child in psutil.Process(process.pid).children() if "workers" in child.cmdline()]
        if len(children) >= count:
            return children
    raise AssertionError(f"ended with status {process.returncode} before it had workers")


# ---------------------------------------------------------------- what comes out


def test_json_is_one_object() -> None:
    result = generate_json(*DRAFT, "--max-tokens", "30", "--seed", "7")
    assert len(result["token_ids"]) == len(result["text"]) == result["tokens"] == 30
    assert result["finish_reason"] == "length"
    assert (result["seed"], result["prompt_tokens"], result["num_speculative_tokens"]) == (7, 5, 5)
    assert 1 < result["acceptance_length"] <= 6
    assert len(result["acceptance_by_position"]) == 5
    assert result["tok_s"] > 0
    assert 0 < result["time_to_first_token_s"] <= result["seconds"]
    assert (result["drafts"].keys(), result["drafts"]["invalid"]) == ({"missed", "invalid", "stale"}, 0)
    assert [lane["lane"] for lane in result["lanes"]] == ["target", "speculator"]
    for lane in result["lanes"]:
        assert lane["pid"] > 0
        assert lane["resident_mb"] > 1
        assert 0 <= lane["busy_share"] <= 1
    assert "logprobs" not in result


@pytest.mark.parametrize("temperature", ["0", "1.3"])
def test_speculation_changes_no_token(temperature: str) -> None:
    options = ("--max-tokens", "40", "--seed", "3", "--temperature", temperature)
    alone = generate_json(*options, "--speculator", "off")
    drafted = generate_json(*options, *DRAFT)
    assert drafted["token_ids"] == alone["token_ids"]
    assert (alone["acceptance_length"], alone["acceptance_by_position"], alone["rounds"]) == (1.0, [], 40)
    assert alone["num_speculative_tokens"] == 0
    assert [lane["lane"] for lane in alone["lanes"]] == ["target"]


def test_sampling_options_arrive() -> None:
    whole = generate_json("--max-tokens", "20", "--logprobs", "2")
    assert len(whole["logprobs"]) == 20
    assert all(len(entry["top"]) == 2 for entry in whole["logprobs"])
    text, tokens = whole["text"], whole["token_ids"]

    stopped = generate_json("--max-tokens", "20", "--stop", "nowhere", "--stop", text[5:8])
    assert (stopped["text"], stopped["finish_reason"]) == (text[:5], "stop")
    stopped = generate_json("--max-tokens", "20", "--stop-token-id", str(tokens[4]))
    assert (stopped["token_ids"], stopped["finish_reason"]) == (tokens[:5], "stop")
    stopped = generate_json("--max-tokens", "20", "--stop", text[5:8], "--min-tokens", "20")
    assert stopped["finish_reason"] == "length"
    likely = generate_json("--max-tokens", "20", "--temperature", "5", "--top-k", "1")
    assert likely["token_ids"] == tokens


def test_what_restricts_tokens_arrives(capsys) -> None:
    given = (
        "generate",
        *TOY,
        "--prompt",
        "hello",
        "--max-tokens",
        "150",
        "--seed",
        "3",
        "--temperature",
        "1",
    )
    outputs = set()
    for options in (
        (),
        ("--presence-penalty", "2"),
        ("--frequency-penalty", "2"),
        ("--repetition-penalty", "5"),
        [word for letter in "abcdefghijklmnopqrstuvwxyz" for word in ("--bad-word", letter)],
    ):
        assert command([*given, *options]) == 0
        outputs.add(capsys.readouterr().out)
    assert len(outputs) == 5


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (
            ("--presence-penalty", "3"),
            "--presence-penalty must be at least -2 and at most 2, got 3.0; try 0.5",
        ),
        (("--bad-word", ""), "--bad-word: bad words must be non-empty text"),
        (("--regex", "[0-9"), "--regex cannot be followed: "),
        (("--regex", "a", "--choice", "b"), "--choice contradicts --regex; leave one of them out"),
        (("--json-schema", "nothing"), "--json-schema nothing: No such file or directory; try a file"),
        (("--choice", "a"), "a toy's tokens are no text; use --engine native"),
    ],
)
def test_restrictions_that_cannot_be(options, says, capsys) -> None:
    assert command(["generate", *TOY, "--prompt", "hello", *options]) == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert says in err


@pytest.mark.model
def test_an_answer_in_a_form(thin, tmp_path, capsys) -> None:
    schema = tmp_path / "schema.json"
    schema.write_text('{"type": "integer", "minimum": 10, "maximum": 99}')
    given = ("generate", "--target", str(thin), "--threads", "1", "--max-model-len", "128", "--prompt")
    for options, form in (
        (("--json-schema", str(schema)), "[1-9][0-9]\n"),
        (("--regex", "(ab){1,3}c"), "(ab){1,3}c\n"),
        (("--choice", "yes", "--choice", "no"), "(yes|no)\n"),
    ):
        assert command([*given, "A number?", *options]) == 0
        assert re.fullmatch(form, capsys.readouterr().out)


def test_text_on_stdout_and_the_rest_on_stderr() -> None:
    expected = generate_json("--max-tokens", "12")["text"]
    done = run("generate", *TOY, "--prompt", "hello", "--max-tokens", "12")
    assert (done.returncode, done.stdout) == (0, expected + "\n")
    assert done.stderr.startswith(
        "speclane: serving: target vocabulary=256 (toy, bf16), speculator ngram, K=5\n"
    )
    for heading in ("tokens", "speed", "acceptance length", "target lane", "speculator lane", "seed"):
        assert f"\n{heading} " in done.stderr


def test_prompt_from_stdin() -> None:
    expected = generate_json("--max-tokens", "12")["token_ids"]
    done = run("generate", *TOY, "--max-tokens", "12", "--json", stdin=b"hello\n")
    assert json.loads(done.stdout)["token_ids"] == expected


def test_system_message_precedes_the_prompt() -> None:
    done = run("generate", *TOY, "--system", "be kind", "--prompt", "hello", "--max-tokens", "2", "--json")
    assert json.loads(done.stdout)["prompt_tokens"] == len("be kind\nhello")


def test_verbose_tells_phases_and_notes() -> None:
    done = run("generate", *TOY, "--prompt", "hello", "--max-tokens", "2", "--verbose", "--speculator", "off")
    assert "speclane: target load in " in done.stderr
    assert "speclane: target: toy model without weights" in done.stderr


def test_on_a_terminal_text_and_lanes_share_the_screen() -> None:
    master, slave = pty.openpty()
    seen = b""
    environment = {**os.environ, "COLUMNS": "80", "LINES": "24", "TERM": "xterm"}
    arguments = ("generate", *SLOW, "--prompt", "hello", "--max-tokens", "30")
    with running(*arguments, stdout=slave, stderr=slave, env=environment) as (process, _):
        os.close(slave)
        try:
            while chunk := os.read(master, 4096):
                seen += chunk
        except OSError:
            pass  # how Linux tells the end of a terminal
        finally:
            os.close(master)
        assert process.wait(SECONDS) == 0
    text = generate_json("--max-tokens", "30")["text"].encode()
    assert text + b"\r\n" in seen
    assert b"pid " in seen
    assert b"acceptance length" in seen


def test_version_and_help() -> None:
    assert run("--version").stdout == run("version").stdout
    assert run("version").stdout.startswith("speclane ")
    for arguments in (
        (),
        ("--help",),
        ("generate", "--help"),
        ("bench", "--help"),
        ("bench", "decode", "-h"),
    ):
        done = run(*arguments)
        assert (done.returncode, done.stderr) == (0, "")
        assert "Usage: speclane" in done.stdout


# ---------------------------------------------------------------- bad input


@pytest.mark.parametrize(
    "arguments", [("generat",), ("generate", *TOY), ("generate", *TOY, "--prompt", "hi", "--max-tokens", "0")]
)
def test_bad_input_is_one_line_and_status_2(arguments: tuple[str, ...]) -> None:
    done = run(*arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("speclane: error: ")
    assert done.stderr.count("\n") == 1


def test_prompt_that_is_no_text() -> None:
    for done in (
        run("generate", *TOY, "--prompt", os.fsdecode(b"\xff")),
        run("generate", *TOY, stdin=b"\xff"),
    ):
        assert done.returncode == 2
        assert "not valid UTF-8" in done.stderr
        assert done.stderr.count("\n") == 1


def test_a_lane_that_fails_is_status_1() -> None:
    with running("generate", *SLOW, "--prompt", "hi") as (process, children):
        children += workers_of(process, 1)
        children[0].kill()
        out, err = process.communicate(timeout=SECONDS)
    assert (process.returncode, out) == (1, b"")
    assert err == b"speclane: error: target lane failed: killed by SIGKILL\n"


def test_a_toy_that_cannot_be_is_status_2() -> None:
    done = run("generate", "--engine", "toy", "--target", "step=3", "--prompt", "hi")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("speclane: error: --target 'step=3': a toy has no parameter 'step'")
    assert done.stderr.count("\n") == 1


def test_what_only_a_worker_can_refuse_is_one_line_and_status_2_too(tmp_path) -> None:
    settings = {"architectures": ["LlamaForCausalLM"], "vocab_size": 2, "max_position_embeddings": 64}
    (tmp_path / "config.json").write_text(json.dumps(settings | {"hidden_act": "gelu"}))
    (tmp_path / "model.safetensors").write_bytes(b"")
    words = tokenizers.models.WordLevel({"hi": 0, "?": 1}, unk_token="?")
    tokenizers.Tokenizer(words).save(str(tmp_path / "tokenizer.json"))
    done = run("generate", "--target", str(tmp_path), "--prompt", "hi", "--raw")
    reason = f"{tmp_path}/config.json: hidden_act is 'gelu'; the native engine supports 'silu' only"
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == f"speclane: error: --target: {reason}; try the hf engine\n"


# ---------------------------------------------------------------- left early


@pytest.mark.parametrize(
    ("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
def test_signal_while_loading(number: signal.Signals, status: int) -> None:
    with running("generate", *SLOW, "--prompt", "hi") as (process, children):
        children += workers_of(process, 1)
        children[0].suspend()  # so that loading does not end by itself
        process.send_signal(number)
        out, err = process.communicate(timeout=SECONDS)
    assert (process.returncode, out) == (status, b"")
    assert b"Traceback" not in err
    assert b"error" not in err


@pytest.mark.parametrize(("number", "status"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
@pytest.mark.parametrize("stream", [(), ("--json",)])
def test_signal_while_generating(number: signal.Signals, status: int, stream: tuple[str, ...]) -> None:
    with running("generate", *SLOW, "--prompt", "hi", "--verbose", *stream) as (process, children):
        assert process.stderr is not None
        assert process.stdout is not None
        while b"speculator warm_up" not in process.stderr.readline():
            pass
        if not stream:
            process.stdout.read(1)
        children += workers_of(process, 2)
        process.send_signal(number)
        out, err = process.communicate(timeout=SECONDS)
    assert process.returncode == status
    assert b"Traceback" not in err
    assert b"error" not in err
    if stream:
        assert out == b""


def test_reader_that_goes_away() -> None:
    with running("generate", *SLOW, "--prompt", "hi") as (process, children):
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.read(1)
        children += workers_of(process, 2)
        process.stdout.close()
        assert process.wait(SECONDS) == 128 + signal.SIGPIPE
        assert process.stderr.read().startswith(b"speclane: serving: ")


# ---------------------------------------------------------------- streams that are none

GENERATE = ("generate", *TOY, "--prompt", "hello", "--max-tokens", "12")


def redirected(redirection: str, *arguments: str) -> subprocess.CompletedProcess[bytes]:
    """The command as a shell runs it with this redirection, such as `>&-`."""
    return subprocess.run(
        ["sh", "-c", f'exec "$@" {redirection}', "sh", *COMMAND, *arguments],
        capture_output=True,
        timeout=SECONDS,
        check=False,
        stdin=subprocess.DEVNULL,
    )


@pytest.mark.parametrize("arguments", [GENERATE, (*GENERATE, "--json"), ("--help",), ("version",)])
def test_stdout_that_is_full_is_told_in_one_line(arguments: tuple[str, ...]) -> None:
    done = redirected(">/dev/full", *arguments)
    *before, last = done.stderr.decode().splitlines()
    assert (done.returncode, last) == (
        1,
        "speclane: error: stdout cannot be written: No space left on device",
    )
    assert all(line.startswith("speclane: serving: ") for line in before)


@pytest.mark.parametrize("arguments", [GENERATE, ("--help",)])
def test_stdout_that_is_closed_is_told_before_anything_is_loaded(arguments: tuple[str, ...]) -> None:
    done = redirected(">&-", *arguments)
    expected = b"speclane: error: stdout is closed; redirect it, for example to /dev/null\n"
    assert (done.returncode, done.stderr) == (1, expected)


@pytest.mark.parametrize("redirection", ["2>&-", "2>/dev/full", "<&- 2>&-"])
def test_an_answer_needs_no_stderr(redirection: str) -> None:
    expected = generate_json("--max-tokens", "12")["text"]
    done = redirected(redirection, *GENERATE)
    assert (done.returncode, done.stdout.decode(), done.stderr) == (0, expected + "\n", b"")


def test_a_prompt_from_a_closed_stdin_is_missing() -> None:
    done = redirected("<&-", "generate", *TOY)
    assert (done.returncode, done.stdout) == (2, b"")
    assert done.stderr.startswith(
        b"speclane: error: --prompt is missing, and stdin is a terminal or closed; "
    )
    assert done.stderr.count(b"\n") == 1
