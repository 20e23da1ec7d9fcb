"""`cpuserve bench step`, `load`, `latency` and `throughput` on a tiny model: they run and print the
expected records. The measured figures are not checked.
"""

import importlib.util
import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from cpuserve.base.errors import StartupError
from cpuserve.bench import load, server, tune
from cpuserve.bench import step as bench_step
from cpuserve.cli import main as cli
from cpuserve.engine.memory_use import resident_bytes
from cpuserve.platforms import tuned
from tests.helpers.children import child_options
from tests.helpers.depth import deep_but
from tests.helpers.patience import PATIENCE_S, wait_gone, wait_until
from tests.helpers.tiny import tiny_model


def script(name):
    """Import a script of benchmarks/, which is not a package."""
    path = Path(__file__).parents[2] / f"benchmarks/{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def bench(capsys, kind, *more):
    """Run `cpuserve bench KIND`; its records by metric (the last one of each name)."""
    model = str(tiny_model("llama", dtype="bfloat16"))
    assert cli.main(["bench", kind, model, "--json", "--max-model-len=256", *more]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    return {line["metric"]: line for line in lines}


def test_steps_are_measured_without_drafts(monkeypatch):
    configs = []
    monkeypatch.setattr(bench_step, "step_records", lambda config, *_: configs.append(config))
    model = str(tiny_model("llama", dtype="bfloat16"))
    for kind in ("step", "kernels"):
        assert cli.main(["bench", kind, model, "--json", "--speculate=auto"]) == 0
    assert [config.speculation for config in configs] == [None, None]


def test_step_prints_rates_as_shares_of_the_probe(capsys):
    sizes = ["--batch", "2", "--context", "16", "--prefill", "32", "--leave", "32", "--rounds", "3"]
    found = bench(capsys, "step", *sizes)
    assert {"decode_step", "decode_step_python", "prefill_python", "leave"} <= set(found)
    assert found["decode_rate"]["of"] == "reading weights and caches"
    assert found["prefill_rate"]["of"] == "bf16 dot peak"
    assert found["decode_rate"]["fraction"] > 0
    assert found["decode_rate"]["parameters"] == {"batch": 2, "context": 16}


def test_step_says_what_it_does_and_each_result_at_once(capsys):
    model = str(tiny_model("llama", dtype="bfloat16"))
    sizes = ["--batch", "2", "--context", "16", "--prefill", "32", "--leave", "32", "--rounds", "3"]
    assert cli.main(["bench", "step", model, "--max-model-len=256", *sizes]) == 0
    seen = capsys.readouterr()
    lines = " ".join(seen.err.split()).split("cpuserve: ")
    order = ("loading", "all measurements: about", "1 x a prompt of 32 tokens: about")
    order += (
        "prefill_rate (tokens 32): ",
        "3 x an aborted prompt",
        "2 sequences of 16 tokens: about",
    )
    order += ("decode_rate (batch 2, context 16): ",)
    at = [next(i for i, line in enumerate(lines) if line.startswith(start)) for start in order]
    assert at == sorted(at), lines
    assert "decode_rate" in seen.out, "the table of all results follows on stdout"


def test_each_record_is_printed_before_the_next_measurement_begins(monkeypatch, capsys):
    events = []
    monkeypatch.setattr("cpuserve.cli.bench.note", events.append)
    monkeypatch.setattr("cpuserve.cli.bench.say", lambda text: events.append(text))
    bench(capsys, "step", "--batch", "1", "--context", "16", "--prefill", "16", "--rounds", "2")
    first = next(i for i, e in enumerate(events) if '"prefill_rate"' in e)
    decode = next(i for i, e in enumerate(events) if e.startswith("1 sequence of 16"))
    assert first < decode < len(events) - 1


@pytest.mark.deep
@pytest.mark.parametrize("number", deep_but([signal.SIGTERM], [signal.SIGTERM, signal.SIGHUP]))
def test_a_signal_that_ends_a_measurement_ends_its_server(number):
    model = str(tiny_model("llama", dtype="bfloat16"))
    command = ["bench", "latency", model, "--max-model-len=256", "--output-len=200"]
    child = subprocess.Popen(
        [sys.executable, "-m", "cpuserve", *command, "--input-len=16", "--rounds=1000"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        **child_options(),
    )
    try:
        bench = psutil.Process(child.pid)
        wait_until(lambda: len(bench.children(recursive=True)) > 1)  # the front end and its engine
        servers = bench.children(recursive=True)
        child.send_signal(number)
        assert child.wait(PATIENCE_S) == 128 + number
        for server in servers:
            wait_gone(server.pid)
    finally:
        child.kill()
        child.wait()


@pytest.mark.parametrize(("scheme", "dot"), [("int8", "int8"), ("int4", "int4")])
def test_prompts_are_held_against_the_product_of_the_models_weights(capsys, scheme, dot):
    sizes = ["--batch", "1", "--context", "16", "--prefill", "16", "--leave", "16", "--rounds", "1"]
    found = bench(capsys, "step", *sizes, "--quantization", scheme)
    assert found["prefill_rate"]["of"] == f"{dot} dot peak"


def test_tuning_tries_sizes_and_later_starts_say_what_they_use(capsys, monkeypatch, tmp_path):
    monkeypatch.setattr(tune, "PROBE_S", 0.001)
    monkeypatch.setattr(tuned, "tuned_file", lambda: tmp_path / "sizes.json")
    strips = []  # the first one has the size for this CPU's caches
    probe = tune.Probe.__call__

    def pretend(self, sizes):
        assert probe(self, sizes) > 0  # which no result depends on
        strips.append(sizes["strip_bytes"])
        return 0.01 if strips[-1] < strips[0] else 1.0

    monkeypatch.setattr(tune.Probe, "__call__", pretend)
    model = str(tiny_model("llama", dtype="bfloat16"))
    arguments = [model, "--json", "--max-model-len=256"]
    assert cli.main(["bench", "kernels", *arguments, "--tune"]) == 0
    shown = capsys.readouterr()
    tried = [json.loads(line) for line in shown.out.splitlines()]
    assert {trial["name"] for trial in tried} == {*tune.FACTORS, *tune.VALUES}
    assert next(trial for trial in tried if trial["name"] == "strip_bytes")["kept"]
    assert "strip" in shown.err
    line = "kernels use sizes that were tuned on this machine: strip"
    sizes = ["--batch", "1", "--context", "16", "--prefill", "16", "--rounds", "1"]
    assert cli.main(["bench", "kernels", *arguments, *sizes]) == 0
    assert line in capsys.readouterr().err
    (tmp_path / "sizes.json").write_text("{")
    assert cli.main(["bench", "kernels", *arguments, *sizes]) == 0
    shown = capsys.readouterr().err
    assert line not in shown
    assert "sizes.json is ignored" in shown


class Clock:
    """A native executor whose linears take the seconds that `seconds(sizes, rows)` says."""

    num_linears = 12

    def __init__(self, seconds, refused=()):
        self.sizes = {"strip_bytes": 1024, "rows": 512, "near_bytes": 64, "ahead_bytes": 8}
        self.sizes |= {"float_pass_rows": 6, "far_pass_rows": 3, "near_blocks": 1}
        self.seconds, self.refused, self.noise = seconds, refused, 0

    @property
    def work_sizes(self):
        return dict(self.sizes)

    @work_sizes.setter
    def work_sizes(self, sizes):
        if any(sizes.get(name) == value for name, value in self.refused):
            msg = "cannot work with this"
            raise ValueError(msg)
        self.sizes |= sizes

    def probe_linears(self, rows, first, count):
        self.noise = (self.noise + 1) % 3
        return count * self.seconds(self.sizes, rows) * (1 + 0.001 * self.noise)


def test_tuning_keeps_what_is_clearly_faster_at_every_number_of_rows():
    def seconds(sizes, rows):
        faster = 0.8 if sizes["strip_bytes"] == 512 else 1.0
        if sizes["ahead_bytes"] == 16:
            faster *= 0.5 if rows == 1 else 1.2  # faster for one row only
        return faster * (0.99 if sizes["rows"] == 256 else 1.0)  # too little to count

    native, trials = Clock(seconds), []
    assert tune.tune(native, 3, 512, trials.append) == {"strip_bytes": 512}
    assert native.sizes["strip_bytes"] == 512
    assert native.sizes["ahead_bytes"] == 8
    assert [t.name for t in trials if t.kept] == ["strip_bytes"]
    assert next(t for t in trials if t.value == 16).rows == 8


def test_tuning_tries_a_choice_at_the_rows_that_depend_on_it():
    def seconds(sizes, rows):
        faster = 0.8 if sizes["far_pass_rows"] == 16 and rows == 8 else 1.0
        blocks = {16: 0.8, 32: 1.1}.get(rows, 1.0)  # faster at 16 rows only
        return faster * (1.0 if sizes["near_blocks"] else blocks)

    trials = []
    assert tune.tune(Clock(seconds), 3, 512, trials.append) == {"far_pass_rows": 16}
    tried = {(t.name, t.value): t.rows for t in trials if t.name in tune.VALUES}
    assert tried == {("float_pass_rows", 12): 8, ("far_pass_rows", 16): 8, ("near_blocks", 0): 32}


def test_tuning_follows_the_machine_through_a_change_of_its_speed():
    calls = []

    def seconds(sizes, rows):
        calls.append(1)
        return 2.0 if len(calls) % 40 < 20 else 1.0

    assert tune.tune(Clock(seconds), 3, 512, lambda _: None) == {}


def test_tuning_passes_over_sizes_that_kernels_cannot_work_with():
    trials = []
    native = Clock(lambda sizes, rows: 1.0, refused=[("strip_bytes", 2048)])
    assert tune.tune(native, 3, 512, trials.append) == {}
    assert 2048 not in [t.value for t in trials]
    assert native.sizes["strip_bytes"] == 1024


def test_kernels_are_the_operations_of_a_step_against_their_roofs(capsys):
    model = str(tiny_model("llama", dtype="bfloat16"))
    sizes = ["--batch", "2", "--context", "16", "--prefill", "32", "--rounds", "2"]
    assert cli.main(["bench", "kernels", model, "--json", "--max-model-len=256", *sizes]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    of = {True: {}, False: {}}  # records by kernel: of prompts (True), of decode steps (False)
    for line in lines:
        found = line["parameters"].pop("kernel")
        assert found not in of["tokens" in line["parameters"]]
        of["tokens" in line["parameters"]][found] = line
    assert of[True].keys() == of[False].keys()
    matrices = [name for name in of[False] if "dense_bf16" in name]
    assert len(matrices) == 5, "qkv, o, gate and up, down, lm_head"
    for name in matrices:
        read = of[False][name]
        assert (read["metric"], read["unit"], read["of"]) == (
            "kernel_rate",
            "GB/s",
            "read bandwidth",
        )
        assert read["fraction"] > 0
        assert read["facts"]["us"] > 0
        if not name.startswith("logits"):
            assert (of[True][name]["unit"], of[True][name]["of"]) == ("GOP/s", "bf16 dot peak")
    assert {"attention", "rms_norm", "rope_store_kv"} <= of[False].keys()
    assert of[False]["attention"]["metric"] == "kernel_time"


def refused(capsys, *more):
    """(error line, exit code) of a plan that exceeds the engine's limits."""
    model = str(tiny_model("llama", dtype="bfloat16"))
    code = cli.main(["bench", "step", model, "--max-model-len=256", *more])
    out, err = capsys.readouterr()
    assert (out, err.count("cpuserve: error: ")) == ("", 1)
    return err.splitlines()[-1], code


@pytest.mark.parametrize(
    ("more", "says"),
    [
        (["--prefill", "8", "--batch", "128"], "--batch=128: at most 64 sequences"),
        (
            ["--prefill", "8", "--batch", "8", "--max-num-batched-tokens=4"],
            "--batch=8: at most 4 sequences",
        ),
        (["--prefill", "16384"], "--prefill=16384: a prompt has at most 255 tokens"),
        (["--leave", "256", "--prefill"], "--leave=256: a prompt has at most 255 tokens"),
        (["--rounds", "999", "--batch", "1", "--prefill", "8"], "give fewer --rounds"),
        (["--overheads", "--rounds", "999"], "--rounds=999: 1 sequences"),
    ],
)
def test_a_step_beyond_the_limits_is_refused_before_anything_is_measured(capsys, more, says):
    line, code = refused(capsys, *more)
    assert (code, says in line) == (2, True), line


def test_the_nearest_context_that_is_named_works(capsys):
    sizes = ["--batch", "3", "--prefill", "8", "--rounds", "3"]
    line, _ = refused(capsys, *sizes, "--context", "255")
    most = int(re.search(r"--context=255: .* with --batch 3 give at most (\d+)$", line)[1])
    assert most > 200
    found = bench(capsys, "step", *sizes, "--context", str(most))
    assert found["decode_step"]["parameters"] == {"batch": 3, "context": most}


def test_a_prompt_that_the_engine_refuses_has_no_rate(capsys, monkeypatch):
    monkeypatch.setattr("cpuserve.bench.step.check_plan", lambda *_: None)
    line, code = refused(capsys, "--prefill", "300")
    assert (code, "refused a request of the benchmark: the prompt has 300" in line) == (1, True)


def test_sequences_that_do_not_all_stay_have_no_rate(capsys, monkeypatch):
    monkeypatch.setattr("cpuserve.bench.step.check_plan", lambda *_: None)
    more = ["--prefill", "8", "--batch", "2", "--context", "250", "--rounds", "20"]
    line, code = refused(capsys, *more)
    assert (code, "ended or was preempted" in line) == (1, True)


def test_overheads_are_those_of_line_5(capsys):
    found = bench(capsys, "step", "--overheads", "--rounds", "2", "--max-num-seqs=64")
    assert set(found) == {
        "barrier", "python_step", "outside_matrices", "step_allocations", "sample_top_p",
    }  # fmt: skip
    assert found["step_allocations"]["median"] == 0
    assert found["python_step"]["parameters"]["batch"] == 64
    assert found["outside_matrices"]["parameters"]["layers"] == 2
    assert found["sample_top_p"]["parameters"]["vocab"] == 151936
    assert all(record["median"] > 0 for name, record in found.items() if name != "step_allocations")


@pytest.mark.deep  # 3 s
def test_load_measures_start_and_memory(capsys, monkeypatch):
    dropped = []
    monkeypatch.setattr(load, "drop_page_cache", lambda: dropped.append(1))
    found = bench(capsys, "load", "--rounds", "1", "--cold")
    assert len(dropped) == len(found["cold_health"]["samples"]) == 1
    for kind in ("", "cold_"):
        health, token = found[f"{kind}health"], found[f"{kind}start_to_first_token"]
        assert 0 < health["median"] < token["median"]
    for name in ("ready", "first_token", "pss", "engine_before_load", "engine_peak"):
        assert found[name]["median"] > 0
    # The front end, the engine, and the process that renders templates, perhaps with a warm copy.
    assert found["processes"]["median"] in (3, 4)
    before, peak = found["engine_before_load"]["median"], found["engine_peak"]["median"]
    assert before < peak < 1000
    weights = found["engine_peak"]["parameters"]["weights_mib"]
    shares = [found[name]["median"] for name in ("engine_peak_of_weights", "load_peak_of_weights")]
    assert shares == pytest.approx([peak / weights, (peak - before) / weights], rel=0.1)
    assert 0 < found["besides_weights_and_kv"]["median"] < found["pss"]["median"]


@pytest.mark.deep
def test_latency_is_of_batches(capsys):
    sizes = ["--input-len", "16", "--output-len", "4", "--batch-size", "2"]
    found = bench(capsys, "latency", *sizes, "--num-iters", "2", "--num-iters-warmup", "0")
    assert found["ttft"]["facts"]["values"] == 4
    assert len(found["batch_latency"]["samples"]) == 2
    assert found["e2el"]["median"] <= found["batch_latency"]["p95"]


@pytest.fixture
def odd_settings(monkeypatch, tmp_path):
    """An environment and a config file that set another address and API key for the server."""
    monkeypatch.setenv("CPUSERVE_API_KEY", "a-key")
    monkeypatch.setenv("CPUSERVE_HTTP_HOST", "127.0.0.7")
    monkeypatch.setenv("CPUSERVE_UDS", str(tmp_path / "by-variable"))
    file = tmp_path / "c.json"
    file.write_text(json.dumps({"uds": str(tmp_path / "by-file"), "api-key": "b", "port": 1}))
    return f"--config={file}"


@pytest.mark.deep  # 4 s
def test_a_server_to_measure_listens_where_it_is_measured(capsys, odd_settings):
    sizes = ["--input-len", "8", "--output-len", "4", "--num-iters", "1"]
    assert bench(capsys, "latency", *sizes, odd_settings)["ttft"]["median"] > 0
    model = [str(tiny_model("llama", dtype="bfloat16")), "--max-model-len=256", odd_settings]
    start = load.time_start(model)
    assert 0 < start.health < start.first_token < 60
    assert load.server_memory(model)["pss"][1] > 0


def test_a_server_that_never_answers_is_given_up(monkeypatch):
    sleep = [sys.executable, "-c", "import time; time.sleep(60)"]
    monkeypatch.setattr(load, "serve_command", lambda _: sleep)
    monkeypatch.setattr(load, "START_TIMEOUT_S", 0.3)
    monkeypatch.setattr(server, "STOP_TIMEOUT_S", 0.1)  # no signal ends it before it takes signals
    with pytest.raises(StartupError, match=r"not answer /health with 200 within 0\.3 s"):
        load.time_start([])


def test_a_page_cache_that_may_not_be_dropped_is_an_error(monkeypatch):
    def refuse(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(load.Path, "write_text", refuse)
    with pytest.raises(StartupError, match=r"Permission denied.* run as root, or leave out --cold"):
        load.drop_page_cache()


@pytest.mark.deep
def test_throughput_sends_prompts_at_once(capsys):
    sizes = ["--input-len", "8", "--output-len", "4", "--num-prompts", "6"]
    found = bench(capsys, "throughput", *sizes)
    assert found["total"]["median"] == pytest.approx(3 * found["output"]["median"], rel=1e-3)
    assert found["output"]["parameters"]["requests"] == 6
    assert found["failed"]["median"] == 0


def test_a_rate_between_tokens_needs_two(capsys):
    assert cli.main(["bench", "throughput", "m", "--output-len", "1"]) == 2
    assert "--output-len=1: the decode rate is measured between tokens" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["bench_busy", "bench_quota"])
def test_a_script_with_a_rate_between_tokens_needs_two(capsys, name):
    with pytest.raises(SystemExit):
        script(name).main(["m", "--output-tokens", "1"])
    assert "1 is less than 2" in capsys.readouterr().err


def test_resident_memory_is_that_of_the_status_file(tmp_path):
    status = tmp_path / "status"
    status.write_text("Name:\tx\nVmHWM:\t  2048 kB\nVmRSS:\t   1024 kB\n")
    assert resident_bytes(status) == (1 << 20, 2 << 20)
    now, most = resident_bytes()
    assert 0 < now <= most
    assert resident_bytes(tmp_path / "none")[0] == 0


@pytest.mark.deep
def test_busy_compares_rounds_with_and_without_a_neighbour(capsys):
    model = str(tiny_model("llama", dtype="bfloat16"))
    sizes = ["--rounds", "2", "--output-tokens", "8", "--vocab-size", "512"]
    assert script("bench_busy").main([model, *sizes]) == 0
    found = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    by_name = {record["metric"]: record for record in found}
    quiet, busy = by_name["decode_quiet"]["samples"], by_name["decode_busy"]["samples"]
    shares = [b / q for b, q in zip(busy, quiet, strict=True)]
    assert by_name["busy_of_quiet"]["samples"] == pytest.approx(shares, rel=1e-3)
    assert by_name["decode_quiet"]["isa"]


@pytest.fixture
def hasty_script(monkeypatch):
    """Return a function of a script of benchmarks/ and of pauses in it that are short here."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))

    def hasty(name, **seconds):
        module = script(name)
        for pause, length in seconds.items():
            monkeypatch.setattr(module, pause, length)
        return module

    return hasty


@pytest.mark.deep  # 9 s
def test_the_front_end_is_measured_in_every_dialect(capsys, hasty_script):
    model = str(tiny_model("llama", dtype="bfloat16"))
    sizes = ["--streams=2", "--rates", "1000", "--tokens=700", "--rounds=1"]
    assert hasty_script("bench_front_end", SETTLE_S=0.05).main([model, *sizes]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    dialects = {line["parameters"]["dialect"] for line in lines}
    assert dialects == {"completions", "chat", "responses", "messages", "ollama"}
    for line in lines:
        assert line["median"] > 0 or line["metric"] == "front_end_memory"
        assert line["facts"]["tokens"] > 100


@pytest.mark.deep  # 4 s
def test_the_front_end_is_measured_though_tokens_come_late(capsys, hasty_script):
    model = str(tiny_model("llama", dtype="bfloat16"))
    sizes = ["--streams=1", "--rates", "100", "--tokens=5", "--rounds=1", "--dialects", "chat"]
    assert hasty_script("bench_front_end", SETTLE_S=0.05).main([model, *sizes]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 3


@pytest.mark.deep  # 7 s
def test_a_modest_caller_is_timed_beside_greedy_ones(capsys, hasty_script):
    model = str(tiny_model("llama", dtype="bfloat16"))
    kinds = ["messages", "tiny", "batches"]
    sizes = ["--short=5", "--long=50", "--rounds=1", "--samples=2", "--crowd=4"]
    bench_callers = hasty_script("bench_callers", PAUSE_S=0.02, SETTLE_S=0.2)
    assert bench_callers.main([model, *sizes, "--kinds", *kinds]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    found = [(line["metric"], line["parameters"]["tokens"]) for line in lines]
    assert found == [(f"time_beside_{kind}", tokens) for kind in kinds for tokens in (5, 50)]
    assert all(len(line["samples"]) == 1 and line["median"] > 0 for line in lines)
    assert all(line["facts"]["cpu_ms"] > 0 for line in lines)


@pytest.mark.deep  # 5 s
def test_records_are_compared_with_none_in_one_server(capsys, hasty_script):
    model = str(tiny_model("llama", dtype="bfloat16"))
    sizes = ["--streams=2", "--rate=500", "--tokens=40", "--pairs=1", "--dialects", "chat"]
    bench_records = hasty_script("bench_records", TRACES_S=0.05, WRITTEN_S=0.2)
    assert bench_records.main([model, *sizes]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [each["metric"] for each in lines] == [
        "front_end_logged", "front_end_observed", "front_end_audited",
    ]  # fmt: skip
    assert all(len(each["samples"]) == 1 and each["median"] > 0 for each in lines)
