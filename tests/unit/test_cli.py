"""The command line without processes: how errors are told, and what is read from options and files."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections import Counter

import pytest
import typer

from executor.bench import decode, decode_plan
from executor.bench.percentile import percentile
from executor.bench.prompts import COPY_HEAVY, LANE_BENCH, mixed, read_prompts
from executor.cli import swap_speculator
from executor.cli.complaint import complaint
from executor.cli.prune import parse_layers
from executor.errors import Closed, InvalidConfig, InvalidRequest, LaneFailed
from ipc.errors import WireError


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


def test_a_speculator_is_named_so_that_it_is_foundfrom_anywhere(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "draft").mkdir()
    for name in ("draft", "./draft", "~/draft"):
        assert swap_speculator.from_anywhere(name) == str(tmp_path / "draft")
    for name in ("off", "ngram", "smollm2-135m", "some/model", "agree=0.8", "x" * 300):
        assert swap_speculator.from_anywhere(name) == name
    with pytest.raises(InvalidConfig, match=r"^model '~nosuchuser/x' is in the home of no user; try ngram$"):
        swap_speculator.from_anywhere("~nosuchuser/x")


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
    assert decode_plan.parse_modes("sequential, off") == ["sequential", "off"]
    with pytest.raises(InvalidConfig, match="modes names off twice; try off,sequential"):
        decode_plan.parse_modes("off,off")
    for unknown in ("fast", "", "Auto", "Off"):
        with pytest.raises(
            InvalidConfig,
            match=f"modes has no '{unknown}', only off, sequential, ahead, outcomes, auto; try off,seq",
        ):
            decode_plan.parse_modes(f"off,{unknown}")


def test_acceptances() -> None:
    assert decode_plan.parse_acceptances("block, coupled") == ["block", "coupled"]
    with pytest.raises(
        InvalidConfig, match="acceptance has no 'typical', only coupled, rejection, block"
    ) as no:
        decode_plan.parse_acceptances("coupled,typical")
    assert no.value.field == "acceptance"


def test_kinds_of_lanes() -> None:
    assert decode_plan.parse_lanes("inline,process") == ["inline", "process"]
    with pytest.raises(InvalidConfig, match="lanes has no 'thread', only process, inline") as no:
        decode_plan.parse_lanes("process,thread")
    assert no.value.field == "lanes"


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
    assert percentile(values, share) == expected


def test_shipped_prompts() -> None:
    prompts = read_prompts(COPY_HEAVY)
    assert len(prompts) == 8
    assert len({prompt.question_id for prompt in prompts}) == 8
    assert read_prompts(COPY_HEAVY, 3) == prompts[:3]


def test_lane_bench_has_twenty_prompts_in_each_of_eight_categories() -> None:
    prompts = read_prompts(LANE_BENCH)
    counts = Counter(prompt.category for prompt in prompts)
    assert set(counts.values()) == {20}
    assert len(counts) == 8
    assert len({prompt.text for prompt in prompts}) == len({prompt.question_id for prompt in prompts}) == 160
    assert Counter(prompt.category for prompt in read_prompts(LANE_BENCH, each=3)) == dict.fromkeys(counts, 3)
    mix = mixed(read_prompts(LANE_BENCH))
    assert len(mix) == sum(counts.values())
    assert [prompt.category for prompt in mix[: len(counts)]] == list(counts)
    assert read_prompts(LANE_BENCH, limit=5, each=3) == [*prompts[:3], *prompts[20:22]]


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
