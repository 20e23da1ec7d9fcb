"""Finds the safetensors conversion on the hub for a repository that contains only pickles."""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice

# Anyone may open a pull request with arbitrary weights.
# Only the conversions by this account of the hub have the same weights as the repository.
BOT = "SFconvertbot"
MOST_REQUESTS = 5


def has_safetensors(names: list[str]) -> bool:
    """Whether a repository with these files has safetensors of the model itself.

    Only files outside of folders count: folders contain modules of sentence-transformers.
    """
    return any(n.endswith(".safetensors") and "/" not in n for n in names)


def find_conversion(
    repo: str, names_at: Callable[[str], list[str]]
) -> tuple[str, list[str]] | None:
    """Return (revision "refs/pr/N", its files) of an open conversion pull request, or None.

    names_at: a function that returns the files of a revision.
    Exceptions of this function and of the hub library are passed on.
    """
    from huggingface_hub import HfApi

    requests = HfApi().get_repo_discussions(
        repo, author=BOT, discussion_type="pull_request", discussion_status="open"
    )
    for request in islice(requests, MOST_REQUESTS):
        # The query already filters by author, type and status. They are checked again for safety,
        # because anyone could have written the weights of another pull request.
        if request.author != BOT or not request.is_pull_request or request.status != "open":
            continue
        revision = f"refs/pr/{request.num}"
        names = names_at(revision)
        if has_safetensors(names):
            return revision, names
    return None
