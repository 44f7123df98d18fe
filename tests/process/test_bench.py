"""The benchmarks: what they report, and that modes decode the same tokens. No figure is judged here."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

TOY = ("--engine", "toy", "--target", "vocabulary=128")
DRAFT = ("--speculator", "vocabulary=128,agree=0.8")


def bench(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "executor", "bench", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        stdin=subprocess.DEVNULL,
    )


@pytest.mark.parametrize("batch", [1, 4])
def test_overhead(batch: int) -> None:
    done = bench("overhead", "--batch", str(batch), "--rounds", "20", "--repeat", "2", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    result = json.loads(done.stdout)
    assert (result["batch"], result["k"], result["rounds"], result["repeats"]) == (batch, 5, 20, 2)
    assert 0 < result["round_us"]["p50"] <= result["round_us"]["p99"]
    assert result["floor_us"] > 0
    assert result["over_floor_us"] == pytest.approx(result["round_us"]["p50"] - result["floor_us"], abs=0.02)
    assert result["per_sequence_us"] == pytest.approx(result["round_us"]["p50"] / batch, abs=0.01)
    assert result["lanes_us"]["draft"] > 0
    assert result["lanes_us"]["verify"] > 0


def test_overhead_table() -> None:
    done = bench("overhead", "--rounds", "10", "--repeat", "1", "--num-speculative-tokens", "2")
    assert done.returncode == 0
    for heading in ("per sequence", "floor", "over floor"):
        assert heading in done.stdout


def test_handoff() -> None:
    done = bench("handoff", "--count", "10", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    result = json.loads(done.stdout)
    assert (result["shape"], result["bytes"], result["count"]) == ([8, 7, 49152], 11010048, 10)
    p50 = {way: result[f"{way}_us"]["p50"] for way in ("descriptor", "copy", "message", "bare")}
    assert all(0 < time <= result[f"{way}_us"]["p99"] for way, time in p50.items())
    assert result["times_less"] == pytest.approx(p50["message"] / p50["descriptor"], abs=0.1)
    assert result["overhead_us"] == pytest.approx(p50["descriptor"] - p50["bare"], abs=0.02)
    assert 0 < result["work_us"]["p50"] <= result["work_us"]["p99"]
    assert "in place" in bench("handoff", "--count", "10").stdout


@pytest.mark.parametrize(("temperature", "agrees"), [("0", True), ("1", False)])
def test_decode_by_rejection(temperature: str, agrees: bool) -> None:
    """Texts that hang on the drafts are no error, where nothing else was promised."""
    options = ("--new-tokens", "16", "--limit", "3", "--repeat", "1", "--temperature", temperature)
    done = bench("decode", *TOY, *DRAFT, *options, "--acceptance", "rejection", "--json")
    result = json.loads(done.stdout)
    assert (done.returncode, result["acceptance"], result["tokens_agree"]) == (0, "rejection", agrees)
    assert result["rows"][1]["acceptance_length"] > 1


def test_decode_by_each_acceptance_side_by_side() -> None:
    options = ("--new-tokens", "16", "--limit", "3", "--repeat", "1", "--temperature", "1")
    done = bench("decode", *TOY, *DRAFT, *options, "--acceptance", "coupled,rejection,block", "--json")
    result = json.loads(done.stdout)
    assert (done.returncode, result["acceptance"]) == (0, "coupled,rejection,block")
    assert (result["promise_kept"], result["tokens_agree"]) == (True, False)
    rows = {row["method"]: row for row in result["rows"]}
    ways = ("coupled", "rejection", "block")
    assert list(rows) == ["off", *(f"sequential {way}" for way in ways)]
    assert [row["acceptance"] for row in result["rows"]] == [None, *ways]
    assert rows["off"]["tokens_sha256"] == rows["sequential coupled"]["tokens_sha256"]
    assert all(rows[f"sequential {way}"]["acceptance_length"] > 1 for way in ways)


def test_decode_in_processes_and_inline_side_by_side() -> None:
    options = ("--new-tokens", "16", "--limit", "2", "--repeat", "1", "--lanes", "process,inline")
    done = bench("decode", *TOY, *DRAFT, *options, "--json")
    result = json.loads(done.stdout)
    assert (done.returncode, result["lanes"], result["tokens_agree"]) == (0, "process,inline", True)
    found = [(row["method"], row["lanes"]) for row in result["rows"]]
    assert found == [
        (f"{mode} {own}", own) for own in ("process", "inline") for mode in ("off", "sequential")
    ]
    off, _, other, _ = result["rows"]
    assert (off["speedup"], other["speedup"]) == (1.0, pytest.approx(other["tok_s"] / off["tok_s"], abs=1e-3))


def test_a_run_is_not_known_by_heart_in_the_next_one() -> None:
    lengths = []
    for repeat in ("1", "3"):
        options = ("--speculator", "suffix", "--new-tokens", "40", "--limit", "2", "--repeat", repeat)
        done = bench("decode", *TOY, *options, "--modes", "sequential", "--json")
        lengths.append(json.loads(done.stdout)["rows"][0]["acceptance_length"])
    assert lengths[0] == lengths[1]


@pytest.mark.parametrize(("temperature", "batch"), [("0", "1"), ("1", "3")])
def test_decode(temperature: str, batch: str) -> None:
    options = (
        "--new-tokens",
        "24",
        "--limit",
        "3",
        "--batch",
        batch,
        "--repeat",
        "2",
        "--temperature",
        temperature,
    )
    done = bench("decode", *TOY, *DRAFT, *options, "--modes", "off,sequential", "--json")
    result = json.loads(done.stdout)
    assert done.returncode == 0
    off, sequential = result["rows"]
    assert (off["mode"], sequential["mode"]) == ("off", "sequential")
    assert off["tokens_sha256"] == sequential["tokens_sha256"]
    assert len(off["tokens_sha256"]) == 64
    assert result["tokens_agree"] is True
    assert (off["tokens"], off["acceptance_length"], off["acceptance_by_position"]) == (72, 1.0, [])
    assert (off["rounds"], off["speedup"], off["round_ms"]["draft"]) == (72, 1.0, 0.0)
    assert sequential["acceptance_length"] > 1
    assert len(sequential["acceptance_by_position"]) == 5
    assert sequential["speedup"] == pytest.approx(sequential["tok_s"] / off["tok_s"], rel=1e-2)
    for row in result["rows"]:
        assert len(row["tok_s_each"]) == 2
        split = row["round_ms"]
        assert split["total"] == pytest.approx(sum(split.values()) - split["total"], abs=1e-3)
    assert result["prompts"] == 3
    assert result["new_tokens"] == 24
    turns = [
        line.split(" 1 of ")[0].split(" 2 of ")[0] for line in done.stderr.splitlines() if " of 2: " in line
    ]
    assert turns == ["speclane: off", "speclane: sequential"] * 2


def test_decode_of_own_prompts_without_the_mode_off(tmp_path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"question_id": 1, "category": "x", "turns": ["abc"]}))
    options = ("--prompts", str(prompts), "--modes", "sequential", "--new-tokens", "8", "--repeat", "1")
    done = bench("decode", *TOY, *options, "--json")
    result = json.loads(done.stdout)
    (row,) = result["rows"]
    assert row["speedup"] is None
    assert result["prompt_tokens"] == 3


def test_decode_table() -> None:
    done = bench("decode", *TOY, *DRAFT, "--new-tokens", "8", "--limit", "1", "--repeat", "1")
    assert done.returncode == 0
    for heading in ("tok/s", "speedup", "sequential", "verify"):
        assert heading in done.stdout


def test_slower_than_no_speculation_is_said() -> None:
    slow = ("--speculator", "vocabulary=128,agree=0,step_ms=5")
    done = bench("decode", *TOY, *slow, "--new-tokens", "8", "--limit", "1", "--repeat", "1")
    assert done.returncode == 0
    assert "speclane: warning: sequential is slower than no speculation" in done.stderr


def test_recovery() -> None:
    options = ("--times", "1", "--new-tokens", "400", "--threads", "1")
    done = bench("recovery", *TOY, *DRAFT, *options, "--json")
    assert (done.returncode, done.stderr.count("warning")) == (0, 0)
    result = json.loads(done.stdout)
    assert (result["times"], result["plain_step_ms"] > 0, result["degraded_share"] > 0) == (1, True, True)
    assert result["undisturbed"].keys() == {"gap_steps"}
    for name in ("speculator_killed", "speculator_stopped", "speculator_swapped", "target_killed"):
        row = result[name]
        assert 0 < row["gap_steps"]["p50"] <= row["gap_steps"]["p99"] <= row["gap_steps"]["max"]
        # Only a load that began before the disturbance could take longer than the way back.
        assert 0 < row["back_beyond_load_seconds"]["p50"] < row["back_seconds"]["p50"]
        assert row["unmapped_ms"] is None  # such lanes share no memory
        assert (row["ended_ms"] is not None) == name.endswith("_killed")


def test_recovery_refuses_what_leaves_nothing_to_measure() -> None:
    done = bench("recovery", *TOY, "--speculator", "off")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "speclane: error: --speculator off leaves nothing to measure; try ngram\n"


@pytest.mark.model
def test_invariance(thin) -> None:
    options = ("--target", str(thin), "--context", "20", "--repeat", "1", "--num-speculative-tokens", "3")
    done = bench("invariance", *options, "--threads", "1", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    result = json.loads(done.stdout)
    assert [row["rows"] for row in result["rows"]] == [1, 4]
    for row in result["rows"]:
        assert row["cost_ratio"] == pytest.approx(row["invariant_ms"] / row["plain_ms"], rel=1e-3)


def test_invariance_refuses_what_does_not_fit(tmp_path) -> None:
    done = bench("invariance", "--target", str(tmp_path / "nothing"))
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("speclane: error: --target ")


def test_decode_reports_each_category(tmp_path) -> None:
    options = ("--prompts", "lane-bench", "--each", "2", "--new-tokens", "6", "--repeat", "1", "--batch", "4")
    done = bench("decode", *TOY, *DRAFT, *options, "--json")
    assert done.returncode == 0
    result = json.loads(done.stdout)
    assert (result["prompts"], result["tokens_agree"]) == (16, True)
    names = ["chat", "explain", "code", "math", "summarise", "edit", "creative", "extract"]
    off, sequential = result["rows"]
    for row in (off, sequential):
        assert list(row["categories"]) == names
        assert row["tokens"] == 16 * 6
    for name in names:
        plain, fast = off["categories"][name], sequential["categories"][name]
        assert (plain["acceptance_length"], plain["speedup"]) == (1.0, 1.0)
        assert fast["acceptance_length"] >= 1  # a few rounds, whose drafts may all be late on a busy machine
        assert fast["speedup"] == pytest.approx(fast["tok_s"] / plain["tok_s"], rel=1e-2)
    assert sequential["acceptance_length"] > 1
    assert "extract" in bench("decode", *TOY, *DRAFT, *options).stdout


def test_http() -> None:
    done = bench("http", "--streams", "3", "--tokens", "20", "--step-ms", "1", "--json")
    assert (done.returncode, done.stderr) == (0, "")
    result = json.loads(done.stdout)
    assert (result["streams"], result["tokens"], result["k"]) == (3, 60, 5)
    assert 0 < result["delay_ms"]["p50"] <= result["delay_ms"]["p99"]
    assert min(result["tok_s"].values()) > 0
    table = bench("http", "--streams", "1", "--tokens", "5", "--step-ms", "1")
    assert table.returncode == 0
    for heading in ("delay", "CPU", "speed"):
        assert heading in table.stdout


PEER = """
import argparse, json, pathlib, sys
parser = argparse.ArgumentParser()
for name in ("method", "model", "prompts", "k", "new-tokens", "batch", "threads", "dtype", "temperature"):
    parser.add_argument("--" + name, required=True)
given = parser.parse_args()
questions = [json.loads(line) for line in pathlib.Path(given.prompts).read_text().splitlines()]
print("a line of a log")
if given.method == "ngram":
    sys.exit("no n-grams here")
tokens = len(questions) * int(given.new_tokens)
print(json.dumps({"engine": "ENGINE " + given.dtype, "tokens": tokens, "tok_s": 100.0 * int(given.batch)}))
print("the end of a log")
"""


def test_decode_with_peers_at_several_batches(tmp_path) -> None:
    for script, engine in (("run_hf.py", "hf"), ("run_vllm.py", "v")):
        (tmp_path / script).write_text(PEER.replace("ENGINE", engine))
    report = tmp_path / "report.html"
    options = ("--batch", "1,2", "--limit", "2", "--new-tokens", "6", "--repeat", "1", "--html", str(report))
    peers = ("--peers", str(tmp_path), "--peer-python", sys.executable)
    done = bench("decode", *TOY, *DRAFT, *options, *peers, "--modes", "off,ahead", "--json")
    assert done.returncode == 0
    result = json.loads(done.stdout)
    assert (result["batch"], result["tokens_agree"]) == ([1, 2], True)
    assert [(row["engine"], row["method"], row["batch"]) for row in result["rows"]] == [
        (engine, method, batch)
        for batch in (1, 2)
        for engine, method in (
            ("speclane", "off"),
            ("speclane", "ahead"),
            ("hf bfloat16", "none"),
            ("hf bfloat16", "lookup"),
            ("v bfloat16", "none"),
            ("vllm", "ngram"),
        )
    ]
    off, ahead, none, lookup, _, failed = result["rows"][6:]
    assert (off["tokens"], ahead["tokens"], none["tokens"], lookup["tok_s"]) == (12, 12, 12, 200.0)
    assert none["speedup"] == pytest.approx(200.0 / off["tok_s"], rel=1e-3)
    assert (failed["mode"], failed["tok_s"], failed["error"]) == (None, None, "no n-grams here")
    assert done.stderr.count("speclane: warning: vllm ngram failed: no n-grams here") == 2
    page = report.read_text()
    for said in (
        "no n-grams here",
        "hf bfloat16 lookup",
        'aria-label="lanes in mode ahead, 2 sequences at once"',
    ):
        assert said in page


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--batch", "1,0"), "--batch must be whole, from 1 to 1024, got '0'; try 8 or 1,2,4,8"),
        (("--peer-python", "python3"), "--peer-python says nothing without --peers; try --peers DIR"),
        (("--peers", "/no/such"), "--peers /no/such has no run_hf.py; try a directory that has it"),
        (("--html", "/no/such/r.html"), "--html /no/such/r.html: No such file or directory; try report.html"),
    ],
)
def test_decode_refuses_before_anything_starts(options: tuple[str, str], said: str) -> None:
    done = bench("decode", *TOY, *DRAFT, *options)
    assert (done.returncode, done.stdout, done.stderr) == (2, "", f"speclane: error: {said}\n")
