"""A server with all routes on a real socket: what options add, created models, files and seals."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from cpuserve.api.ollama.created.directory import ModelDirectory
from cpuserve.api.ollama.created.store import CreatedModels
from cpuserve.api.request.sealed import Seal
from tests.api.live import Live, live
from tests.api.post_routes import prepare
from tests.tokenizer.test_infill import tokenizer_with

INFILL = ("<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|repo_name|>", "<|file_sep|>")
SEAL = Seal(bytes(32))


@asynccontextmanager
async def all_routes(context: Any, pooling: str, home: Path) -> AsyncIterator[Live]:
    """Run a server of the model of `context`, with this pooling, until the block ends.

    home: an empty directory.
    """
    prepare(context, pooling)
    context.adapters_change = True
    context.tokenizer = tokenizer_with(home, *INFILL)
    options = {"admin_routes": True, "files_dir": str(home / "files"), "files_bytes": 1 << 30}
    async with live(context=context, **options) as server:
        directory = ModelDirectory(str(home / "models"), 1 << 30, 1000)
        created = CreatedModels(directory, server.state.models, None, {"tiny": "/models/tiny"})
        server.state.created, server.state.seal = created, SEAL
        yield server
