"""Find the stored items that a request refers to, and assign ids to the items that it adds."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

from cpuserve.api.openai.responses.schema import conversation_id
from cpuserve.api.openai.responses.stored_conversation import StoredConversation, find_conversation
from cpuserve.api.openai.responses.stored_response import StoredResponse, find_response
from cpuserve.api.stored.store import StoredItem
from cpuserve.base.errors import InvalidRequest, NotFound, brief
from cpuserve.base.ids import guarding_id
from cpuserve.serving.threads import run_sized

if TYPE_CHECKING:
    from cpuserve.api.openai.responses.schema import ResponsesRequest
    from cpuserve.api.request.context import RequestContext
    from cpuserve.api.stored.store import Store

# The prefix of an item's id for each item type; other item types have the prefix "item".
_PREFIXES = {
    "message": "msg",
    "reasoning": "rs",
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
    "compaction": "cmp",
}


# The time in microseconds to give an item an id and to write its JSON.
_ITEM_US = 4


@dataclass(slots=True)
class ReferringRequest:
    """A request for a response, together with the stored items that it refers to.

    body: the request; its input has all items, and its `store` is true or false.
    num_stored: how many items of its input come from an earlier response or a conversation.
    history: the items of the earlier response or the conversation, as StoredItems.
    own: the items that the request adds to the history.
    conversation: the conversation that the response extends;
      no other request can extend it until the work of the request ends.
    """

    body: ResponsesRequest
    num_stored: int = 0
    history: list[StoredItem] = field(default_factory=list)
    own: list[StoredItem] = field(default_factory=list)
    conversation: StoredConversation | None = None


async def read_turn(request: RequestContext, body: ResponsesRequest) -> ReferringRequest:
    """Return the request together with all stored items that it refers to.

    A thread reads long conversations. From then on their bytes count as bytes of the body.

    Raises:
      NotFound: the caller has no such response, conversation or item.
      InvalidRequest: fields contradict each other, or the earlier response has no result.
      ConversationLocked: another request extends the conversation.
      ServerBusy: other requests use the memory for the items; see BodyBudget.take.
    """
    store, caller = request.state.stored, request.caller
    _check_storing(body, store)
    store.drop_old()
    named = conversation_id(body)
    turn = ReferringRequest(body)
    if body.previous_response_id:
        turn.history = _earlier(store, caller, body.previous_response_id)
    elif named is not None:
        turn.conversation = found = find_conversation(store, caller, named)
        found.lock()
        request.work.hold(found.unlock)
        turn.history = list(found.items)
    await _read_items(request, turn)
    stores = body.store is not False and store.enabled
    turn.body = msgspec.structs.replace(turn.body, store=stores)
    return turn


async def _read_items(request: RequestContext, turn: ReferringRequest) -> None:
    """Set the items that the request adds, and put stored items into its input."""
    given, store, caller = turn.body.input or [], request.state.stored, request.caller
    num_items = 1 if isinstance(given, str) else len(given)
    turn.own = await run_sized(_ITEM_US * num_items, lambda: own_items(given, store, caller))
    stored = [item for item in turn.own if item.users]
    # Items with `users` are stored already; they replace the item references in the input.
    if not given or not (turn.history or stored):
        return
    turn.num_stored = len(turn.history)
    size = await run_sized(
        turn.num_stored, lambda: sum(len(item.data) for item in [*turn.history, *stored])
    )
    _check_bytes(request.body_bytes + size, request.models.most_body_bytes)
    await request.hold(size)
    items = await run_sized(request.body_bytes, lambda: decoded([*turn.history, *turn.own]))
    turn.body = msgspec.structs.replace(turn.body, input=items)


def _check_storing(body: ResponsesRequest, store: Store) -> None:
    if body.previous_response_id and body.conversation:
        msg = "previous_response_id and conversation exclude each other: set one of them"
        raise InvalidRequest(msg, param="previous_response_id")
    if body.background and body.store is False:
        msg = "background needs store, because the response is retrieved later: omit store"
        raise InvalidRequest(msg, param="background")
    if not store.enabled and (body.store or body.background):
        field = "background" if body.background else "store"
        msg = (
            f"{field} is not possible, because this server stores nothing (--stored-responses 0): "
            "omit it"
        )
        raise InvalidRequest(msg, param=field)


def _earlier(store: Store, caller: str, response_id: str) -> list[StoredItem]:
    found = find_response(store, caller, response_id, param="previous_response_id")
    if found.status not in ("completed", "incomplete"):
        msg = (
            f"previous_response_id is a response with the status {found.status}: refer to one that "
            "is completed"
        )
        raise InvalidRequest(msg, param="previous_response_id")
    return list(found.items)


def own_items(given: str | list[dict[str, Any]], store: Store, caller: str) -> list[StoredItem]:
    """Return the items of a request, each with an id; for errors, see `read_turn`.

    Another thread than that of the event loop may run this.
    """
    return [_own_item(item, store, caller) for item in _items(given)]


def _items(given: str | list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{"role": "user", "content": given}] if isinstance(given, str) else given


def _own_item(item: dict[str, Any], store: Store, caller: str) -> StoredItem:
    """Return an item with an id and a type; a reference becomes the stored item."""
    kind = item.get("type") or ("message" if "role" in item else None)
    given = item.get("id")
    if kind == "item_reference" or (kind is None and set(item) == {"id"}):
        found = store.item(caller, given) if isinstance(given, str) else None
        if found is None:
            msg = (
                f"Item with id {brief(given)!r} not found: it was never stored here, or is not "
                "stored any more. Send the item itself"
            )
            raise NotFound(msg, param="input", code="item_not_found")
        return found
    shown = dict(item)
    if not isinstance(given, str) or not given:
        shown["id"] = given = guarding_id(f"{_PREFIXES.get(str(kind), 'item')}_")
    if kind == "message":
        shown |= {"type": "message", "status": item.get("status") or "completed"}
        if isinstance(text := item.get("content"), str):
            shown["content"] = [_text_part(item.get("role"), text)]
    return StoredItem(given, msgspec.json.encode(shown))


def _text_part(role: object, text: str) -> dict[str, Any]:
    if role == "assistant":
        return {"type": "output_text", "text": text, "annotations": []}
    return {"type": "input_text", "text": text}


def _check_bytes(size: int, most: int) -> None:
    if size > most:
        msg = (
            f"The conversation has {size} bytes with its stored items, and this server reads at "
            f"most {most} bytes: begin a new one, or compact it (POST /v1/responses/compact)"
        )
        raise InvalidRequest(msg, param="input")


def decoded(items: list[StoredItem]) -> list[dict[str, Any]]:
    """Return the items as objects."""
    return [msgspec.json.decode(item.data) for item in items]


def new_items(found: StoredResponse) -> list[StoredItem]:
    """Return the items that the request of a response added, without its earlier history."""
    return found.items[found.num_before : found.num_before + found.num_own]
