"""Made-up sessions of Claude Code and Codex with the structure of requests of November 2026.

An agent makes the body of each turn's request, and reads the response as the real client does: it
keeps thoughts and calls, decodes the arguments and encodes them again as JavaScript does, makes up
a result of the call, and marks the last block for the cache. The parts that change with every
request of the real client change here as well: the billing block, ids, metadata and the positions
of cache marks.
"""

from __future__ import annotations

import json
import random
from typing import Any

# The tools in their order: (name, characters of the description, characters of the schema).
CLAUDE_TOOLS = (
    ("Agent", 1227, 1249), ("Bash", 1196, 1397), ("CronCreate", 2924, 979),
    ("CronDelete", 167, 219), ("CronList", 106, 126), ("Edit", 360, 584),
    ("EnterWorktree", 3031, 628), ("ExitWorktree", 1923, 496), ("NotebookEdit", 619, 981),
    ("Read", 838, 770), ("ReportFindings", 574, 1286), ("ScheduleWakeup", 2802, 820),
    ("SendMessage", 655, 452), ("Skill", 1713, 345), ("TaskCreate", 2146, 605),
    ("TaskGet", 732, 227), ("TaskList", 998, 126), ("TaskOutput", 1049, 465),
    ("TaskStop", 203, 293), ("TaskUpdate", 2243, 1166), ("WebFetch", 374, 336),
    ("WebSearch", 311, 499), ("Workflow", 18780, 1818), ("Write", 240, 367),
)  # fmt: skip
CODEX_TOOLS = (
    ("exec_command", 82, 1629), ("write_stdin", 80, 819), ("request_user_input", 120, 1419),
    ("view_image", 124, 391), ("get_goal", 122, 297), ("create_goal", 265, 784),
    ("update_goal", 1541, 2187),
)  # fmt: skip
WORDS = ("file", "block", "test", "that", "fails", "cache", "reads", "caller", "when", "room")


def words(chance: random.Random, num_chars: int) -> str:
    """A text of about this length."""
    found = ""
    while len(found) < num_chars:
        found += f"{chance.choice(WORDS)}{chance.randrange(100)} "
    return found[:num_chars].strip() or "x"


def schema(chance: random.Random, num_chars: int) -> dict[str, Any]:
    """A JSON schema of about this length."""
    properties: dict[str, Any] = {}
    while len(json.dumps(properties)) + 120 < num_chars:
        name = f"option_{len(properties)}"
        properties[name] = {"type": "string", "description": words(chance, 60)}
    return {"type": "object", "properties": properties, "additionalProperties": False}


class Agent:
    """A session of `turns` requests; the model calls a tool in each turn except the last.

    scale: a factor of the lengths of all texts; 1 = the lengths of the real client.
    """

    path = ""

    def __init__(self, seed: int, scale: float = 1.0, turns: int = 10) -> None:
        self.chance = random.Random(seed)
        self.scale = scale
        self.turns = turns
        self.turn = 0
        self.known: list[dict[str, Any]] = []

    def text(self, num_chars: int) -> str:
        """Return a text for one that has `num_chars` characters in the real client."""
        return words(self.chance, int(num_chars * self.scale))

    def reply(self) -> str:
        """The response of the model in this turn, in its own spelling."""
        thought = f"<think>\n{words(self.chance, 60)}\n</think>\n\n"
        self.turn += 1
        if self.turn == self.turns:
            return thought + words(self.chance, 80)
        arguments = {"file_path": f"/project/{self.turn}.py", "note": words(self.chance, 40) + "é"}
        # Compact and escaped, which is not the template's way of writing JSON.
        call = json.dumps({"name": self.called, "arguments": arguments}, separators=(",", ":"))
        return f"{thought}<tool_call>{call}</tool_call>"

    called = ""


class ClaudeCode(Agent):
    """A session of Claude Code: POST /v1/messages."""

    path = "/v1/messages?beta=true"
    called = "Read"

    def __init__(self, seed: int, scale: float = 1.0, turns: int = 10) -> None:
        super().__init__(seed, scale, turns)
        self.system = [self.text(62), self.text(5857)]
        self.tools = [
            {
                "name": name,
                "description": self.text(about),
                "input_schema": schema(self.chance, int(size * scale)),
            }
            for name, about, size in CLAUDE_TOOLS
        ]
        first = [{"type": "text", "text": self.text(306)}, {"type": "text", "text": self.text(204)}]
        self.known = [
            {"role": "user", "content": first},
            {"role": "system", "content": self.text(6062)},
        ]

    def body(self) -> dict[str, Any]:
        """The next request."""
        mark = {"cache_control": {"type": "ephemeral"}}
        nonce = f"{self.chance.randrange(1 << 20):05x}"
        billing = "x-anthropic-billing-header: cc_version=2.1.197.85d; cc_entrypoint=cli; cch="
        system = [{"type": "text", "text": f"{billing}{nonce};"}]
        system += [{"type": "text", "text": text, **mark} for text in self.system]
        messages = json.loads(json.dumps(self.known))
        last = next(m for m in reversed(messages) if m["role"] == "user")
        last["content"][-1].update(mark)
        return {
            "model": "tiny",
            "messages": messages,
            "system": system,
            "tools": self.tools,
            "metadata": {"user_id": nonce},
            "max_tokens": 32000,
            "thinking": {"type": "adaptive"},
            "context_management": {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]},
            "output_config": {"effort": "high"},
        }

    def take(self, body: dict[str, Any]) -> None:
        """Read the response, and run its calls."""
        self.known.append({"role": "assistant", "content": body["content"]})
        results = [
            {
                "tool_use_id": block["id"],
                "type": "tool_result",
                "content": words(self.chance, 100),
                "is_error": False,
            }
            for block in body["content"]
            if block["type"] == "tool_use"
        ]
        if results:
            self.known.append({"role": "user", "content": results})
        if results and self.turn % 4 == 0:  # a reminder, for example about its list of tasks
            self.known.append({"role": "system", "content": self.text(400)})

    @staticmethod
    def usage(body: dict[str, Any]) -> tuple[int, int]:
        """(tokens of the prompt, those that came from the cache)."""
        usage = body["usage"]
        cached = usage["cache_read_input_tokens"]
        return usage["input_tokens"] + cached, cached


class Codex(Agent):
    """A session of Codex: POST /v1/responses."""

    path = "/v1/responses"
    called = "exec_command"

    def __init__(self, seed: int, scale: float = 1.0, turns: int = 10) -> None:
        super().__init__(seed, scale, turns)
        self.tools = [
            {
                "type": "function",
                "name": name,
                "description": self.text(about),
                "strict": False,
                "parameters": schema(self.chance, int(size * scale)),
            }
            for name, about, size in CODEX_TOOLS
        ]
        self.tools.append({"type": "web_search", "external_web_access": True})
        self.known = [
            self._message("developer", 16979),
            self._message("developer", 2128, 362),
            self._message("user", 357),
            self._message("user", 73),
        ]

    def _message(self, role: str, *sizes: int) -> dict[str, Any]:
        parts = [{"type": "input_text", "text": self.text(size)} for size in sizes]
        return {"type": "message", "role": role, "content": parts}

    def body(self) -> dict[str, Any]:
        """The next request; the ids of its items are other ones each time."""
        number = self.chance.randrange(1 << 30)
        items = [{**item, "id": f"msg_{number}_{i}"} for i, item in enumerate(self.known)]
        return {
            "model": "tiny",
            "input": items,
            "tools": self.tools,
            "tool_choice": "auto",
            "parallel_tool_calls": True,
            "reasoning": {"summary": "auto"},
            "store": False,
            "include": ["reasoning.encrypted_content"],
            "prompt_cache_key": "00000000-0000-4000-8000-000000000000",
            "client_metadata": {"turn_id": str(number)},
        }

    def take(self, body: dict[str, Any]) -> None:
        """Read the response, and run its calls; thoughts are kept as they were encrypted."""
        for item in body["output"]:
            kept = {key: value for key, value in item.items() if key not in ("id", "status")}
            if item["type"] == "reasoning":
                kept["content"] = None
            self.known.append(kept)
            if item["type"] == "function_call":
                self.known.append(
                    {
                        "type": "function_call_output",
                        "call_id": item["call_id"],
                        "output": words(self.chance, 114),
                    }
                )

    @staticmethod
    def usage(body: dict[str, Any]) -> tuple[int, int]:
        """(tokens of the prompt, those that came from the cache)."""
        usage = body["usage"]
        return usage["input_tokens"], usage["input_tokens_details"]["cached_tokens"]
