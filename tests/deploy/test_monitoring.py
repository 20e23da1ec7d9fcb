"""The dashboard, the alerts and the autoscaler's rule use metrics and labels that exist."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from cpuserve.api.status.router import AdapterMetrics, store_families, task_families
from cpuserve.engine.client import ReplicaStatus
from cpuserve.engine.ipc import Stats
from cpuserve.metrics.families import exposition, server_families
from cpuserve.metrics.figures import CpuSample
from cpuserve.metrics.http import HttpMetrics
from cpuserve.metrics.operating import OperatingFigures, operating_families
from cpuserve.metrics.processes import PageFigures, RoleFigures, page_families, process_families
from cpuserve.metrics.server import SERVED, ServerMetrics

DEPLOY = Path(__file__).parents[2] / "deploy"
MONITORING = DEPLOY / "monitoring"
# Labels that Prometheus adds to every sample.
TARGET_LABELS = {"instance", "job", "namespace", "pod", "__name__"}
METRIC = re.compile(r"\b((?:vllm|cpuserve):\w+|http_requests_total|process_\w+)(?:\{([^}]*)\})?")


def families():
    """Return all metrics of a server with a CPU quota, which stores files and has served."""
    metrics = ServerMetrics(
        model_name="m",
        max_model_len=100,
        stats=Stats,
        cache={"block_size": 32, "num_gpu_blocks": 100},
        cpu=lambda: CpuSample(4, 1.0, 1.0, 1.0, 1.0, 0, 0.0, 4.0),
        replicas=lambda: [ReplicaStatus(serves=True, restarts=0, stats=Stats())],
        tiers=("disk",),
        drafts=True,
    )
    metrics.on_cache_miss("new")
    token = SERVED.set({"trace_id": "4bf92f3577b34da6a3ce929d0e0e4736", "request_id": 'a"b'})
    for _ in range(2):
        sequence = metrics.start(10, 20, 1, "key-1")
        for _ in range(3):
            metrics.on_tokens(sequence, 1, 0, 0.0)
        metrics.finish(sequence, "stop")
    SERVED.reset(token)
    http = HttpMetrics()
    http.count("/v1/chat/completions", "POST", 200)
    http.refuse("key-1", "requests")
    return [
        *server_families(metrics),
        *http.collect(),
        *process_families({"engine": RoleFigures(1, 1.0, 1, 1, 1.0, 1, 1)}),
        *page_families(PageFigures({"engine": 0}, {("engine", "0"): 0})),
        *task_families({"running batches": True}),
        *store_families({"files": (1, 2)}),
        *operating_families(OperatingFigures("1", {}, 1.0, (True, 0), {"m": 1.0}, 1, 2)),
        *AdapterMetrics(["a"], ()).collect(),
    ]


@pytest.fixture(scope="module")
def labels_of():
    """{name of a sample: its labels} of a server."""
    return {
        sample.name: set(sample.labels)
        for family in text_string_to_metric_families(exposition(families()).decode())
        for sample in family.samples
    }


def dashboard():
    return json.loads((MONITORING / "grafana/cpuserve.json").read_text())


def expressions():
    """Return (place, PromQL) of everything that queries Prometheus."""
    for panel in dashboard()["panels"]:
        for target in panel["targets"]:
            yield panel["title"], target["expr"]
    for variable in dashboard()["templating"]["list"]:
        if variable["type"] == "query":
            yield variable["name"], variable["query"]["query"]
    for group in yaml.safe_load((MONITORING / "alerts.yml").read_text())["groups"]:
        for rule in group["rules"]:
            yield rule["alert"], rule["expr"]
    adapter = yaml.safe_load((MONITORING / "prometheus-adapter.yaml").read_text())
    for rule in adapter["rules"]["custom"]:
        yield "prometheus-adapter", re.search(r'__name__="([^"]+)"', rule["seriesQuery"])[1]


@pytest.mark.parametrize(("place", "expression"), [*expressions()])
def test_queries_use_metrics_and_labels_of_the_server(place, expression, labels_of):
    found = METRIC.findall(expression)
    assert found or expression.startswith("up{")
    for name, selector in found:
        assert name in labels_of, place
        known = labels_of[name] | TARGET_LABELS
        assert set(re.findall(r"(\w+)\s*(?:=~|!=|!~|=)", selector)) <= known, place
        grouped = re.findall(r"\bby \(([^)]*)\)", expression)
        assert {label.strip() for group in grouped for label in group.split(",")} <= known, place


def test_the_alerts_mention_labels_that_their_expressions_keep(labels_of):
    for group in yaml.safe_load((MONITORING / "alerts.yml").read_text())["groups"]:
        for rule in group["rules"]:
            used = set(re.findall(r"\$labels\.(\w+)", rule["annotations"]["summary"]))
            kept = re.findall(r"\bby \(([^)]*)\)", rule["expr"])
            names = METRIC.findall(rule["expr"])
            known = {"instance", "job"} | (labels_of[names[0][0]] if names and not kept else set())
            assert used <= known, rule["alert"]


def promtool_or_skip():
    if (promtool := shutil.which("promtool")) is None:
        pytest.skip("promtool is not installed (apt-get install prometheus)")
    return promtool


def test_promtool_accepts_the_settings_the_alerts_and_every_query(tmp_path):
    promtool = promtool_or_skip()
    (tmp_path / "key").write_text("key")
    settings = (MONITORING / "prometheus.yml").read_text()
    settings = settings.replace("/run/secrets/api-key", str(tmp_path / "key"))
    (tmp_path / "prometheus.yml").write_text(settings)
    shutil.copy(MONITORING / "alerts.yml", tmp_path)
    variables = {"$__rate_interval": "1m", "$model": ".*", "$instance": ".*"}
    rules = []
    for panel in dashboard()["panels"]:
        for expression in (target["expr"] for target in panel["targets"]):
            for name, value in variables.items():
                expression = expression.replace(name, value)
            rules.append({"record": f"panel_{len(rules)}", "expr": expression})
    groups = {"groups": [{"name": "dashboard", "rules": rules}]}
    (tmp_path / "dashboard.yml").write_text(json.dumps(groups))
    wrong = {"groups": [{"name": "wrong", "rules": [{"record": "a", "expr": "sum("}]}]}
    (tmp_path / "wrong.yml").write_text(json.dumps(wrong))

    def accepts(what, file):
        command = [promtool, "check", what, tmp_path / file]
        return subprocess.run(command, capture_output=True, check=False).returncode == 0

    assert accepts("config", "prometheus.yml")
    assert accepts("rules", "dashboard.yml")
    assert not accepts("rules", "wrong.yml")


# What promtool says of names that vLLM chose, and other servers' dashboards use.
OF_VLLM = (
    "metric names should not contain ':'",
    'vllm:iteration_tokens_total non-counter metrics should not have "_total" suffix',
)


def test_promtool_finds_no_fault_in_the_metrics():
    promtool = promtool_or_skip()

    def check(text):
        command = [promtool, "check", "metrics"]
        found = subprocess.run(command, input=text, capture_output=True, text=True, check=False)
        lines = (found.stdout + found.stderr).splitlines()
        return [line for line in lines if not line.endswith(OF_VLLM)]

    text = exposition(families()).decode()
    assert "vllm:request_decode_time_seconds_bucket" in text
    assert check(text) == []
    assert check(text.replace("# HELP process_open_fds", "# HELP process_closed_fds")) != []
    assert check(text.replace('role="engine"', 'role="engine', 1)) != []


def test_promtool_reads_openmetrics_with_exemplars(tmp_path):
    """It reads this format only to import it, and then wants a time of each sample."""
    promtool = promtool_or_skip()
    text = exposition(families(), openmetrics=True).decode()
    assert text.count(" # {") > 10

    def imports(text):
        (tmp_path / "metrics").write_text(text)
        command = [promtool, "tsdb", "create-blocks-from", "openmetrics", "metrics", "data"]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        return done.returncode == 0 or done.stderr

    timed = re.sub(r"^([^#\n]\S* \S+)", r"\1 1700000000", text, flags=re.MULTILINE)
    assert imports(timed) is True
    assert imports(timed.replace(" # {", " # ", 1)) is not True


def test_panels_have_units_descriptions_and_places_of_their_own():
    panels = dashboard()["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels) >= 12
    cells = [
        (panel["gridPos"]["x"] + dx, panel["gridPos"]["y"] + dy)
        for panel in panels
        for dx in range(panel["gridPos"]["w"])
        for dy in range(panel["gridPos"]["h"])
    ]
    assert len({*cells}) == len(cells)
    assert max(x for x, _ in cells) < 24
    for panel in panels:
        assert panel["description"].endswith(".")
        assert panel["fieldConfig"]["defaults"]["unit"]


def test_the_metrics_that_routers_of_vllm_read_are_there(labels_of):
    """The names in the comment of deploy/gateway.yaml, which are those of its default settings."""
    comment = (DEPLOY / "gateway.yaml").read_text().partition("apiVersion")[0]
    named = set(re.findall(r"vllm:\w+", comment))
    (adapters,) = AdapterMetrics(["a"], ()).collect()
    assert len(named) == 5
    assert named <= {*labels_of, adapters.name}
    assert {"block_size", "num_gpu_blocks"} <= labels_of["vllm:cache_config_info"]
