"""The Slurm script as bash runs it: what Slurm does is to send TERM, and to take the status."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "launcher"))
from launching import SECONDS, toy

SCRIPT = Path(__file__).resolve().parents[2] / "deploy" / "slurm" / "speclane.sbatch"


@pytest.fixture
def environment(tmp_path) -> dict[str, str]:
    program = tmp_path / "speclane"
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m executor "$@"\n')
    program.chmod(0o755)
    return os.environ | {"SPECLANE": str(program), "SLURM_JOB_ID": "7"}


def test_term_drains_and_the_status_is_the_launchers(tmp_path, environment):
    (tmp_path / "toy.toml").write_text(toy())
    said = tmp_path / "said"
    with (
        said.open("wb") as out,
        subprocess.Popen(
            ["bash", str(SCRIPT), str(tmp_path / "toy.toml")],
            cwd=tmp_path,
            env=environment,
            stdout=out,
            stderr=out,
        ) as job,
    ):
        deadline = time.monotonic() + SECONDS
        while "event=launch_ready" not in said.read_text():
            assert job.poll() is None, said.read_text()
            assert time.monotonic() < deadline
            time.sleep(0.05)
        job.send_signal(signal.SIGTERM)
        assert job.wait(SECONDS) == 0, said.read_text()
    assert "process main (target)" in said.read_text()
    assert (tmp_path / "speclane-7" / "status.json").exists()
    (made,) = re.findall(r"^directory (/tmp/sl-7-\w+)/", said.read_text(), re.M)
    assert not Path(made).exists()


def test_a_topology_that_cannot_run_fails_the_job(tmp_path, environment):
    (tmp_path / "bad.toml").write_text("name = 1")
    done = subprocess.run(
        ["bash", str(SCRIPT), str(tmp_path / "bad.toml")],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    assert done.returncode == 2
    assert "speclane: error: TOPOLOGY" in done.stderr
