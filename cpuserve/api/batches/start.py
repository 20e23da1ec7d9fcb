"""Make the BatchService of a server from its options."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cpuserve.api.batches.directory import FileDirectory
from cpuserve.api.batches.service import BatchService
from cpuserve.base.errors import NotFound

if TYPE_CHECKING:
    from cpuserve.api.request.state import ServerState
    from cpuserve.config.server import ServerOptions


def batch_service(state: ServerState, options: ServerOptions) -> BatchService:
    """Return a BatchService for --files-dir; ConfigError if the directory cannot be used."""
    assert options.files_dir is not None
    limits = options.files_bytes, options.files_count
    directory = FileDirectory(options.files_dir, *limits, state.callers)
    return BatchService(directory, lambda: state.models.most_body_bytes)


def batches_of(state: ServerState) -> BatchService:
    """Return the BatchService of the server; NotFound if it runs without --files-dir."""
    if state.batches is None:
        msg = "This server keeps no files and runs no batches: start it with --files-dir DIR"
        raise NotFound(msg, code="files_disabled")
    found: BatchService = state.batches
    return found
