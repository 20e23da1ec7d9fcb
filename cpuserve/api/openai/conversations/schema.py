"""The bodies of requests to /v1/conversations, and of the responses."""

from __future__ import annotations

from typing import Any

import msgspec


class CreateConversation(msgspec.Struct):
    """POST /v1/conversations. items: the first items of the conversation."""

    items: list[dict[str, Any]] | None = None
    metadata: dict[str, str] | None = None


class UpdateConversation(msgspec.Struct):
    """POST /v1/conversations/ID: the new metadata, which replaces the old one."""

    metadata: dict[str, str] | None = None


class AddItems(msgspec.Struct):
    """POST /v1/conversations/ID/items."""

    items: list[dict[str, Any]] | None = None


class DeletedConversation(msgspec.Struct):
    """The body of DELETE /v1/conversations/ID."""

    id: str
    object: str = "conversation.deleted"
    deleted: bool = True


class ConversationItem(msgspec.Struct):
    """An item of a conversation; it has the members of its type as well."""

    id: str
    type: str
