"""`speclane serve` as a process: address, config file, signals, exit statuses."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import urllib.request
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

import psutil
import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

COMMAND = (sys.executable, "-m", "executor", "serve")
TOY = ("--engine", "toy", "--port", "0", "--threads", "1")
SECONDS = 60


@contextmanager
def serving(*arguments: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The process and its address, once it has told it."""
    with subprocess.Popen(
        [*COMMAND, *arguments], stdin=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    ) as process:
        try:
            line = process.stderr.readline()
            assert " on http://127.0.0.1:" in line, line + process.stderr.read()
            yield process, line.split()[-1]
            process.terminate()
            process.wait(SECONDS)
        finally:
            process.kill()


def get(url: str) -> dict:
    with urllib.request.urlopen(url, timeout=SECONDS) as reply:
        return json.load(reply)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_it_drains_and_ends_well(number):
    with serving(*TOY) as (process, url):
        assert get(f"{url}/v1/models")["data"][0]["id"] == "vocabulary=256"
        process.send_signal(number)
        assert process.wait(SECONDS) == 0
        assert process.stderr.read() == ""


def test_what_is_cut_off_is_a_failure():
    slow = ("--target", "vocabulary=256,step_ms=20", "--shutdown-timeout", "0.2")
    with serving(*TOY, *slow) as (process, url):
        body = json.dumps({"prompt": "x", "max_tokens": 4000, "stream": True}).encode()
        request = urllib.request.Request(f"{url}/v1/completions", body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=SECONDS) as reply:
            reply.readline()
            process.send_signal(signal.SIGTERM)
            assert '"code":"cancelled"' in reply.read().decode()
        assert process.wait(SECONDS) == 1
        assert "1 answers were cut off after 0.2 s" in process.stderr.read()


def test_a_target_that_is_lost_for_good_ends_it():
    with serving(*TOY, "--target", "vocabulary=256", "--load-timeout", "30") as (process, _):
        while process.poll() is None:  # until the lane is given up
            for child in psutil.Process(process.pid).children():
                with suppress(psutil.Error):  # it is gone already
                    if "target" in child.cmdline():
                        child.kill()
        assert process.returncode == 1
        assert "the executor failed" in process.stderr.read()


def test_a_file_of_options_stands_below_the_command_line(tmp_path: Path):
    file = tmp_path / "speclane.toml"
    file.write_text(
        'engine = "toy"\nport = 0\nthreads = 1\nserved-model-name = "filed"\nmax_model_len = 99\n'
        'speculative_config = \'{"method": "ngram", "num_speculative_tokens": 3}\'\n'
    )
    with serving("--config", str(file), "--served-model-name", "given") as (_, url):
        (card,) = get(f"{url}/v1/models")["data"]
        assert (card["id"], card["max_model_len"]) == ("given", 99)
        assert get(f"{url}/v1/speculator")["model"] == "ngram"
        assert get(f"{url}/v1/speculator")["num_speculative_tokens"] == 3
