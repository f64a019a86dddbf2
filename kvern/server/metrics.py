"""Prometheus metrics. docs/metrics.md defines each one by a formula.

Two sources: the requests, observed here as they come and end, each exactly once; and the engine's own totals
(EngineStats after the latest step), which are only read when somebody scrapes. A request here is one completion: a
call with two prompts and n=3 is six.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from kvern.engine.messages import EngineStats
from kvern.outputs import RequestMetrics
from kvern.request import BlockedBy

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)
_TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5, 5.0)
_COUNTS = (0, 1, 2, 4, 8, 16, 32)


class Metrics:
    """stats: gives the engine's state after its latest step."""

    def __init__(self, stats: Callable[[], EngineStats]) -> None:
        disable_created_metrics()  # type: ignore[no-untyped-call]  # one series per counter, of no use here
        self.registry = CollectorRegistry()
        self.registry.register(_EngineCollector(stats))
        self.prompt_tokens = self._counter("kvern_prompt_tokens_total", "tokens of admitted prompts")
        self.generation_tokens = self._counter("kvern_generation_tokens_total", "tokens delivered to clients")
        self.success = self._counter("kvern_request_success_total", "completions that ended well", "finish_reason")
        for reason in ("stop", "length"):
            self.success.labels(reason)
        self.aborted = self._counter("kvern_requests_aborted_total", "completions ended by their client or by shutdown")
        self.failed = self._counter("kvern_requests_failed_total", "completions that ended with an error")
        self.rejected = self._counter("kvern_requests_rejected_total", "calls refused before admission", "status")
        self.time_to_first_token = self._histogram(
            "kvern_time_to_first_token_seconds", "arrival to first token", _SECONDS
        )
        self.time_per_output_token = self._histogram(
            "kvern_time_per_output_token_seconds", "mean time between tokens after the first", _TOKEN_SECONDS
        )
        self.latency = self._histogram("kvern_e2e_request_latency_seconds", "arrival to end", _SECONDS)
        self.queue_time = self._histogram("kvern_request_queue_time_seconds", "arrival to first scheduled", _SECONDS)
        self.preemptions = self._histogram("kvern_request_preemptions", "preemptions of one completion", _COUNTS)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(name, text, labels, registry=self.registry)

    def _histogram(self, name: str, text: str, buckets: Iterable[float]) -> Histogram:
        return Histogram(name, text, buckets=tuple(buckets), registry=self.registry)

    def completion_ended(self, finish_reason: str, num_tokens: int, times: RequestMetrics) -> None:
        """To be called exactly once for every admitted completion.

        The histograms take only those that ended well, so that their counts are equal and a burst of aborts does
        not make the server look fast.
        """
        if finish_reason == "abort":
            self.aborted.inc()
        elif finish_reason == "error":
            self.failed.inc()
        else:
            self.success.labels(finish_reason).inc()
            self._observe(num_tokens, times)

    def _observe(self, num_tokens: int, times: RequestMetrics) -> None:
        start = times.arrival_time
        first, last = times.first_token_time, times.last_token_time
        end = times.finished_time if times.finished_time is not None else last
        if times.first_scheduled_time is not None:
            self.queue_time.observe(times.first_scheduled_time - start)
        if first is not None:
            self.time_to_first_token.observe(first - start)
            if last is not None and num_tokens > 1:
                self.time_per_output_token.observe((last - first) / (num_tokens - 1))
        if end is not None:
            self.latency.observe(end - start)
        self.preemptions.observe(times.num_preemptions)

    def render(self) -> bytes:
        """The text format, version 0.0.4."""
        return generate_latest(self.registry)


class _EngineCollector(Collector):
    """Turns EngineStats into metrics at scrape time: nothing is counted twice and a step pays nothing."""

    def __init__(self, stats: Callable[[], EngineStats]) -> None:
        self._stats = stats

    def collect(self) -> Iterator[Metric]:
        stats = self._stats()
        yield GaugeMetricFamily("kvern_num_requests_running", "completions in the running batch", stats.num_running)
        waiting = GaugeMetricFamily(
            "kvern_num_requests_waiting", "completions that wait, by what they wait for", labels=["reason"]
        )
        for blocked_by in BlockedBy:
            waiting.add_metric([blocked_by.value], stats.waiting_by_reason.get(blocked_by.value, 0))
        yield waiting
        used = _ratio(stats.num_blocks - stats.num_free_blocks, stats.num_blocks)
        yield GaugeMetricFamily("kvern_kv_cache_usage_ratio", "share of the blocks that are held", used)
        yield GaugeMetricFamily("kvern_pinned_blocks", "blocks that pinned prefixes hold", stats.num_pinned_blocks)
        hosted = _ratio(stats.num_host_blocks - stats.num_free_host_blocks, stats.num_host_blocks)
        yield GaugeMetricFamily("kvern_host_cache_usage_ratio", "share of the host's blocks in use", hosted)
        tax = _ratio(stats.recomputed_tokens, stats.scheduled_tokens)
        yield GaugeMetricFamily("kvern_recompute_tax", "recomputed tokens / computed tokens", tax)
        for name, text, value in (
            ("kvern_prefix_cache_queried_tokens", "prompt tokens looked up", stats.prefix_queried_tokens),
            ("kvern_prefix_cache_hit_tokens", "prompt tokens found in the cache", stats.prefix_hit_tokens),
            ("kvern_preemptions", "times a running request lost its place", stats.preemptions),
            ("kvern_recomputed_tokens", "tokens computed again after a preemption", stats.recomputed_tokens),
            ("kvern_drafted_tokens", "tokens proposed and judged in steps", stats.drafted_tokens),
            ("kvern_accepted_tokens", "drafted tokens that were right", stats.accepted_tokens),
            ("kvern_swapped_out_blocks", "blocks moved to the host", stats.swapped_out_blocks),
            ("kvern_swapped_in_blocks", "blocks moved back from the host", stats.swapped_in_blocks),
            ("kvern_policy_errors", "failures of the scheduling policy", stats.policy_errors),
            ("kvern_policy_changes", "times another policy was set", stats.policy_changes),
            ("kvern_steps", "steps of the engine", stats.steps),
            ("kvern_scheduled_tokens", "tokens computed in steps", stats.scheduled_tokens),
        ):  # fmt: skip
            yield CounterMetricFamily(name, text, value)


def _ratio(part: int, whole: int) -> float:
    return part / whole if whole else 0.0
