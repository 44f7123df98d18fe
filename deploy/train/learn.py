"""One head and its optimiser: losses, steps, an average of the weights, checkpoints."""

from __future__ import annotations

import copy
import os
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from simulate import Score, simulate

if TYPE_CHECKING:
    from pathlib import Path

    from head import Head
    from teacher import Lessons
    from torch import Tensor

STEP_WEIGHTS = (1.0, 0.8, 0.6, 0.4)
"""Of the unrolled steps, several from the start: a head that meets its own rows late stays weak there."""
_GIVEN = 0.3
"""Share of the tokens that the target did not write which count: drafts are asked for what it writes."""
_AVERAGE = 0.995
_CLIP = 1.0
_NOISE = 0.05
"""Of features, relative to their size: a guard against learning rows by heart."""


class Learner:
    def __init__(
        self,
        head: Head,
        embedding: Tensor,
        draft_to_target: Tensor,
        rate: float,
        decay: float,
        metadata: dict[str, str] | None = None,
    ) -> None:
        """`embedding` [vocabulary, hidden]: the target's, which stay as they are, as do the output rows.

        `metadata`: what the head's file has to say of itself.
        """
        self._draft_to_target = draft_to_target
        self._metadata = metadata
        self.head = head
        self.average = copy.deepcopy(head)
        self.seen = 0
        self._embedding = embedding
        self.output = embedding[draft_to_target].float()
        vocabulary = embedding.shape[0]
        self._target_to_draft = torch.full((vocabulary,), -1, device=embedding.device)
        self._target_to_draft[draft_to_target] = torch.arange(len(draft_to_target), device=embedding.device)
        matrices = [weight for weight in head.parameters() if weight.dim() > 1]
        others = [weight for weight in head.parameters() if weight.dim() == 1]
        self._rate = rate
        self._steps = 0
        groups = [{"params": matrices, "weight_decay": decay}, {"params": others, "weight_decay": 0.0}]
        self._optimiser = torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.95))

    def step(self, lessons: Lessons, generator: torch.Generator) -> float:
        """Learn from some rows. Returns the loss of the first step's guesses, in nats."""
        self._steps += 1
        for group in self._optimiser.param_groups:
            group["lr"] = self._rate * min(1.0, self._steps / 100)
        total, first = self._loss(lessons, generator)
        self._optimiser.zero_grad(set_to_none=True)
        total.backward()
        torch.nn.utils.clip_grad_norm_(self.head.parameters(), _CLIP)
        self._optimiser.step()
        with torch.no_grad():
            # The average follows quickly at first and slowly later.
            share = max(1 - _AVERAGE, 1 / (self._steps + 1))
            for mean, weight in zip(self.average.parameters(), self.head.parameters(), strict=True):
                mean.lerp_(weight, share)
        self.seen += lessons.tokens.numel()
        return float(first)

    def _loss(self, lessons: Lessons, generator: torch.Generator) -> tuple[Tensor, Tensor]:
        tokens = lessons.tokens.long()
        length = tokens.shape[1]
        count = min(len(STEP_WEIGHTS), length - 2)
        features = lessons.features.float()
        scale = features.abs().mean(dim=(0, 1), keepdim=True) * _NOISE
        features = features + scale * torch.randn(features.shape, generator=generator).to(features.device)
        inputs = (self._embedding[_shifted(tokens, 1 + step)].float() for step in range(count))
        chosen = torch.rand(tokens.shape, generator=generator).to(tokens.device) < _GIVEN
        losses = []
        for step, rows in enumerate(self.head.steps(features, inputs)):
            counted = _shifted(lessons.written | chosen, 2 + step)
            losses.append(self._cross_entropy(rows, lessons, step, counted))
        weights = STEP_WEIGHTS[:count]
        total = sum(
            (weight * loss for weight, loss in zip(weights, losses, strict=True)), start=losses[0] * 0
        )
        return total / sum(weights), losses[0].detach()

    def _cross_entropy(self, rows: Tensor, lessons: Lessons, step: int, counted: Tensor) -> Tensor:
        """Against the target's distribution after index + 1 + step, as far as it is kept and can be drafted.

        `counted` [n, length]: which indices count; zeros stand where the text has ended.
        """
        top = self._target_to_draft[_shifted(lessons.top_tokens.long(), 1 + step)[counted]]
        share = _shifted(lessons.top_logprobs, 1 + step)[counted].float().exp() * (top >= 0)
        logits = rows[counted] @ self.output.T
        guessed = logits.gather(-1, top.clamp(min=0)) - logits.logsumexp(dim=-1, keepdim=True)
        # Where little of the target's mass can be drafted, little can be learned.
        return -(share * guessed).sum() / share.sum().clamp(min=1e-6)

    def evaluate(self, lessons: Lessons, k: int) -> Score:
        """What the average of the weights is worth."""
        return simulate(self.average, self.output, self._embedding, self._draft_to_target, lessons, k)

    def export(self, out: Path) -> None:
        """The average, as `best.safetensors`."""
        tensors = {name: tensor.bfloat16() for name, tensor in self.average.state_dict().items()}
        tensors["draft_to_target"] = self._draft_to_target
        write(out / "best.safetensors", tensors, self._metadata)

    def save(self, file: Path) -> None:
        """Everything that going on needs. Written whole or not at all."""
        state = {f"head.{name}": tensor for name, tensor in self.head.state_dict().items()}
        state |= {f"average.{name}": tensor for name, tensor in self.average.state_dict().items()}
        for index, slot in self._optimiser.state_dict()["state"].items():
            state |= {f"optimiser.{index}.{name}": tensor for name, tensor in slot.items()}
        state["counts"] = torch.tensor([self._steps, self.seen])
        write(file, state)

    def load(self, file: Path) -> None:
        state = load_file(file)
        self.head.load_state_dict(_part(state, "head."))
        self.average.load_state_dict(_part(state, "average."))
        slots: dict[int, dict[str, Tensor]] = {}
        for name, tensor in _part(state, "optimiser.").items():
            index, field = name.split(".")
            slots.setdefault(int(index), {})[field] = tensor
        self._optimiser.load_state_dict(self._optimiser.state_dict() | {"state": slots})
        self._steps, self.seen = state["counts"].tolist()


def write(file: Path, tensors: dict[str, Tensor], metadata: dict[str, str] | None = None) -> None:
    """A safetensors file, written whole or not at all."""
    part = file.with_suffix(".part")
    # Copies, since tensors that share memory are refused.
    save_file(
        {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}, part, metadata
    )
    os.replace(part, file)


def _part(state: dict[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in state.items() if name.startswith(prefix)}


def _shifted(x: Tensor, by: int) -> Tensor:
    """x[:, t + by] at t; zeros where there is none."""
    padding = [0, 0] * (x.dim() - 2) + [0, by]
    return F.pad(x[:, by:], padding)
