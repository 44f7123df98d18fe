"""Shipped topologies of speculators that stand alone, with toys in them: for many targets, and over TCP."""

from __future__ import annotations

import signal
from concurrent.futures import ThreadPoolExecutor

from asking import PROMPT, SAMPLING, text
from launching import DRAFT, ROOT, free_port, launched, wait_for

from executor import LLM, SamplingParams

TOY = 'engine = "toy"\nthreads = 1\nmax_model_len = 512'
SLOW = "vocabulary=256,step_ms=10"


def shipped(name: str) -> str:
    """The topology with toys for models and free ports."""
    topology = (ROOT / "deploy" / "topologies" / f"{name}.toml").read_text()
    speculator = f'engine = "toy"\nthreads = 1\nmax_model_len = 512\nspeculator = "{DRAFT}"'
    for real, toy in (
        ('target = "smollm2-135m"          # whose head it is\nspeculator = "cascade"', speculator),
        ('target = "smollm2-135m"', f'{TOY}\ntarget = "{SLOW}"'),
    ):
        assert real in topology
        topology = topology.replace(real, toy)
    for port in ("8000", "8001", "7000"):
        topology = topology.replace(port, str(free_port()))
    return topology


def plain() -> str:
    with LLM(engine="toy", target=SLOW, speculator="off", lanes="inline", max_model_len=512) as llm:
        return llm.generate([PROMPT], SamplingParams(**SAMPLING))[0].text


def test_targets_that_share_a_speculator_do_not_share_their_deaths(tmp_path):
    expected = plain()
    with launched(shipped("many-targets-one-speculator"), tmp_path) as launch, ThreadPoolExecutor() as pool:
        launch.until("healthy")
        first, second = launch.url("first"), launch.url("second")
        assert list(pool.map(text, (first, second))) == [expected, expected]

        under_way = pool.submit(text, second)
        launch.kill(launch.of("first")["pid"])
        assert under_way.result() == expected
        launch.again("first", 2)
        assert launch.of("second")["starts"] == launch.of("pool")["starts"] == 1

        under_way = pool.submit(text, second)
        launch.kill(launch.of("pool")["pid"])
        assert under_way.result() == expected
        assert text(launch.url("first")) == expected
        launch.again("pool", 2)
        wait_for(lambda: all(launch.of(name)["health"] == "healthy" for name in ("first", "second")))
        assert list(pool.map(text, (first, second))) == [expected, expected]
        assert launch.stop() == 0


def test_a_speculator_over_tcp_may_die_for_good(tmp_path):
    expected = plain()
    topology = shipped("remote-speculator") + "[supervision]\nintensity = 1\n"
    with launched(topology, tmp_path) as launch:
        launch.until("healthy")
        assert launch.url("remote").startswith("tcp://127.0.0.1:")
        assert text(launch.url()) == expected
        launch.kill(launch.of("remote")["pid"])
        assert text(launch.url()) == expected
        launch.again("remote", 2)
        launch.kill(launch.of("main")["lanes"]["target"])
        assert text(launch.url()) == expected

        launch.kill(launch.of("remote")["pid"])
        wait_for(lambda: launch.of("remote")["state"] == "failed")
        assert text(launch.url()) == expected
        launch.kill(launch.of("main")["pid"])
        wait_for(lambda: launch.of("main")["starts"] == 2 and launch.of("main")["state"] == "ready")
        assert launch.status["state"] == "degraded"
        assert text(launch.url()) == expected


def test_a_target_that_starts_again_without_its_speculator_has_it_once_it_is_back(tmp_path):
    expected = plain()
    with launched(shipped("remote-speculator") + "[supervision]\nwatchdog = 600\n", tmp_path) as launch:
        launch.until("healthy")
        launch.kill(launch.of("remote")["pid"], signal.SIGSTOP)
        launch.kill(launch.of("main")["pid"])
        wait_for(lambda: launch.of("main")["starts"] == 2 and launch.of("main")["health"] == "degraded")
        assert text(launch.url()) == expected
        launch.kill(launch.of("remote")["pid"], signal.SIGCONT)
        wait_for(lambda: launch.of("main")["health"] == "healthy")
        assert set(launch.of("main")["lanes"]) == {"target", "speculator"}
        assert text(launch.url()) == expected
