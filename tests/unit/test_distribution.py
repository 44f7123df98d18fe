"""Samples are distributed as the model and the filters say, with drafts or without; and a bias would be seen.

Chi-square tests against exact probabilities at the 0.1 % level, with fixed seeds: each test has one outcome.
Vocabulary and counts are such that a temperature off by a tenth is seen with a probability above 95 %.
"""

from __future__ import annotations

from collections import Counter
from functools import cache
from itertools import product

import pytest
import torch
from draws import draw, toy_lane
from scipy import stats

from workers import noise, sampler
from workers.acceptance import accept
from workers.engines.engine import Window
from workers.engines.toy import ToyEngine
from workers.pure_sampler import sample_row
from workers.sampler import Sampler

LEVEL = 1e-3
CONTEXT = [3, 1, 4]
TOY = ToyEngine(toy_lane("vocabulary=14"))
LOGITS = TOY.model.logits(TOY.model.state(CONTEXT))
TEMPERATURES = [0.5, 0.8, 1.0, 1.5]
FILTERS = [
    {"temperature": 1.0, "top_k": 5},
    {"temperature": 1.5, "top_p": 0.8},
    {"temperature": 1.5, "min_p": 0.1},
    {"temperature": 1.2, "top_k": 8, "top_p": 0.9, "min_p": 0.05},
]


@pytest.fixture(autouse=True)
def _tensors_on_one_thread(monkeypatch):
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    monkeypatch.setattr(sampler, "FEW", 0)  # so that small rows take the way of large ones
    yield
    torch.set_num_threads(threads)


@cache
def pure_counts(samples=6000, **fields):
    """Tokens sampled at 20 positions of each of many seeds."""
    draws = [draw(position=i % 20, seed=i // 20, **fields) for i in range(samples)]
    return Counter(sample_row(LOGITS, how).token for how in draws)


@cache
def torch_counts(samples=5000, **fields):
    draws = [draw(position=i % 20, seed=i // 20, **fields) for i in range(samples)]
    rows = torch.tensor([LOGITS]).expand(samples, -1)
    return Counter(sample.token for sample in Sampler(len(LOGITS), "cpu").sample(rows, draws))


SAMPLERS = [pure_counts, torch_counts]


def expected(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    """Exact probabilities by token; the filters are written out once more, on probabilities."""
    every = TOY.exact_probabilities(CONTEXT, temperature)
    best = sorted(range(len(every)), key=lambda token: -every[token])[: top_k or None]
    mass = sum(every[token] for token in best)
    before = [sum(every[token] for token in best[:i]) / mass for i in range(len(best))]
    kept = [token for token, above in zip(best, before, strict=True) if above < top_p]
    kept = [token for token in kept if every[token] >= min_p * every[best[0]]]
    total = sum(every[token] for token in kept)
    return {token: every[token] / total for token in kept}


def p_value(counts, probabilities):
    """Of a chi-square test; 0 if something impossible was seen. Cells that expect fewer than 5 are pooled."""
    if set(counts) - set(probabilities):
        return 0.0
    n = counts.total()
    cells = [(counts[key], probability * n) for key, probability in probabilities.items()]
    large = [cell for cell in cells if cell[1] >= 5]
    small = [cell for cell in cells if cell[1] < 5]
    if small:
        large.append((sum(seen for seen, _ in small), sum(wanted for _, wanted in small)))
    seen, wanted = zip(*large, strict=True)
    return float(stats.chisquare(seen, wanted).pvalue)


@pytest.mark.parametrize("count", SAMPLERS)
@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_samples_follow_the_model(count, temperature):
    assert p_value(count(temperature=temperature), expected(temperature)) > LEVEL


@pytest.mark.parametrize("count", SAMPLERS)
@pytest.mark.parametrize("fields", FILTERS)
def test_samples_follow_the_filtered_model(count, fields):
    wanted = expected(**fields)
    assert 3 <= len(wanted) < len(LOGITS)
    assert p_value(count(samples=3000, **fields), wanted) > LEVEL


@pytest.mark.parametrize("count", SAMPLERS)
@pytest.mark.parametrize("temperature", TEMPERATURES)
def test_a_temperature_off_by_a_tenth_would_be_seen(count, temperature):
    for asked in (temperature * 1.1, temperature / 1.1):
        assert p_value(count(temperature=temperature), expected(asked)) < LEVEL


@pytest.mark.parametrize("count", SAMPLERS)
@pytest.mark.parametrize("off_by_one", [-1, 1])
def test_a_filter_off_by_one_token_would_be_seen(count, off_by_one):
    assert p_value(count(samples=3000, temperature=1.0, top_k=5), expected(top_k=5 + off_by_one)) < LEVEL


def test_noise_of_a_wrong_shape_would_be_seen(monkeypatch):
    true_gumbel = noise.gumbel
    monkeypatch.setattr(noise, "gumbel", lambda row, token: 1.1 * true_gumbel(row, token))
    assert p_value(pure_counts.__wrapped__(), expected()) < LEVEL


TARGET = "vocabulary=5,order=2"
PROMPT = [1, 2]
DRAFT_TOKENS = 3


def joint_probabilities(temperature):
    target = ToyEngine(toy_lane(TARGET))
    first = target.exact_probabilities(PROMPT, temperature)
    second = [target.exact_probabilities([*PROMPT, token], temperature) for token in range(5)]
    return {(a, b): first[a] * second[a][b] for a, b in product(range(5), repeat=2)}


def speculate(speculator, tokens, seed, temperature):
    """A draft sampled with the target's own noise, as a lane does it."""
    draft = []
    for _ in range(DRAFT_TOKENS):
        history = tokens + draft
        states = speculator.forward([Window(0, 0, history, 1)])
        how = draw(len(history), len(history) - len(PROMPT), seed=seed, temperature=temperature)
        draft.append(speculator.sample(states, [how])[0].token)
    return draft


def verify(target, tokens, draft, seed, temperature):
    window = tokens + draft
    states = target.forward([Window(0, 0, window, len(draft) + 1)])
    positions = range(len(tokens), len(window) + 1)
    draws = [draw(p, p - len(PROMPT), seed=seed, temperature=temperature) for p in positions]
    return accept(draft, [sample.token for sample in target.sample(states, draws)])


def generate(seed, temperature, speculator, target):
    """The first two tokens by rounds of draft and verify, and the counts of accepted and drafted tokens."""
    tokens, accepted, drafted = list(PROMPT), 0, 0
    while len(tokens) < len(PROMPT) + 2:
        draft = speculate(speculator, tokens, seed, temperature) if speculator else []
        n_accepted, next_token = verify(target, tokens, draft, seed, temperature)
        tokens += [*draft[:n_accepted], next_token]
        accepted += n_accepted
        drafted += len(draft)
    return tuple(tokens[len(PROMPT) : len(PROMPT) + 2]), accepted, drafted


def run(seeds, temperature, speculator_parameters):
    target = ToyEngine(toy_lane(TARGET))
    target.open(0)
    speculator = None
    if speculator_parameters is not None:
        speculator = ToyEngine(toy_lane(speculator_parameters))
        speculator.open(0)
    return [generate(seed, temperature, speculator, target) for seed in seeds]


@pytest.mark.parametrize("temperature", [0.8, 1.5])
def test_acceptance_leaves_the_joint_distribution_of_two_tokens_as_it_is(temperature):
    runs = run(range(3000), temperature, f"{TARGET},agree=0.5")
    share = sum(accepted for _, accepted, _ in runs) / sum(drafted for *_, drafted in runs)
    assert 0.1 < share < 0.9
    assert p_value(Counter(tokens for tokens, *_ in runs), joint_probabilities(temperature)) > LEVEL


def test_the_text_is_the_same_with_and_without_drafts():
    with_drafts = run(range(200), 1.0, f"{TARGET},agree=0.5")
    without = run(range(200), 1.0, None)
    assert [tokens for tokens, *_ in with_drafts] == [tokens for tokens, *_ in without]


def test_noise_shared_between_positions_would_be_seen(monkeypatch):
    true_key = noise.key
    monkeypatch.setattr(noise, "key", lambda seed, position, purpose: true_key(seed, 0, purpose))
    runs = run(range(3000), 0.8, f"{TARGET},agree=0.5")
    assert p_value(Counter(tokens for tokens, *_ in runs), joint_probabilities(0.8)) < LEVEL


def test_accepting_a_draft_that_the_target_did_not_sample_would_be_seen(monkeypatch):
    monkeypatch.setitem(globals(), "accept", lambda draft, sampled: (len(draft), sampled[-1]))
    runs = run(range(3000), 0.8, f"{TARGET},agree=0.5")
    assert p_value(Counter(tokens for tokens, *_ in runs), joint_probabilities(0.8)) < LEVEL
