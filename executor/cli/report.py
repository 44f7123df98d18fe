"""What is told of finished generations: one dictionary for machines, one table for people."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

from executor.request import Acceptance

if TYPE_CHECKING:
    from executor.config import Config
    from executor.request import Completion
    from executor.stats import Stats
    from executor.transport import TransportInfo


@dataclass(frozen=True, slots=True)
class Run:
    """One generation. Times in seconds from the request's submission; `lanes` as of LaneView.as_dicts."""

    completion: Completion
    seconds: float
    first_token_seconds: float
    lanes: list[dict[str, Any]]
    stats: Stats
    stale: int
    transport: TransportInfo

    @property
    def tokens_per_second(self) -> float:
        """Of all generated tokens over the whole time, the prompt's included."""
        return len(self.completion.token_ids) / self.seconds if self.seconds > 0 else 0.0


@dataclass(frozen=True, slots=True)
class Batch:
    """Several generations that ran together, from the first's submission to the last's end."""

    completions: list[Completion]
    seconds: float
    lanes: list[dict[str, Any]]
    stats: Stats
    stale: int
    transport: TransportInfo

    @property
    def tokens(self) -> int:
        return sum(len(done.token_ids) for done in self.completions)

    @property
    def tokens_per_second(self) -> float:
        """Of all generated tokens over the whole time, the prompts' included."""
        return self.tokens / self.seconds if self.seconds > 0 else 0.0


def as_dict(run: Run | Batch, config: Config) -> dict[str, Any]:
    if isinstance(run, Batch):
        return _batch_as_dict(run, config)
    return {
        **_completion(run.completion),
        "tok_s": round(run.tokens_per_second, 3),
        "time_to_first_token_s": round(run.first_token_seconds, 6),
        "seconds": round(run.seconds, 6),
        **_circumstances(run, config),
    }


def _batch_as_dict(batch: Batch, config: Config) -> dict[str, Any]:
    return {
        "completions": [_completion(done) for done in batch.completions],
        "tokens": batch.tokens,
        "tok_s": round(batch.tokens_per_second, 3),
        "seconds": round(batch.seconds, 6),
        "preempted": batch.stats.preempted,
        **_circumstances(batch, config),
    }


def lost_drafts(run: Run | Batch) -> dict[str, int]:
    """Drafts that did not come in time, that could not be used, and that came when nobody waited."""
    stats = run.stats
    return {"missed": stats.missed, "invalid": stats.invalid + stats.broken, "stale": run.stale}


def _completion(done: Completion) -> dict[str, Any]:
    result: dict[str, Any] = {
        "text": done.text,
        "token_ids": done.token_ids,
        "finish_reason": done.finish_reason,
        "acceptance_length": round(done.acceptance_length, 4),
        "acceptance_by_position": [round(share, 4) for share in done.acceptance.by_position],
        "seed": done.seed,
        "prompt_tokens": len(done.prompt_token_ids),
        "tokens": len(done.token_ids),
        "rounds": done.acceptance.rounds,
    }
    if done.logprobs is not None:
        result["logprobs"] = [{"logprob": entry.logprob, "top": entry.top} for entry in done.logprobs]
    if done.prompt_logprobs is not None:
        result["prompt_logprobs"] = [
            {"logprob": entry.logprob, "rank": entry.rank, "top": entry.top} for entry in done.prompt_logprobs
        ]
    return result


def _circumstances(run: Run | Batch, config: Config) -> dict[str, Any]:
    return {
        "drafts": lost_drafts(run),
        "target": config.target,
        "speculator": config.speculator,
        "engine": config.engine,
        "dtype": config.dtype,
        "num_speculative_tokens": config.num_speculative_tokens if config.speculates else 0,
        "acceptance": config.acceptance,
        "lanes": run.lanes,
        "transport": run.transport._asdict(),
    }


def show(run: Run | Batch) -> None:
    """The table, to stderr."""
    table = Table.grid(padding=(0, 2))
    if isinstance(run, Run):
        _add_run(table, run)
    else:
        _add_batch(table, run)
    if lost := [f"{count} {how}" for how, count in lost_drafts(run).items() if count]:
        table.add_row("lost drafts", ", ".join(lost))
    for lane in run.lanes:
        memory = "" if lane["resident_mb"] is None else f", {lane['resident_mb']:.0f} MB"
        table.add_row(f"{lane['lane']} lane", f"busy {lane['busy_share']:.0%}{memory}, {lane['engine']}")
    if run.transport.name != "none":
        reason = f" ({run.transport.reason})" if run.transport.reason else ""
        table.add_row("tensors", f"by {run.transport.name}{reason}")
    if isinstance(run, Run):
        table.add_row("seed", str(run.completion.seed))
    Console(stderr=True, highlight=False).print(table)


def _add_run(table: Table, run: Run) -> None:
    done = run.completion
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


def _add_batch(table: Table, batch: Batch) -> None:
    table.add_row("prompts", str(len(batch.completions)))
    table.add_row("tokens", str(batch.tokens))
    table.add_row("speed", f"{batch.tokens_per_second:.1f} tok/s")
    acceptance = Acceptance()
    for done in batch.completions:
        acceptance.add(done.acceptance)
    table.add_row("acceptance length", f"{acceptance.length:.2f} tokens per target step")
    if batch.stats.preempted:
        table.add_row("preempted", f"{batch.stats.preempted} times for want of memory; see --kv-tokens")
