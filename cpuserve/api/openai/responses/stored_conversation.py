"""StoredConversation: a stored list of items, which responses extend."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import msgspec

from cpuserve.api.stored.store import Entry
from cpuserve.base.errors import NotFound, RequestError

if TYPE_CHECKING:
    from cpuserve.api.stored.store import Store


class ConversationLocked(RequestError, status=409):
    """Another request is extending the conversation (409), so OpenAI clients retry later."""


class ConversationBody(msgspec.Struct):
    """A conversation, as responses show it."""

    id: str
    created_at: int
    metadata: dict[str, str]
    object: str = "conversation"


@dataclass(slots=True, eq=False, kw_only=True)
class StoredConversation(Entry):
    """A stored conversation; its `running` is true while a request extends it."""

    metadata: dict[str, str]
    created: int = field(default_factory=lambda: int(time.time()))

    @property
    def body(self) -> ConversationBody:
        """The conversation, as responses show it, without its items."""
        return ConversationBody(self.id, self.created, self.metadata)

    def lock(self) -> None:
        """Prevent other requests from extending the conversation.

        Raises:
          ConversationLocked: another request is extending it.
        """
        self.check_unlocked()
        self.running = True

    def unlock(self) -> None:
        """Allow other requests to extend the conversation."""
        self.running = False

    def check_unlocked(self) -> None:
        """Raise ConversationLocked if a running request extends the conversation."""
        if self.running:
            msg = f"Another request extends the conversation {self.id[:80]!r} now: wait for its end"
            raise ConversationLocked(msg, param="conversation")


def find_conversation(store: Store, caller: str, conversation_id: str) -> StoredConversation:
    """Return the caller's conversation with this id; NotFound if there is none."""
    found = store.find(StoredConversation, caller, conversation_id)
    if found is None:
        msg = (
            f"Conversation {conversation_id[:80]!r} was not found: it was never created, was "
            "deleted, or made room for newer ones (see --stored-responses)"
        )
        raise NotFound(msg, param="conversation", code="conversation_not_found")
    return found
