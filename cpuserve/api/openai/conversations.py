"""Routes to create, read, change and delete conversations and their items."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
from fastapi import APIRouter, Request, Response

from cpuserve.api.openai.responses.conversation import calls_of, check_items
from cpuserve.api.openai.responses.history import decoded, own_items
from cpuserve.api.openai.responses.schema import check_metadata
from cpuserve.api.openai.responses.stored_conversation import (
    ConversationBody,
    ConversationLocked,
    StoredConversation,
    find_conversation,
)
from cpuserve.api.request.context import RequestContext
from cpuserve.api.request.headers import CALLER
from cpuserve.api.request.state import get_state
from cpuserve.api.response.writer import json_response
from cpuserve.api.route import delete, get, post
from cpuserve.api.stored.page import Page, page_of
from cpuserve.base.errors import InvalidRequest, NotFound
from cpuserve.base.ids import guarding_id
from cpuserve.serving.threads import run_sized

if TYPE_CHECKING:
    from cpuserve.api.stored.store import StoredItem


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


router = APIRouter()
_ONE = "/v1/conversations/{conversation_id}"
_ITEM = f"{_ONE}/items/{{item_id}}"
# The maximum number of items in one request, as in the OpenAI API.
_MOST_ITEMS = 20
_LOCKED = (ConversationLocked.status,)


@post(
    router,
    "/v1/conversations",
    schema=CreateConversation,
    response=ConversationBody,
    id_prefix="conv_",
    conversation="items",
)
async def create_conversation(request: RequestContext, body: CreateConversation) -> Response:
    """Create a conversation that responses can extend."""
    store = request.state.stored
    if not store.enabled:
        msg = "This server stores no conversations (--stored-responses 0): send all items as input"
        raise InvalidRequest(msg)
    metadata = body.metadata or {}
    check_metadata(metadata)
    items = await _checked(request, body.items or [])
    made = StoredConversation(request.caller, guarding_id("conv_"), metadata=metadata)
    made.size += sum(len(key) + len(value) for key, value in metadata.items())
    store.add(made, items)
    return json_response(made.body)


@post(router, _ONE, schema=UpdateConversation, response=ConversationBody, id_prefix="conv_")
async def update_conversation(request: RequestContext, body: UpdateConversation) -> Response:
    """Replace the metadata of a conversation."""
    found = _found(request)
    metadata = body.metadata or {}
    check_metadata(metadata)
    found.metadata = metadata
    return json_response(found.body)


@get(router, _ONE, ConversationBody)
async def get_conversation(request: Request) -> Response:
    """Return a conversation without its items."""
    return json_response(_named(request).body)


@delete(router, _ONE, DeletedConversation, also=_LOCKED)
async def delete_conversation(request: Request) -> Response:
    """Delete a conversation; the responses that extended it remain stored."""
    found = _named(request)
    found.check_unlocked()
    get_state(request).stored.remove(found)
    return json_response(DeletedConversation(found.id))


@post(
    router,
    f"{_ONE}/items",
    schema=AddItems,
    response=Page,
    also=_LOCKED,
    id_prefix="conv_",
    conversation="items",
)
async def add_items(request: RequestContext, body: AddItems) -> Response:
    """Append items to a conversation, and return these items."""
    found = _found(request)
    if not body.items:
        msg = "items is missing: send a list of at least one item"
        raise InvalidRequest(msg, param="items")
    found.lock()
    try:
        items = await _checked(request, body.items, found.items)
        request.state.stored.grow(found, items)
        request.state.stored.refresh(found)
    finally:
        found.unlock()
    return json_response(page_of({"order": "asc"}, items, _id, _data))


@get(router, f"{_ONE}/items", Page, after=str, limit=int, order=str, include=str)
async def list_items(request: Request) -> Response:
    """List the items of a conversation."""
    return json_response(page_of(request.query_params, _named(request).items, _id, _data))


@get(router, _ITEM, ConversationItem)
async def get_item(request: Request) -> Response:
    """Return one item of a conversation."""
    return Response(_item(request, _named(request)).data, media_type="application/json")


@delete(router, _ITEM, ConversationBody, also=_LOCKED)
async def delete_item(request: Request) -> Response:
    """Delete an item of a conversation, and return the conversation without its items."""
    found = _named(request)
    item = _item(request, found)
    found.check_unlocked()
    get_state(request).stored.drop_item(found, item)
    return json_response(found.body)


async def _checked(
    request: RequestContext, items: list[dict[str, Any]], before: list[StoredItem] | None = None
) -> list[StoredItem]:
    """Return the items with ids; InvalidRequest for an item that no response could use as input.

    before: the items that the conversation already has.
    """
    if len(items) > _MOST_ITEMS:
        msg = f"items has {len(items)} items, and may have {_MOST_ITEMS}: send several requests"
        raise InvalidRequest(msg, param="items")
    store, caller = request.state.stored, request.caller
    store.drop_old()
    earlier = list(before or [])

    def check() -> list[StoredItem]:
        found = own_items(items, store, caller)
        added = decoded(found)
        calls = calls_of(added, earlier)
        check_items(calls + added, len(calls))
        return found

    return await run_sized(request.body_bytes + len(earlier), check)


def _found(request: RequestContext) -> StoredConversation:
    named = request.path["conversation_id"]
    return find_conversation(request.state.stored, request.caller, named)


def _named(request: Request) -> StoredConversation:
    named = request.path_params["conversation_id"]
    return find_conversation(get_state(request).stored, request.scope[CALLER].name, named)


def _item(request: Request, found: StoredConversation) -> StoredItem:
    named = request.path_params["item_id"]
    for item in found.items:
        if item.id == named:
            return item
    msg = f"Conversation {found.id!r} has no item {named[:80]!r}: GET its items to see their ids"
    raise NotFound(msg, param="item_id", code="item_not_found")


def _id(item: StoredItem) -> str:
    return item.id


def _data(item: StoredItem) -> bytes:
    return item.data
