"""deploy/kubernetes.yaml and deploy/compose.yaml fit the server's behaviour and options."""

import json
import re
from pathlib import Path

import pytest
import yaml

from cpuserve.cli import main as cli
from cpuserve.cli.flags import asked, normalize
from cpuserve.config.server import ServerOptions
from tests.api.server_process import served
from tests.helpers.patience import wait_until

ROOT = Path(__file__).parents[2]
# Seconds from the end of the drain to the end of the process: 5 s for the engine, 2 s for
# connections, and a margin.
END_S = 10


@pytest.fixture(scope="module")
def pod():
    documents = yaml.safe_load_all((ROOT / "deploy/kubernetes.yaml").read_text())
    return next(d for d in documents if d["kind"] == "Deployment")["spec"]["template"]["spec"]


@pytest.fixture(scope="module")
def container(pod):
    return pod["containers"][0]


def options(container):
    """Return the server's options for the container's arguments, all of which must be known."""
    args, unknown = cli.build_parser().parse_known_args(normalize(["serve", *container["args"]]))
    assert unknown == []
    return asked(args).server


def path_of(container, probe):
    return container[probe]["httpGet"]["path"]


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
    hook = container["lifecycle"]["preStop"]["exec"]["command"]
    assert hook[0] == "sleep"
    server = options(container)
    needed = int(hook[1]) + server.drain_delay + server.drain_timeout + END_S
    assert pod["terminationGracePeriodSeconds"] >= needed


def test_balancers_that_ask_as_the_readiness_probe_does_notice_the_drain_in_time(container):
    probe = container["readinessProbe"]
    noticed_s = probe["failureThreshold"] * (probe["periodSeconds"] + probe["timeoutSeconds"])
    assert options(container).drain_delay > noticed_s


def test_the_pod_has_few_rights_and_writes_only_into_volumes(pod, container):
    rights = container["securityContext"]
    assert rights["readOnlyRootFilesystem"] is True
    assert rights["allowPrivilegeEscalation"] is False
    assert rights["capabilities"] == {"drop": ["ALL"]}
    assert pod["securityContext"]["runAsNonRoot"] is True
    dockerfile = (ROOT / "Dockerfile.cpu").read_text()
    written = re.findall(r"(?:CPUSERVE_CACHE|HF_HOME)=(\S+)", dockerfile)
    assert len(written) == 2
    mounts = [mount["mountPath"] for mount in container["volumeMounts"]]
    assert {mount["name"] for mount in container["volumeMounts"]} == {
        volume["name"] for volume in pod["volumes"]
    }
    assert all(any(Path(path).is_relative_to(m) for m in mounts) for path in [*written, "/tmp"])
    uid = re.search(r"--uid (\d+)", dockerfile)[1]
    assert pod["securityContext"]["runAsUser"] == int(uid)


def test_the_key_comes_from_a_secret_and_the_image_is_not_asked_of_a_registry(container):
    key = next(e for e in container["env"] if e["name"] == "CPUSERVE_API_KEY")
    assert set(key["valueFrom"]) == {"secretKeyRef"}
    assert container["imagePullPolicy"] == "IfNotPresent"


def test_compose_does_not_kill_a_server_that_drains():
    service = yaml.safe_load((ROOT / "deploy/compose.yaml").read_text())["services"]["cpuserve"]
    grace = re.fullmatch(r"(\d+)s", service["stop_grace_period"])
    http = ServerOptions()
    assert int(grace[1]) >= http.drain_delay + http.drain_timeout + END_S
