"""The one interface between a lane and a model: windows of tokens in, logit rows out, rows to samples.

An engine owns weights and KV of one model. It knows nothing of speculation, verdicts or the wire.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, NamedTuple, Protocol, TypeVar

if TYPE_CHECKING:
    from collections.abc import Sequence

    from ipc.messages import MemoryProfile, SamplingSpec, StepTime, Vocabulary
    from workers.distribution import Distribution
    from workers.row_edit import RowEdit


class Window(NamedTuple):
    """Run `tokens` of a sequence at positions start, start + 1, …

    `start` is at most the number of tokens whose keys and values the sequence holds; what it holds beyond
    `start` is dropped first, so rolling back is no separate operation. Logits are wanted for the last `rows`
    of the tokens (0 ≤ rows ≤ len(tokens)).
    """

    seq: int
    start: int
    tokens: Sequence[int]
    rows: int


class Draw(NamedTuple):
    """How to sample one row: its token stands at `position` of the sequence, prompt included, and is the
    `generated`-th after the prompt; both are 0-based. `edit`, if any, says what becomes of the row first."""

    sampling: SamplingSpec
    position: int
    generated: int
    edit: RowEdit | None = None


@dataclass(frozen=True, slots=True)
class Sample:
    """A sampled token; `logprob` and `top` (id, log-probability, best first) only if the draw asks for it."""

    token: int
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()


class Score(NamedTuple):
    """Log-probability of a given token, the best alternatives as in Sample, and its rank, 1 for the best."""

    logprob: float
    top: tuple[tuple[int, float], ...]
    rank: int


R = TypeVar("R")


class Served(Protocol):
    """What a lane says of itself when it is ready, and does once before: the steps of workers.lifecycle."""

    @property
    def vocabulary(self) -> Vocabulary:
        """Size 0 means: yields only tokens that it was given."""
        ...

    @property
    def max_model_len(self) -> int:
        """Longest sequence in tokens."""
        ...

    @property
    def pass_tokens(self) -> int:
        """Tokens that one pass takes; more are run in several. 0 is any number."""
        ...

    @property
    def notes(self) -> list[str]:
        """What the user should know about how this runs here, a line each."""
        ...

    @property
    def step_times(self) -> list[StepTime]:
        """Of steps such as serving takes, as they were when it got ready; none from who takes no time."""
        ...

    @property
    def reused_tokens(self) -> int:
        """Tokens that sequences held when they were opened, in total."""
        ...

    @property
    def device_id(self) -> str:
        """The device that it runs on, as all processes identify it."""
        ...

    def set_up_attention(self) -> None:
        """Choose how to attend, by this lane's own shapes. Raises ValueError for what cannot be served."""
        ...

    def profile(self) -> MemoryProfile:
        """Run the worst shapes and measure them. Keeps nothing but workspace."""
        ...

    def allocate(self, kv_tokens: int) -> None:
        """Make the storage of keys and values of so many tokens. Raises MemoryError if they do not fit."""
        ...

    def capture(self) -> str:
        """Capture graphs, where the device has them; says how many, or `none`."""
        ...

    def lock(self) -> None:
        """From now on no workspace grows."""
        ...

    def warm_up(self) -> None:
        """Run once what serving will run, so that the first order is not slower than the others."""
        ...


class Engine(Served, Protocol, Generic[R]):
    """A causal language model. `R` is the engine's own type of a batch of logit rows."""

    def open(self, seq: int, tokens: Sequence[int] = ()) -> int:
        """Take in a sequence of these tokens; returns how many of them, from the start on, it holds already.

        Raises MemoryError if there are max_sequences.
        """
        ...

    def close(self, seq: int) -> None: ...

    def fork(self, seq: int, other: int) -> None:
        """Take in `other`, which holds what `seq` does. It is a guess, so it counts for no seat."""
        ...

    def replace(self, seq: int, other: int) -> None:
        """From now on `seq` holds what `other` does, which is no sequence any more."""
        ...

    def room(self, length: int) -> int:
        """How many forks could grow by so many tokens each while all sequences do, too."""
        ...

    def forward(self, windows: Sequence[Window]) -> R:
        """Logit rows [sum of window.rows, vocabulary], float32, in the order of windows and their tokens."""
        ...

    def sample(self, rows: R, draws: Sequence[Draw]) -> list[Sample]:
        """One sample per row; a pure function of the row and its draw, whatever stands beside it."""
        ...

    def distribution(self, rows: R, index: int, draw: Draw) -> Distribution:
        """What `sample` samples one of the rows from, at a temperature that is not greedy."""
        ...

    def scores(self, rows: R, tokens: Sequence[int], alternatives: int) -> list[Score]:
        """For each row what the model thinks of its token, with so many alternatives."""
        ...

    def ranked(self, rows: R, draws: Sequence[Draw], count: int) -> list[list[int]]:
        """For each row up to `count` tokens, the likeliest first, to be its sample, as far as can be told
        quickly."""
        ...

    def confidences(self, rows: R, tokens: Sequence[int]) -> list[float]:
        """For each row the probability of its token, at temperature 1 and unfiltered."""
        ...
