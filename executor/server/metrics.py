"""What Prometheus is told: vLLM's names, so that its dashboards and load tools work, and our own.

Latencies are observed as requests go by; everything else is read from the coordinator when it is scraped, so
that a round pays nothing for it.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, disable_created_metrics
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
)
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

from executor.request import Acceptance
from executor.server.latency import Distribution, add

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from prometheus_client.core import Metric

    from executor.lane import Lane
    from executor.llm import LLM

    _ByLane = dict[str, tuple[str, Callable[[Lane], float]]]

CONTENT_TYPE = CONTENT_TYPE_LATEST
_LABELS = ("model_name", "engine")
_FIRST_TOKEN = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1, 2.5, 5, 10, 20, 40, 80)
_BETWEEN = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2.5, 5, 10)
_WHOLE = (0.01, 0.05, 0.1, 0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 60, 120, 300)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000)


class Metrics:
    def __init__(self, llm: LLM, model_name: str) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self._registry = CollectorRegistry()
        self._registry.register(_State(llm, model_name))
        self._values = (model_name, "0")

        self.first_token = Distribution(
            "vllm:time_to_first_token_seconds", "From request to first token.", _FIRST_TOKEN
        )
        self.between_tokens = Distribution(
            "vllm:inter_token_latency_seconds", "Between tokens, as the executor gives them out.", _BETWEEN
        )
        self.whole = Distribution("vllm:e2e_request_latency_seconds", "From request to its end.", _WHOLE)
        self.prompt_length = Distribution("vllm:request_prompt_tokens", "Tokens of a prompt.", _TOKENS)
        self.length = Distribution("vllm:request_generation_tokens", "Tokens of an answer.", _TOKENS)
        self._registry.register(self)
        self.prompt_tokens = self.tokens = 0
        """Of prompts that have been run, and given out."""
        self._ended = Counter(
            "vllm:request_success",
            "Requests that ended, by reason.",
            (*_LABELS, "finished_reason"),
            registry=self._registry,
        )
        for reason in ("stop", "length", "cancelled", "error"):
            self.ended(reason, 0)

    def watch(self, prompt_tokens: int) -> Watch:
        """To be told of one sequence's progress, from now on."""
        return Watch(self, prompt_tokens)

    def ended(self, reason: str, count: int = 1) -> None:
        self._ended.labels(*self._values, reason).inc(count)

    def collect(self) -> Iterator[Metric]:
        """What was counted as requests went by, when Prometheus asks."""
        for name, text, count in (
            ("vllm:prompt_tokens", "Tokens of prompts.", self.prompt_tokens),
            ("vllm:generation_tokens", "Tokens given out.", self.tokens),
        ):
            family = CounterMetricFamily(name, text, labels=_LABELS)
            family.add_metric(self._values, count)
            yield family
        for each in (self.first_token, self.between_tokens, self.whole, self.prompt_length, self.length):
            yield each.family(_LABELS, self._values)

    def exposition(self) -> bytes:
        return generate_latest(self._registry)


class Watch:
    """One sequence's latencies, in seconds."""

    def __init__(self, metrics: Metrics, prompt_tokens: int) -> None:
        self._metrics = metrics
        self._prompt_tokens = prompt_tokens
        self._tokens = 0
        self._began = self._last = time.perf_counter()

    def added(self, tokens: int) -> None:
        """So many tokens came in one round: the time since the last ones is theirs, in equal parts."""
        now = time.perf_counter()
        metrics = self._metrics
        if self._tokens == 0:
            metrics.first_token.observe(now - self._began)
            metrics.prompt_length.observe(self._prompt_tokens)
            metrics.prompt_tokens += self._prompt_tokens
        else:
            metrics.between_tokens.observe((now - self._last) / max(1, tokens), tokens)
        self._last = now
        self._tokens += tokens
        metrics.tokens += tokens

    def ended(self, reason: str) -> None:
        self._metrics.whole.observe(time.perf_counter() - self._began)
        self._metrics.length.observe(self._tokens)
        self._metrics.ended(reason)


class _State:
    """The coordinator, as it is when somebody asks."""

    def __init__(self, llm: LLM, model_name: str) -> None:
        self._llm = llm
        self._values = (model_name, "0")

    def collect(self) -> Iterator[Metric]:
        yield from self._load()
        yield from self._acceptance()
        yield from self._rounds()
        yield from self._hypotheses()
        yield from self._lanes()
        yield from self._memory()

    # ------------------------------------------------------------ vLLM's

    def _load(self) -> Iterator[Metric]:
        load, memory = self._llm.coordinator.load, self._llm.coordinator.memory
        usage = load.tokens / memory.tokens if memory is not None else 0.0
        yield self._gauge("vllm:num_requests_running", "Sequences that run.", load.running)
        yield self._gauge("vllm:num_requests_waiting", "Sequences that wait for a seat.", load.waiting)
        preempted = self._llm.coordinator.stats.preempted
        yield self._counter("vllm:num_preemptions", "Times that one had to wait for memory.", preempted)
        yield self._gauge(
            "vllm:kv_cache_usage_perc", "Part of the KV that is in use, 0 … 1.", min(1.0, usage)
        )

    def _acceptance(self) -> Iterator[Metric]:
        # A copy, made in one step of the interpreter: the coordinator's thread goes on counting.
        acceptance = Acceptance(dict(self._llm.coordinator.stats.acceptance.outcomes))
        drafted, accepted = acceptance.drafted, acceptance.accepted
        prefix = "vllm:spec_decode_num"
        yield self._counter(f"{prefix}_drafts", "Drafts verified.", drafted[0] if drafted else 0)
        yield self._counter(f"{prefix}_draft_tokens", "Draft tokens verified.", sum(drafted))
        yield self._counter(f"{prefix}_accepted_tokens", "Draft tokens accepted.", sum(accepted))
        by_position = CounterMetricFamily(
            f"{prefix}_accepted_tokens_per_pos",
            "Draft tokens accepted, by position in the draft.",
            labels=(*_LABELS, "position"),
        )
        for position in range(max(len(drafted), self._llm.config.num_speculative_tokens)):
            count = accepted[position] if position < len(accepted) else 0
            by_position.add_metric((*self._values, str(position)), count)
        yield by_position

    # ------------------------------------------------------------ ours

    def _rounds(self) -> Iterator[Metric]:
        stats = self._llm.coordinator.stats
        yield CounterMetricFamily("speclane_rounds", "Rounds.", value=stats.rounds)
        rest = max(0, stats.round_ns - stats.draft_ns - stats.verify_ns)
        yield _labelled(
            CounterMetricFamily(
                "speclane_round_phase_seconds",
                "Time of rounds: the lanes' own, and the rest, which is coordinator and wire.",
                labels=("phase",),
            ),
            {
                "draft": stats.draft_ns / 1e9,
                "verify": stats.verify_ns / 1e9,
                "wire_and_coordinator": rest / 1e9,
            },
        )
        yield _labelled(
            CounterMetricFamily(
                "speclane_lost_drafts", "Drafts that were asked for and not used.", labels=("how",)
            ),
            {
                "missed": stats.missed,
                "invalid": stats.invalid,
                "broken": stats.broken,
                "stale": self._llm.coordinator.stale,
                "spared": stats.spared,
            },
        )
        yield CounterMetricFamily(
            "speclane_quarantined_sequences", "Continued without drafts.", value=stats.quarantined
        )
        k = self._llm.coordinator.controller.current.k if self._llm.speculation != "off" else 0
        yield GaugeMetricFamily("speclane_num_speculative_tokens", "Longest draft, K.", value=k)

    def _hypotheses(self) -> Iterator[Metric]:
        stats = self._llm.coordinator.stats
        hits, asked = stats.hits, stats.hits + stats.misses
        yield GaugeMetricFamily("speclane_hypotheses", "Prepared per sequence, N.", value=stats.hypotheses)
        yield CounterMetricFamily("speclane_hypothesis_hits", "Verdicts that one foresaw.", value=hits)
        yield CounterMetricFamily(
            "speclane_hypothesis_misses", "Verdicts that none foresaw.", value=stats.misses
        )
        yield GaugeMetricFamily(
            "speclane_hypothesis_hit_rate", "Hits among them, 0 … 1.", value=hits / asked if asked else 0.0
        )

    def _lanes(self) -> Iterator[Metric]:
        coordinator = self._llm.coordinator
        lanes = coordinator.lanes
        restarts, deaths = coordinator.restarts, coordinator.deaths
        now = time.monotonic()
        gauges: _ByLane = {
            "lane_up": ("Whether it serves.", lambda lane: lane.serving),
            "lane_progress_age_seconds": ("Since it was last heard of.", lambda lane: now - lane.heard_at),
        }
        counters: _ByLane = {
            "lane_restarts": ("How often it was started again.", lambda lane: restarts.get(lane.name, 0)),
            "lane_deaths": ("How often it died while it served.", lambda lane: deaths.get(lane.name, 0)),
            "lane_busy_seconds": ("Computed by this incarnation.", lambda lane: lane.busy_ns / 1e9),
            "lane_orders": ("That this incarnation had to answer.", lambda lane: lane.orders),
        }
        for family, table in ((GaugeMetricFamily, gauges), (CounterMetricFamily, counters)):
            for name, (text, of) in table.items():
                metric = family(f"speclane_{name}", text, labels=("lane",))
                yield _labelled(metric, {lane.name: float(of(lane)) for lane in lanes})
        info = InfoMetricFamily("speclane_transport", "How tensors go from lane to lane.")
        info.add_metric((), coordinator.transport._asdict())
        yield info
        yield _labelled(
            GaugeMetricFamily(
                "speclane_slots", "Of shared tensor memory, by who needs them.", labels=("state",)
            ),
            {state: float(count) for state, count in coordinator.slots.items()},
        )
        times = coordinator.lane_times
        bubbles = CounterMetricFamily(
            "speclane_lane_bubble_seconds", "Rounds ran, and it had nothing to do.", labels=("lane",)
        )
        yield _labelled(bubbles, {lane.name: times.bubble_ns[lane.name] / 1e9 for lane in lanes})
        wire = HistogramMetricFamily(
            "speclane_wire_latency_seconds", "From order to reply, less what it computed.", labels=("lane",)
        )
        for lane in lanes:
            add(wire, (lane.name,), times.wire[lane.name])
        yield wire
        states = ("starting", "healthy", "degraded", "recovering", "failed")
        yield _labelled(
            GaugeMetricFamily("speclane_health", "1 for the present state.", labels=("state",)),
            {state: float(state == coordinator.health.state) for state in states},
        )

    def _memory(self) -> Iterator[Metric]:
        memory = self._llm.coordinator.memory
        if memory is None:
            return
        family = GaugeMetricFamily("speclane_lane_memory_bytes", "Planned.", labels=("lane", "kind"))
        for lane in memory.lanes:
            profile = lane.profile
            for kind, size in (
                ("process", profile.process),
                ("weights", profile.weights),
                ("activations", profile.activations),
                ("workspace", profile.workspace),
                ("graphs", profile.graphs),
                ("kv", lane.kv),
            ):
                family.add_metric((lane.name, kind), size)
        yield family

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(name, text, labels=_LABELS)
        family.add_metric(self._values, value)
        return family

    def _counter(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(name, text, labels=_LABELS)
        family.add_metric(self._values, value)
        return family


def _labelled(family: CounterMetricFamily | GaugeMetricFamily, values: Mapping[str, float]) -> Metric:
    """One sample for each value of the only label."""
    for label, value in values.items():
        family.add_metric((label,), value)
    return family
