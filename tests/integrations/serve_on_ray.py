"""`python -m tests.integrations.serve_on_ray PORT ARGS`: the Ray Serve application on a local node.

ARGS is JSON, what `serve run` would be given. Prints "ready" once it serves; ends when its standard
input does.
"""

import json
import sys

import ray
from ray import serve

from cpuserve.integrations.ray_serve import app


def main() -> None:
    port, args = int(sys.argv[1]), json.loads(sys.argv[2])
    ray.init(num_cpus=2, include_dashboard=False, object_store_memory=80 << 20)
    serve.start(http_options={"host": "127.0.0.1", "port": port})
    serve.run(app(args), name="cpuserve", route_prefix="/")
    print("ready", flush=True)
    sys.stdin.read()
    serve.shutdown()
    ray.shutdown()


if __name__ == "__main__":
    main()
