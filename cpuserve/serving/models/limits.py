"""Limits on the memory and time that one client, or all clients together, may use."""

from __future__ import annotations

from dataclasses import dataclass

from cpuserve.config.server import ServerOptions

# A prompt token takes 2 to 6 bytes of text in any language. In JSON it takes up to 64 bytes,
# when many short messages escape all non-ASCII characters. LEAST_BODY_BYTES allows for bodies
# with many prompts or long lists of token ids, which the context length does not bound.
BODY_BYTES_PER_TOKEN = 64
LEAST_BODY_BYTES = 4 << 20
LEAST_HELD_BYTES = 32 << 20


_DEFAULTS = ServerOptions()


def default_body_bytes(max_model_len: int) -> int:
    """Return the default limit on the bytes of a request body, for a context of max_model_len."""
    return max(LEAST_BODY_BYTES, BODY_BYTES_PER_TOKEN * max_model_len)


@dataclass(frozen=True, slots=True)
class ClientLimits:
    """Limits on the memory and time that one client, or all clients together, may use."""

    max_body_bytes: int = LEAST_BODY_BYTES
    body_timeout_s: float = 60.0
    # The most bytes of all request bodies together, until their prompts are tokenized, and the most
    # seconds that a body waits for its reservation (BodyBudget). Bodies up to 64 KiB do not count.
    max_held_bytes: int = LEAST_HELD_BYTES
    body_wait_s: float = 10.0
    # The most admitted sequences that have not finished;
    # each takes a few KB here and in the engine. FrontEnd sets this limit
    # to the number of sequences that may wait plus the number that its engines can run.
    max_sequences: int = 2048
    # A stream's headers wait for its first token, so that an earlier error has its own status.
    # But proxies close connections that are silent for a minute,
    # and a long prompt can take that long: after this time the headers and a comment are sent.
    silent_s: float = _DEFAULTS.sse_ping_interval
    # The most sequences that may wait for their first token,
    # and the most prompt tokens of these sequences together (Backlog).
    max_queued_requests: int = _DEFAULTS.max_num_queued_reqs
    max_queued_tokens: int = _DEFAULTS.max_num_queued_tokens
    # The number of sequences that can run at the same time in all engines together.
    slots: int = 1
    # The longest time in seconds that a request may take, including its wait.
    # A request without a timeout gets this one.
    longest_s: float | None = None
