"""The ASGI application: the routes of all modules in ROUTERS, behind the middleware."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from fastapi import FastAPI
from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response

from cpuserve.api import shared_paths, systemone
from cpuserve.api.anthropic import batches as message_batches
from cpuserve.api.anthropic import files as anthropic_files
from cpuserve.api.anthropic import models as anthropic_models
from cpuserve.api.anthropic import router as messages
from cpuserve.api.dialects import DIALECTS
from cpuserve.api.errors.dialect import OPENAI
from cpuserve.api.errors.http_errors import install_error_handlers
from cpuserve.api.http.guards import (
    METRICS_PATHS,
    PUBLIC_PATHS,
    AllowedHosts,
    ApiKeys,
    CallersWithinLimits,
    WebPages,
    host_names,
)
from cpuserve.api.http.middleware import (
    UNCOUNTED_PATHS,
    ConnectionClose,
    RequestIds,
    RequestLine,
    ResponseCounts,
    UnexpectedErrors,
)
from cpuserve.api.http.records import Records, records_of
from cpuserve.api.llamacpp import adapters
from cpuserve.api.llamacpp import server as llamacpp_server
from cpuserve.api.llamacpp.completion import router as completion
from cpuserve.api.ollama import create, pull
from cpuserve.api.ollama import models as ollama_models
from cpuserve.api.ollama import router as ollama
from cpuserve.api.openai import batches, conversations, files, uploads
from cpuserve.api.openai import models as openai_models
from cpuserve.api.openai.chat import router as chat
from cpuserve.api.openai.completions import router as completions
from cpuserve.api.openai.completions import tokens
from cpuserve.api.openai.responses import router as responses
from cpuserve.api.response.openapi import install_schema
from cpuserve.api.status import router as status
from cpuserve.api.tgi import router as tgi
from cpuserve.api.vectors import llamacpp as llamacpp_embedding
from cpuserve.api.vectors import ollama as ollama_embed
from cpuserve.api.vectors import openai as embeddings
from cpuserve.api.vectors import pooling, scores
from cpuserve.api.vectors.cohere import embed as cohere
from cpuserve.api.vectors.tei import embed as tei
from cpuserve.api.vectors.tei import info, predict, token_labels
from cpuserve.api.vectors.tei import tokens as tei_tokens
from cpuserve.api.vllm import tokens as tokenize
from cpuserve.base.version import version

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from fastapi import APIRouter

    from cpuserve.api.callers.known_callers import KnownCallers
    from cpuserve.api.request.state import ServerState
    from cpuserve.config.server import ServerOptions

# The modules of all routes, in the order of /openapi.json. A path that several modules have
# belongs to the first of them.
ROUTERS = tuple(
    module.router
    for module in (
        *(messages, message_batches, anthropic_models, anthropic_files),
        *(chat, completions, tokens, responses, conversations),
        *(embeddings, files, uploads, batches, openai_models),
        *(ollama, ollama_embed, ollama_models, pull, create),
        *(llamacpp_server, completion, llamacpp_embedding, adapters),
        *(scores, pooling, systemone),
        *(tei, predict, tei_tokens, token_labels, info, tgi, cohere),
        *(tokenize, shared_paths, status),
    )
)


@dataclass(frozen=True, slots=True)
class Cors:
    """The origins, methods and headers that CORS allows; "*" allows all."""

    origins: Sequence[str]
    methods: Sequence[str] = ("*",)
    headers: Sequence[str] = ("*",)
    credentials: bool = False


def create_app(
    state: ServerState,
    *,
    callers: KnownCallers | None = None,
    public_metrics: bool = False,
    host_names: Sequence[str] | None = None,
    cors: Cors | None = None,
    admin_routes: bool = False,
    webui: bool = True,
    records: Records | None = None,
) -> FastAPI:
    """Return the app that serves the API with `state`.

    callers: all requests need a key of these, except to read /health, /ping, /live and the chat
      page; None = requests need no key, and have the caller that their scope has.
    public_metrics: whether /metrics and /version need no key either.
    host_names: the values that the Host header may have besides local names; None allows any.
    cors: the CORS rules; None = web pages of other origins cannot read responses.
    admin_routes: serve the routes that change the state of the server.
    webui: serve the chat page to browsers.
    records: the logs of requests; None = the records of `state`.
    """
    # FastAPI's documentation pages load scripts from the internet; this server must work offline.
    app = FastAPI(
        title="cpuserve",
        version=version(),
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
    )
    app.state.server = state
    app.state.webui = webui
    routers = _routers(state, admin_routes=admin_routes, webui=webui)
    app.state.paths = _paths(routers)
    app.state.routes = [*app.routes, *(route for router in routers for route in router.routes)]
    # FastAPI's include_router would try all routes of each router twice per request,
    # and rebuild them for each app. These routers have no path prefix, so neither is needed.
    app.router.routes.extend(app.state.routes[len(app.routes) :])
    install_error_handlers(app)
    install_schema(app, app.state.routes)
    # The middleware that is added last handles a request first.
    origins = () if cors is None else cors.origins
    app.add_middleware(WebPages, routes=app.state.routes, origins=origins)
    app.add_middleware(CallersWithinLimits)
    if callers is not None:
        public = PUBLIC_PATHS | METRICS_PATHS if public_metrics else PUBLIC_PATHS
        app.add_middleware(ApiKeys, callers=callers, public=public, webui=webui)
    if host_names is not None:
        app.add_middleware(AllowedHosts, names=host_names)
    app.add_middleware(UnexpectedErrors)
    if cors is not None:
        _add_cors(app, cors)
    app.add_middleware(RequestLine)
    _add_records(app, state, records or state.records or Records())
    app.add_middleware(ConnectionClose, state=state)
    return app


def _add_records(app: FastAPI, state: ServerState, records: Records) -> None:
    """Add the middleware that counts requests and writes their logs."""
    state.records = records
    state.http.dropped_traces = records.dropped_traces
    counts = ResponseCounts(state.http, app.state.paths)
    if records.audit is not None:
        from cpuserve.api.http.audit import Audited

        def covers(path: str) -> bool:
            return path not in UNCOUNTED_PATHS

        app.add_middleware(Audited, audit=records.audit, covers=covers, shown=counts.shown)
    app.add_middleware(RequestIds, counts=counts, records=records)


# A browser asks so whether a public web page may use a server in a private network.
_FROM_OUTSIDE = "access-control-request-private-network"


class _CorsOfPrivateNetworks(CORSMiddleware):
    """CORS for public pages of the allowed origins as well.

    Starlette knows this question of browsers from 0.51 on, and this class with every version.
    """

    def preflight_response(self, request_headers: Headers) -> Response:
        """Return the response to a preflight request."""
        others = [(k, v) for k, v in request_headers.raw if k.decode("latin-1") != _FROM_OUTSIDE]
        response = super().preflight_response(Headers(raw=others))
        if _FROM_OUTSIDE in request_headers and response.status_code < 400:
            response.headers["access-control-allow-private-network"] = "true"
        return response


def _add_cors(app: FastAPI, cors: Cors) -> None:
    app.add_middleware(
        _CorsOfPrivateNetworks,
        allow_origins=cors.origins,
        allow_methods=cors.methods,
        allow_headers=cors.headers,
        allow_credentials=cors.credentials,
        expose_headers=["x-request-id", *dict.fromkeys(_shown_headers())],
    )


def _shown_headers() -> Iterator[str]:
    """Yield the response headers of all dialects that pages of other origins may read."""
    for dialect in (OPENAI, *DIALECTS):
        yield from dialect.id_headers
        yield from dialect.limits.all()
    yield "retry-after"
    yield "warning"


def app_of(state: ServerState, options: ServerOptions) -> FastAPI:
    """Return the app that the server options describe, with the callers of `state`.

    Raises:
      ConfigError: see records_of.
    """
    cors = None
    if options.allowed_origins:
        lists = options.allowed_origins, options.allowed_methods, options.allowed_headers
        cors = Cors(*lists, credentials=options.allow_credentials)
    return create_app(
        state,
        callers=state.callers if state.callers.have_keys else None,
        public_metrics=options.public_metrics,
        host_names=host_names(options),
        cors=cors,
        admin_routes=options.admin_routes,
        webui=options.webui,
        records=records_of(options),
    )


def _routers(state: ServerState, *, admin_routes: bool, webui: bool) -> tuple[APIRouter, ...]:
    """Return the routers of all endpoints that this server has."""
    more: list[APIRouter] = []
    if state.context.adapters_change:
        from cpuserve.api.vllm.admin import lora_router

        more.append(lora_router)
    if admin_routes:
        from cpuserve.api.vllm import admin

        more.append(admin.router)
    if webui:
        from cpuserve.api.webui import router as page

        more.append(page.router)
    return (*ROUTERS, *more)


def _paths(routers: Sequence[APIRouter]) -> list[str]:
    """Return the sorted paths of all routes without path parameters."""
    paths = {path for router in routers for path in (getattr(r, "path", "") for r in router.routes)}
    return sorted(["/openapi.json", *(path for path in paths if path and "{" not in path)])
