"""`chat`, `top` and `doctor` as processes."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from executor import LLM, SamplingParams

SECONDS = 100
TOY = ("--engine", "toy", "--speculator", "vocabulary=256,agree=0.8")


def run(*arguments: str, stdin: str = "") -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "executor", *arguments]
    return subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=SECONDS, check=False)


def test_a_chat_remembers_what_was_said():
    said = "hello\n/new\nhello\nagain\n/huh\n/quit\nnever read\n"
    done = run("chat", *TOY, "--seed", "3", "--max-tokens", "9", stdin=said)
    assert (done.returncode, done.stderr) == (0, "speclane: /new begins again, /quit ends; so does Ctrl-D\n")
    first, anew, second, end = done.stdout.split("\n")
    with LLM(engine="toy", speculator="off", threads=1) as llm:
        params = SamplingParams(seed=3, max_tokens=9, temperature=0.7)
        user = {"role": "user", "content": "hello"}
        assert llm.chat([user], params).text == first == anew
        messages = [user, {"role": "assistant", "content": anew}, {"role": "user", "content": "again"}]
        assert llm.chat(messages, params).text == second
    assert end == ""


def test_a_chat_that_has_filled_the_context_can_begin_again():
    done = run(
        *("chat", *TOY[:2], "--speculator", "off", "--target", "vocabulary=256,context=20"),
        *("--max-tokens", "4"),
        stdin="x" * 30 + "\nhello\n",
    )
    assert done.returncode == 0
    assert "the context 20" in done.stderr
    assert "or /new" in done.stderr
    assert len(done.stdout) == 5


def test_top_tells_programs_what_it_draws():
    with LLM(engine="toy", speculator="vocabulary=256,agree=0.8", threads=1) as llm:
        llm.generate("x", SamplingParams(max_tokens=30))
        done = run("top", "--pid", str(os.getpid()), "--json", "--count", "2", "--interval", "0.1")
    assert (done.returncode, done.stderr) == (0, "")
    looks = [json.loads(line) for line in done.stdout.splitlines()]
    assert [look["pid"] for look in looks] == [os.getpid()] * 2
    assert [lane["lane"] for lane in looks[1]["lanes"]] == ["target", "speculator"]
    assert len(looks[1]["acceptance_by_position"]) == 5
    plan = {lane["lane"]: lane for lane in looks[1]["memory"]}
    assert plan["target"]["kv_tokens"] == plan["speculator"]["kv_tokens"] > 0
    assert all(lane["total"] >= lane["process"] + lane["kv"] > 0 for lane in plan.values())


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_a_shell_completes_commands_and_options(shell):
    """As the installed scripts ask: for fish the words so far, for others how many there are, too."""
    asking = {"_SPECLANE_COMPLETE": f"complete_{shell}", "_TYPER_COMPLETE_FISH_ACTION": "get-args"}
    for line, expected, other in (
        ("speclane sw", "swap-speculator", "serve"),
        ("speclane bench dec", "decode", "memory"),
        ("speclane serve --kv", "--kv-tokens", "--port"),
    ):
        environment = os.environ | asking | {"COMP_WORDS": line, "_TYPER_COMPLETE_ARGS": line}
        environment["COMP_CWORD"] = str(line.count(" "))
        done = subprocess.run(
            [sys.executable, "-m", "executor"],
            env=environment,
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=False,
        )
        assert (expected in done.stdout, other in done.stdout, done.stderr) == (True, False, ""), done


def test_the_completion_of_a_shell_can_be_shown():
    shown = run("--show-completion", "bash")
    assert "_SPECLANE_COMPLETE=complete_bash" in shown.stdout


def test_top_needs_a_terminal():
    done = run("top")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "speclane: error: stdout is no terminal to draw in; try --json\n"


def test_the_doctor():
    done = run("doctor", "--json")
    findings = json.loads(done.stdout)["findings"]
    assert done.returncode == any(finding["level"] == "error" for finding in findings)
    subjects = {finding["subject"] for finding in findings}
    assert {"cores", "cpu", "memory", "/dev/shm", "open files", "sockets", "cache", "torch"} <= subjects
    assert all(finding["advice"] for finding in findings if finding["level"] != "ok")
    table = run("doctor")
    assert table.returncode == done.returncode
    assert "torch" in table.stdout
