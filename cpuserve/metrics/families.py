"""The metric families of a model, called as in vLLM, or with the prefix "cpuserve:"."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from inspect import signature

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.openmetrics.exposition import (
    CONTENT_TYPE_LATEST,
)
from prometheus_client.openmetrics.exposition import (
    generate_latest as open_text,
)
from prometheus_client.registry import Collector
from prometheus_client.samples import Exemplar

from cpuserve.metrics.figures import CpuSample, ReplicaFigures, StepStats
from cpuserve.metrics.histogram import BucketHistogram
from cpuserve.metrics.server import ServerMetrics

# (metric name, field of StepStats, help text)
ENGINE_COUNTERS = (
    ("num_preemptions", "preemptions", "Sequences preempted."),
    ("prefix_cache_queries", "prefix_queries", "Tokens looked up in the prefix cache."),
    ("prefix_cache_hits", "prefix_hits", "Tokens found in the prefix cache."),
)
# Counters of speculative decoding: (metric name, field of StepStats, help text)
DRAFT_COUNTERS = (
    ("spec_decode_num_drafts", "drafts", "Times that a sequence got draft tokens."),
    ("spec_decode_num_draft_tokens", "draft_tokens", "Draft tokens verified."),
    ("spec_decode_num_accepted_tokens", "accepted_tokens", "Draft tokens that the model accepted."),
)
# Counters of pictures: (metric name, field of StepStats, help text)
PICTURE_COUNTERS = (
    ("mm_cache_queries", "media_queries", "Pictures whose encoded rows a prompt needed."),
    ("mm_cache_hits", "media_hits", "Pictures that were encoded already."),
)
ENCODE_COUNTERS = (("encode_seconds", "encode_s", "Seconds spent on encoding pictures."),)
EXPERT_COUNTERS = (
    ("expert_hits", "expert_hits", "Matrices of experts that a step found in memory."),
    ("expert_misses", "expert_misses", "Matrices of experts that a step had to wait for."),
    ("expert_read_bytes", "expert_bytes", "Bytes of experts read from the disk."),
    (
        "expert_wait_seconds",
        "expert_wait_s",
        "Time that compute threads waited for experts, summed over threads.",
    ),
    ("expert_read_errors", "expert_errors", "Experts that could not be read."),
    ("expert_guesses", "expert_guesses", "Matrices of experts read before their router chose."),
    ("expert_right_guesses", "expert_right_guesses", "Matrices read early that were then used."),
)
# (metric name, attribute of ServerMetrics, help text)
SEQUENCE_COUNTERS = (
    ("prompt_tokens", "prompt_tokens", "Prompt tokens of sequences with a first token."),
    ("generation_tokens", "generation_tokens", "Tokens generated."),
    ("prompt_tokens_cached", "cached_tokens", "Prompt tokens found in the prefix cache."),
)
# (metric name, help text) for the metrics of each caller, which is an API key or an address.
CALLER_COUNTERS = (
    ("requests", "Finished sequences of each caller."),
    ("prompt_tokens", "Prompt tokens of the finished sequences of each caller."),
    ("generation_tokens", "Tokens generated for each caller."),
)
# (metric name, attribute of ServerMetrics, help text)
HISTOGRAMS = (
    ("time_to_first_token_seconds", "ttft", "From the arrival of a request to its first token."),
    ("inter_token_latency_seconds", "itl", "Time between two outputs of a request."),
    # The name in vLLM until 0.11, which older dashboards still use.
    ("time_per_output_token_seconds", "itl", "Time between two outputs of a request."),
    (
        "request_time_per_output_token_seconds",
        "per_token",
        "Mean time between the output tokens of a request.",
    ),
    ("e2e_request_latency_seconds", "e2e", "From arrival to last token."),
    ("request_prefill_time_seconds", "prefill", "From first step to first token."),
    ("request_decode_time_seconds", "decode", "From first token to last token."),
    ("request_inference_time_seconds", "inference", "From first step to last token."),
    ("request_prompt_tokens", "request_prompt", "Prompt tokens per request."),
    ("request_generation_tokens", "request_generation", "Generated tokens per request."),
    (
        "request_max_num_generation_tokens",
        "request_max_tokens",
        "Largest number of generated tokens of a request's sequences.",
    ),
    ("request_params_max_tokens", "params_max_tokens", "max_tokens of requests."),
    ("request_params_n", "params_n", "n of requests."),
    ("iteration_tokens_total", "iteration", "Tokens per engine step."),
)
QUEUE_TEXT = (
    "From arrival to first step, once for each request; "
    "the label `cause` says for what it waited longest."
)


# (label values, figures) of an engine
Engine = tuple[list[str], StepStats]


def server_families(metrics: ServerMetrics) -> Iterable[Metric]:
    """Yield all metric families of a model with their samples."""
    names = list(metrics.labels)
    replicas = list(metrics.replicas())
    engines = _engines(metrics, replicas)
    yield from _gauges(metrics, engines)
    yield from _replicas(metrics.labels["model_name"], names, replicas)
    cache = {key: str(value) for key, value in metrics.cache.items()}
    text = "Configuration of the KV cache."
    yield _one(GaugeMetricFamily, "vllm:cache_config_info", text, {**metrics.labels, **cache}, 1)
    for name, attribute, text in SEQUENCE_COUNTERS:
        value = getattr(metrics, attribute)
        yield _one(CounterMetricFamily, f"vllm:{name}", text, metrics.labels, value)
    yield from _step_counters(ENGINE_COUNTERS, names, engines)
    yield from _reasons(metrics)
    yield from _histograms(metrics)
    if metrics.callers:
        yield from _callers(metrics)
    if metrics.tiers:
        yield from _tiers(metrics, engines)
    if metrics.drafts:
        yield from _step_counters(DRAFT_COUNTERS, names, engines)
    if metrics.media:
        yield from _step_counters(PICTURE_COUNTERS, names, engines)
        yield from _step_counters(ENCODE_COUNTERS, names, engines, "cpuserve")
    if metrics.experts:
        yield from _step_counters(EXPERT_COUNTERS, names, engines, "cpuserve")
    if metrics.cpu is not None:
        yield from _cpu(metrics.cpu(), metrics.labels)


def _engines(metrics: ServerMetrics, replicas: list[ReplicaFigures]) -> list[Engine]:
    if not metrics.several:
        return [(list(metrics.labels.values()), metrics.stats())]
    model = metrics.labels["model_name"]
    return [([model, str(i)], each.stats) for i, each in enumerate(replicas)]


def _one(
    kind: type[GaugeMetricFamily | CounterMetricFamily],
    name: str,
    text: str,
    labels: Mapping[str, str],
    value: float,
) -> Metric:
    """Return a metric family with one sample."""
    family = kind(name, text, labels=list(labels))
    family.add_metric(list(labels.values()), value)
    return family


def _gauges(metrics: ServerMetrics, engines: list[Engine]) -> Iterable[Metric]:
    families = [
        GaugeMetricFamily(f"vllm:{name}", text, labels=list(metrics.labels))
        for name, text in (
            ("num_requests_running", "Requests in the running batch."),
            ("num_requests_waiting", "Requests waiting to be scheduled."),
            ("kv_cache_usage_perc", "KV cache in use, 1 is full."),
        )
    ]
    for labels, stats in engines:
        # With several engines, the figures of each are already limited to its own sequences.
        own = (stats.running, stats.waiting, stats.kv_usage)
        figures = own if metrics.several else metrics.gauges()
        for family, value in zip(families, figures, strict=True):
            family.add_metric(labels, value)
    yield from families


def _replicas(model: str, names: list[str], replicas: list[ReplicaFigures]) -> Iterable[Metric]:
    """Yield which engines serve, and how often each was restarted."""
    if not replicas:
        return
    serves = GaugeMetricFamily("cpuserve:replica_up", "1 while the engine serves.", labels=names)
    restarts = CounterMetricFamily(
        "cpuserve:replica_restarts", "Restarts after the engine died.", labels=names
    )
    for i, replica in enumerate(replicas):
        serves.add_metric([model, str(i)], replica.serves)
        restarts.add_metric([model, str(i)], replica.restarts)
    yield from (serves, restarts)


def _step_counters(
    counters: Iterable[tuple[str, str, str]],
    names: list[str],
    engines: list[Engine],
    prefix: str = "vllm",
) -> Iterable[Metric]:
    """Yield counters of StepStats for each engine."""
    for name, attribute, text in counters:
        family = CounterMetricFamily(f"{prefix}:{name}", text, labels=names)
        for labels, stats in engines:
            family.add_metric(labels, getattr(stats, attribute))
        yield family


def _reasons(metrics: ServerMetrics) -> Iterable[Metric]:
    """Yield misses of the prefix cache, if any, tokens computed ahead, and finished sequences."""
    names, values = list(metrics.labels), list(metrics.labels.values())
    misses = CounterMetricFamily(
        "cpuserve:prompt_cache_misses",
        "Prompts that share less than expected with an earlier one of their caller.",
        labels=[*names, "reason"],
    )
    for reason, count in metrics.cache_misses.items():
        misses.add_metric([*values, reason], count)
    if metrics.cache_misses:
        yield misses
    ahead = CounterMetricFamily(
        "cpuserve:prompt_tokens_ahead",
        "Prompt tokens of next turns of conversations that were computed while no request ran.",
        labels=names,
    )
    ahead.add_metric(values, metrics.computed_ahead)
    yield ahead
    success = CounterMetricFamily(
        "vllm:request_success", "Finished requests by reason.", labels=[*names, "finished_reason"]
    )
    for reason, count in metrics.finished.items():
        success.add_metric([*values, reason], count)
    yield success


def _histograms(metrics: ServerMetrics) -> Iterable[Metric]:
    for name, attribute, text in HISTOGRAMS:
        histogram: BucketHistogram = getattr(metrics, attribute)
        family = HistogramMetricFamily(f"vllm:{name}", text, labels=list(metrics.labels))
        family.add_metric(list(metrics.labels.values()), _buckets(histogram), histogram.sum)
        yield family
    names = [*metrics.labels, "cause"]
    family = HistogramMetricFamily("vllm:request_queue_time_seconds", QUEUE_TEXT, labels=names)
    for cause, histogram in metrics.queue.items():
        labels = [*metrics.labels.values(), cause]
        family.add_metric(labels, _buckets(histogram), histogram.sum)
    yield family


def _buckets(
    histogram: BucketHistogram,
) -> Sequence[tuple[str, float] | tuple[str, float, Exemplar]]:
    """Return (upper bound, number of values up to it, an exemplar if there is one) of buckets."""
    since = time.time() - time.monotonic()
    return [
        (bound, count)
        if example is None
        else (bound, count, Exemplar(dict(example[0]), example[1], since + example[2]))
        for (bound, count), example in zip(histogram.cumulative(), histogram.examples, strict=True)
    ]


def _callers(metrics: ServerMetrics) -> Iterable[Metric]:
    """Yield the figures of each caller that has sent requests."""
    for i, (name, text) in enumerate(CALLER_COUNTERS):
        names = [*metrics.labels, "caller"]
        family = CounterMetricFamily(f"cpuserve:caller_{name}", text, labels=names)
        for caller, totals in metrics.callers.items():
            family.add_metric([*metrics.labels.values(), caller], totals[i])
        yield family


def _tiers(metrics: ServerMetrics, engines: list[Engine]) -> Iterable[Metric]:
    """Yield the size and the hits of the KV cache's offload tiers."""
    names = [*metrics.labels, "tier"]
    blocks = GaugeMetricFamily("cpuserve:kv_tier_blocks", "KV blocks in a tier.", labels=names)
    size = GaugeMetricFamily("cpuserve:kv_tier_bytes", "Bytes in a tier.", labels=names)
    hits = CounterMetricFamily(
        "cpuserve:kv_tier_hits", "KV blocks restored instead of recomputed.", labels=names
    )
    for labels, stats in engines:
        for name in metrics.tiers:
            tier = stats.tiers.get(name)
            for family, attribute in ((blocks, "blocks"), (size, "bytes"), (hits, "hits")):
                family.add_metric([*labels, name], getattr(tier, attribute, 0))
    yield from (blocks, size, hits)


def _cpu(cpu: CpuSample, labels: Mapping[str, str]) -> Iterable[Metric]:
    """Yield CPU metrics; rate(bytes) / rate(busy) / roofline is the share of the roofline."""
    for name, text, value in (
        ("cpu_threads", "Compute threads.", cpu.threads),
        ("cpu_quota", "CPU quota of the control group, in CPUs.", cpu.quota),
        (
            "cpu_roofline_bytes_per_second",
            "Memory bandwidth, measured at the start.",
            cpu.roofline_bytes_per_s or None,
        ),
    ):
        if value is not None:
            yield _one(GaugeMetricFamily, f"cpuserve:{name}", text, labels, value)
    yield _one(
        GaugeMetricFamily,
        "cpuserve:numa_binding",
        "How memory is placed on NUMA nodes: bind, first_touch, interleave, none (one rank).",
        {"mode": cpu.numa_binding, **labels},
        1,
    )
    for name, text, value in (
        ("cpu_busy_seconds", "Time spent in engine steps.", cpu.busy_s),
        ("cpu_weight_bytes_read", "Bytes of weights read by steps.", cpu.weight_bytes),
        (
            "cpu_barrier_wait_seconds",
            "Time that threads waited for others in engine steps, summed over the threads.",
            cpu.barrier_wait_s,
        ),
        ("cpu_nr_throttled", "Periods throttled by the CPU quota.", cpu.throttled_periods),
        ("cpu_throttled_seconds", "Time throttled by the CPU quota.", cpu.throttled_s),
    ):
        if value is not None:
            yield _one(CounterMetricFamily, f"cpuserve:{name}", text, labels, value)


CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
OPEN_METRICS, OPEN_CONTENT_TYPE = "application/openmetrics-text", CONTENT_TYPE_LATEST
# Newer versions of the library write the colon in a name as "_", unless all characters may stay.
_AS_THEY_ARE = {"escaping": "allow-utf-8"} if "escaping" in signature(open_text).parameters else {}
_open_text: Callable[..., bytes] = partial(open_text, **_AS_THEY_ARE)
# The most characters of the names and values of an exemplar's labels (OpenMetrics 1.0).
MOST_IN_EXEMPLAR = 128


def exposition(families: Iterable[Metric], *, openmetrics: bool = False) -> bytes:
    """Return metric families in the text format of Prometheus (CONTENT_TYPE).

    Families with the same name become one family with all of their samples, told apart by labels.
    openmetrics: use the format OpenMetrics (OPEN_CONTENT_TYPE), which has exemplars.
    """
    registry = CollectorRegistry()
    registry.register(_Families(families))
    return _open_text(registry) if openmetrics else generate_latest(registry)


def wants_openmetrics(accept: str) -> bool:
    """Return whether an Accept header lists OpenMetrics, and not with less weight than text."""
    weights: dict[str, float] = {}
    for item in accept.split(","):
        name, *parameters = (part.strip() for part in item.lower().split(";"))
        given = [each[2:] for each in parameters if each.startswith("q=")]
        try:
            weight = float(given[0]) if given else 1.0
        except ValueError:
            weight = 0.0
        weights[name] = max(weight, weights.get(name, 0.0))
    asked = weights.get(OPEN_METRICS, 0.0)
    return asked > 0 and asked >= weights.get("text/plain", 0.0)


def exemplar_labels(request_id: str, trace_id: str = "") -> dict[str, str]:
    """Return the labels that name a request in exemplars: its trace, and its id if it fits.

    trace_id: the trace of the client; "" = the request has none.
    """
    labels = {"trace_id": trace_id} if trace_id else {}
    room = MOST_IN_EXEMPLAR - sum(len(name) + len(value) for name, value in labels.items())
    if len("request_id") + len(request_id) <= room:
        labels["request_id"] = request_id
    return labels


class _Families(Collector):
    """Passes metric families to prometheus-client."""

    def __init__(self, families: Iterable[Metric]) -> None:
        self._families: dict[str, Metric] = {}
        for family in families:
            known = self._families.setdefault(family.name, family)
            if known is not family:
                known.samples.extend(family.samples)

    def collect(self) -> Iterable[Metric]:
        """Return each family once."""
        return self._families.values()

    def describe(self) -> Iterable[Metric]:
        # All metrics are distinct, so there is nothing to check at registration.
        return ()
