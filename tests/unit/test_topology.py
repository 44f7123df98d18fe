"""What a topology file may say, and how it is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from executor.errors import InvalidConfig
from executor.launch.commands import arguments, config_of, server_config_of
from executor.launch.plan import attaching_later, make_plan
from executor.launch.topology import parse, read

GPUS = '[[gpus]]\nname = "a"\nselect = 0\nmps = {}\n[[gpus]]\nname = "b"\nselect = "GPU-1"\n'
TARGET = '[[targets]]\nname = "main"\n'


def test_what_is_left_out_has_a_default():
    made = parse('name = "small"\n' + TARGET)
    (target,) = made.targets
    assert (target.host, target.port, target.attach, target.options) == ("127.0.0.1", 8000, [], {})
    assert target.lanes.target.devices == ["cpu"]
    assert made.supervision.drain == 30.0


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("name = ", "is no TOML"),
        ("", "missing required field `name`"),
        ('name = "x"\ntargets = []', "targets: there is nothing to run; try [[targets]]"),
        ('name = "X"\n' + TARGET, "name: 'X' must be small letters"),
        (f'name = "x"\nextra = 1\n{TARGET}', "unknown field `extra`"),
        (f'name = "x"\n{TARGET}prot = 1', "targets[0]: Object contains unknown field `prot`"),
        (f'name = "x"\n{TARGET}port = 0', "targets.main.port: must be from 1 to 65535, got 0; try 8000"),
        (f'name = "x"\n{TARGET}port = "80"', "targets[0].port: Expected `int`, got `str`"),
        (f'name = "x"\n{TARGET}{TARGET}', "targets.name: 'main' is taken; try main-2"),
        (
            f'name = "x"\n{TARGET}{TARGET.replace("main", "two")}',
            "targets.two.port: 8000 is taken twice; try 8001",
        ),
        (f'name = "x"\n{TARGET}attach = ["p"]', "targets.main.attach: there is no speculator 'p'"),
        (
            f'name = "x"\n{TARGET}attach = ["p"]\noptions.speculator = "off"\n[[speculators]]\nname = "p"',
            "targets.main.options.speculator: contradicts attach",
        ),
        (
            f'name = "x"\n{TARGET}[[speculators]]\nname = "p"\nbind = "udp://x"',
            "speculators.p.bind: 'udp://x'",
        ),
        (
            f'name = "x"\n{GPUS}{TARGET}lanes.target.device = "c"',
            "there is no 'c', only cpu, gpu:0, a, b; try b",
        ),
        (f'name = "x"\n{TARGET}lanes.target.device = []', "lanes.target.device: is an empty list; try cpu"),
        (f'name = "x"\n{TARGET}lanes.target.share = {{}}', "lanes.target.share: its GPU has no MPS"),
        (
            f'name = "x"\n{GPUS}{TARGET}lanes.target = {{device = "b", share = {{}}}}',
            "share: its GPU has no MPS; try mps = {}",
        ),
        (
            f'name = "x"\n{GPUS}{TARGET}lanes.target = {{device = "a", share.active_thread_percentage = 0}}',
            "active_thread_percentage: must be from 1 to 100, got 0; try 50",
        ),
        (
            f'name = "x"\n{GPUS}{TARGET}lanes.target = {{device = "a", share = {{pinned_memory = "much"}}}}',
            "pinned_memory: 'much' is no size; try 8GB",
        ),
        (
            f'name = "x"\n{GPUS}{TARGET}lanes.target = {{device = "a", share = {{priority = "high"}}}}',
            "Invalid enum value 'high'",
        ),
        (
            f'name = "x"\n[[gpus]]\nname = "a"\nselect = "7"\n{TARGET}',
            "gpus.a.select: '7' is neither number nor UUID",
        ),
        (
            f'name = "x"\n[[gpus]]\nname = "a"\nselect = -1\n{TARGET}',
            "gpus.a.select: there is no GPU -1; try 0",
        ),
        (f'name = "x"\n[[gpus]]\nname = "cpu"\nselect = 1\n{TARGET}', "cpu means the CPU; try gpu0"),
        (f'name = "x"\n{GPUS}mps.patience = 0\n{TARGET}', "gpus.b.mps.patience: must be a positive number"),
        (f'name = "x"\n{TARGET}[supervision]\ndrain = 0', "supervision.drain: must be a positive number"),
        (f'name = "x"\n{TARGET}[supervision]\nintensity = -1', "supervision.intensity: must not be negative"),
    ],
)
def test_a_refusal_names_the_field_and_what_works(text, says):
    with pytest.raises(InvalidConfig) as refusal:
        parse(text)
    assert says in str(refusal.value)
    assert "; try " in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    with pytest.raises(
        InvalidConfig, match=r"nowhere.toml: No such file or directory; try deploy/topologies"
    ):
        read(tmp_path / "nowhere.toml")


def test_speculators_may_be_alone_and_targets_attach_to_others():
    assert parse('name = "x"\n[[speculators]]\nname = "p"\n').targets == []
    target = parse(f'name = "x"\n{TARGET}attach = ["tcp://other:7000"]\noptions.keys = "k"').targets[0]
    (process,) = make_plan(
        parse(f'name = "x"\n{TARGET}attach = ["tcp://127.0.0.1:1"]'), (), Path("/x")
    ).processes
    assert target.attach == ["tcp://other:7000"]
    assert (process.needs, process.attaches) == ((), ("tcp://127.0.0.1:1",))
    assert "--speculator=tcp://127.0.0.1:1" in process.argv
    assert [lane.name for lane in process.lanes] == ["target"]
    assert config_of("x", attaching_later(process.argv)[5:]).attach == "later"


def test_a_gpu_may_be_named_by_its_number_where_it_is_used():
    made = parse(f'name = "x"\n{TARGET}lanes.speculator.device = "gpu:1"\n')
    ((name, select, mps),) = [(gpu.name, gpu.select, gpu.mps) for gpu in made.gpus]
    assert (name, select, mps) == ("gpu:1", 1, None)


def test_options_are_words_of_a_command_line():
    options = {
        "threads": 2,
        "max_model_len": 99,
        "verbose": True,
        "raw": False,
        "standby": ["target", "speculator"],
    }
    assert arguments("here", options) == [
        *("--threads=2", "--max-model-len=99", "--verbose", "--standby=target", "--standby=speculator")
    ]
    with pytest.raises(InvalidConfig, match=r"^here.x: dict is no option's value; try"):
        arguments("here", {"x": {}})


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--threats=1"], "No such option: --threats"),
        (["--port=many"], "--port"),
        (["--draft-timeout=-1"], "--draft-timeout must be a positive number of seconds, got -1.0; try 10"),
        (["--memory-budget=much"], "--memory-budget 'much' is no size"),
    ],
)
def test_a_commands_own_refusal_is_told_before_it_runs(words, says):
    with pytest.raises(InvalidConfig) as refusal:
        config_of("targets.main.options", words)
    assert str(refusal.value).startswith("targets.main.options: ")
    assert says in str(refusal.value)


def test_an_address_among_the_options_is_attached_to_alike():
    options = 'options.speculator = "ipc:///a,ipc:///b"'
    (process,) = make_plan(parse(f'name = "x"\n{TARGET}{options}'), (), Path("/x")).processes
    assert process.attaches == ("ipc:///a", "ipc:///b")
    assert [lane.name for lane in process.lanes] == ["target"]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--port=8000"], "No such option: --port"),
        (
            ["--bind=tcp://10.0.0.7:7000"],
            "--keys are needed to let other hosts in at tcp://10.0.0.7:7000; try",
        ),
        (["--clients=400"], "--clients: 400 with 8 sequences each are too many; try 128"),
    ],
)
def test_a_speculators_options_are_checked_too(words, says):
    made = server_config_of("x", ["--bind=ipc:///x", "--engine=toy", "--clients=3", "--max-sequences=4"])
    assert (made.engine, made.max_sequences) == ("toy", 12)
    with pytest.raises(InvalidConfig) as refusal:
        server_config_of("x", ["--bind=ipc:///x", *words])
    assert str(refusal.value).startswith("x: ")
    assert says in str(refusal.value)


def test_a_commands_config_is_known_without_running_it():
    config = config_of("x", ["--engine=toy", "--port=81", "--target-env=A=1", "--group=one_for_all"])
    assert (config.engine, config.target_env, config.recovery.group) == ("toy", ("A=1",), "one_for_all")
