"""The files of the chat page: headers, keys, size, and what the page may load."""

import re
from pathlib import Path

import pytest

from tests.api.fakes import Api

FOLDER = Path(__file__).parents[2] / "cpuserve" / "webui"
FILES = sorted(path.name for path in FOLDER.iterdir() if path.is_file())
HTML = {"accept": "text/html,application/xhtml+xml,*/*;q=0.8"}


def folder_of(page):
    """The folder of the files that a page loads."""
    (name,) = set(re.findall(r'"webui/(\w+)/', page.text))
    return name


def test_browsers_get_the_page_and_others_the_description():
    api = Api()
    page = api.get("/", headers=HTML)
    folder = folder_of(page)
    own = page.text.replace(f"webui/{folder}/", "webui/")
    assert own == (FOLDER / "index.html").read_text(encoding="utf-8")
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert page.headers["vary"] == "accept, accept-encoding"
    assert api.get("/", headers={"accept": "application/json"}).json()["server"] == "cpuserve"
    assert api.get("/", headers={"accept": "*/*"}).text == "Ollama is running"


def test_without_the_page_browsers_get_the_description():
    api = Api(webui=False)
    assert api.get("/", headers=HTML).json()["server"] == "cpuserve"
    assert api.get("/webui/app.js").status_code == 404


@pytest.mark.parametrize("name", [name for name in FILES if name != "index.html"])
def test_each_file_has_its_type_and_may_load_only_from_this_server(name):
    file = Api().get(f"/webui/{name}")
    assert file.content == (FOLDER / name).read_bytes()
    kinds = {"js": "text/javascript", "css": "text/css", "svg": "image/svg+xml"}
    assert file.headers["content-type"].startswith(kinds[name.rpartition(".")[2]])
    assert file.headers["x-content-type-options"] == "nosniff"
    policy = file.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "connect-src 'self'" in policy
    assert "unsafe" not in policy
    assert "http" not in policy


def test_a_file_that_has_not_changed_is_not_sent_again():
    api = Api()
    first = api.get("/webui/app.js")
    again = api.get("/webui/app.js", headers={"if-none-match": first.headers["etag"]})
    assert (again.status_code, again.content) == (304, b"")
    other = api.get("/webui/app.js", headers={"if-none-match": '"other"'})
    assert other.status_code == 200
    weak = api.get("/webui/app.js", headers={"if-none-match": f"W/{first.headers['etag']}"})
    assert weak.status_code == 304


def test_a_second_visit_asks_for_the_page_only():
    api = Api()
    page = api.get("/", headers=HTML)
    assert page.headers["cache-control"] == "no-cache"
    for name in re.findall(r'"(webui/\w+/[\w.]+)"', page.text):
        file = api.get(f"/{name}")
        assert file.content == (FOLDER / name.rpartition("/")[2]).read_bytes()
        assert file.headers["cache-control"] == "public, max-age=31536000, immutable"
    assert api.get("/webui/0123456789abcdef/app.js").status_code == 404


def test_a_first_visit_transfers_less_than_90_kb():
    api = Api()
    page = api.get("/", headers=HTML)
    sizes = [int(page.headers["content-length"])]
    for name in set(re.findall(r'"(webui/\w+/[\w.]+)"', page.text)):
        file = api.get(f"/{name}", headers={"accept-encoding": "gzip, deflate, br, zstd"})
        assert file.headers["content-encoding"] == "gzip"
        assert "accept-encoding" in file.headers["vary"]
        sizes.append(int(file.headers["content-length"]))
    assert sum(sizes) <= 90_000


@pytest.mark.parametrize(
    ("accepted", "packed"),
    [("", False), ("gzip", True), ("GZIP;q=0.5, br", True), ("*", True), ("*, gzip;q=0", False),
     ("gzip; q=0.000", False), ("br", False), ("x-gzip", False), ("identity;q=0, *;q=1", True)],
)  # fmt: skip
def test_files_are_compressed_for_those_who_accept_it(accepted, packed):
    api = Api()
    for path in ("/", "/webui/app.js"):
        file = api.get(path, headers={**HTML, "accept-encoding": accepted})
        plain = api.get(path, headers={**HTML, "accept-encoding": "identity"})
        assert (file.headers.get("content-encoding") == "gzip") == packed
        assert file.content == plain.content
        assert (file.headers["etag"] != plain.headers["etag"]) == packed


@pytest.mark.parametrize("name", ["none.js", "..%2fapp.py", "%2e%2e", "app.js%00", "x" * 5000])
def test_there_are_no_other_files(name):
    assert Api().get(f"/webui/{name}").status_code == 404


def test_the_page_needs_no_key_and_everything_else_does():
    api = Api(api_keys=["secret"])
    page = api.get("/", headers=HTML)
    assert page.status_code == 200
    assert api.get("/webui/app.js").status_code == 200
    assert api.get(f"/webui/{folder_of(page)}/app.js").status_code == 200
    assert api.get("/").status_code == 401
    assert api.get("/v1/activity", headers=HTML).status_code == 401
    off = Api(api_keys=["secret"], webui=False)
    assert off.get("/", headers=HTML).status_code == 401
    assert off.get("/webui/app.js").status_code == 401


def test_the_page_loads_all_of_its_modules_at_once():
    html = (FOLDER / "index.html").read_text(encoding="utf-8")
    named = set(re.findall(r'href="webui/(\w+\.js)"', html)) | {"app.js"}
    assert named == {name for name in FILES if name.endswith(".js")}


@pytest.mark.parametrize("name", FILES)
def test_no_file_names_another_server(name):
    text = (FOLDER / name).read_text(encoding="utf-8")
    known = {"http://www.w3.org/2000/svg", "http://www.w3.org/1998/Math/MathML"}
    assert set(re.findall(r"""https?://[^\s"'`<>)\\/]+[^\s"'`<>)\\]*""", text)) <= known
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|eval\(|new Function", text)
