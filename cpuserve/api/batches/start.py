"""Open the directory of files that the options of the server name."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cpuserve.api.batches.directory import FileDirectory
from cpuserve.api.batches.service import BatchService

if TYPE_CHECKING:
    from cpuserve.api.state import ServerState
    from cpuserve.config.server import ServerOptions


def batch_service(state: ServerState, options: ServerOptions) -> BatchService:
    """Return the batches in --files-dir; ConfigError if the directory cannot be used."""
    assert options.files_dir is not None
    directory = FileDirectory(options.files_dir, options.files_bytes, options.files_count)
    return BatchService(directory, lambda: state.models.most_body_bytes)
