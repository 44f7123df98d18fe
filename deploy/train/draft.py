"""A plain small causal model as a draft: some of the target's own layers, taught to speak as all of them do.

It reads tokens alone, so of the lessons it needs only the text and the best next tokens. It starts from the
layers as they are in the target; with few of them left it knows little more than the embedding does.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from simulate import Score, score
from transformers import AutoModelForCausalLM

from executor.prune import prune

if TYPE_CHECKING:
    from pathlib import Path

    from teacher import Lessons
    from torch import Tensor

_WARM_UP = 100
_CLIP = 1.0


class DraftLearner:
    """See learn.Learner, which has the same methods for a head."""

    def __init__(self, target: Path, layers: int, out: Path, device: str, rate: float, decay: float) -> None:
        """Takes `layers` of the target's layers, the first and the last among them."""
        self.directory = out / "draft"
        if not self.directory.exists():
            count = json.loads((target / "config.json").read_text())["num_hidden_layers"]
            prune(target, self.directory, spread(count, layers))
        self._model = AutoModelForCausalLM.from_pretrained(self.directory, dtype=torch.float32).to(device)
        self._rate = rate
        self._steps = 0
        self.seen = 0
        self._optimiser = torch.optim.AdamW(self._model.parameters(), lr=rate, weight_decay=decay)

    def step(self, lessons: Lessons, generator: torch.Generator) -> float:
        """Learn from some rows. Returns the mean loss, in nats."""
        self._steps += 1
        self._model.train()
        for group in self._optimiser.param_groups:
            group["lr"] = self._rate * min(1.0, self._steps / _WARM_UP)
        logits = self._model(input_ids=lessons.tokens.long(), use_cache=False).logits
        share = lessons.top_logprobs.float().exp()
        guessed = logits.gather(-1, lessons.top_tokens.long()) - logits.logsumexp(dim=-1, keepdim=True)
        loss = -(share * guessed).sum() / share.sum()
        self._optimiser.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), _CLIP)
        self._optimiser.step()
        self.seen += lessons.tokens.numel()
        return float(loss.detach())

    @torch.inference_mode()
    def evaluate(self, lessons: Lessons, k: int) -> Score:
        """Rounds of greedy drafting: as far as guesses are right, they were made after the text itself."""
        self._model.eval()
        accepted = []
        for tokens in lessons.tokens.long():
            guesses = self._model(input_ids=tokens[None], use_cache=False).logits[0].argmax(dim=-1)
            accepted.append(_runs(guesses[1:-1] == tokens[2:], k))
        return score(lessons.written, torch.stack(accepted), k)

    def export(self, out: Path) -> None:
        """Into the directory that `--speculator` takes."""
        state = {name: tensor.bfloat16() for name, tensor in self._state().items()}
        save_file(state, self.directory / "model.safetensors", {"format": "pt"})

    def save(self, file: Path) -> None:
        """The weights as they are; the optimiser begins anew when learning goes on."""
        counts = torch.tensor([self._steps, self.seen])
        save_file(self._state() | {"counts": counts}, file)

    def load(self, file: Path) -> None:
        state = load_file(file)
        self._steps, self.seen = state.pop("counts").tolist()
        self._model.load_state_dict(state, strict=False)

    def _state(self) -> dict[str, Tensor]:
        """Without the output rows if they are the embedding's."""
        state = {name: tensor.cpu().contiguous() for name, tensor in self._model.state_dict().items()}
        if self._model.config.tie_word_embeddings:
            state.pop("lm_head.weight", None)
        return state


def spread(count: int, kept: int) -> list[int]:
    """`kept` of `count` layers: the first, the last, and others evenly between them."""
    if not 2 <= kept <= count:
        raise ValueError(f"layers must be from 2 to {count}, got {kept}; try 6")
    return sorted({round(index * (count - 1) / (kept - 1)) for index in range(kept)})


def _runs(right: Tensor, k: int) -> Tensor:
    """For every index of a text how many guesses in a row are right from there on, at most k; padded with
    two zeros, as long as the text."""
    padded = F.pad(right.long(), (0, k))
    ahead = torch.stack([padded[step : step + len(right)] for step in range(k)], dim=1)
    return F.pad(ahead.cumprod(dim=1).sum(dim=1), (0, 2))
