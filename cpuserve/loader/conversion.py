"""Repositories of pickles only: the safetensors conversion that the hub's own bot proposes."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice

# Anyone may open a pull request with weights of any kind; only what this account of the hub
# converted is the repository's own model.
BOT = "SFconvertbot"
MOST_REQUESTS = 5


def find_conversion(
    repo: str, names_at: Callable[[str], list[str]]
) -> tuple[str, list[str]] | None:
    """(revision "refs/pr/N", names of its files) of an open conversion, or None.

    names_at(revision) lists the files of a revision; what it and the hub library raise comes out.
    """
    from huggingface_hub import HfApi

    requests = HfApi().get_repo_discussions(
        repo, author=BOT, discussion_type="pull_request", discussion_status="open"
    )
    for request in islice(requests, MOST_REQUESTS):
        # asked of the hub already, and too important to take its filter's word
        if request.author != BOT or not request.is_pull_request or request.status != "open":
            continue
        revision = f"refs/pr/{request.num}"
        names = names_at(revision)
        if any(name.endswith(".safetensors") for name in names):
            return revision, names
    return None
