"""`cpuserve` with the engine of scripted_engine.py, for bench_front_end.py and bench_records.py."""

import functools

from msgspec.structs import replace

from cpuserve.api.app import app_of
from cpuserve.api.lifecycle import front_end
from cpuserve.cli import main as cli
from cpuserve.engine.replicas import ReplicaClient

# The records of requests with these queries; other requests have all that the options ask for.
NO_AUDIT = {"audit": None}
NO_TRACES = {**NO_AUDIT, "otlp_traces_endpoint": None}
FEWER = {b"observed": NO_AUDIT, b"logged": NO_TRACES, b"bare": {**NO_TRACES, "access_log": "off"}}


def app_with_fewer(state, options):
    """Return the app of a server; the query of a request chooses its records."""
    apps = {query: app_of(state, replace(options, **less)) for query, less in FEWER.items()}
    app = app_of(state, options)

    async def chosen(scope, receive, send):
        await apps.get(scope.get("query_string"), app)(scope, receive, send)

    return chosen


def main():
    """Run the command line; each engine is a scripted one."""
    ReplicaClient.spawn = functools.partial(ReplicaClient.spawn, module="scripted_engine")
    front_end.app_of = app_with_fewer
    return cli.main()
