"""The hf engine on small random models: transformers' own logits and tokens in any windows."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
import torch
import transformers
from small_hf_models import COMMON, CONTEXT, FAMILIES, SLOTS, save, spec, tokens

from workers.engines import hf, hf_model
from workers.engines.engine import Window
from workers.engines.hf import HfEngine
from workers.lifecycle import made_ready

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

NEW_TOKENS = 8


class Pair:
    """An engine and the plain model of the same checkpoint."""

    def __init__(self, directory: Path) -> None:
        self.engine = made_ready(HfEngine(spec(directory)))
        self.plain = transformers.AutoModelForCausalLM.from_pretrained(
            directory, dtype=torch.float32, attn_implementation="eager"
        ).eval()

    @torch.inference_mode()
    def expected(self, ids: list[int]) -> Tensor:
        return self.plain(torch.tensor([ids]), use_cache=False).logits[0]

    def run(self, *windows: tuple[int, int, list[int]]) -> list[Tensor]:
        """All rows of each window (sequence, start, tokens)."""
        rows = self.engine.forward([Window(seq, start, ids, len(ids)) for seq, start, ids in windows])
        return list(torch.split(rows, [len(ids) for _, _, ids in windows]))


@pytest.fixture(scope="module", params=FAMILIES)
def pair(request, tmp_path_factory):
    return Pair(save(FAMILIES[request.param](), tmp_path_factory.mktemp("model")))


@pytest.fixture(scope="module")
def llama(tmp_path_factory):
    return Pair(save(FAMILIES["llama"](), tmp_path_factory.mktemp("llama")))


@pytest.fixture(autouse=True)
def closed(request):
    """Every test leaves its engine empty."""
    yield
    for name in {"pair", "llama"} & set(request.fixturenames):
        engine = request.getfixturevalue(name).engine
        for seq in range(SLOTS):
            try:
                engine.close(seq)
            except KeyError:
                continue


def close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5 * float(expected.abs().max().clamp_min(1)))


def test_greedy_tokens_of_a_mixed_batch_equal_generate(pair: Pair) -> None:
    prompts = [tokens(length, seed=length) for length in (1, 5, 11, 30)]
    texts = [list(prompt) for prompt in prompts]
    for seq in range(SLOTS):
        pair.engine.open(seq)
    rows = pair.engine.forward([Window(seq, 0, text, 1) for seq, text in enumerate(texts)])
    for _ in range(NEW_TOKENS):
        for text, row in zip(texts, rows, strict=True):
            text.append(int(row.argmax()))
        rows = pair.engine.forward([Window(seq, len(t) - 1, t[-1:], 1) for seq, t in enumerate(texts)])
    for prompt, text in zip(prompts, texts, strict=True):
        ids = torch.tensor([prompt])
        expected = pair.plain.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=NEW_TOKENS
        )
        assert text == expected[0].tolist()


def test_windows_of_any_width_give_the_logits_of_the_whole(pair: Pair) -> None:
    ids = tokens(18)
    expected = pair.expected(ids)
    for width in range(1, 9):
        pair.engine.open(0)
        rows = [pair.run((0, start, ids[start : start + width]))[0] for start in range(0, len(ids), width)]
        close(torch.cat(rows), expected)
        pair.engine.close(0)


def test_packed_sequences_do_not_see_each_other(pair: Pair) -> None:
    ids = [tokens(length, seed=length) for length in (20, 3, 14, 9)]
    for seq in range(SLOTS):
        pair.engine.open(seq)
    first = pair.run(*((seq, 0, text[: seq + 2]) for seq, text in enumerate(ids)))
    second = pair.run(*((seq, seq + 2, text[seq + 2 :]) for seq, text in reversed(list(enumerate(ids)))))
    for seq, text in enumerate(ids):
        close(torch.cat([first[seq], second[SLOTS - 1 - seq]]), pair.expected(text))


def test_what_lies_beyond_the_start_is_dropped(pair: Pair) -> None:
    ids, wrong = tokens(16), tokens(16, seed=9)
    pair.engine.open(0)
    pair.run((0, 0, ids[:10] + wrong[10:]))
    rows = pair.run((0, 10, ids[10:13]))[0]
    close(rows, pair.expected(ids)[10:13])
    with pytest.raises(ValueError, match="holds 13"):
        pair.run((0, 14, ids[14:]))


def test_a_prefill_in_several_passes_changes_nothing(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hf, "PASS_TOKENS", 7)
    long, short = tokens(40), tokens(5, seed=2)
    pair.engine.open(0)
    pair.engine.open(1)
    windows = [Window(0, 0, long, 17), Window(1, 0, short, 2)]
    rows = pair.engine.forward(windows)
    close(rows, torch.cat([pair.expected(long)[-17:], pair.expected(short)[-2:]]))


def test_many_rows_in_one_piece(llama: Pair) -> None:
    ids = tokens(CONTEXT)
    llama.engine.open(0)
    close(llama.run((0, 0, ids))[0], llama.expected(ids))


def test_only_the_rows_asked_for_are_returned(llama: Pair) -> None:
    ids = tokens(12)
    for seq in (0, 1, 2):
        llama.engine.open(seq)
    rows = llama.engine.forward([Window(0, 0, ids, 0), Window(1, 0, ids, 3), Window(2, 0, [], 0)])
    assert rows.dtype == torch.float32
    close(rows, llama.expected(ids)[-3:])
    assert llama.engine.forward([]).shape == (0, COMMON["vocab_size"])
    assert llama.engine.forward([Window(1, 5, [], 0)]).shape == (0, COMMON["vocab_size"])
    close(llama.run((1, 5, ids[5:]))[0], llama.expected(ids)[5:])


def test_a_slot_is_reused_without_a_trace(llama: Pair) -> None:
    ids = tokens(8)
    llama.engine.open(0)
    llama.run((0, 0, tokens(50, seed=4)))
    llama.engine.close(0)
    llama.engine.open(1)
    close(llama.run((1, 0, ids))[0], llama.expected(ids))


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (Window(1, 3, [5], 1), "holds 2 of at most 96"),
        (Window(1, -1, [5], 1), "holds 2"),
        (Window(1, 2, [5], 2), "2 rows of 1 tokens"),
        (Window(1, 2, [5], -1), "-1 rows"),
        (Window(1, 2, [5] * CONTEXT, 1), "96 tokens at 2"),
        (Window(1, 2, [5, 101], 1), r"token 101 is not in 0 … 100"),
        (Window(1, 2, [-1], 1), "token -1"),
        (Window(0, 0, [5], 1), "more than one window"),
    ],
)
def test_a_window_that_cannot_be_run_changes_nothing(llama: Pair, bad: Window, message: str) -> None:
    ids = tokens(6)
    llama.engine.open(0)
    llama.engine.open(1)
    llama.run((0, 0, ids[:4]), (1, 0, ids[:2]))
    with pytest.raises(ValueError, match=message):
        llama.engine.forward([Window(0, 1, [7], 1), bad])
    close(llama.run((0, 4, ids[4:]))[0], llama.expected(ids)[4:])


def test_sequences_beyond_the_slots_are_refused(llama: Pair) -> None:
    for seq in range(SLOTS):
        llama.engine.open(seq)
    with pytest.raises(MemoryError):
        llama.engine.open(SLOTS)


def test_it_says_what_it_is_and_is_silent(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    save(FAMILIES["llama"](), tmp_path)
    capfd.readouterr()
    engine = made_ready(HfEngine(spec(tmp_path, max_sequences=2, max_model_len=40)))
    engine.warm_up()
    assert capfd.readouterr() == ("", "")
    assert engine.vocabulary.size == COMMON["vocab_size"]
    assert engine.max_model_len == 40
    assert any("last bits" in note for note in engine.notes)
    engine.open(0)
    engine.open(1)


def test_one_sequence_of_one_token_can_be_proved(tmp_path: Path) -> None:
    engine = made_ready(HfEngine(spec(save(FAMILIES["llama"](), tmp_path), max_sequences=1, max_model_len=1)))
    engine.warm_up()
    assert engine.max_model_len == 1


@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
def test_sixteen_bits(tmp_path: Path, dtype: str) -> None:
    engine = made_ready(HfEngine(spec(save(FAMILIES["llama"](), tmp_path), dtype)))
    plain = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=hf_model.DTYPES[dtype]).float()
    ids = tokens(20)
    engine.open(0)
    rows = engine.forward([Window(0, 0, ids, len(ids))])
    with torch.inference_mode():
        expected = plain(torch.tensor([ids])).logits[0]
    assert rows.dtype == torch.float32
    if any("computed in fp32" in note for note in engine.notes):
        close(rows, expected)
    else:
        assert float((rows - expected).norm() / expected.norm()) < 0.05
