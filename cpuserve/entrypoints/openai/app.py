"""The ASGI application: one router file per endpoint, listed in ROUTERS."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fastapi import FastAPI

from cpuserve.entrypoints.openai import chat, completions, cpu, health, metrics, models, tokenize
from cpuserve.entrypoints.openai.errors import install_error_handlers
from cpuserve.entrypoints.openai.middleware import ApiKeys, LastNet, RequestIds
from cpuserve.entrypoints.openai.schema import install_schema
from cpuserve.version import version

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cpuserve.entrypoints.openai.serving import Serving

ROUTERS = (
    chat.router,
    completions.router,
    models.router,
    tokenize.router,
    cpu.router,
    health.router,
    metrics.router,
)


def create_app(serving: Serving, *, api_keys: Sequence[str] = ()) -> FastAPI:
    """The app over `serving`; with `api_keys` every route but /health and /ping asks for one."""
    # The documentation pages load scripts from elsewhere, which an offline server should not.
    app = FastAPI(
        title="cpuserve",
        version=version(),
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    app.state.serving = serving
    for router in ROUTERS:
        app.include_router(router)
    install_error_handlers(app)
    install_schema(app)
    # The last added is the outermost.
    app.add_middleware(LastNet)
    if api_keys:
        app.add_middleware(ApiKeys, keys=api_keys)
    app.add_middleware(RequestIds)
    return app
