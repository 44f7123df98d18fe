"""Several ranks of a real model compute, bit for bit, what one computes; SmolLM2's tokens are the same."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import psutil
import pytest
import torch
from rank_worker import COLLECTIVE, EXACT, PAIRED, computed
from safetensors.torch import load_file
from small_models import FAMILIES, lane, save

from executor import LLM, SamplingParams
from workers.engines.native import NativeEngine
from workers.lifecycle import made_ready

if TYPE_CHECKING:
    from torch import Tensor

SCRIPT = str(Path(__file__).with_name("rank_worker.py"))
ONE_HEAD = "llama, one KV head"
THREE = {"hidden_size": 192, "intermediate_size": 200, "num_attention_heads": 6, "num_key_value_heads": 3}


class Run(NamedTuple):
    """Logits by model and way, hidden rows too, what each rank printed, and logits and hidden rows of one
    rank, by model."""

    rows: dict[str, Tensor]
    said: list[str]
    alone: dict[str, tuple[Tensor, Tensor]]


def together(directories: list[Path], ranks: int, work: Path, device: str = "cpu") -> Run:
    results = work / "results.safetensors"
    meeting = work / "meeting"
    meeting.mkdir()
    outputs = [work / f"rank{rank}" for rank in range(ranks)]
    processes = []
    for rank, output in enumerate(outputs):
        words = [SCRIPT, device, str(rank), str(ranks), str(meeting), str(results), *map(str, directories)]
        with output.open("w") as file:
            processes.append(subprocess.Popen([sys.executable, *words], stdout=file, stderr=file))
    try:
        statuses = [process.wait(500) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    said = [output.read_text() for output in outputs]
    assert statuses == [0] * ranks, said
    alone = {path.name: computed(made_ready(NativeEngine(lane(path)))) for path in directories}
    return Run(load_file(results), said, alone)


def slug(family: str) -> str:
    return family.replace(" ", "-").replace(",", "")


QUICK = ("llama, biases", "mistral, sliding window", "qwen3")
OTHERS = [family for family in FAMILIES if family not in (*QUICK, ONE_HEAD)]
"""But for that whose only head of keys and values cannot be shared."""

pytestmark = pytest.mark.timeout(600)


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Two ranks of a few families, and of three heads of keys and values with weights in 16 bits."""
    work = tmp_path_factory.mktemp("two")
    three = save(work / "three", "llama", dtype=torch.bfloat16, **THREE)
    return together([three, *(save(work / slug(family), family) for family in QUICK)], 2, work)


def check(run: Run, family: str) -> None:
    name = slug(family)
    logits, hidden = run.alone[name]
    assert torch.equal(run.rows[f"{name}/{EXACT}"], logits)
    assert torch.equal(run.rows[f"{name}/{EXACT}/hidden"], hidden)
    # Sums in another order: all but the last bits are the same.
    difference = (run.rows[f"{name}/{PAIRED}"] - logits).abs().max()
    assert 0 < difference < 1e-3


@pytest.mark.parametrize("family", QUICK)
def test_two_ranks_compute_the_same_bits_as_one_or_add_up_to_the_same(two, family):
    check(two, family)


@pytest.mark.slow
def test_other_families(tmp_path):
    run = together([save(tmp_path / slug(family), family) for family in OTHERS], 2, tmp_path)
    for family in OTHERS:
        check(run, family)


def test_heads_that_two_cannot_share_evenly(two):
    check(two, "three")
    assert torch.equal(two.rows[f"three/{COLLECTIVE}"], two.alone["three"][0])
    lines = [[line.split("; ") for line in said.splitlines()] for said in two.said]
    heads = [[words[2:4] for words in rank if words[0] == "three"] for rank in lines]
    assert heads == [[["4", "2"]] * 3, [["2", "1"]] * 3]


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="two ranks on GPUs need two")
def test_two_gpus_add_up_to_what_a_cpu_computes(tmp_path):
    """NCCL, inside captured graphs, too: windows of one token and of several are in the steps."""
    families = [*QUICK, *OTHERS]
    run = together([save(tmp_path / slug(family), family) for family in families], 2, tmp_path, "cuda")
    for family in families:
        name = slug(family)
        assert (run.rows[f"{name}/{PAIRED}"] - run.alone[name]).abs().max() < 1e-3


@pytest.mark.gpu
@pytest.mark.model
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="two ranks on GPUs need two")
@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_rank_on_a_gpu_is_replaced(smollm2, rank):
    """float32, so that rounding decides no token of these; each rank has a GPU of its own."""
    options = {"target": str(smollm2), "dtype": "fp32", "max_model_len": 512, "speculator": "ngram"}
    with LLM(**options, device="cuda:0") as llm:
        expected = texts(llm)
    with LLM(**options, target_device="cuda:0", speculator_device="cpu", target_ranks=2) as llm:
        shares = [share for share in llm.coordinator.memory.lanes if share.lane == "target"]
        assert len({share.profile.device_id for share in shares}) == 2
        assert texts(llm) == expected
        llm.coordinator.lanes[0].process.ranks[rank].kill()
        assert texts(llm) == expected
        assert llm.coordinator.deaths["target"] == 1


@pytest.mark.slow
def test_three_ranks(tmp_path):
    run = together([save(tmp_path / "three", "llama", **THREE)], 3, tmp_path)
    for way in (EXACT, COLLECTIVE):
        assert torch.equal(run.rows[f"three/{way}"], run.alone["three"])
    assert "3 ranks, proved to compute what one would" in run.said[0]


# ---------------------------------------------------------------- SmolLM2

PROMPTS = [
    "The quick brown fox jumps over the lazy dog. The quick brown fox",
    "1, 2, 3, 4, 5, 6,",
    "a b c a b c a b c a b c",
]
PARAMS = [
    SamplingParams(temperature=temperature, seed=7, max_tokens=12, ignore_eos=True)
    for temperature in (0.0, 0.8)
]


def texts(llm: LLM) -> list[list[int]]:
    prompts = [prompt for prompt in PROMPTS for _ in PARAMS]
    return [done.token_ids for done in llm.generate(prompts, PARAMS * len(PROMPTS), progress=False)]


@pytest.mark.model
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("model", "speculator", "dtype"),
    [
        ("thin", "ngram", "bf16"),
        *(pytest.param("smollm2", "eagle", dtype, marks=pytest.mark.slow) for dtype in ("bf16", "fp32")),
    ],
)
def test_two_ranks_of_smollm2_say_what_one_says(request, model, speculator, dtype):
    """With drafts, those of a head that reads hidden rows too, and without; memory is shared, sockets are
    local."""
    target = str(request.getfixturevalue(model))
    options = {"target": target, "dtype": dtype, "threads": 1, "max_model_len": 512}
    with LLM(**options, speculator="off") as llm:
        expected = texts(llm)
        whole = llm.coordinator.memory.lanes[0]
    with LLM(**options, speculator=speculator, target_ranks=2) as llm:
        assert texts(llm) == expected
        assert sum(llm.coordinator.stats.acceptance.accepted) > 0
        llm.swap_speculator("off")
        assert texts(llm) == expected
        first, second = llm.coordinator.memory.lanes
        assert [share.profile.kv_bytes_per_token * 3 for share in (first, second)] == [
            whole.profile.kv_bytes_per_token * 2,
            whole.profile.kv_bytes_per_token,
        ]
        assert first.profile.weights + second.profile.weights < 1.5 * whole.profile.weights
        group = llm.coordinator.lanes[0].process
        listening = [
            connection.laddr.ip
            for pid in group.pids
            for connection in psutil.Process(pid).net_connections("inet")
            if connection.status == psutil.CONN_LISTEN
        ]
        assert set(listening) == {"127.0.0.1"}


@pytest.mark.model
@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_rank_of_smollm2_costs_no_token(smollm2, rank):
    options = {"target": str(smollm2), "threads": 1, "max_model_len": 512, "speculator": "ngram"}
    with LLM(**options) as llm:
        expected = texts(llm)
    with LLM(**options, target_ranks=2) as llm:
        streams = [llm.stream(prompt, params) for prompt in PROMPTS for params in PARAMS]
        first = iter(streams[0])
        next(first)
        llm.coordinator.lanes[0].process.ranks[rank].kill()
        for stream in (first, *streams[1:]):
            for _ in stream:
                pass
        assert [stream.completion.token_ids for stream in streams] == expected
        assert llm.coordinator.deaths["target"] == 1
