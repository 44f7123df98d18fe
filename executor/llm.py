"""The executor as a Python object: prompts in, completions out. Holds one coordinator from start to close."""

from __future__ import annotations

import atexit
import itertools
import logging
import secrets
import sys
import threading
from contextlib import contextmanager
from dataclasses import replace
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any

from executor.config import Config, Timeouts, check_seconds
from executor.control import ControlServer
from executor.controller import Controller
from executor.coordinator import Coordinator
from executor.errors import Closed, InvalidConfig, InvalidRequest, LaneFailed, SpeclaneError
from executor.events import record
from executor.model import check_prompt, prepare, speculator_spec
from executor.request import Completion, Request
from executor.sampling import SamplingParams
from executor.status import observe
from executor.stream import Stream
from executor.text import TextStream
from executor.trace import Trace
from ipc.messages import ConstraintSpec, SamplingSpec

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from pathlib import Path
    from types import TracebackType

    from executor.model import ModelText
    from executor.request import Delta, Outputs
    from executor.status import Status

log = logging.getLogger("speclane")


class LLM:
    """`with LLM(target="smollm2-135m", speculator="cascade") as llm: llm.generate(["Once upon"])`.

    Options are those of executor.config.Config. Nothing is loaded before `start`, which the first use calls.
    Thread-safe.
    """

    def __init__(self, config: Config | None = None, **options: Any) -> None:
        """Finds, and if need be fetches, the checkpoints. Raises InvalidConfig."""
        if config is not None and options:
            raise TypeError("pass a Config or options, not both")
        self.config = config or Config(**options)
        self._prepared = prepare(self.config, log.info)
        self._text = self._prepared.text
        self._coordinator: Coordinator | None = None
        self._numbers = itertools.count()
        self._closed = False
        self._lock = threading.Lock()  # guards the making of the coordinator
        self._control: ControlServer | None = None
        self._speculation = self.config.speculator
        self._one_swap = threading.Lock()
        self.trace: Trace | None = None
        """What lanes did when. One that is put here before `start` is filled, also without a file."""

    # ------------------------------------------------------------ life

    def start(self) -> None:
        """Start the lanes and wait until they serve. Raises LaneFailed. Does nothing the second time."""
        config = self.config
        with self._lock:
            if self._closed:
                raise Closed("the executor was closed; make a new one")
            if self._coordinator is not None:
                return  # whoever made it waits for it; what is submitted until then waits in its inbox
            if self.trace is None and config.trace is not None:
                self.trace = Trace(config.trace)
            self._coordinator = Coordinator(
                self._prepared.specs,
                Controller(config.setting, adapts=config.adapts),
                config.timeouts,
                config.recovery,
                self._prepared.max_model_len,
                config.memory,
                config.lanes,
                config.max_verify_tokens,
                config.placements,
                config.transport_policy,
                config.attach_policy,
                self.trace,
            )
            log.info("layout: %s", config.layout)
            self._control = self._listen(self._coordinator.directory)
        atexit.register(self.close)
        try:
            self._coordinator.start()
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Stop the workers and answer all that is open with Closed. Idempotent."""
        with self._lock:
            self._closed = True
        if self._coordinator is not None:
            self._coordinator.close()
        if self._control is not None:
            self._control.close()
        atexit.unregister(self.close)

    def __enter__(self) -> LLM:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def coordinator(self) -> Coordinator:
        """For those who watch: lanes and statistics. Raises Closed before `start`."""
        if self._coordinator is None:
            raise Closed("the executor has not been started")
        return self._coordinator

    @property
    def max_model_len(self) -> int:
        """Longest sequence in tokens, prompt included; the target may lower it when it starts."""
        return (self._coordinator or self._prepared).max_model_len

    @property
    def target_model(self) -> str:
        """The target's checkpoint directory, wherever its name led; a toy's parameters for a toy."""
        return self._prepared.specs[0].model

    @property
    def text(self) -> ModelText:
        """The model's own text: tokens, their bytes, its template."""
        return self._text

    @property
    def vocabulary_size(self) -> int:
        """Number of token ids, padding rows included."""
        return self._text.vocabulary_size

    def status(self) -> Status:
        """Health, lanes and totals. Raises Closed before `start`."""
        return observe(self.coordinator, self.speculation)

    # ------------------------------------------------------------ another speculator

    @property
    def speculation(self) -> str:
        """What drafts now: `off`, `ngram` or a model, as it was named."""
        return self._speculation

    def swap_speculator(self, model: str, timeout: float | None = None) -> None:
        """Go on with another speculator: `off`, `ngram` or a model. It loads while the present one serves.

        Texts do not change. timeout: seconds that it may take to serve, once its checkpoint is found; None is
        the load timeout. Swaps are made one after the other. Raises InvalidConfig (`model`, `timeout`),
        LaneFailed if it does not come to serve, Closed; then all is as before.
        """
        if not isinstance(model, str) or not model:
            raise InvalidConfig("model", f"model must be off, ngram or a model, got {model!r}; try ngram")
        config = replace(self.config, speculator=model)
        seconds = self.config.timeouts.load if timeout is None else timeout
        check_seconds("timeout", seconds, works=Timeouts().load)
        self.start()
        with self._one_swap:
            spec = speculator_spec(config, self._prepared.specs[0], log.info, field="model")
            swap = self.coordinator.swap_speculator(spec)
            try:
                swap.result(seconds)
            except TimeoutError:
                if swap.cancel():
                    raise LaneFailed("speculator", f"{model} does not serve after {seconds:g} s") from None
                swap.result()  # it came at the last moment
            self._speculation = config.speculator

    # ------------------------------------------------------------ requests

    def encode(self, prompt: str | Sequence[int], params: SamplingParams | None = None) -> list[int]:
        """Token ids of a prompt that can be run as asked. Raises InvalidRequest. Starts nothing."""
        tokens = self._text.encode(prompt) if isinstance(prompt, str) else list(prompt)
        return self._checked(tokens, params or SamplingParams())

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        params: SamplingParams | None = None,
        *,
        tools: Sequence[Mapping[str, Any]] = (),
    ) -> list[int]:
        """The same for a chat: a list of {"role": …, "content": …}, through the model's own template.

        tools: functions that the template may tell the model of.
        """
        if not any(message.get("content") for message in messages):
            raise InvalidRequest("prompt", "the prompt is empty; give at least one token of text")
        return self._checked(self._text.encode_chat(messages, tools), params or SamplingParams())

    def stream(self, prompt: str | Sequence[int], params: SamplingParams | None = None) -> Stream:
        """Run one prompt, text or token ids. Raises InvalidRequest."""
        params = params or SamplingParams()
        return self._stream(self.encode(prompt, params), params)

    def submit(self, tokens: Sequence[int], params: SamplingParams, outputs: Outputs) -> Callable[[], None]:
        """Run a prompt that `encode` has passed, for those who wait otherwise than by a thread.

        Deltas, and at the end a Completion or an error, go to `outputs`. Returns what cancels it, at any time
        and from any thread.
        """
        request = self._request(tokens, params, outputs)
        self.start()
        coordinator = self.coordinator
        coordinator.submit(request)
        return lambda: coordinator.cancel(request)

    def generate(
        self,
        prompts: str | Sequence[str] | Sequence[Sequence[int]],
        params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        progress: bool = True,
    ) -> list[Completion]:
        """Completions in the order of the prompts, each text or token ids.

        params: one for all, or one each. progress: show a bar on stderr if that is a terminal.
        Raises InvalidRequest before anything runs, or what a request failed of.
        """
        several: Sequence[str | Sequence[int]] = [prompts] if isinstance(prompts, str) else prompts
        each = params if isinstance(params, list | tuple) else [params or SamplingParams()] * len(several)
        if len(each) != len(several):
            raise InvalidRequest(
                "params", f"{len(each)} params for {len(several)} prompts; give one, or one each"
            )
        encoded = [(self.encode(prompt, its), its) for prompt, its in zip(several, each, strict=True)]
        streams: list[Stream] = []
        try:
            for tokens, its in encoded:
                streams.append(self._stream(tokens, its))
            with _bar(len(streams), progress) as advance:
                for stream in streams:
                    for _ in stream:
                        pass
                    advance()
        finally:
            for stream in streams:
                stream.close()
        return [stream.completion for stream in streams]

    def chat(
        self,
        messages: Sequence[Mapping[str, str]],
        params: SamplingParams | None = None,
    ) -> Completion:
        """The answer to a chat, through the model's own template."""
        params = params or SamplingParams()
        return self.generate([self.encode_chat(messages, params)], params, progress=False)[0]

    # ------------------------------------------------------------ inside

    def _listen(self, directory: Path) -> ControlServer | None:
        try:
            return ControlServer(directory, self)
        except (OSError, RuntimeError) as error:  # it serves without being controlled
            record(logging.WARNING, "control_unavailable", reason=error)
            return None

    def _stream(self, tokens: list[int], params: SamplingParams) -> Stream:
        """Run a prompt that `encode` has passed."""
        outputs: SimpleQueue[Delta | Completion | SpeclaneError] = SimpleQueue()
        return Stream(outputs, self.submit(tokens, params, outputs))

    def _checked(self, tokens: list[int], params: SamplingParams) -> list[int]:
        check_prompt(tokens, self._text.vocabulary_size, self._prepared.max_model_len)
        if self._coordinator is not None:
            self._coordinator.check(len(tokens), params.max_tokens)
        last = self._text.vocabulary_size - 1
        for name in ("stop_token_ids", "allowed_token_ids", "logit_bias"):
            for token in getattr(params, name) or ():
                if token > last:
                    raise InvalidRequest(name, f"token {token} is not in the vocabulary, 0 to {last}")
        if params.grammar is not None and self.config.engine == "toy":
            raise InvalidRequest("grammar", "grammar: a toy's tokens are no text; use --engine native")
        if params.grammar is not None and not (self._text.eos_token_ids or params.stop_token_ids):
            raise InvalidRequest(
                "grammar", "grammar: the model has no end-of-text token; give stop_token_ids"
            )
        return tokens

    def _constraints(self, params: SamplingParams, stops: set[int]) -> ConstraintSpec | None:
        if not params.constrained:
            return None
        words = [self._text.encode_part(text) for word in params.bad_words for text in (word, f" {word}")]
        return ConstraintSpec(
            presence_penalty=float(params.presence_penalty),
            frequency_penalty=float(params.frequency_penalty),
            repetition_penalty=float(params.repetition_penalty),
            logit_bias=tuple((token, float(bias)) for token, bias in sorted(params.logit_bias.items())),
            allowed_token_ids=params.allowed_token_ids or (),
            bad_words=tuple(tuple(word) for word in words if word),
            grammar=params.grammar.compiled if params.grammar is not None else "",
            end_token_ids=tuple(sorted(stops)),
        )

    def _request(self, tokens: Sequence[int], params: SamplingParams, outputs: Outputs) -> Request:
        stops = set(params.stop_token_ids)
        if not params.ignore_eos or params.grammar is not None:
            stops |= self._text.eos_token_ids
        spec = SamplingSpec(
            temperature=float(params.temperature),
            top_p=float(params.top_p),
            top_k=params.top_k,
            min_p=float(params.min_p),
            seed=params.seed if params.seed is not None else secrets.randbits(63),
            min_tokens=params.min_tokens,
            stop_token_ids=tuple(sorted(stops)),
            logprobs=params.logprobs,
            constraints=self._constraints(params, stops),
            prompt_logprobs=params.prompt_logprobs,
        )
        return Request(
            seq=next(self._numbers),
            gen=0,
            prompt_len=len(tokens),
            tokens=list(tokens),  # it grows
            params=params,
            spec=spec,
            text=TextStream(self._text.detokenizer(), params.stop),
            outputs=outputs,
        )


@contextmanager
def _bar(total: int, wanted: bool) -> Iterator[Callable[[], None]]:
    if not wanted or total < 2 or not sys.stderr.isatty():
        yield lambda: None
        return

    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    with Progress(console=console, transient=True) as bar:
        task = bar.add_task("prompts", total=total)
        yield lambda: bar.advance(task)
