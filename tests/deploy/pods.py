"""Checks of pod specifications that hold for every way to deploy on Kubernetes."""

import re
from pathlib import Path

from cpuserve.cli import main as cli
from cpuserve.cli.flags import asked, normalize

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
# Seconds from the end of the drain to the end of the process: 5 s for the engine, 2 s for
# connections, and a margin.
END_S = 10


def options(arguments):
    """Return the server's options for the container's arguments, all of which must be known."""
    args, unknown = cli.build_parser().parse_known_args(normalize(["serve", *arguments]))
    assert unknown == []
    return asked(args).server


def path_of(container, probe):
    return container[probe]["httpGet"]["path"]


def check_times(pod, container):
    """The pod is not killed while it drains, and balancers notice the drain in time."""
    hook = container.get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command")
    assert hook is None or hook[0] == "sleep"
    server = options(container["args"])
    needed = (int(hook[1]) if hook else 0) + server.drain_delay + server.drain_timeout + END_S
    assert pod["terminationGracePeriodSeconds"] >= needed
    probe = container["readinessProbe"]
    noticed_s = probe["failureThreshold"] * (probe["periodSeconds"] + probe["timeoutSeconds"])
    assert server.drain_delay > noticed_s


def check_rights(pod, container):
    """The container has few rights and writes only into volumes."""
    rights = container["securityContext"]
    assert rights["readOnlyRootFilesystem"] is True
    assert rights["allowPrivilegeEscalation"] is False
    assert rights["capabilities"] == {"drop": ["ALL"]}
    user = {**pod.get("securityContext", {}), **rights}
    assert user["runAsNonRoot"] is True
    dockerfile = (ROOT / "Dockerfile.cpu").read_text()
    assert user["runAsUser"] == int(re.search(r"--uid (\d+)", dockerfile)[1])
    written = re.findall(r"(?:CPUSERVE_CACHE|HF_HOME)=(\S+)", dockerfile)
    assert len(written) == 2
    mounts = [mount["mountPath"] for mount in container["volumeMounts"]]
    assert {mount["name"] for mount in container["volumeMounts"]} == {
        volume["name"] for volume in pod["volumes"]
    }
    assert all(any(Path(path).is_relative_to(m) for m in mounts) for path in [*written, "/tmp"])
