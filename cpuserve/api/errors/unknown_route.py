"""Error messages for unknown routes and methods, with a suggestion."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence

from starlette.routing import BaseRoute, Route

BASE = "/v1"
_BASES = (BASE, "/api")
_CHAT = f"{BASE}/chat/completions"
_MAX_SHOWN = 200

# Hints for methods that clients of other servers expect, appended to the error message.
_FIXED = {("POST", "/props"): ". The settings of this server are the options of its start"}
# Routes that are never suggested, because clients with a similar path mean a longer route.
_NOT_MEANT = {"/", "/completion", "/embedding"}
NO_AUDIO = "audio is not supported: this server reads and writes text only"
NO_IMAGES = "images are not supported: this server reads and writes text only"
# Path prefixes of other servers with a hint for this server; the first matching prefix is used.
_ELSEWHERE = (
    (f"{BASE}/audio", NO_AUDIO),
    (f"{BASE}/realtime", NO_AUDIO),
    (f"{BASE}/images", NO_IMAGES),
    (f"{BASE}/moderations", "moderation is not supported: this server generates text only"),
    (f"{BASE}/fine_tuning", "this server does not train models"),
    (f"{BASE}/assistants", f"OpenAI's Assistants API is not supported: use {_CHAT}"),
    (f"{BASE}/threads", f"OpenAI's Assistants API is not supported: use {_CHAT}"),
    (
        f"{BASE}/load_lora_adapter",
        "adapters are loaded at the start (--lora-modules), unless it is started with "
        "--allow-runtime-lora-updating",
    ),
    (
        f"{BASE}/unload_lora_adapter",
        "adapters stay loaded, unless it is started with --allow-runtime-lora-updating",
    ),
    *(
        (path, "it is only served with --admin-routes")
        for path in ("/server_info", "/reset_prefix_cache", "/sleep", "/wake_up", "/is_sleeping")
    ),
    ("/api/blobs", "the digest of a file is missing: use /api/blobs/sha256:DIGEST"),
    ("/api/web_search", "there is no search of the web"),
    ("/api/web_fetch", "there is no access to the web"),
    ("/api/me", "there are no accounts: see --api-key"),
    ("/api/signin", "there are no accounts: see --api-key"),
    ("/api/signout", "there are no accounts: see --api-key"),
    *(
        (f"/api/v{n}/models", f"LM Studio's own API is not supported: use {BASE}/models")
        for n in "01"
    ),
    ("/docs", "there are no documentation pages: /openapi.json has the schema"),
    ("/redoc", "there are no documentation pages: /openapi.json has the schema"),
)


def allowed_methods(path: str, routes: Iterable[BaseRoute]) -> list[str]:
    """Return the sorted HTTP methods that the routes of `path` accept.

    A route with exactly this path hides matching routes with a path parameter:
    in /v1/responses/input_tokens, `input_tokens` is not the id of a response.
    """
    own = [r for r in routes if isinstance(r, Route) and r.path_regex.match(path)]
    literal = [route for route in own if route.path == path]
    return sorted({method for route in literal or own for method in route.methods or ()})


def missing_method(method: str, path: str, allowed: str) -> str:
    """Return the error message for a method that `path` lacks; allowed: the methods it has."""
    asked = f"{method[:_MAX_SHOWN]} is not allowed on {path[:_MAX_SHOWN]}"
    return f"{asked}: use {allowed}{_FIXED.get((method, path), '')}"


def unknown_route(method: str, path: str, known: Sequence[str]) -> str:
    """Return the error message for an unknown `path`, with an alternative or a similar route."""
    shown = path[:_MAX_SHOWN]
    what = f"Unknown route: {method[:_MAX_SHOWN]} {shown}"
    if shown == BASE:
        return f"{what}. It is the base URL of the API: POST to {_CHAT}, or GET {BASE}/models"
    for beginning, instead in _ELSEWHERE:
        if any(f"{full}/".startswith(f"{beginning}/") for full in (shown, BASE + shown)):
            return f"{what}. On this server {instead}"
    near = _near(shown, known)
    if near is None:
        return f"{what}. GET / lists the routes"
    hint = f" The base URL of this API ends with {BASE}" if _is_base_missing(shown, near) else ""
    return f"{what}. Did you mean {near}?{hint}"


def _near(path: str, known: Sequence[str]) -> str | None:
    """Return the route that `path` probably means, or None.

    Three searches are tried in order: a route that, without /v1, is a suffix of `path`
    (the client has a wrong base URL); a route that begins with `path`;
    a route with a similar spelling.
    """
    lowered = path.lower()
    others = [route for route in known if route not in _NOT_MEANT]
    for route in sorted(others, key=len, reverse=True):
        if lowered.endswith(route.removeprefix(BASE)):
            return route
    for route in others:
        if route.startswith(f"{lowered}/"):
            return route
    # All routes of an API share its base path, so remove it before comparing spellings.
    known_bare = {_bare(route): route for route in others}
    close = difflib.get_close_matches(_bare(lowered), known_bare, n=1, cutoff=0.75)
    if not close:
        return None
    same = next((base for base in _BASES if lowered.startswith(f"{base}/")), "") + close[0]
    return same if same in others else known_bare[close[0]]


def _bare(path: str) -> str:
    """Return the path without the base path of its API."""
    base = next((base for base in _BASES if path.startswith(f"{base}/")), "")
    return path.removeprefix(base)


def _is_base_missing(path: str, near: str) -> bool:
    return near.startswith(BASE) and not path.lower().startswith(BASE)
