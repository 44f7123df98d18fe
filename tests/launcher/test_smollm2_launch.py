"""The shipped CPU topology as it is, but for its port: a real model says what plain decoding says."""

from __future__ import annotations

import pytest
from asking import PROMPT, SAMPLING, text
from launching import ROOT, free_port, launched, wait_for

from executor import LLM, SamplingParams

pytestmark = [pytest.mark.model, pytest.mark.slow, pytest.mark.timeout(600)]
SECONDS = 300.0


def test_cpu_topology_survives_the_death_of_each_of_its_processes(tmp_path, smollm2):
    topology = (ROOT / "deploy" / "topologies" / "cpu.toml").read_text()
    assert "port = 8000" in topology
    with LLM(target=str(smollm2), speculator="off", threads=1) as llm:
        plain = llm.generate([PROMPT], SamplingParams(**SAMPLING))[0].text
    changed = topology.replace("port = 8000", f"port = {free_port()}").replace(
        "[targets.options]", "[targets.options]\nthreads = 1"
    )
    with launched(changed, tmp_path) as launch:
        launch.until("healthy", SECONDS)
        assert text(launch.url(), SECONDS) == plain
        for lane in ("speculator", "target"):
            before = launch.of("main")["lanes"]
            launch.kill(before[lane])
            assert text(launch.url(), SECONDS) == plain
            wait_for(
                lambda lane=lane, old=before[lane]: launch.of("main")["lanes"].get(lane) not in (None, old),
                SECONDS,
            )
        launch.until("healthy", SECONDS)
        launch.kill(launch.of("main")["pid"])
        launch.again("main", 2, SECONDS)
        assert text(launch.url(), SECONDS) == plain
