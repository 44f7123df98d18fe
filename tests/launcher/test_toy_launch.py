"""A whole launch of toys: it says what plain decoding says, whoever of it dies, and leaves nothing behind."""

from __future__ import annotations

import http.client
import json
import os
import signal
import socket
import subprocess
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from asking import PROMPT, SAMPLING, text
from launching import LAUNCH, SECONDS, free_port, launched, toy, wait_for

from executor import LLM, SamplingParams
from executor.launch.ear import Ear


@pytest.fixture(scope="module")
def plain() -> str:
    """What the target says without a speculator, in this process."""
    with LLM(engine="toy", speculator="off", lanes="inline", max_model_len=512) as llm:
        return llm.generate([PROMPT], SamplingParams(**SAMPLING))[0].text


def test_it_survives_the_death_of_each_of_its_processes(tmp_path, plain):
    with launched(toy(target_ranks=2), tmp_path) as launch:
        launch.until("healthy")
        assert text(launch.url()) == plain
        assert set(launch.of("main")["lanes"]) == {"target", "target/1", "speculator"}
        for lane in ("speculator", "target", "target/1"):
            before = launch.of("main")["lanes"]
            launch.kill(before[lane])
            assert text(launch.url()) == plain
            wait_for(
                lambda lane=lane, old=before[lane]: launch.of("main")["lanes"].get(lane) not in (None, old)
            )
        assert launch.of("main")["starts"] == 1
        launch.kill(launch.of("main")["pid"])
        launch.again("main", 2)
        assert text(launch.url()) == plain
        assert launch.stop() == 0
        assert launch.status["state"] == "stopped"
        assert launch.status["exit_status"] == 0
        assert launch.log("main").count("serving") == 2


def test_a_process_that_hangs_starts_again_and_one_that_dies_too_often_is_the_end(tmp_path, plain):
    with launched(toy() + "[supervision]\nwatchdog = 2.0\nintensity = 1\n", tmp_path) as launch:
        launch.until("healthy")
        launch.kill(launch.of("main")["pid"], signal.SIGSTOP)
        launch.again("main", 2)
        assert "no sign of life" in launch.said
        assert text(launch.url()) == plain
        launch.kill(launch.of("main")["pid"])
        assert launch.process.wait(SECONDS) == 1
        assert "speclane: error: main killed by SIGKILL" in launch.said
        assert launch.status["state"] == "failed"


def test_nothing_outlives_a_killed_launcher(tmp_path):
    topology = toy()
    with launched(topology, tmp_path) as launch:
        launch.until("healthy")
        second = subprocess.run(
            [*LAUNCH, str(tmp_path / "topology.toml"), "--state", str(tmp_path / "other")],
            capture_output=True,
            text=True,
            timeout=SECONDS,
            check=False,
        )
        assert second.returncode == 2  # its port is taken
        assert "change the port in the topology" in second.stderr
        assert launch.stop(signal.SIGKILL) == -signal.SIGKILL
        wait_for(lambda: not [each for each in launch.ever if each.is_running()])
        left = Path(os.environ["XDG_RUNTIME_DIR"]) / "speclane.launch.toy"
        assert left.is_dir()
        with launched(topology, tmp_path) as successor:  # takes over what was left
            successor.until("healthy")


def test_answers_that_are_cut_off_are_told(tmp_path):
    topology = toy(target="vocabulary=256,step_ms=20", speculator="off", shutdown_timeout=0.2)
    with launched(topology, tmp_path) as launch:
        launch.until("healthy")
        address = urlsplit(launch.url())
        connection = http.client.HTTPConnection(str(address.hostname), address.port, timeout=SECONDS)
        body = {"prompt": "x", "max_tokens": 400, "stream": True}
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        reply = connection.getresponse()
        assert reply.readline()
        assert launch.stop() == 3
        assert '"code":"cancelled"' in reply.read().decode()
        connection.close()


def test_a_hang_up_that_is_ignored_and_a_status_that_cannot_be_written_end_nothing(tmp_path, plain):
    with launched(toy(), tmp_path, before=["nohup"]) as launch:
        launch.until("healthy")
        launch.process.send_signal(signal.SIGHUP)
        (launch.state / "status.partial").mkdir()
        launch.kill(launch.of("main")["pid"])
        wait_for(lambda: "event=status_not_written" in launch.said)
        (launch.state / "status.partial").rmdir()
        launch.again("main", 2)
        assert text(launch.url()) == plain
        assert "launch_draining" not in launch.said


def test_whoever_started_it_is_told_how_it_is(tmp_path):
    ear, told = Ear(tmp_path / "manager"), {}

    def hear() -> dict[str, str]:
        while (heard := ear.hear()) is not None:
            assert heard.pid == launch.process.pid
            told.update(heard.facts)
        return told

    with launched(toy(), tmp_path, {"NOTIFY_SOCKET": str(ear.path)}) as launch:
        launch.until("healthy")
        wait_for(lambda: hear().get("STATUS") == "healthy: main ready")
        assert told["READY"] == "1"
        launch.kill(launch.of("main")["pid"])
        wait_for(lambda: hear()["STATUS"].startswith("recovering: main "))
        wait_for(lambda: hear()["STATUS"] == "healthy: main ready")
        assert "STOPPING" not in told
        assert launch.stop() == 0
        hear()
        assert (told["STOPPING"], told["STATUS"]) == ("1", "stopped: main stopped")
        assert int(told["EXTEND_TIMEOUT_USEC"]) > 30e6
    ear.close()


def test_a_process_that_refuses_ends_the_launch_in_its_words(tmp_path):
    with launched(toy(kv_tokens=1), tmp_path) as launch:
        assert launch.process.wait(SECONDS) == 2
        *_, last = launch.said.strip().splitlines()
        assert last.startswith(
            "speclane: error: TOPOLOGY: main exited with status 2: speclane: error: --kv-tokens"
        )
        assert launch.status["state"] == "failed"


def test_a_port_that_is_taken_is_found_before_anything_starts(tmp_path):
    port = free_port()
    topology = toy().partition("port = ")[0] + f"port = {port}\n[targets.options]\nengine = 'toy'\n"
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", port))
        taken.listen()
        with launched(topology, tmp_path) as launch:
            assert launch.process.wait(SECONDS) == 2
            assert f"main: http://127.0.0.1:{port}: Address already in use; end who has it" in launch.said
            assert not (tmp_path / "state").exists()
