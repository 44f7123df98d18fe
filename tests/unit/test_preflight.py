"""What keeps a topology from running on a machine, and what to change."""

from __future__ import annotations

import socket
from dataclasses import replace
from pathlib import Path

import pytest
from test_shipped_topologies import AROUND, GPUS, MACHINE

from executor.errors import InvalidConfig
from executor.launch import preflight
from executor.launch.plan import make_plan
from executor.launch.run import refuse
from executor.launch.topology import parse

SHARED = """
name = "shared"
[[gpus]]
name = "a"
select = 0
[[targets]]
name = "main"
options = { engine = "toy", speculator = "vocabulary=256" }
lanes.target = { device = "a", cores = "0-3" }
lanes.speculator = { device = "a", cores = "4" }
"""
MPS = SHARED.replace("select = 0", "select = 0\nmps = {}")
DIRECTORY = Path("/run/user/1000/speclane.launch.shared")


def found(text: str, machine=MACHINE, around=AROUND, directory=DIRECTORY) -> dict[str, tuple[str, str, str]]:
    plan = make_plan(parse(text), machine.gpus or (), directory)
    return {
        finding.subject: (finding.level, finding.found, finding.advice)
        for finding in preflight.judge(plan, machine, around)
        if finding.level != "ok"
    }


def test_lanes_that_take_turns_are_a_warning_and_under_mps_all_is_well():
    assert found(SHARED) == {
        "gpu a": (
            "warning",
            "main/target, main/speculator take turns on it",
            "`mps = {}` lets them run at once; see DEPLOY.md for what that isolates",
        )
    }
    assert found(MPS) == {}


@pytest.mark.parametrize(
    ("text", "machine", "around", "subject", "advice"),
    [
        (
            SHARED,
            replace(MACHINE, gpus=(GPUS[0]._replace(compute_mode="Exclusive_Process"),)),
            AROUND,
            "gpu a",
            "mps = {}",
        ),
        (
            SHARED,
            replace(MACHINE, gpus=(GPUS[0]._replace(compute_mode="Prohibited"),)),
            AROUND,
            "gpu a",
            "-c DEFAULT",
        ),
        (SHARED, replace(MACHINE, gpus=None), AROUND, "gpu a", "nvidia-smi -L"),
        (SHARED.replace("select = 0", 'select = "GPU-9"'), MACHINE, AROUND, "gpu a", "nvidia-smi -L"),
        (MPS, MACHINE, replace(AROUND, mps_program=None), "mps-a", "compute utilities"),
        (
            MPS.replace("mps = {}", 'mps = { compute_mode = "exclusive" }'),
            MACHINE,
            AROUND,
            "mps-a",
            'compute_mode = "keep"',
        ),
        (SHARED, MACHINE, replace(AROUND, cores=frozenset({0, 1})), "main/target", "use cores of 0-1"),
        (
            SHARED.replace('cores = "4"', 'cores = "3-4"'),
            MACHINE,
            AROUND,
            "main/speculator",
            "cores of its own",
        ),
        (
            SHARED,
            MACHINE,
            replace(AROUND, busy={"http://127.0.0.1:8000": "Address already in use"}),
            "main",
            "change the port",
        ),
    ],
)
def test_what_is_wrong_comes_with_what_to_change(text, machine, around, subject, advice):
    assert advice in found(text, machine, around)[subject][2]


def test_a_path_that_is_too_long_is_found_before_anything_is_bound():
    text = MPS + '[[speculators]]\nname = "pool"\n'
    problems = found(text, directory=Path("/" + "x" * 105))
    assert problems["mps-a"][0] == "error"
    assert problems["pool"][0] == "error"
    assert "shorten the topology's name" in problems["pool"][2]


def test_weights_must_fit(smollm2):
    text = f"""
name = "big"
[[gpus]]
name = "a"
select = 0
mps = {{}}
[[targets]]
name = "main"
options = {{ target = "{smollm2}", speculator = "{smollm2}" }}
lanes.target.device = "cpu"
lanes.speculator = {{ device = "a", share.pinned_memory = "100MB" }}
"""
    problems = found(text, replace(MACHINE, memory=200 << 20))
    assert "weights of 270MB for 210MB on the CPU" in problems["memory"][1]
    assert problems["main/speculator"][2] == "try pinned_memory 539MB"


def test_only_errors_keep_it_from_running():
    plan = make_plan(parse(SHARED), MACHINE.gpus or (), DIRECTORY)
    refuse(preflight.judge(plan, MACHINE, AROUND))
    broken = preflight.judge(
        plan, MACHINE, replace(AROUND, cores=frozenset({0}), busy={"http://127.0.0.1:8000": "taken"})
    )
    with pytest.raises(InvalidConfig, match=r"^main: http://127.0.0.1:8000: taken; end .* \(and 2 more, see"):
        refuse(broken)


def test_ports_are_really_tried():
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        text = SHARED.replace('name = "main"', f'name = "main"\nport = {port}')
        plan = make_plan(parse(text), MACHINE.gpus or (), DIRECTORY)
        assert preflight.look(plan).busy == {f"http://127.0.0.1:{port}": "Address already in use"}
    assert preflight.look(plan).busy == {}


@pytest.mark.skipif(not socket.has_dualstack_ipv6(), reason="this machine has no IPv6")
def test_ports_of_ipv6_are_tried_alike():
    with socket.create_server(("::1", 0), family=socket.AF_INET6) as taken:
        port = taken.getsockname()[1]
        text = SHARED.replace('name = "main"', f'name = "main"\nhost = "::1"\nport = {port}')
        plan = make_plan(parse(text), MACHINE.gpus or (), DIRECTORY)
        assert preflight.look(plan).busy == {f"http://[::1]:{port}": "Address already in use"}


def test_a_rank_group_has_a_gpu_for_each_rank():
    text = SHARED.replace('device = "a", cores = "0-3"', 'device = ["a", "gpu:1"]')
    process = make_plan(parse(text), GPUS, DIRECTORY).processes[0]
    assert "--target-ranks=2" in process.argv
    assert process.lanes[0].environment["CUDA_VISIBLE_DEVICES"] == f"{GPUS[0].uuid},{GPUS[1].uuid}"
    with pytest.raises(InvalidConfig, match=r"target.device: 2 GPUs for 3 ranks; try leaving"):
        make_plan(parse(text.replace('engine = "toy"', 'engine = "toy", target_ranks = 3')), GPUS, DIRECTORY)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (('device = "a", cores = "0-3"', 'device = ["a", "cpu"]'), "on GPUs or on the CPU, not both"),
        (('cores = "4"', 'cores = "four"'), "cores must be numbers of cores, got 'four'; try 0-1"),
        (("mps = {}", "mps = {}\n[[gpus]]\nname = 'b'\nselect = 1"), ""),
    ],
)
def test_a_lane_that_cannot_be_placed_is_refused(change, says):
    text = MPS.replace(*change)
    if not says:
        text, says = text.replace('device = "a", cores = "0-3"', 'device = ["a", "b"]'), "serves one GPU"
    with pytest.raises(InvalidConfig) as refusal:
        make_plan(parse(text), GPUS, DIRECTORY)
    assert says in str(refusal.value)
    assert "targets.main.lanes." in str(refusal.value)
