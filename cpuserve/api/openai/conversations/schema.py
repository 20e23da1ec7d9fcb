"""The bodies of requests to /v1/conversations, and of their responses."""

from __future__ import annotations

from typing import Any

import msgspec


class CreateConversation(msgspec.Struct):
    """The body of POST /v1/conversations. items: the first items of the conversation."""

    items: list[dict[str, Any]] | None = None
    metadata: dict[str, str] | None = None


class UpdateConversation(msgspec.Struct):
    """The body of POST /v1/conversations/ID: metadata that replaces the old metadata."""

    metadata: dict[str, str] | None = None


class AddItems(msgspec.Struct):
    """The body of POST /v1/conversations/ID/items."""

    items: list[dict[str, Any]] | None = None


class DeletedConversation(msgspec.Struct):
    """The response to DELETE /v1/conversations/ID."""

    id: str
    object: str = "conversation.deleted"
    deleted: bool = True


class ConversationItem(msgspec.Struct):
    """An item of a conversation; members besides these depend on its type."""

    id: str
    type: str
