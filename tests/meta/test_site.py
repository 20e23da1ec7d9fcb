"""The documentation site has all pages and drawings, and the check of a built site finds faults.

`.ci/run docs` builds the site and checks it.
"""

import json
import re
from pathlib import Path

import pytest
import yaml

from docs.site import chart, check, drawings, hooks, recording
from docs.tables.pages import PAGES, replaced

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


def navigation():
    """The pages of mkdocs.yml."""
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8").replace("!!python/name:", "")
    entries = [*yaml.safe_load(text)["nav"]]
    while entries:
        for value in entries.pop(0).values():
            if isinstance(value, str):
                yield value
            else:
                entries += value


def test_the_navigation_has_every_page_once():
    pages = [*navigation()]
    ours = {path.relative_to(DOCS).as_posix() for path in DOCS.rglob("*.md")}
    assert len({*pages}) == len(pages)
    assert {*pages} == ours | {*hooks.SOURCES}


@pytest.mark.parametrize("name", drawings.PICTURES)
def test_the_drawings_are_those_of_the_script(name):
    made = "run: python -m docs.site.drawings docs/images"
    assert (DOCS / "images" / f"{name}.svg").read_text("utf-8") == drawings.PICTURES[name](), made


@pytest.mark.parametrize("name", PAGES)
def test_a_page_with_tables_from_the_code_has_them_as_they_are_now(name):
    page = (DOCS / name).read_text(encoding="utf-8")
    assert replaced(name, page) == page, "run: python -m docs.tables"


def test_a_page_without_its_markers_is_refused():
    with pytest.raises(ValueError, match=r"metrics\.md: the markers"):
        replaced("metrics.md", "# Metrics")


def test_the_page_of_metrics_has_those_that_the_code_names():
    files = (ROOT / "cpuserve" / "metrics").glob("*.py")
    source = "".join(path.read_text(encoding="utf-8") for path in files)
    page = (DOCS / "metrics.md").read_text(encoding="utf-8")
    whole = re.findall(r'"((?:vllm|cpuserve):\w+)"', source)
    assert len(whole) >= 5
    assert [name for name in whole if f"`{name}" not in page] == []


@pytest.mark.parametrize(
    ("place", "link", "on_the_site"),
    [
        ("index.md", "[a](serving.md#numa)", "[a](serving.md#numa)"),
        ("guides/docker.md", "[a](../deploy.md)", "[a](../deploy.md)"),
        ("concepts.md", "[a](../ARCHITECTURE.md#x)", "[a](project/architecture.md#x)"),
        ("project/architecture.md", "[a](docs/options.md)", "[a](../options.md)"),
        ("deploy.md", "[a](../deploy)", "a"),
        ("index.md", "[a](https://example.com)", "[a](https://example.com)"),
        ("index.md", "![a](images/step.svg)", "![a](images/step.svg)"),
    ],
)
def test_links_of_the_repository_become_links_of_the_site(place, link, on_the_site):
    assert hooks.rewritten(link, place) == on_the_site


GOOD = '<html><head><script src="a.js"></script></head><body id="top"><a href="b.html#x">b</a>'


@pytest.mark.parametrize(
    ("html", "problem"),
    [
        (GOOD, None),
        ('<script src="https://cdn.example/a.js"></script>', "from another server"),
        ('<link rel="stylesheet" href="//fonts.example/a.css">', "from another server"),
        ('<link rel="canonical" href="https://example.com/a.html">', None),
        ('<img src="none.png">', "does not exist"),
        ('<a href="none.html">a</a>', "does not exist"),
        ('<a href="b.html#none">a</a>', "no such part"),
        ('<a href="#none">a</a>', "no such part"),
        ('<a href="https://example.com/none">a</a>', None),
    ],
)
def test_the_check_of_a_site_finds(tmp_path, html, problem):
    (tmp_path / "a.html").write_text(html)
    (tmp_path / "b.html").write_text('<p id="x">')
    (tmp_path / "a.js").write_text("")
    found = [*check.problems(tmp_path)]
    assert len(found) == (problem is not None)
    assert problem is None or problem in found[0]


def test_the_check_of_a_site_finds_imports_of_style_sheets(tmp_path):
    (tmp_path / "a.css").write_text("p { background: url('https://example.com/a.png') }")
    assert [*check.problems(tmp_path)] == ["a.css loads a resource from another server"]


def test_the_chart_of_the_readme_has_the_figures_of_the_page_on_performance():
    made = "run: python -m docs.site.chart docs/images/peers.svg"
    assert (DOCS / "images" / "peers.svg").read_text("utf-8") == chart.chart(), made
    head = "## Compared with other servers\n\n| model | with | decode |\n|---|---|---|\n"
    page = f"{head}| a | b | 1.5 x |\n| | c | - |"
    assert chart.factors(page) == {("a", "b"): {"decode": 1.5}, ("a", "c"): {}}


def test_the_recording_of_the_readme_is_drawn_from_a_session_with_its_commands():
    made = "run: python -m docs.site.recording draw FILE.json FILE.svg"
    session = json.loads((DOCS / "images" / "first-minute.json").read_text("utf-8"))
    shown = (DOCS / "images" / "first-minute.svg").read_text("utf-8")
    assert shown == recording.draw(session), made
    readme = (ROOT / "README.md").read_text("utf-8")
    assert [part["command"] for part in session] == ["cpuserve serve", recording.CURL]
    assert all(part["command"] in readme and part["output"] for part in session)
    assert "Paris" in shown
