"""Codex, which speaks Responses."""

from pathlib import Path

from tests.clients.agents.agent import Agent, call

_CONFIG = """\
model = "{model}"
model_provider = "cpuserve"
model_context_window = {context}
check_for_update_on_startup = false
[analytics]
enabled = false
[model_providers.cpuserve]
name = "cpuserve"
base_url = "{url}/v1"
wire_api = "responses"
request_max_retries = 0
stream_max_retries = 0
"""


class Codex(Agent):
    """It compacts when 90 % of model_context_window are used."""

    name = "codex"
    packages = ("@openai/codex@0.171.0",)
    program = "node_modules/.bin/codex"
    context = 30_000

    def environment(self, url):
        return {"OPENAI_API_KEY": "none"}

    def settings(self, url: str, context: int):
        return {".codex/config.toml": _CONFIG.format(url=url, context=context, model=self.model)}

    def arguments(self, text: str, image: Path | None) -> list[str]:
        given = [] if image is None else ["-i", str(image)]
        options = ["--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"]
        return ["exec", *options, *given, "--", text]

    def edit(self, path: Path, old: str, new: str) -> str:
        return self.run(f"sed -i s/{old}/{new}/ {path}")

    def run(self, command: str) -> str:
        return call("exec_command", cmd=command)

    def read_image(self, path: Path) -> str:
        return call("view_image", path=str(path))


class CodexPatch(Codex):
    """Codex with a model that it knows: files are edited by a custom tool, which takes a patch."""

    name = "codex-patch"
    shares = "codex"
    model = "gpt-5.5"

    def edit(self, path: Path, old: str, new: str) -> str:
        hunk = f"*** Update File: {path.name}\n@@\n-{old}\n+{new}"
        return f"[[custom apply_patch *** Begin Patch\n{hunk}\n*** End Patch]]"


AGENTS = (Codex, CodexPatch)
