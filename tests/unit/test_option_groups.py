"""Options by groups: how a command comes by them, and what they make."""

import inspect
from dataclasses import dataclass, field

import pytest
import typer

from executor.cli import options
from executor.cli.complaint import UsageError
from executor.cli.groups import ModelOptions, RecoveryOptions, SamplingOptions, grouped
from executor.config import Config, Recovery
from executor.errors import InvalidRequest
from executor.sampling import SamplingParams


def test_options_not_given_leave_the_defaults() -> None:
    assert ModelOptions(engine="toy").config() == Config(engine="toy")
    assert RecoveryOptions().recovery() == Recovery()
    assert SamplingOptions(max_tokens=9).params() == SamplingParams(max_tokens=9, temperature=0.0)


def test_options_given_are_taken() -> None:
    model = ModelOptions(engine="toy", target="vocabulary=9", load_timeout=7.0, num_speculative_tokens=3)
    config = model.config(max_sequences=2, recovery=RecoveryOptions(standby=["target"]).recovery())
    assert (config.target, config.timeouts.load) == ("vocabulary=9", 7.0)
    assert (config.num_speculative_tokens, config.max_sequences) == (3, 2)
    assert config.recovery == Recovery(standby=("target",))
    params = SamplingOptions(max_tokens=9, stop=["a", "b"], stop_token_id=[1, 2], top_k=0, seed=4).params()
    assert params == SamplingParams(
        max_tokens=9, temperature=0.0, stop=("a", "b"), stop_token_ids=(1, 2), top_k=0, seed=4
    )


def test_what_a_command_fixes_is_none_of_its_options() -> None:
    @dataclass(frozen=True, kw_only=True)
    class OnCpu(ModelOptions):
        device: str = field(init=False, default="cpu")
        threads: options.Threads = 3

    seen: list[tuple[int, ModelOptions]] = []

    @grouped
    def measure(model: OnCpu, *, repeat: int = 1) -> None:
        """Of its own."""
        seen.append((repeat, model))

    names = list(inspect.signature(measure).parameters)
    assert (measure.__name__, measure.__doc__, names[-1]) == ("measure", "Of its own.", "repeat")
    assert "threads" in names
    assert not {"model", "device"} & set(names)
    app = typer.Typer()
    app.command()(measure)
    run = typer.main.get_command(app).main
    run(["--engine", "toy", "--repeat", "2"], standalone_mode=False)
    run(["--engine", "toy", "--threads", "5"], standalone_mode=False)
    assert seen == [(2, OnCpu(engine="toy")), (1, OnCpu(engine="toy", threads=5))]
    assert seen[0][1].config().device == "cpu"
    with pytest.raises(UsageError, match="No such option: --device"):
        run(["--device", "cuda"], standalone_mode=False)


@pytest.mark.parametrize("speculator", ["off", "ngram", "agree=1"])
def test_options_of_drafting_go_with_every_speculator(speculator: str) -> None:
    model = ModelOptions(engine="toy", speculator=speculator, num_speculative_tokens=4, draft_timeout=1.5)
    config = model.config()
    assert (config.speculator, config.num_speculative_tokens, config.timeouts.draft) == (speculator, 4, 1.5)


def test_text_that_is_no_text_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="--stop is not valid UTF-8"):
        SamplingOptions(stop=["\udcff"]).params()
