"""Where a lane runs: what may be asked for, and what becomes of it."""

from __future__ import annotations

import os

import pytest

from executor.config import Config, available_cores
from executor.errors import InvalidConfig
from executor.placement import Placement, parse_cores

UUID = "GPU-8a3c1f2e-0000-4444-8888-0123456789ab"
MIG = "MIG-1a2b3c4d-0000-4444-8888-0123456789ab"


def test_lanes_are_where_the_executor_is_unless_told():
    assert Config().placements == {"target": Placement("auto"), "speculator": Placement("auto")}


def test_one_lane_is_moved_by_one_option():
    places = Config(device="cuda:0", speculator_device="cpu").placements
    assert (places["target"].device, places["speculator"].device) == ("cuda:0", "cpu")


@pytest.mark.parametrize("uuid", [UUID, MIG, f"{UUID},{MIG}"])
def test_a_uuid_becomes_all_that_the_lane_sees(uuid):
    places = Config(speculator_device=uuid, target_env=("A=b=c", "EMPTY=")).placements
    assert places["speculator"] == Placement("cuda", {"CUDA_VISIBLE_DEVICES": uuid})
    assert places["target"] == Placement("auto", {"A": "b=c", "EMPTY": ""})


def test_cores_decide_how_many_threads_there_are():
    core = str(min(os.sched_getaffinity(0)))
    config = Config(target_cores=core)
    assert config.placements["target"].cores == {int(core)}
    assert config.threads_of("target") == 1
    assert config.threads_of("speculator") == available_cores()
    assert Config(target_cores=core, threads=3).threads_of("target") == 3


@pytest.mark.parametrize(
    ("text", "cores"), [("0", {0}), ("2-4", {2, 3, 4}), ("0-1,7", {0, 1, 7}), ("3-3", {3})]
)
def test_cores_are_numbers_and_ranges(text, cores):
    assert parse_cores("target_cores", text) == cores


@pytest.mark.parametrize(
    ("options", "field", "says"),
    [
        ({"target_device": "tpu"}, "target_device", "got 'tpu'; try auto"),
        ({"speculator_device": ""}, "speculator_device", "got ''; try auto"),
        ({"speculator_device": "GPU-1,cuda"}, "speculator_device", "try auto"),
        ({"target_env": ("A",)}, "target_env", "got 'A'; try CUDA_"),
        ({"target_env": ("1A=2",)}, "target_env", "got '1A=2'; try CUDA_"),
        ({"target_env": "A=1"}, "target_env", "must be a tuple"),
        ({"speculator_env": ("OMP_NUM_THREADS=4",)}, "speculator_env", "the executor's own"),
        ({"device": UUID, "target_env": ("CUDA_VISIBLE_DEVICES=0",)}, "target_env", "try device cuda"),
        ({"target_cores": "one"}, "target_cores", "got 'one'; try 0-1"),
        ({"target_cores": "3-1"}, "target_cores", "try 0-1"),
        ({"target_cores": ""}, "target_cores", "try 0-1"),
        ({"speculator_cores": "9999"}, "speculator_cores", "may not use core 9999; try"),
        ({"lanes": "inline", "target_env": ("A=1",)}, "lanes", "try process"),
        ({"lanes": "inline", "device": UUID}, "lanes", "try process"),
    ],
)
def test_what_cannot_be_is_refused_by_name(options, field, says):
    with pytest.raises(InvalidConfig) as refusal:
        Config(**options)
    assert refusal.value.field == field
    assert says in str(refusal.value)
