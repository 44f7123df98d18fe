"""Other engines in a benchmark: what their scripts are told, and what becomes of what they say."""

from __future__ import annotations

import os
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from executor.bench.decode import together
from executor.bench.decode_plan import Plan, at_batches, parse_batches, total_threads
from executor.bench.peers import Peer, PeerRun, Terms, find_peers, peer_row, run_peer
from executor.config import Config, available_cores
from executor.errors import InvalidConfig


@pytest.fixture
def terms(tmp_path) -> Terms:
    return Terms(
        model="some/model",
        prompts=tmp_path / "prompts.jsonl",
        k=5,
        new_tokens=7,
        batch=3,
        threads=2,
        dtype="bf16",
        temperature=0.5,
    )


def peer(tmp_path, code: str) -> Peer:
    script = tmp_path / "run_hf.py"
    script.write_text(code)
    return Peer("transformers", "lookup", script, sys.executable)


def test_a_script_is_told_all_terms_and_its_last_result_counts(tmp_path, terms) -> None:
    run = run_peer(
        peer(
            tmp_path,
            "import json, sys\n"
            'print("loading")\n'
            'print(json.dumps({"tok_s": 1, "tokens": 1}))\n'
            'print(json.dumps({"engine": " ".join(sys.argv[1:]), "tok_s": 12.5, "tokens": 21}))\n'
            'print({"tok_s": 2})\nprint([3])\nprint("INFO stopped")\n',
        ),
        terms,
    )
    told = (
        f"--method lookup --model some/model --prompts {terms.prompts} --k 5 --new-tokens 7 --batch 3 "
        "--threads 2 --dtype bfloat16 --temperature 0.5"
    )
    assert run == PeerRun(told, 12.5, 21)


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("import sys; sys.stderr.write('warned\\nno such model\\n\\n'); sys.exit(3)", "no such model"),
        ("import sys; sys.exit(3)", "ended with status 3"),
        ("print('hello')", "printed no JSON object with tok_s"),
        ('print(\'{"tok_s": 0, "tokens": 4}\')', "printed no JSON object with tok_s"),
        ("raise RuntimeError('boom')", "RuntimeError: boom"),
    ],
)
def test_a_failure_is_its_last_complaint(tmp_path, terms, code: str, error: str) -> None:
    assert run_peer(peer(tmp_path, code), terms) == PeerRun("transformers", error=error)


def test_what_takes_too_long_is_ended(tmp_path, terms) -> None:
    run = run_peer(peer(tmp_path, "import time; time.sleep(600)"), terms, seconds=0.1)
    assert run.error == "no result within 0.1 seconds"


def test_what_a_script_leaves_behind_is_ended(tmp_path, terms) -> None:
    """That process holds a FIFO open, so the end of file says that it is gone."""
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    holds = f"import time; held = open({str(fifo)!r}, 'w'); print(flush=True); time.sleep(600)"
    code = f"""
import json, subprocess, sys
child = subprocess.Popen([sys.executable, "-c", {holds!r}], stdout=subprocess.PIPE)
child.stdout.readline()
print(json.dumps({{"tok_s": 3, "tokens": 1}}))
"""
    with ThreadPoolExecutor(1) as pool:
        read = pool.submit(fifo.read_bytes)
        assert run_peer(peer(tmp_path, code), terms).tok_s == 3
        assert read.result(timeout=60) == b""


def test_an_interpreter_that_cannot_be_started_is_a_failure(tmp_path, terms) -> None:
    gone = Peer("vllm", "none", tmp_path / "run_vllm.py", str(tmp_path / "python"))
    assert run_peer(gone, terms).error == f"{tmp_path / 'python'}: No such file or directory"


def test_a_row_is_the_median_or_the_error(terms, tmp_path) -> None:
    one = Peer("vllm", "ngram", tmp_path, "python")
    runs = [PeerRun("vllm-cpu", speed, 9) for speed in (1.0, 5.0, 2.0)]
    row = peer_row(one, runs, terms, 4.0)
    assert (row["engine"], row["method"], row["batch"], row["threads"]) == ("vllm-cpu", "ngram", 3, 2)
    assert (row["tok_s"], row["speedup"], row["tok_s_each"], row["tokens"]) == (2.0, 0.5, [1.0, 5.0, 2.0], 9)
    row = peer_row(one, [runs[0], PeerRun("vllm", error="no room")], terms, 4.0)
    assert (row["mode"], row["tok_s"], row["speedup"], row["error"]) == (None, None, None, "no room")
    assert peer_row(one, runs, terms, None)["speedup"] is None


def test_peers_that_are_found(tmp_path) -> None:
    with pytest.raises(InvalidConfig, match=r"peers .* has no run_hf\.py; try "):
        find_peers(tmp_path, None)
    (tmp_path / "run_hf.py").touch()
    assert [each.name for each in find_peers(tmp_path, None)] == ["transformers none", "transformers lookup"]
    with pytest.raises(InvalidConfig, match=r"has no run_vllm\.py"):
        find_peers(tmp_path, sys.executable)
    (tmp_path / "run_vllm.py").touch()
    found = find_peers(tmp_path, sys.executable)
    assert [each.name for each in found][2:] == ["vllm none", "vllm ngram"]
    with pytest.raises(InvalidConfig, match="peer-python /no/python is no program; try "):
        find_peers(tmp_path, "/no/python")


def test_batches() -> None:
    assert parse_batches("1, 2,8") == [1, 2, 8]
    for text in ("", "0", "1,x", "-1", "1025", "1,,2", "1.5"):
        with pytest.raises(InvalidConfig, match="try 8 or 1,2,4,8"):
            parse_batches(text)
    with pytest.raises(InvalidConfig, match="names 2 twice"):
        parse_batches("2,2")


def test_results_at_several_batches() -> None:
    one = {"batch": 1, "rows": ["a"], "tokens_agree": True, "promise_kept": True, "k": 5}
    two = {"batch": 2, "rows": ["b"], "tokens_agree": False, "promise_kept": True, "k": 5}
    assert together([one]) is one
    both = {"batch": [1, 2], "rows": ["a", "b"], "tokens_agree": False, "promise_kept": True, "k": 5}
    assert together([one, two]) == both


def test_traces_of_several_batches_have_names_of_their_own(tmp_path) -> None:
    config = Config(
        engine="toy",
        target="vocabulary=128",
        speculator="vocabulary=128",
        trace=tmp_path / "t.json",
        threads=1,
    )
    plan = Plan(config=config, prompts=(), modes=("off",), new_tokens=1, temperature=0, seed=0, repeat=1)
    names = [each.config.trace.name for each in at_batches(plan, [1, 4])]
    assert names == ["t-batch1.json", "t-batch4.json"]
    assert [each.config.max_sequences for each in at_batches(plan, [1, 4])] == [1, 4]
    assert at_batches(plan, [4])[0].config.trace == config.trace
    assert total_threads(plan) == 1


def test_each_mode_is_measured_by_each_acceptance_but_the_one_without_drafts(tmp_path) -> None:
    config = Config(
        engine="toy", target="vocabulary=128", speculator="vocabulary=128", trace=str(tmp_path / "t.json")
    )
    rest = {"prompts": (), "new_tokens": 1, "temperature": 0.8, "seed": 0, "repeat": 1}
    plan = Plan(config=config, modes=("off", "ahead"), acceptances=("coupled", "block"), **rest)
    off, coupled, block = plan.variants
    assert [plan.name(each) for each in plan.variants] == ["off", "ahead coupled", "ahead block"]
    assert [each.bound(0.8) for each in plan.variants] == [True, True, False]
    assert block.bound(0.0)
    assert plan.config_of(off).speculator == "off"
    assert plan.config_of(coupled).acceptance == "coupled"
    its = plan.config_of(block)
    assert (its.mode, its.acceptance, its.trace.name) == ("ahead", "block", "t-ahead-block.json")
    single = Plan(config=its, modes=("ahead",), **rest)
    assert [single.name(each) for each in single.variants] == ["ahead"]
    assert single.config_of(*single.variants).acceptance == "block"


def test_each_mode_is_measured_in_each_kind_of_lanes(tmp_path) -> None:
    config = Config(
        engine="toy", target="vocabulary=128", speculator="vocabulary=128", trace=str(tmp_path / "t.json")
    )
    rest = {"prompts": (), "new_tokens": 1, "temperature": 0.8, "seed": 0, "repeat": 1}
    plan = Plan(config=config, modes=("off", "auto"), hostings=("process", "inline"), **rest)
    configs = {plan.name(each): plan.config_of(each) for each in plan.variants}
    assert list(configs) == ["off process", "auto process", "off inline", "auto inline"]
    assert [its.lanes for its in configs.values()] == ["process", "process", "inline", "inline"]
    assert [its.speculator for its in configs.values()] == ["off", "vocabulary=128"] * 2
    assert configs["auto inline"].trace.name == "t-auto-inline.json"
    assert plan.name(plan.plain) == "off process"
    single = Plan(config=configs["auto inline"], modes=("auto",), **rest)
    assert [single.config_of(each).lanes for each in single.variants] == ["inline"]


@pytest.mark.parametrize(("modes", "threads"), [(("off", "sequential"), 1), (("off", "ahead"), 2)])
def test_threads_in_total_are_those_that_compute_at_once(modes, threads: int) -> None:
    config = Config(engine="toy", target="vocabulary=128", speculator="vocabulary=128", threads=1)
    plan = Plan(config=config, prompts=(), modes=modes, new_tokens=1, temperature=0, seed=0, repeat=1)
    assert total_threads(plan) == min(threads, available_cores())
