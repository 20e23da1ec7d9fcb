"""`python -m tests.api.serve_fake OPTIONS`: serve() over the fake engine process.

OPTIONS is JSON: {"model", "port", "uds", "drain_s", "drain_delay_s", "keys", "key_file",
"replicas", "restart", "limits": [of HangLimits], "download", "also", "config": {...}}.
It prints "preparing" when the command line would look for the model, "engine PID" at the start of
each engine, and "ready URL" once it serves. It exits as the command line does.
download: what happens before the engine starts: "none", "until a line comes" on standard input,
or "refuse", which fails. also: the same for a further model, "two".
"""

import json
import sys
from concurrent.futures import ThreadPoolExecutor

from cpuserve.api.http import startup_server
from cpuserve.api.lifecycle.serve import serve
from cpuserve.base.children import exit_now
from cpuserve.base.errors import ModelError, StartupError
from cpuserve.config.engine import Resolved
from cpuserve.config.load import from_arguments
from cpuserve.config.server import ServerOptions
from cpuserve.config.several import NamedModel
from cpuserve.engine.liveness import HangLimits
from cpuserve.engine.process import ProcessClient
from cpuserve.models.spec import ModelSpec
from cpuserve.platforms import select
from cpuserve.prepare import Prepared
from cpuserve.serving.models.preparation import StoppedWhilePreparing
from tests.helpers.fake_executor import fake_config
from tests.helpers.hosts import SMOLLM2
from tests.helpers.patience import PATIENCE_S

SPEC = ModelSpec(
    architecture="LlamaForCausalLM",
    vocab=49152,
    width=576,
    layers=30,
    q_heads=9,
    kv_heads=3,
    head_dim=64,
    intermediate=1536,
    max_position=8192,
    norm_eps=1e-5,
    tied=True,
    dtype="bfloat16",
)


def main() -> int:
    options = json.loads(sys.argv[1])
    spawn = ProcessClient.spawn

    def spawn_fake(config, **kwargs):
        own = {"module": "tests.helpers.fake_engine", "limits": HangLimits(*options["limits"])}
        client = spawn(config, **{**kwargs, **own})
        print(f"engine {client.pid}", flush=True)
        return client

    ProcessClient.spawn = spawn_fake
    startup_server.HEAD_TIMEOUT_S = PATIENCE_S  # a client may wait until the engine has started
    config = fake_config(model=options["model"], **options["config"])
    http = ServerOptions(
        port=options["port"],
        uds=options["uds"],
        drain_timeout=options["drain_s"],
        drain_delay=options["drain_delay_s"],
        api_key=options["keys"],
        api_key_file=options["key_file"],
        engine_restart=options["restart"],
    )

    resolved = Resolved(config, others=(config,) * (options.get("replicas", 1) - 1))

    def prepare(progress):
        download(options["download"], progress)
        return Prepared(resolved, SPEC, SMOLLM2, None, select("cpu")[0], ())

    def prepare_two(promised_bytes):
        download(options["also"], lambda *_: None)
        two = fake_config(
            model=options["model"], **{**options["config"], "served_model_names": ["two"]}
        )
        return Prepared(Resolved(two), SPEC, SMOLLM2, None, select("cpu")[0], ())

    async def on_ready(prepared, url, client):
        assert prepared.resolved is resolved
        print(f"ready {url}", flush=True)

    try:
        two = NamedModel("two", from_arguments({"model": options["model"]}))
        others = [(two, prepare_two)] if options.get("also") else []
        return serve(prepare, http, on_ready=on_ready, others=others)
    except StartupError as error:
        print(f"cpuserve: error: {error}", file=sys.stderr)
        return 2
    except StoppedWhilePreparing as stopped:
        exit_now(stopped.code)


def download(how, progress):
    print("preparing", flush=True)
    if how == "until a line comes":
        progress("download owner/model", 40, 100)
        with ThreadPoolExecutor() as pool:  # like the library that downloads from the hub
            pool.submit(sys.stdin.readline).result()
    elif how == "refuse":
        msg = "model owner/model cannot be fetched"
        raise ModelError(msg)


if __name__ == "__main__":
    sys.exit(main())
