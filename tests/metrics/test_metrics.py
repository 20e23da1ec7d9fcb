"""Metrics: exact counts, vLLM's names and buckets, and Prometheus' text format."""

import platform

import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from cpuserve.base.errors import EngineDead
from cpuserve.engine.ipc import Output, Stats, TierStats
from cpuserve.metrics.families import CONTENT_TYPE, exposition, server_families
from cpuserve.metrics.histogram import BucketHistogram, buckets_1_2_5
from cpuserve.metrics.server import ServerMetrics
from tests.api.fakes import Api, events_of, tokenizer

HISTOGRAMS = (
    "time_to_first_token_seconds", "inter_token_latency_seconds", "time_per_output_token_seconds",
    "request_time_per_output_token_seconds", "e2e_request_latency_seconds",
    "request_queue_time_seconds", "request_prefill_time_seconds", "request_decode_time_seconds",
    "request_inference_time_seconds", "request_prompt_tokens", "request_generation_tokens",
    "request_max_num_generation_tokens", "request_params_max_tokens", "request_params_n",
    "iteration_tokens_total",
)  # fmt: skip
COUNTERS = (
    "prompt_tokens", "generation_tokens", "prompt_tokens_cached", "num_preemptions",
    "prefix_cache_queries", "prefix_cache_hits", "request_success",
)  # fmt: skip
GAUGES = (
    "num_requests_running",
    "num_requests_waiting",
    "kv_cache_usage_perc",
    "cache_config_info",
)


def samples(api):
    """Return {(name, finished_reason or le or ""): value} of all samples."""
    out = {}
    for family in text_string_to_metric_families(api.get("/metrics").text):
        for sample in family.samples:
            if "engine" not in sample.labels:  # of the server, not of a model
                continue
            extra = sample.labels.get("finished_reason") or sample.labels.get("le") or ""
            assert sample.labels["model_name"] == "tiny"
            assert sample.labels["engine"] == "0"
            out[sample.name.removeprefix("vllm:"), extra] = sample.value
    return out


def test_every_series_of_vllm_is_there_from_the_start():
    api = Api()
    response = api.get("/metrics")
    assert response.headers["content-type"] == CONTENT_TYPE
    families = {f.name: f for f in text_string_to_metric_families(response.text)}
    for names, kind in ((HISTOGRAMS, "histogram"), (COUNTERS, "counter"), (GAUGES, "gauge")):
        for name in names:
            assert families[f"vllm:{name}"].type == kind
            assert families[f"vllm:{name}"].documentation
    assert families["http_requests"].type == "counter"
    of_models = {name for name in families if name.startswith("vllm:")}
    assert len(of_models) == len(HISTOGRAMS + COUNTERS + GAUGES)
    reasons = {k[1] for k in samples(api) if k[0] == "request_success_total"}
    assert reasons == {"stop", "length", "abort", "error", "repetition"}


def http_answers(api):
    """Return {(handler, method, status, code): value} of http_requests_total."""
    families = {f.name: f for f in text_string_to_metric_families(api.get("/metrics").text)}
    labels = ("handler", "method", "status", "code")
    return {
        tuple(sample.labels[name] for name in labels): sample.value
        for sample in families["http_requests"].samples
        if sample.name == "http_requests_total"
    }


def test_every_answer_is_counted_with_its_status():
    api = Api(api_keys=("key",), key="key")
    assert http_answers(api) == {}
    for _ in range(2):
        assert api.chat(stream=True).status_code == 200
    assert api.chat(temperature=-1).status_code == 400
    assert api.get("/v1/chat/completions/").status_code == 405
    assert api.get("/v1/models/tiny").status_code == 200
    assert api.get("/health").status_code == 200
    for path in ("/a", "/b"):
        assert api.get(path).status_code == 404
    assert api.request("BREW", "/a").status_code == 404
    stranger = Api(api_keys=("key",))
    stranger.app = api.app
    assert stranger.get("/v1/models").status_code == 401
    chat = "/v1/chat/completions"
    assert http_answers(api) == {
        (chat, "POST", "2xx", "200"): 2,
        (chat, "POST", "4xx", "400"): 1,
        (chat, "GET", "4xx", "405"): 1,
        ("/v1/models/{name:path}", "GET", "2xx", "200"): 1,
        ("none", "GET", "4xx", "404"): 2,
        ("none", "other", "4xx", "404"): 1,
        ("/v1/models", "GET", "4xx", "401"): 1,
    }


def test_finished_requests_are_counted_exactly():
    api = Api()
    num_prompt = len(tokenizer().encode("hi"))
    for stream in (False, True, False):
        api.complete("hi", max_tokens=5, stream=stream)
    api.complete("hi", max_tokens=100)
    answer = len(
        api.complete("hi", max_tokens=100, return_token_ids=True).json()["choices"][0]["token_ids"]
    )
    values = samples(api)
    assert values["prompt_tokens_total", ""] == 5 * num_prompt
    assert values["generation_tokens_total", ""] == 15 + 2 * answer
    assert values["request_success_total", "length"] == 3
    assert values["request_success_total", "stop"] == 2
    assert values["time_to_first_token_seconds_count", ""] == 5
    assert values["inter_token_latency_seconds_count", ""] == 3 * 4 + 2 * (answer - 1)
    assert values["time_per_output_token_seconds_count", ""] == 3 * 4 + 2 * (answer - 1)
    assert values["request_time_per_output_token_seconds_count", ""] == 5
    for name in ("e2e_request_latency", "request_queue_time", "request_prefill_time"):
        assert values[f"{name}_seconds_count", ""] == 5
    assert values["request_prompt_tokens_sum", ""] == 5 * num_prompt
    assert values["request_generation_tokens_sum", ""] == 15 + 2 * answer
    assert values["request_params_max_tokens_sum", ""] == 215
    assert values["request_params_n_sum", ""] == 5


def test_each_choice_counts_as_a_request():
    api = Api()
    api.complete(["a", "b"], n=3, max_tokens=2)
    values = samples(api)
    assert values["request_success_total", "length"] == 6
    assert values["generation_tokens_total", ""] == 12
    assert values["request_params_n_bucket", "2.0"] == 0
    assert values["request_params_n_bucket", "5.0"] == 6


@pytest.mark.parametrize("stream", [False, True])
def test_errors_are_counted_and_leave_nothing_running(stream):
    def fail(engine, number, prompt, params):
        yield Output(number, [70])
        yield EngineDead("gone")

    api = Api(fail)
    api.complete("hi", stream=stream)
    values = samples(api)
    assert values["request_success_total", "error"] == 1
    assert api.context.metrics.active == 0


def test_refused_requests_are_not_counted():
    api = Api()
    api.complete("hi", temperature=-1)
    api.complete("hi", model="nope")
    assert not any(value for (name, _), value in samples(api).items() if name.endswith("_count"))


def test_a_stop_string_counts_as_stop():
    api = Api()
    events_of(api.complete("hi", stop="w", stream=True))
    assert samples(api)["request_success_total", "stop"] == 1


def test_scoring_counts_its_prompt_and_no_token():
    api = Api()
    api.complete([5, 6, 7], echo=True, logprobs=0, max_tokens=0)
    values = samples(api)
    assert values["prompt_tokens_total", ""] == 3
    assert values["generation_tokens_total", ""] == 0
    assert values["time_to_first_token_seconds_count", ""] == 1
    assert values["inter_token_latency_seconds_count", ""] == 0


def test_gauges_and_engine_counters_are_the_engines():
    api = Api()
    api.engine.stats = Stats(
        running=3, waiting=2, kv_usage=0.5, preemptions=4, prefix_queries=10, prefix_hits=6
    )
    api.context.metrics.active = 7
    values = samples(api)
    assert values["num_requests_running", ""] == 3
    assert values["num_requests_waiting", ""] == 4  # two have come since the engine's last step
    assert values["kv_cache_usage_perc", ""] == 0.5
    assert values["num_preemptions_total", ""] == 4
    assert values["prefix_cache_queries_total", ""] == 10
    assert values["prefix_cache_hits_total", ""] == 6


def test_tiers_of_the_kv_cache_have_series_where_there_are_any():
    assert "kv_tier" not in Api().get("/metrics").text
    stats = Stats(tiers={"swap": TierStats(3, 96, 7), "disk": TierStats(2, 80)})
    metrics = ServerMetrics(
        model_name="m", max_model_len=8, stats=lambda: stats, tiers=("swap", "disk")
    )
    found = {
        (sample.name.removeprefix("cpuserve:kv_tier_"), sample.labels["tier"]): sample.value
        for family in text_string_to_metric_families(exposition(server_families(metrics)).decode())
        for sample in family.samples
        if "tier" in sample.labels
    }
    assert found == {
        ("blocks", "swap"): 3,
        ("blocks", "disk"): 2,
        ("bytes", "swap"): 96,
        ("bytes", "disk"): 80,
        ("hits_total", "swap"): 7,
        ("hits_total", "disk"): 0,
    }


def test_gauges_are_zero_when_nothing_is_held_whatever_the_last_step_said():
    api = Api()
    api.engine.stats = Stats(running=3, waiting=2, kv_usage=0.5)
    values = samples(api)
    assert values["num_requests_running", ""] == 0
    assert values["num_requests_waiting", ""] == 0
    assert values["kv_cache_usage_perc", ""] == 0
    api.context.metrics.active = 4
    assert samples(api)["num_requests_waiting", ""] == 1


def test_requests_wait_from_the_moment_they_came_not_only_after_the_next_step():
    api = Api()
    api.engine.stats = Stats(running=1, waiting=0)
    api.context.metrics.active = 6
    values = samples(api)
    assert (values["num_requests_running", ""], values["num_requests_waiting", ""]) == (1, 5)


def test_times_are_split_at_schedule_and_first_token(monkeypatch):
    now = [100.0]
    monkeypatch.setattr("cpuserve.metrics.server.time.monotonic", lambda: now[0])
    metrics = ServerMetrics(model_name="m", max_model_len=100, stats=Stats)
    sequence = metrics.start(7, 3, 1)
    sequence.arrival = 100.0
    now[0] = 103.0
    metrics.on_tokens(sequence, 1, 4, scheduled=101.0)
    now[0] = 104.5
    metrics.on_tokens(sequence, 1, 4, scheduled=0.0)
    now[0] = 105.0
    metrics.on_tokens(sequence, 1, 4, scheduled=0.0)
    metrics.finish(sequence, "length")
    sums = {
        "ttft": 3.0, "itl": 2.0, "per_token": 1.0, "e2e": 5.0, "queue": 1.0, "prefill": 2.0,
        "decode": 2.0, "inference": 4.0, "request_prompt": 7.0, "request_generation": 3.0,
    }  # fmt: skip
    queue = metrics.queue["step"]
    assert {n: (queue if n == "queue" else getattr(metrics, n)).sum for n in sums} == sums
    assert metrics.cached_tokens == 4
    assert metrics.prompt_tokens == 7


def test_a_time_in_the_queue_is_counted_once_by_its_main_cause():
    metrics = ServerMetrics(model_name="m", max_model_len=100, stats=Stats)
    for waits in ({"slots": 2.0, "share": 0.5}, {"share": 1.0, "step": 0.1}, {"share": 3.0}, {}):
        sequence = metrics.start(7, 3, 1)
        scheduled = sequence.arrival + sum(waits.values())
        metrics.on_tokens(sequence, 1, 0, scheduled, (waits, {"media": 9.0}))
        metrics.finish(sequence, "stop")
    (family,) = (
        f for f in server_families(metrics) if f.name.endswith("request_queue_time_seconds")
    )
    counts = {s.labels["cause"]: s.value for s in family.samples if s.name.endswith("_count")}
    assert counts == {"step": 1, "slots": 1, "share": 2}
    sums = {s.labels["cause"]: s.value for s in family.samples if s.name.endswith("_sum")}
    assert sums == {"step": 0.0, "slots": pytest.approx(2.5), "share": pytest.approx(4.1)}


def test_steps_are_counted_by_what_they_added():
    metrics = ServerMetrics(model_name="m", max_model_len=100, stats=Stats)
    metrics.on_step(Stats(prompt_tokens=10, generation_tokens=2))
    metrics.on_step(Stats(prompt_tokens=10, generation_tokens=5))
    assert metrics.iteration.sum == 15
    assert sum(metrics.iteration.counts) == 2


def test_a_value_on_a_bound_belongs_to_its_bucket():
    histogram = BucketHistogram([1, 2, 5])
    for value in (0, 1, 1.5, 2, 5, 6):
        histogram.observe(value)
    assert histogram.cumulative() == [("1.0", 2), ("2.0", 4), ("5.0", 5), ("+Inf", 6)]
    assert histogram.sum == 15.5


@pytest.mark.parametrize(
    ("most", "bounds"),
    [(1, [1]), (4, [1, 2]), (60, [1, 2, 5, 10, 20, 50]), (100, [1, 2, 5, 10, 20, 50, 100])],
)
def test_length_buckets_go_1_2_5(most, bounds):
    assert buckets_1_2_5(most) == bounds


def test_adapters_of_running_and_waiting_requests_are_labels():
    api = Api()
    assert "lora_requests_info" not in api.get("/metrics").text
    context = api.context
    context.adapters.update(one="/one", two="/two", three="/three")
    running, waiting, ended, plain = (context.metrics.start(1, 1, 1) for _ in range(4))
    running.adapter, waiting.adapter, ended.adapter = "one", "two", "three"
    for sequence in (running, plain):
        context.metrics.on_tokens(sequence, 1, 0, 0.0)
    context.metrics.finish(ended, "stop")
    families = {f.name: f for f in text_string_to_metric_families(api.get("/metrics").text)}
    (sample,) = families["vllm:lora_requests_info"].samples
    assert sample.labels == {
        "max_lora": "3",
        "running_lora_adapters": "one",
        "waiting_lora_adapters": "two",
    }
    assert sample.value > 1.7e9


def test_a_request_for_an_adapter_counts_for_it():
    api = Api()
    api.context.adapters["one"] = "/one"
    assert api.chat(model="one").status_code == 200
    assert api.chat().status_code == 200
    assert [each.adapter for each in api.context.metrics.sequences()] == ["one", ""]


def test_pictures_have_series_where_the_model_reads_them():
    assert "mm_cache" not in Api().get("/metrics").text
    stats = Stats(media_queries=5, media_hits=2, encode_s=1.5)
    metrics = ServerMetrics(model_name="m", max_model_len=8, stats=lambda: stats, media=True)
    text = exposition(server_families(metrics)).decode()
    found = {
        sample.name: sample.value
        for f in text_string_to_metric_families(text)
        for sample in f.samples
    }
    assert found["vllm:mm_cache_queries_total"] == 5
    assert found["vllm:mm_cache_hits_total"] == 2
    assert found["cpuserve:encode_seconds_total"] == 1.5


def test_operators_see_the_build_the_load_and_the_free_memory():
    api = Api()
    families = text_string_to_metric_families(api.get("/metrics").text)
    found = {sample.name: sample for family in families for sample in family.samples}
    build = found["cpuserve:build_info"]
    assert build.value == 1
    assert build.labels["version"] == api.get("/version").json()["version"]
    assert build.labels["python"] == platform.python_version()
    load = found["cpuserve:model_load_seconds"]
    assert load.labels == {"model_name": "tiny"}
    assert load.value > 0
    free, limit = (found[f"cpuserve:memory_{name}_bytes"].value for name in ("free", "limit"))
    assert 0 < free < limit <= psutil.virtual_memory().total
    assert not {name for name in found if "audit" in name or "certificate" in name}
