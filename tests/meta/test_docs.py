"""What the documents say is what the code does."""

import json
import re
import shlex
from pathlib import Path

import pytest
import yaml

from cpuserve.api.app import ROUTERS
from cpuserve.api.vllm import admin
from cpuserve.api.vllm.admin import lora_router
from cpuserve.cli import listings
from cpuserve.cli import main as cli
from cpuserve.cli.flags import normalize
from cpuserve.config.fields import FIELDS
from cpuserve.models import MODELS, families
from cpuserve.runtime.executor import Executor
from cpuserve.sampling.chain import _LETTERS, DEFAULT_ORDER
from docs.tables.options import table
from tests.helpers import classifiers, rerankers, splade
from tests.helpers.quantized import FORMATS
from tests.helpers.tiny import ENCODERS, FAMILIES, tiny_config

ROOT = Path(__file__).parent.parent.parent
DOCUMENTS = (
    "README.md",
    "ARCHITECTURE.md",
    "CONTRIBUTING.md",
    "CHANGELOG.md",
    *(str(page.relative_to(ROOT)) for page in sorted((ROOT / "docs").rglob("*.md"))),
)
README = (ROOT / "README.md").read_text(encoding="utf-8")


def code_blocks(text, language=""):
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    return [block for of, block in blocks if of == language]


def test_readme_has_the_two_set_up_lines():
    lines = code_blocks(README)[0].splitlines()
    assert lines == ["pip install . && cpuserve serve", "pip install '.[test]' && pytest"]


def test_readme_fits_on_two_screens():
    assert len(README.splitlines()) <= 110


def test_the_page_on_serving_lists_every_endpoint():
    page = (ROOT / "docs" / "serving.md").read_text(encoding="utf-8")
    table = page.partition("## Endpoints")[2].partition("A request accepts")[0]
    listed = set(re.findall(r"`(/[\w/.-]+)`", table)) - {"/v1", "/openapi.json"}
    routes = [
        route.path for router in (*ROUTERS, lora_router, admin.router) for route in router.routes
    ]
    served = {path for path in routes if "{" not in path and path != "/"}
    assert listed == served - {"/rerank", "/score"}  # "both also without /v1"


def test_every_family_format_and_architecture_of_that_page_has_a_test():
    tested = {
        name for family in (*FAMILIES, *ENCODERS) for name in tiny_config(family)["architectures"]
    }
    tested |= {name for _, name, _ in rerankers.KINDS.values()}
    tested |= {name for _, name in (*classifiers.TEXTS.values(), *classifiers.TOKENS.values())}
    tested |= {name for _, name in splade.KINDS.values()}
    tested.add("RobertaModel")  # the class of XLMRobertaModel
    tested.add("GraniteMoeSharedForCausalLM")  # tests/models/test_families.py, as granite-moe
    tested.add("Ernie4_5_ForCausalLM")  # the older name of Ernie4_5ForCausalLM
    # Older names of classes, in tests/models/test_config.py.
    tested |= {"ExaoneMoEForCausalLM", "LLaMAForCausalLM", "MPTForCausalLM"}
    tested |= {"MiniMaxM3SparseForCausalLM", "LFM2ForCausalLM", "StableLMEpochForCausalLM"}
    tested |= {"RWForCausalLM", "Rwkv7ForCausalLM", "CamembertModel"}
    tested.add("PhiMoEForCausalLM")  # the published name of PhimoeForCausalLM
    tested.add("NewModel")  # the older name of GteModel
    tested.add("LlamaBidirectionalModel")  # tests/llm/test_encoders.py
    tested.add("Ernie4_5_VLMoeForCausalLM")  # tests/llm/test_text_parts.py
    tested.add("JinaEmbeddingsV5Model")  # tests/llm/test_tasks.py
    tested.add("MT5EncoderModel")  # tests/llm/test_relative.py
    tested |= {"JinaBertModel", "JinaBertForMaskedLM"}  # tests/llm/test_jina_v2.py
    tested |= {"MiniCPMForCausalLM", "InternLM2ForCausalLM"}  # tests/models/test_published_code.py
    tested |= {"BaichuanForCausalLM", "BaiChuanForCausalLM"}  # there, too
    tested |= {"OrionForCausalLM", "PanguEmbeddedForCausalLM"}  # there, too
    tested |= {"TeleChat3ForCausalLM", "XverseForCausalLM"}  # there, too
    # The older name of Gte, in tests/llm/test_rerankers.py.
    tested |= {"NewForSequenceClassification", "NewForTokenClassification"}
    tested |= {"DeciLMForCausalLM", "DeepseekForCausalLM"}  # there, too
    tested |= {"MiMoV2ForCausalLM", "NemotronHPuzzleForCausalLM"}  # there, too
    tested |= {"BailingMoeForCausalLM", "BailingMoeV2ForCausalLM"}  # there, too
    tested.add("Rwkv6ForCausalLM")  # tests/models/test_rwkv6.py
    tested |= {"MiMoForCausalLM"}  # tests/models/test_guess_heads.py
    tested |= {"MiniMaxText01ForCausalLM", "MiniMaxM1ForCausalLM"}  # tests/models/test_config.py
    tested.add("BailingMoeV3ForCausalLM")  # there, too
    assert {*families.FAMILIES.wholes, *tested} >= {row[0] for row in listings.families()[1:]}
    methods = {settings.get("quant_method", "mlx") for _, settings in FORMATS.values()}
    methods.add("mxfp4")  # tests/quant/test_readers.py, as stacks of experts
    assert {*methods, "none"} == {row[0] for row in listings.formats()[1:]}


def test_the_option_table_is_well_formed_markdown():
    rows = [line for line in table().splitlines() if line.startswith("|")]
    assert rows
    assert all(len(re.findall(r"(?<!\\)\|", row)) == 5 for row in rows)


@pytest.mark.parametrize("name", [*DOCUMENTS, "benchmarks/peers/README.md"])
def test_every_row_of_a_table_has_as_many_cells_as_its_header(name):
    """Otherwise a page shows the bars and dashes instead of a table, or drops cells."""
    text = (ROOT / name).read_text(encoding="utf-8")
    text = re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)  # drawings have bars
    table: list[int] = []
    for line in [*text.splitlines(), ""]:
        if line.lstrip().startswith("|"):
            table.append(len(re.findall(r"(?<!\\)\|", line)))
            continue
        assert len({*table}) <= 1, (line, table)
        table = []


@pytest.mark.parametrize("name", DOCUMENTS)
def test_links_lead_somewhere(name):
    page = ROOT / name
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8")):
        assert target.startswith("https://") or (page.parent / target).exists(), target


@pytest.mark.parametrize("name", sorted({*DOCUMENTS} - {"CHANGELOG.md"}))
def test_files_named_in_the_documents_exist(name):
    text = (ROOT / name).read_text(encoding="utf-8")
    named = re.findall(r"`((?:cpuserve|csrc|tests|benchmarks|deploy)/[\w./]+)`", text)
    assert named or name not in ("ARCHITECTURE.md", "CONTRIBUTING.md")
    for path in named:
        assert "foo" in path or (ROOT / path).exists(), path


def test_commands_of_the_readme_are_understood():
    lines = [li for block in code_blocks(README) for li in block.splitlines()]
    commands = [li.split("#")[0] for li in lines if li.startswith("cpuserve ")]
    assert len(commands) >= 6
    for command in commands:
        argv = normalize(shlex.split(command)[1:])
        args, unknown = cli.build_parser().parse_known_args(argv)
        assert args.command == argv[0]
        assert unknown == []


AGENTS = (ROOT / "docs" / "agents.md").read_text(encoding="utf-8")
CLIENTS = (
    *("Claude Code", "Codex", "opencode", "Qwen Code", "Continue", "Cline", "aider", "Zed"),
    *("pi", "Copilot CLI", "mistral-vibe", "gptme"),
    *("llama.vim", "minuet", "Open WebUI", "LibreChat", "Home Assistant", "n8n", "LangChain"),
)


def test_the_page_on_agents_has_a_part_for_each_client():
    assert re.findall(r"^## (.+)$", AGENTS, re.MULTILINE)[1:] == list(CLIENTS)
    page = (ROOT / "docs" / "serving.md").read_text(encoding="utf-8")
    listed = page.partition("\n## Agents\n")[2].partition("\n## ")[0]
    assert [name for name in CLIENTS if name not in " ".join(listed.split())] == []


def test_the_page_has_the_samplers_in_their_order():
    page = (ROOT / "docs" / "serving.md").read_text(encoding="utf-8")
    part = page.partition("\n### Samplers of llama.cpp\n")[2].partition("\n## ")[0]
    assert ", ".join(DEFAULT_ORDER) in " ".join(part.split())
    letters = {name: letter for letter, name in _LETTERS.items()}
    assert f"`{''.join(letters[name] for name in DEFAULT_ORDER)}`" in part


def test_the_commands_of_the_page_on_agents_are_understood():
    lines = [line for block in code_blocks(AGENTS) for line in block.splitlines()]
    commands = [line for line in lines if line.startswith("cpuserve ")]
    assert len(commands) >= 2
    for command in commands:
        argv = normalize(shlex.split(command)[1:])
        args, unknown = cli.build_parser().parse_known_args(argv)
        assert (args.command, unknown) == ("serve", [])
    flags = {*re.findall(r"`(--[a-z-]+)", AGENTS)} - {"--model"}
    known = {flag for field in FIELDS for flag in field.flags}
    assert flags <= known


def test_the_settings_on_the_page_on_agents_are_valid_in_their_languages():
    tomllib = pytest.importorskip("tomllib")
    readers = {
        "json": json.loads,
        "toml": tomllib.loads,
        "yaml": yaml.safe_load,
        "python": lambda text: compile(text, "agents.md", "exec"),
        "": lambda text: [shlex.split(line) for line in text.splitlines()],
        "lua": str,  # Python has no reader of Lua and of Vim's language
        "vim": str,
    }
    languages = re.findall(r"^```(\w*)\n.*?^```$", AGENTS, re.MULTILINE | re.DOTALL)
    assert set(languages) <= readers.keys()
    for language in {*languages}:
        for block in code_blocks(AGENTS, language):
            assert readers[language](block)


def test_the_addresses_on_the_page_on_agents_are_those_of_routes():
    """A client adds its paths to a base URL, which is that of the server or ends with /v1."""
    routes = {route.path for router in ROUTERS for route in router.routes}
    found = {*re.findall(r"http://HOST:8000([\w/]*)", AGENTS)}
    assert {"", "/v1"} < found
    assert found - {"", "/v1"} <= routes


def test_the_executor_seam_is_named_whole():
    text = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    (line,) = re.findall(r"^4\. `Executor`:(.*?)^5\.", text, re.MULTILINE | re.DOTALL)
    members = {*vars(Executor), *Executor.__annotations__}
    assert set(re.findall(r"`(\w+)`", line)) == {m for m in members if not m.startswith("_")}


def test_a_figure_is_one_figure_in_all_documents():
    names = ("docs/performance.md", "CHANGELOG.md")
    text = " ".join((ROOT / name).read_text(encoding="utf-8") for name in names)
    found = re.findall(
        r"top-p over 152k logits (?:takes )?(?:about )?(\d+) us", text, re.IGNORECASE
    )
    assert len(found) == 2
    assert len(set(found)) == 1


def test_every_architecture_is_on_the_page_of_models():
    page = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")
    for name in MODELS.names():
        assert name in page
