"""The files of deploy/ for Kubernetes, Compose and systemd fit the server's behaviour and options.

test_chart.py has the Helm chart, and the schemas of Kubernetes and Compose.
"""

import ast
import json
import re
import shutil
import subprocess

import pytest
import yaml

from cpuserve.config.fields import FIELDS
from cpuserve.config.load import from_arguments
from cpuserve.config.server import ServerOptions
from cpuserve.engine.liveness import HangLimits
from cpuserve.platforms.memory import BLOCK
from tests.api.server_process import served
from tests.deploy.pods import DEPLOY, END_S, check_rights, check_times, options, path_of
from tests.helpers.patience import wait_until


def documents(name):
    return [*yaml.safe_load_all((DEPLOY / name).read_text())]


def of_kind(name, kind):
    return next(document for document in documents(name) if document["kind"] == kind)


@pytest.fixture(scope="module")
def pod():
    return of_kind("kubernetes.yaml", "Deployment")["spec"]["template"]["spec"]


@pytest.fixture(scope="module")
def container(pod):
    return pod["containers"][0]


@pytest.mark.deep
def test_probes_fit_a_server_that_downloads_loads_serves_and_drains(container):
    ready, alive = path_of(container, "readinessProbe"), path_of(container, "livenessProbe")
    assert path_of(container, "startupProbe") == alive

    def seen():
        return server.get(ready)[0], server.get(alive)[0]

    with served("fake:hang", download="until a line comes") as server:
        assert seen() == (503, 200), "while it downloads"
        server.process.stdin.write("\n")
        server.process.stdin.flush()
        server.another_engine()
        wait_until(lambda: json.loads(server.get(ready)[1])["stage"] != "download")
        assert seen() == (503, 200), "while it loads"
    with served(drain_delay_s=60) as server:
        server.ready()
        assert seen() == (200, 200)
        server.stop()
        wait_until(lambda: server.get(ready)[0] == 503)
        assert seen() == (503, 200), "while it drains"


def test_the_pod_is_not_killed_while_it_drains(pod, container):
    check_times(pod, container)


def test_the_pod_has_few_rights_and_writes_only_into_volumes(pod, container):
    check_rights(pod, container)


def test_the_runtime_of_kserve_drains_and_has_few_rights():
    runtime = of_kind("kserve.yaml", "ServingRuntime")["spec"]
    predictor = of_kind("kserve.yaml", "InferenceService")["spec"]["predictor"]
    container = runtime["containers"][0]
    check_times(predictor, container)
    check_rights(runtime, container)
    assert options(container["args"]).port == container["ports"][0]["containerPort"]
    formats = {each["name"] for each in runtime["supportedModelFormats"]}
    assert predictor["model"]["modelFormat"]["name"] in formats


def test_the_key_comes_from_a_secret_and_the_image_is_not_asked_of_a_registry(container):
    key = next(e for e in container["env"] if e["name"] == "CPUSERVE_API_KEY")
    assert set(key["valueFrom"]) == {"secretKeyRef"}
    assert container["imagePullPolicy"] == "IfNotPresent"


def test_compose_does_not_kill_a_server_that_drains():
    service = documents("compose.yaml")[0]["services"]["cpuserve"]
    grace = re.fullmatch(r"(\d+)s", service["stop_grace_period"])
    http = ServerOptions()
    assert int(grace[1]) >= http.drain_delay + http.drain_timeout + END_S


def test_the_fleet_of_compose_drains_and_its_addresses_agree():
    fleet = documents("compose-fleet.yaml")[0]
    services = fleet["services"]
    servers = [services["cpuserve-1"], services["cpuserve-2"]]
    nginx = " ".join(services["nginx"]["command"])
    upstream = re.findall(r"server (10\.0\.0\.\d+:8000) ", (DEPLOY / "nginx.conf").read_text())
    for server, example in zip(servers, upstream, strict=True):
        http = options(server["command"][1:])
        assert int(server["stop_grace_period"][:-1]) >= (
            http.drain_delay + http.drain_timeout + END_S
        )
        address = server["networks"]["fleet"]["ipv4_address"]
        assert f"s/{example}/{address}:8000/" in nginx
    scraped = documents("monitoring/prometheus.yml")[0]["scrape_configs"][0]
    assert scraped["static_configs"][0]["targets"] == ["cpuserve-1:8000", "cpuserve-2:8000"]
    secret = scraped["authorization"]["credentials_file"].rpartition("/")[2]
    assert services["prometheus"]["secrets"] == [secret]
    assert fleet["secrets"][secret]["environment"] in servers[0]["environment"]
    mounts = [mount for service in services.values() for mount in service["volumes"]]
    files = [mount.split(":")[0] for mount in mounts if mount.startswith("./")]
    assert len(files) == 6
    assert all((DEPLOY / file).is_file() for file in files)


def test_the_pool_and_the_router_select_the_pods_of_the_chart():
    helpers = (DEPLOY / "helm/cpuserve/templates/_helpers.tpl").read_text()
    chart = documents("helm/cpuserve/Chart.yaml")[0]["name"]
    labels = {"app.kubernetes.io/name": chart, "app.kubernetes.io/instance": "cpuserve"}
    assert all(f"{label}:" in helpers for label in labels)
    pool = of_kind("gateway.yaml", "InferencePool")
    assert pool["spec"]["selector"]["matchLabels"] == labels
    assert pool["spec"]["targetPorts"] == [{"number": ServerOptions().port}]
    backend = of_kind("gateway.yaml", "HTTPRoute")["spec"]["rules"][0]["backendRefs"][0]
    assert (backend["kind"], backend["name"]) == ("InferencePool", pool["metadata"]["name"])
    router = of_kind("production-stack.yaml", "Deployment")["spec"]["template"]["spec"]
    arguments = router["containers"][0]["args"]
    assert f"--k8s-label-selector=app.kubernetes.io/name={chart}" in arguments
    assert f"--k8s-port={ServerOptions().port}" in arguments


def test_llm_d_reads_the_events_at_the_ports_and_block_size_of_the_chart():
    config = documents("llm-d.yaml")[0]
    parameters = {plugin["type"]: plugin.get("parameters") for plugin in config["plugins"]}
    events = parameters["precise-prefix-cache-producer"]
    assert events["tokenProcessorConfig"]["blockSize"] == BLOCK
    chart = documents("helm/cpuserve/values.yaml")[0]
    ports = events["kvEventsConfig"]["podDiscoveryConfig"]
    assert ports["socketPort"] == chart["kvEvents"]["port"]
    assert ports["replaySocketPort"] == chart["kvEvents"]["replayPort"]
    assert parameters["token-producer"]["modelName"] == chart["model"]
    (profile,) = config["schedulingProfiles"]
    used = {each["pluginRef"] for each in profile["plugins"]}
    assert used <= parameters.keys()
    assert parameters.keys() - used == {"token-producer", "precise-prefix-cache-producer"}


def test_litellm_balances_one_model_over_the_servers_of_the_other_files():
    config = documents("litellm.yaml")[0]
    models = config["model_list"]
    assert len({model["model_name"] for model in models}) == 1
    bases = [model["litellm_params"]["api_base"] for model in models]
    assert bases == ["http://10.0.0.1:8000/v1", "http://10.0.0.2:8000/v1"]
    assert {model["litellm_params"]["api_key"] for model in models} == {
        "os.environ/CPUSERVE_API_KEY"
    }


def test_the_application_of_kuberay_has_options_of_ray_serve_and_of_the_server():
    source = (DEPLOY.parent / "cpuserve/integrations/ray_serve.py").read_text()
    (scaling,) = [
        node
        for node in ast.parse(source).body
        if isinstance(node, ast.ClassDef) and node.name == "Scaling"
    ]
    own = {each.target.id for each in scaling.body if isinstance(each, ast.AnnAssign)}
    (application,) = yaml.safe_load(of_kind("kuberay.yaml", "RayService")["spec"]["serveConfigV2"])[
        "applications"
    ]
    module, _, name = application["import_path"].partition(":")
    assert f"def {name}(" in source
    assert module == "cpuserve.integrations.ray_serve"
    given = application["args"]
    assert {"num_cpus", "max_replicas"} <= own & given.keys()
    from_arguments({key: value for key, value in given.items() if key not in own})
    cluster = of_kind("kuberay.yaml", "RayService")["spec"]["rayClusterConfig"]
    (workers,) = cluster["workerGroupSpecs"]
    assert workers["maxReplicas"] == given["max_replicas"]
    (worker,) = workers["template"]["spec"]["containers"]
    assert int(worker["resources"]["limits"]["cpu"]) == given["num_cpus"]


def unit():
    """Return [(name, value)] of the settings in deploy/cpuserve.service."""
    lines = (DEPLOY / "cpuserve.service").read_text().splitlines()
    settings = [line.partition("=") for line in lines if line and line[0] not in "#["]
    return [(name, value) for name, _, value in settings]


def test_the_unit_of_systemd_waits_for_the_drain_and_sets_known_variables():
    settings = dict(unit())
    variables = dict(value.split("=", 1) for name, value in unit() if name == "Environment")
    known = {field.env for field in FIELDS} | {"CPUSERVE_CACHE", "HF_HOME"}
    assert variables.keys() <= known
    needed = int(variables["CPUSERVE_DRAIN_TIMEOUT"]) + ServerOptions().drain_delay + END_S
    assert int(settings["TimeoutStopSec"]) >= needed
    assert settings["Type"] == "notify"
    assert int(settings["WatchdogSec"]) > 2 * HangLimits().end_s  # an engine is replaced first
    cache = settings["CacheDirectory"]
    assert variables["CPUSERVE_CACHE"] == f"/var/cache/{cache}"
    assert variables["HF_HOME"].startswith(f"/var/cache/{cache}/")


def test_systemd_accepts_the_unit(tmp_path):
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed (apt-get install systemd)")
    program = tmp_path / "cpuserve"
    program.write_text("#!/bin/sh\n")
    program.chmod(0o755)
    text = (DEPLOY / "cpuserve.service").read_text()
    file = tmp_path / "cpuserve.service"
    file.write_text(text.replace("/opt/cpuserve/bin/cpuserve", str(program)))
    command = ["systemd-analyze", "verify", "--man=no", "--recursive-errors=no", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    file.write_text(text.replace("Type=notify", "Type=execute"))
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "execute" in done.stderr
