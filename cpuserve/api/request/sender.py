"""The settings of a caller that change its requests: its priority and its private cache."""

from __future__ import annotations

import hashlib
import hmac
from typing import TYPE_CHECKING

from cpuserve.errors import InvalidRequest
from cpuserve.sampling.params import is_salt

if TYPE_CHECKING:
    from cpuserve.api.request.sealed import Seal
    from cpuserve.serving.callers.caller import Caller
    from cpuserve.serving.calls.call import GenerateCall


def apply_sender(sender: Caller, call: GenerateCall, seal: Seal) -> None:
    """Set the priority and the cache salt of a call as the operator wants for its sender.

    Raises:
      InvalidRequest: the client asks for a lower priority than it may have.
    """
    if sender.priority is not None:
        if call.priority is not None and call.priority < sender.priority:
            msg = (
                f"priority must be at least {sender.priority} for caller {sender.name}, got "
                f"{call.priority}: omit it, or send a larger number"
            )
            raise InvalidRequest(msg, role="priority")
        call.priority = sender.priority if call.priority is None else call.priority
    if sender.private_cache and (call.cache_salt is None or is_salt(call.cache_salt)):
        call.cache_salt = _private_salt(sender.owner, call.cache_salt, seal)


def _private_salt(owner: str, salt: str | None, seal: Seal) -> str:
    """Return a salt that no other caller can send, because it depends on a secret of the server.

    Salts that a caller sends separate its own prompts further.
    """
    text = f"private cache\0{owner}\0{salt or ''}"
    return hmac.digest(seal.key, text.encode("utf-8", "replace"), hashlib.sha256).hex()
