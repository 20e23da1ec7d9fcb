"""What a web page can do on the server of its reader: nothing without an origin that is allowed.

A page may send POST with three media types, or without a body, before any CORS preflight request;
its browser adds Origin to each, and newer browsers add Sec-Fetch-Site.
"""

import re

import pytest

from cpuserve.api.app import Cors, create_app
from tests.api.fakes import Api
from tests.api.post_routes import ROUTES

EVIL = {"origin": "http://evil.example"}
PAGES = [EVIL, {"origin": "null"}, {"origin": ""}, {"sec-fetch-site": "cross-site"}]
SIMPLE = ["text/plain", "multipart/form-data; boundary=b", "application/x-www-form-urlencoded"]
# Routes that compute, or that store the answers of the API of Responses: a page whose origin
# is allowed sends them JSON, for which its browser asks first.
FOR_PAGES = {
    *ROUTES,
    *("/infill", "/invocations", "/", "/generate", "/generate_stream", "/v1/responses/compact"),
    *("/v1/conversations", "/v1/conversations/{conversation_id}"),
    "/v1/conversations/{conversation_id}/items",
}


def all_routes():
    """Return the methods and the path of each route that is not only read."""
    api = Api()
    api.context.adapters_change = True
    routes = create_app(api.state, admin_routes=True).state.routes
    changes = {(m, r.path) for r in routes for m in r.methods - {"GET", "HEAD"}}
    assert ("POST", "/sleep") in changes
    return sorted(changes)


@pytest.fixture(scope="module")
def api():
    api = Api()
    api.context.adapters_change = True
    api.app = create_app(api.state, admin_routes=True)
    return api


def ask(api, method, path, headers, **kwargs):
    return api.request(method, re.sub(r"\{[^}]*\}", "1", path), headers=headers, **kwargs)


@pytest.mark.parametrize(("method", "path"), all_routes(), ids=str)
def test_no_page_changes_anything_without_asking_first(api, method, path):
    api.engine.asked.clear()
    for page in PAGES:
        bodies = [(None, b""), (None, b"{}"), *((kind, b"{}") for kind in SIMPLE)]
        for kind, content in bodies:
            headers = page if kind is None else {**page, "content-type": kind}
            response = ask(api, method, path, headers, content=content)
            assert response.status_code == 415, (headers, response.text)
    assert not api.engine.asked


@pytest.mark.parametrize(("method", "path"), all_routes(), ids=str)
def test_only_routes_that_compute_read_the_json_of_pages(api, method, path):
    response = ask(api, method, path, {**EVIL, "content-type": "application/json"}, content=b"[]")
    wanted = method == "POST" and path in FOR_PAGES
    assert (response.status_code != 415) == wanted, response.text
    if not wanted:
        assert "--allowed-origins" in response.text


@pytest.mark.parametrize(("method", "path"), all_routes(), ids=str)
def test_a_program_is_never_taken_for_a_page(api, method, path):
    # fetch() of Node adds sec-fetch-mode to what no page sends.
    headers = {"sec-fetch-mode": "cors", "accept": "text/html", "content-type": "application/json"}
    response = ask(api, method, path, headers, content=b"[]")
    assert "web page" not in response.text


def status_with(cors):
    api = Api(cors=cors, admin_routes=True)
    return api.request("POST", "/wake_up", headers=EVIL).status_code


def test_an_origin_changes_something_only_if_it_is_allowed_by_name():
    assert status_with(Cors(("http://evil.example",))) == 200
    assert status_with(Cors(("http://other.example",))) == 415
    assert status_with(Cors(("*",))) == 415  # any page may read, but none may change anything
    assert status_with(None) == 415
