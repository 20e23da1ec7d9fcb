"""`python -m tests.api.serve_fake OPTIONS`: serve() over the fake engine process.

OPTIONS is JSON: {"model", "port", "uds", "drain_s", "keys", "replicas", "config": {...}}. Prints
"engine PID" at the start of each engine, "ready URL" once it serves; ends as the command line does.
"""

import json
import sys

from cpuserve.config.engine import Resolved
from cpuserve.engine.process import ProcessClient
from cpuserve.entrypoints.serve import HttpOptions, serve
from cpuserve.errors import StartupError
from tests.helpers.fake_executor import fake_config


def main() -> int:
    options = json.loads(sys.argv[1])
    spawn = ProcessClient.spawn

    def spawn_fake(config, **kwargs):
        client = spawn(config, **{**kwargs, "module": "tests.helpers.fake_engine"})
        print(f"engine {client.pid}", flush=True)
        return client

    ProcessClient.spawn = spawn_fake
    config = fake_config(model=options["model"], **options["config"])
    http = HttpOptions(
        port=options["port"],
        uds=options["uds"],
        drain_s=options["drain_s"],
        api_keys=options["keys"],
    )

    async def on_ready(url, client):
        print(f"ready {url}", flush=True)

    try:
        others = (config,) * (options.get("replicas", 1) - 1)
        return serve(Resolved(config, others=others), http, on_ready=on_ready)
    except StartupError as error:
        print(f"cpuserve: error: {error}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
