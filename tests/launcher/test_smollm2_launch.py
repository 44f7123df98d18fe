"""The shipped CPU topologies as they are, but for ports and threads: a real model says what plain decoding
says, whichever process dies."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import pytest
from asking import PROMPT, SAMPLING, text
from launching import ROOT, free_port, launched, wait_for

from executor import LLM, SamplingParams

if TYPE_CHECKING:
    from launching import Launched

pytestmark = [pytest.mark.model, pytest.mark.slow, pytest.mark.timeout(900)]
SECONDS = 300.0


@pytest.fixture(scope="module")
def plain(smollm2) -> str:
    with LLM(target=str(smollm2), speculator="off", threads=1) as llm:
        return llm.generate([PROMPT], SamplingParams(**SAMPLING))[0].text


def shipped(name: str, **options: object) -> str:
    """The topology with free ports, one thread for each lane, and these options of its targets."""
    topology = (ROOT / "deploy" / "topologies" / f"{name}.toml").read_text()
    assert "port = 8000" in topology
    for port in ("8000", "8001", "7000"):
        topology = topology.replace(port, str(free_port()))
    more = "".join(f"\n{key} = {value}" for key, value in options.items())
    topology = topology.replace("[speculators.options]", "[speculators.options]\nthreads = 1")
    return topology.replace("[targets.options]", f"[targets.options]\nthreads = 1{more}")


@pytest.mark.parametrize(
    ("name", "options", "processes"),
    [
        ("cpu", {}, {"main": {"target", "speculator"}}),
        ("cpu", {"target_ranks": 2}, {"main": {"target", "target/1", "speculator"}}),
        (
            "many-targets-one-speculator",
            {},
            {"pool": {"speculator"}, "first": {"target", "speculator"}, "second": {"target", "speculator"}},
        ),
        ("remote-speculator", {}, {"remote": {"speculator"}, "main": {"target", "speculator"}}),
    ],
    ids=["cpu", "two-ranks", "many-targets-one-speculator", "remote-speculator"],
)
def test_a_topology_survives_the_death_of_each_of_its_processes(name, options, processes, tmp_path, plain):
    with launched(shipped(name, **options), tmp_path) as launch, ThreadPoolExecutor() as pool:
        launch.until("healthy", SECONDS)
        assert {each["name"]: set(each["lanes"]) for each in launch.status["processes"]} == processes
        targets = [each["name"] for each in launch.status["processes"] if each["kind"] == "target"]

        def texts(*names: str) -> list[str]:
            """What these targets say to one that all are asked at once."""
            return list(pool.map(lambda name: text(launch.url(name), SECONDS), names))

        assert texts(*targets) == [plain] * len(targets)
        for process, lane in own_lanes(launch):
            before = launch.of(process)["lanes"][lane]
            launch.kill(before)
            assert texts(*targets) == [plain] * len(targets)
            wait_for(
                lambda process=process, lane=lane, old=before: (
                    launch.of(process)["lanes"].get(lane) not in (None, old)
                ),
                SECONDS,
            )
            launch.until("healthy", SECONDS)
        assert [each["starts"] for each in launch.status["processes"]] == [1] * len(processes)
        for process in processes:
            others = [each for each in targets if each != process]
            under_way = [pool.submit(text, launch.url(each), SECONDS) for each in others]
            launch.kill(launch.of(process)["pid"])
            assert [each.result() for each in under_way] == [plain] * len(others)
            launch.again(process, 2, SECONDS)
            assert texts(*targets) == [plain] * len(targets)
        assert launch.stop() == 0


def own_lanes(launch: Launched) -> list[tuple[str, str]]:
    """Lanes that are processes of their own: that of a speculator at a server is a thread of its target's."""
    return [
        (each["name"], lane)
        for each in launch.status["processes"]
        for lane, pid in sorted(each["lanes"].items())
        if pid != each["pid"]
    ]
