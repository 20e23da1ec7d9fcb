"""`python -m tests.integrations.serve_on_ray PORT`: a local Ray node whose Serve listens on PORT.

Prints "ready ADDRESS", at which `serve run --address ADDRESS` deploys an application. Ends when its
standard input is closed.
"""

import sys

import ray
from ray import serve


def main() -> None:
    context = ray.init(num_cpus=2, include_dashboard=False, object_store_memory=80 << 20)
    serve.start(http_options={"host": "127.0.0.1", "port": int(sys.argv[1])})
    print("ready", context.address_info["gcs_address"], flush=True)
    sys.stdin.read()
    serve.shutdown()
    ray.shutdown()


if __name__ == "__main__":
    main()
