"""The drafting head: trained and served by the same arithmetic, over rows that the native engine shows."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import save_file
from small_models import lane, save

from ipc.messages import HeadSpec, HiddenRows, LaneSpec, OpenedSequence, SamplingSpec
from workers.engines.engine import Window
from workers.engines.native import NativeEngine
from workers.engines.tap import Tap
from workers.lifecycle import made_ready
from workers.sequence import LaneSequence
from workers.speculator import Ask, News
from workers.speculators.cascade import CascadeSpeculator
from workers.speculators.head import Entry, Head, Read
from workers.tensor_plane import TensorPlane

TRAINING = Path(__file__).parents[2] / "deploy" / "train"
HIDDEN, HEAD_DIM, VOCABULARY, WINDOW = 96, 16, 211, 32
TAPS = (1, 2, 0)
PLANE = TensorPlane()
TEXT = [
    3,
    1,
    4,
    1,
    5,
    9,
    2,
    6,
    5,
    3,
    5,
    8,
    9,
    7,
    9,
    3,
    2,
    3,
    8,
    4,
    6,
    2,
    6,
    4,
    3,
    3,
    8,
    3,
    2,
    7,
    9,
    5,
    0,
    2,
    8,
    8,
]


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Path:
    return save(tmp_path_factory.mktemp("target"), "llama, tied")


@pytest.fixture(scope="module")
def training():
    """deploy/train's head module, which is no installed package."""
    sys.path.insert(0, str(TRAINING))
    try:
        import head
    finally:
        sys.path.remove(str(TRAINING))
    return head


@pytest.fixture(scope="module")
def trained(training):
    """A head with random weights, as it is trained."""
    torch.manual_seed(5)
    shape = training.Shape(
        hidden=HIDDEN,
        query_heads=6,
        kv_heads=2,
        head_dim=HEAD_DIM,
        inner=64,
        features=3 * HIDDEN,
        norm_eps=1e-6,
        window=WINDOW,
    )
    head = training.Head(shape)
    for weight in head.parameters():
        torch.nn.init.normal_(weight, 1.0 if weight.dim() == 1 else 0.0, 0.1)
    return head


@pytest.fixture(scope="module")
def spec(trained, tmp_path_factory) -> HeadSpec:
    file = tmp_path_factory.mktemp("head") / "head.safetensors"
    tensors = {name: weight.detach() for name, weight in trained.state_dict().items()}
    save_file(tensors | {"draft_to_target": torch.arange(0, VOCABULARY, 2)}, file)
    return HeadSpec(str(file), TAPS, row_bytes=2 * 3 * HIDDEN, window=WINDOW)


def rows_of(engine: NativeEngine, tokens: list[int], cuts: list[int], since: int = 0) -> list[HiddenRows]:
    """What is shown of a text that is run in pieces up to each of `cuts`."""
    tap = Tap(TAPS, {0: since}, lambda start, rows: PLANE.pack_rows(start, rows, ""))
    engine.open(0)
    for start, end in zip([0, *cuts], [*cuts, len(tokens)], strict=False):
        engine.forward([Window(0, start, tokens[start:end], 1)], tap)
    engine.close(0)
    return tap.rows(0, len(tokens))


@pytest.fixture(scope="module")
def engine(target) -> NativeEngine:
    return made_ready(NativeEngine(lane(target)))


def test_rows_are_those_of_transformers(engine, target):
    model = transformers.AutoModelForCausalLM.from_pretrained(target).eval()
    with torch.no_grad():
        states = model(torch.tensor([TEXT]), output_hidden_states=True).hidden_states
    # The last of them is normed; after one layer and after two, of which there are only two.
    before_norm = {}
    hook = model.model.norm.register_forward_pre_hook(lambda _, args: before_norm.update(x=args[0]))
    with torch.no_grad():
        model(torch.tensor([TEXT]))
    hook.remove()
    expected = torch.cat((states[1], before_norm["x"], states[2]), dim=-1)[0]
    joined = b"".join(part.data for part in rows_of(engine, TEXT, []))
    rows = torch.frombuffer(bytearray(joined), dtype=torch.bfloat16).view(len(TEXT), -1).float()
    torch.testing.assert_close(rows, expected, rtol=0.01, atol=0.01)


def test_rows_have_the_same_bits_in_any_pieces(engine):
    whole = b"".join(part.data for part in rows_of(engine, TEXT, []))
    pieces = rows_of(engine, TEXT, [5, 6, 20])
    assert b"".join(part.data for part in pieces) == whole
    size = len(whole) // len(TEXT)
    late = rows_of(engine, TEXT, [5, 30], since=17)
    assert [(part.start, part.count) for part in late] == [(17, 13), (30, 6)]
    assert b"".join(part.data for part in late) == whole[17 * size :]


@pytest.mark.parametrize("narrow", [False, True])
def test_a_head_drafts_as_it_was_trained(trained, spec, target, narrow):
    head = Head(spec, target, torch.device("cpu"), narrow=narrow)
    generator = torch.Generator().manual_seed(1)
    count, steps = 60, 4  # more than the window
    rows = torch.randn(1, count, 3 * HIDDEN, generator=generator).bfloat16()
    tokens = torch.randint(0, VOCABULARY, (count + steps,), generator=generator)
    embedded = (head._embedding[tokens[1 + step : 1 + step + count]].float()[None] for step in range(steps))
    with torch.inference_mode():
        outputs = [out[0, -1] for out in trained.steps(rows.float(), embedded)]
        expected = [out @ head._embedding[head.tokens].float().T for out in outputs]
        context = head.context()
        fused = head.fuse(rows[0])
        for first in range(0, count - 1, 7):  # in pieces, over the end of the storage
            last = min(first + 7, count - 1)
            head.absorb([Read(fused[first:last], tokens[first + 1 : last + 1].tolist(), first, context)])
            context.keep()
        row = fused[-1]
        for step in range(steps):
            entry = Entry(row, int(tokens[count + step]), count - 1 + step, context)
            next_rows, logits = head.step([entry])
            row = next_rows[0]
            if step == 0:  # later steps see a window that has moved on by the drafts in it
                torch.testing.assert_close(logits[0], expected[step], rtol=1e-3, atol=1e-3)
            assert torch.allclose(logits[0], expected[step], rtol=0.2, atol=0.2)


def speculator(spec: HeadSpec, target: Path, engine: str = "eagle") -> CascadeSpeculator:
    lane_spec = LaneSpec("speculator", engine, str(target), "fp32", "cpu", 1, 4, 256, head=spec)
    return made_ready(CascadeSpeculator(lane_spec))


def opened(seq: int, tokens: list[int], temperature: float = 0.0) -> LaneSequence:
    sampling = SamplingSpec(temperature, 1.0, 0, 0.0, 11, 0, (), None)
    return LaneSequence(OpenedSequence(seq, 0, list(tokens), 1, sampling))


def shown(parts: list[HiddenRows]) -> list[tuple[int, torch.Tensor]]:
    return [(part.start, PLANE.rows(part)) for part in parts]


def draft(made: CascadeSpeculator, sequence: LaneSequence, rows: list[HiddenRows], k: int = 3) -> list[int]:
    made.observe([News(sequence, shown(rows))])
    return made.propose([Ask(sequence, k)])[0]


def test_what_it_drafts_does_not_hang_on_how_its_rows_came(spec, target, engine, monkeypatch):
    monkeypatch.setattr("workers.speculators.chain.HEAD_REACH", 0.0)
    monkeypatch.setattr("workers.speculators.proposals.LEAST_REACH", 0.0)
    made = speculator(spec, target)
    rows = rows_of(engine, TEXT[:-1], [])
    together = opened(0, TEXT)
    made.open(together)
    expected = draft(made, together, rows)
    assert len(expected) == 3
    bit_by_bit = opened(1, TEXT[:10])
    made.open(bit_by_bit)
    pieces = rows_of(engine, TEXT[:-1], [9, 20])
    draft(made, bit_by_bit, pieces[:1])
    bit_by_bit.tokens += TEXT[10:21]
    draft(made, bit_by_bit, pieces[1:2])
    bit_by_bit.tokens += TEXT[21:]
    assert draft(made, bit_by_bit, pieces[2:]) == expected
    assert draft(made, together, []) == expected  # nothing came in between
    other = opened(2, TEXT[:12], temperature=0.8)
    made.open(other)
    made.observe([News(other, shown(rows_of(engine, TEXT[:11], [])))])
    batched = made.propose([Ask(other, 2), Ask(together, 3)])
    assert batched[1] == expected
    assert len(batched[0]) == 2


def test_without_the_latest_row_the_head_is_silent_but_not_after_a_gap(spec, target, engine, monkeypatch):
    monkeypatch.setattr("workers.speculators.chain.HEAD_REACH", 0.0)
    monkeypatch.setattr("workers.speculators.proposals.LEAST_REACH", 0.0)
    made = speculator(spec, target)
    rows = rows_of(engine, TEXT[:-1], [10, 20])
    sequence = opened(0, TEXT)
    made.open(sequence)
    assert draft(made, sequence, []) == []
    assert draft(made, sequence, rows[:1]) == []
    after_gap = draft(made, sequence, rows[2:])
    fresh = opened(1, TEXT)
    made.open(fresh)
    assert draft(made, fresh, rows[2:]) == after_gap
    assert len(after_gap) == 3


def test_in_cascade_lookups_draft_where_the_head_cannot(spec, target):
    made = speculator(spec, target, "cascade")
    sequence = opened(0, [1, 2, 3, 4, 9, 1, 2])
    made.open(sequence)
    assert draft(made, sequence, []) == [3, 4, 9]
    made.close(sequence)


def test_rows_that_are_no_numbers_make_no_draft(spec, target):
    made = speculator(spec, target)
    sequence = opened(0, TEXT)
    made.open(sequence)
    nothing = np.full((len(TEXT) - 1, 3 * HIDDEN), 0x7FC0, dtype=np.uint16)  # NaN in bfloat16
    assert draft(made, sequence, [HiddenRows(0, len(nothing), nothing.tobytes())]) == []


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"row_bytes": 2 * 3 * 64}, "is a head for rows of 96, but the target's are of 96"),
        ({"file": "prior"}, "is no drafting head: it has no tensor"),
    ],
)
def test_a_file_that_does_not_fit_is_refused(spec, target, tmp_path, changes, says):
    if changes.get("file"):
        save_file({"keys": torch.zeros(3)}, tmp_path / "prior.safetensors")
        changes = {"file": str(tmp_path / "prior.safetensors")}
    fields = {name: getattr(spec, name) for name in ("file", "taps", "row_bytes", "window")}
    with pytest.raises(ValueError, match=says):
        Head(HeadSpec(**(fields | changes)), target, torch.device("cpu"), narrow=False)
