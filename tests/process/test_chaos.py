"""`speclane chaos` with real processes: what it reports, and that it fails when it should."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys

import psutil
import pytest

from executor.chaos import plan as chaos_plan
from executor.chaos import run as chaos_run
from executor.cli.run import run
from executor.errors import SpeclaneError
from executor.process import WorkerProcess
from executor.restart import RestartPolicy

TOY = ("--engine", "toy", "--threads", "1", "--requests", "24", "--concurrency", "4", "--max-tokens", "24")
QUIET = ("--kill-speculator", "0", "--kill-target", "0")
NOTHING = {"processes": 0, "fds": 0, "memfds": 0, "sockets": 0}


def chaos(*arguments: str, timeout: float = 110) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "executor", "chaos", *arguments],
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
        stdin=subprocess.DEVNULL,
    )


def chaos_here(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict]:
    """In this process, so that a test can plant something."""
    status = run(["chaos", *TOY, *arguments, "--json"])
    return status, json.loads(capsys.readouterr().out)


@pytest.fixture
def planted(monkeypatch):
    """`planted(change)`: the undisturbed outputs are changed before they are compared with."""
    real = chaos_run.make_reference

    def plant(change) -> None:
        def make_reference(*given):
            reference = real(*given)
            change(reference.outputs)
            return reference

        monkeypatch.setattr(chaos_run, "make_reference", make_reference)

    return plant


# ---------------------------------------------------------------- what it reports


def test_kills_change_no_token():
    done = chaos(*TOY, "--kill-speculator", "2", "--kill-target", "1", "--json")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("\n") == 1
    result = json.loads(done.stdout)
    assert (result["mismatches"], result["failed"], result["recovered"]) == (0, 0, True)
    assert result["kills"] == result["deaths"] == {"speculator": 2, "target": 1}
    assert result["stops"] == {"speculator": 0}
    assert result["leaks"] == NOTHING
    assert 0 < result["stall_steps"]["p50"] <= result["stall_steps"]["p99"] <= result["stall_steps"]["max"]
    assert -0.5 < result["rss_drift"] < 0.5
    assert result["requests"] >= 24 * result["rounds"] + 4
    assert result["requests"] % 4 == 0
    assert 6 * result["requests"] <= result["tokens"] <= 24 * result["requests"]
    assert (result["seconds"] > 0, result["step_ms"] > 0) == (True, True)
    events = result["events"]
    assert sorted((event["lane"], event["signal"]) for event in events) == [
        ("speculator", "SIGKILL"),
        ("speculator", "SIGKILL"),
        ("target", "SIGKILL"),
    ]
    assert [event["tokens"] for event in events] == sorted(event["tokens"] for event in events)
    assert all(event["back_seconds"] > 0 for event in events)
    assert done.stderr.startswith("speclane: reference: 24 requests, ")
    assert "lane is down" not in done.stderr


def test_a_speculator_that_hangs_and_samples_that_are_drawn():
    hangs = ("--stop-speculator", "1", "--draft-timeout", "0.1", "--hang-timeout", "0.3")
    done = chaos(*TOY, *QUIET, *hangs, "--temperature", "0.9", "--seed", "3", "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert (result["mismatches"], result["failed"], result["recovered"]) == (0, 0, True)
    assert result["kills"] == {"speculator": 0, "target": 0}
    assert result["stops"] == {"speculator": 1}
    assert result["deaths"] == {"speculator": 1, "target": 0}


def test_without_a_speculator():
    done = chaos(*TOY, "--speculator", "off", "--kill-target", "2", "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert (result["kills"], result["recovered"]) == ({"speculator": 0, "target": 2}, True)


def test_rounds_are_repeated_until_the_time_is_up():
    done = chaos(*TOY, "--kill-speculator", "1", "--kill-target", "0", "--minutes", "0.05", "--json")
    result = json.loads(done.stdout)
    assert result["seconds"] >= 3
    assert result["rounds"] > 1
    assert result["kills"]["speculator"] > 1
    assert result["kills"] == result["deaths"]


def test_a_table_for_people():
    done = chaos(*TOY, *QUIET)
    assert done.returncode == 0
    for text in (" in 1 rounds, 0 failed", "0 answers differ", "never away", "yes", "nothing", "since the"):
        assert text in done.stdout


# ---------------------------------------------------------------- what it finds


def test_one_token_that_differs(planted, capsys):
    planted(lambda outputs: outputs[5].__setitem__(2, outputs[5][2] ^ 1))
    status, result = chaos_here(capsys, *QUIET)
    assert (status, result["mismatches"], result["failed"]) == (1, 1, 0)


def test_one_token_that_is_missing(planted, capsys):
    planted(lambda outputs: outputs[7].append(0))
    status, result = chaos_here(capsys, *QUIET)
    assert (status, result["mismatches"]) == (1, 1)


def test_what_is_left_behind(planted, capsys):
    opened: list[int] = []
    children: list[subprocess.Popen[bytes]] = []
    with contextlib.ExitStack() as undo:

        def leak(_outputs) -> None:
            opened.extend(os.pipe())
            opened.append(os.memfd_create("left"))
            children.append(subprocess.Popen(["sleep", "60"]))
            for fd in opened:
                undo.callback(os.close, fd)
            undo.callback(children[0].wait)
            undo.callback(children[0].kill)

        planted(leak)
        status, result = chaos_here(capsys, *QUIET)
    assert (status, result["mismatches"]) == (1, 0)
    assert result["leaks"] == {"processes": 1, "fds": 2, "memfds": 1, "sockets": 0}


def test_requests_that_fail(monkeypatch, capsys):
    monkeypatch.setattr(chaos_plan, "RESTARTS", RestartPolicy(intensity=1))
    status, result = chaos_here(capsys, "--kill-speculator", "0", "--kill-target", "2")
    assert (status, result["mismatches"], result["recovered"]) == (1, 0, False)
    assert result["failed"] > 0
    assert result["kills"] == {"speculator": 0, "target": 2}
    assert result["leaks"] == NOTHING


def test_a_reference_that_fails_is_an_error(monkeypatch, capsys):
    def fail(*_given):
        raise SpeclaneError("no")

    monkeypatch.setattr(chaos_run, "make_reference", fail)
    assert run(["chaos", *TOY]) == 1
    assert capsys.readouterr().err == "speclane: error: no\n"


def test_a_worker_that_was_closed_takes_no_signal():
    process = WorkerProcess("target", "epoch", "ipc:///nowhere", 1)
    assert process.kill()
    process.close()
    assert not process.kill()


# ---------------------------------------------------------------- how it ends early


def test_interrupted_it_leaves_nothing():
    command = [sys.executable, "-m", "executor", "chaos", *TOY, "--minutes", "5"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        assert process.stderr.readline().startswith("speclane: reference: ")
        assert " requests, " in process.stderr.readline()  # after the first round
        workers = psutil.Process(process.pid).children()
        process.send_signal(signal.SIGINT)
        output, errors = process.communicate(timeout=30)
    assert (process.returncode, output) == (130, "")
    assert "error" not in errors
    assert psutil.wait_procs(workers, timeout=5)[1] == []


@pytest.mark.slow
@pytest.mark.timeout(2700)
def test_half_an_hour():
    """Every kind of fault again and again: nothing is lost, and nothing accumulates."""
    traffic = ("--engine", "toy", "--threads", "1", "--requests", "64", "--concurrency", "16")
    sampling = ("--max-tokens", "64", "--temperature", "0.9")
    faults = ("--kill-speculator", "3", "--kill-target", "1", "--stop-speculator", "1")
    limits = ("--draft-timeout", "1", "--hang-timeout", "2")
    done = chaos(*traffic, *sampling, *faults, *limits, "--minutes", "30", "--json", timeout=2600)
    result = json.loads(done.stdout)
    assert done.returncode == 0, done.stderr
    assert (result["mismatches"], result["failed"], result["recovered"]) == (0, 0, True)
    assert result["seconds"] >= 30 * 60
    assert result["leaks"] == NOTHING
    assert abs(result["rss_drift"]) <= 0.02
    assert all(count > 0 for count in (*result["kills"].values(), *result["stops"].values()))


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--requests", "0"), "--requests must be from 1 to 1048576, got 0; try 64"),
        (("--concurrency", "257"), "--concurrency must be from 1 to 256, got 257; try 8"),
        (("--max-tokens", "7"), "--max-tokens must be from 8 to 1048576, got 7; try 64"),
        (("--max-tokens", "5000"), "leaves no room for a prompt in a context of 4096; try 2048"),
        (("--minutes", "-1"), "--minutes must be 0 or more, got -1.0; try 5"),
        (("--minutes", "inf"), "--minutes must be 0 or more, got inf; try 5"),
        (("--kill-target", "-1"), "--kill-target must be from 0 to 1000, got -1; try 3"),
        (("--kill-target", "x"), "--kill-target"),
        (
            ("--speculator", "off", "--stop-speculator", "1"),
            "--stop-speculator 1 contradicts --speculator off; leave it out",
        ),
        (("--speculator", ""), "--speculator must be a text that is not empty, got ''; try ngram"),
        (("--temperature", "-1"), "--temperature must be at least 0"),
        (("--seed", "-1"), "--seed must be a whole number from 0"),
        (("--hang-timeout", "0"), "--hang-timeout must be a positive number of seconds, got 0.0; try 30"),
        (
            ("--target", "vocabulary=x"),
            "--target 'vocabulary=x': toy parameter vocabulary must be",
        ),
    ],
)
def test_bad_options(arguments, told, capsys):
    assert run(["chaos", "--engine", "toy", *arguments]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err.startswith("speclane: error: ")
    assert told in err
