"""What is told of a finished generation: one dictionary for machines, one table for people."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from executor.config import Config
    from executor.request import Completion
    from executor.stats import Stats


@dataclass(frozen=True, slots=True)
class Run:
    """One generation. Times in seconds from the request's submission; `lanes` as of LaneView.as_dicts."""

    completion: Completion
    seconds: float
    first_token_seconds: float
    lanes: list[dict[str, Any]]
    stats: Stats
    stale: int

    @property
    def tokens_per_second(self) -> float:
        """Of all generated tokens over the whole time, the prompt's included."""
        return len(self.completion.token_ids) / self.seconds if self.seconds > 0 else 0.0

    @property
    def lost_drafts(self) -> dict[str, int]:
        """Drafts that did not come in time, that could not be used, and that came when nobody waited."""
        return {
            "missed": self.stats.missed,
            "invalid": self.stats.invalid + self.stats.broken,
            "stale": self.stale,
        }


def as_dict(run: Run, config: Config) -> dict[str, Any]:
    done = run.completion
    result: dict[str, Any] = {
        "text": done.text,
        "token_ids": done.token_ids,
        "finish_reason": done.finish_reason,
        "acceptance_length": round(done.acceptance_length, 4),
        "acceptance_by_position": [round(share, 4) for share in done.acceptance.by_position],
        "tok_s": round(run.tokens_per_second, 3),
        "time_to_first_token_s": round(run.first_token_seconds, 6),
        "seconds": round(run.seconds, 6),
        "seed": done.seed,
        "prompt_tokens": len(done.prompt_token_ids),
        "tokens": len(done.token_ids),
        "rounds": done.acceptance.rounds,
        "drafts": run.lost_drafts,
        "target": config.target,
        "speculator": config.speculator,
        "engine": config.engine,
        "dtype": config.dtype,
        "num_speculative_tokens": config.num_speculative_tokens if config.speculates else 0,
        "lanes": run.lanes,
    }
    if done.logprobs is not None:
        result["logprobs"] = [{"logprob": entry.logprob, "top": entry.top} for entry in done.logprobs]
    return result


def show(run: Run) -> None:
    """The table, to stderr."""
    done = run.completion
    table = Table.grid(padding=(0, 2))
    table.add_row(
        "tokens", f"{len(done.token_ids)} ({done.finish_reason}), prompt {len(done.prompt_token_ids)}"
    )
    table.add_row(
        "speed", f"{run.tokens_per_second:.1f} tok/s, first token after {run.first_token_seconds:.2f} s"
    )
    table.add_row("acceptance length", f"{done.acceptance_length:.2f} tokens per target step")
    if done.acceptance.drafted:
        shares = " ".join(f"{share:.0%}" for share in done.acceptance.by_position)
        table.add_row("by position", shares)
    if lost := [f"{count} {how}" for how, count in run.lost_drafts.items() if count]:
        table.add_row("lost drafts", ", ".join(lost))
    for lane in run.lanes:
        memory = "" if lane["resident_mb"] is None else f", {lane['resident_mb']:.0f} MB"
        table.add_row(f"{lane['lane']} lane", f"busy {lane['busy_share']:.0%}{memory}, {lane['engine']}")
    table.add_row("seed", str(done.seed))
    Console(stderr=True, highlight=False).print(table)
