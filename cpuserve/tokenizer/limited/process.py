"""The processes of a tokenizer that is not plain: one that has loaded it, and forks that encode.

The tokenizer comes with a model, and its texts from clients. Together they can use all memory or
compute for hours (plain.py). The kernel ends a process at its limits: the first one while it
loads, and a fork while it encodes. A fork serves one connection, one job after another.
"""

from __future__ import annotations

import argparse
import os
import socket
import sys
from pathlib import Path

import msgspec

from cpuserve.base.errors import ModelError
from cpuserve.base.fault_points import fault
from cpuserve.limited.child import address_space, limit_memory, limit_time, serve_forks
from cpuserve.limited.wire import receive, send
from cpuserve.tokenizer.direct_coder import LibraryCoder
from cpuserve.tokenizer.directory import directory_parts
from cpuserve.tokenizer.limited.wire import (
    BROKEN,
    DONE,
    FAILED,
    READY,
    STOPPED,
    UNLIMITED,
    AddedEntry,
    Description,
    EncodeJob,
    packed_tokens,
)
from cpuserve.tokenizer.masks import Masks, PlainCore
from cpuserve.tokenizer.parts import Parts, check_vocabulary, reason_of

# Every text has some of these: a letter, a space, a digit, a character of two bytes, of four bytes.
TRIED = "a b 1\n\u00e9\U0001f600"


class _Loaded:
    """The state of the first process after loading; forks share it."""

    def __init__(self) -> None:
        self.first = BROKEN + b"it was not loaded"
        self.coder: LibraryCoder | None = None
        self.ordinary: PlainCore | None = None

    def load(self, path: Path) -> None:
        """Load a tokenizer, or keep the error message."""
        try:
            parts = directory_parts(path)
            check_vocabulary(parts.core)
            coder = self.coder = LibraryCoder(parts.core, parts.scheme)
            coder.encode(TRIED, add_special_tokens=True, unlocked=False)
        except (KeyboardInterrupt, SystemExit):
            raise
        except ModelError as error:
            self.first = BROKEN + str(error).encode("utf-8", "replace")
            return
        except BaseException as error:  # a panic in Rust is a BaseException
            self.first = BROKEN + f"broken tokenizer in {path}: {reason_of(error)}".encode()
            return
        description = _description(parts, coder)
        word = READY if address_space() else UNLIMITED
        self.first = word + msgspec.msgpack.encode(description)


_LOADED = _Loaded()


def main() -> int:
    """Load the tokenizer that the command line names, then fork for each connection."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--path", type=Path, required=True)
    parser.add_argument("--memory", type=int, required=True)
    parser.add_argument("--cpu", type=float, required=True)
    parser.add_argument("--wall", type=float, required=True)
    args, _ = parser.parse_known_args()

    def prepare() -> None:
        import tokenizers  # noqa: F401  its address space does not count

        silence = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silence, 2)  # drop messages when memory runs out
        if used_bytes := address_space():
            limit_memory(used_bytes + args.memory)
        limit_time(args.cpu, args.wall)
        _LOADED.load(args.path)
        limit_time(0, 0)

    return serve_forks(
        "cpuserve-tokenizer",
        _serve,
        prepare,
        lambda: fault("tokenizer_process.accept", 1),
        lambda: fault("tokenizer_process.fork"),
    )


def _serve(sock: socket.socket) -> None:
    """Do the jobs of one connection in this fork."""
    send(sock, _LOADED.first)
    coder = _LOADED.coder
    used_bytes = address_space()
    while coder is not None and (body := receive(sock)) is not None:
        fault("tokenizer_fork.receive")
        kind, content = _do(coder, body, used_bytes)
        fault("tokenizer_fork.send")
        send(sock, kind, content)


def _do(coder: LibraryCoder, body: bytes, used_bytes: int) -> tuple[bytes, bytes]:
    """Return the kind and the content of the reply to a job."""
    job = msgspec.msgpack.decode(body, type=EncodeJob)
    del body
    if used_bytes:
        limit_memory(used_bytes + job.memory_bytes)
    limit_time(job.cpu_s, job.wall_s)
    try:
        return DONE, _done(coder, job)
    except MemoryError:
        return STOPPED, b""
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a panic in Rust is a BaseException
        return FAILED, reason_of(error).encode("utf-8", "replace")
    finally:
        limit_time(0, 0)


def _done(coder: LibraryCoder, job: EncodeJob) -> bytes:
    special = job.add_special_tokens
    if job.what == "json":
        return coder.to_json().encode("utf-8", "surrogatepass")
    if job.what == "spans":
        spans = coder.spans(job.text, add_special_tokens=special, most=job.most)
        return b"" if spans is None else msgspec.msgpack.encode(spans)
    if job.what == "ordinary":
        if job.nonces is not None:
            _LOADED.ordinary = coder.ordinary(Masks(coder.added()).ids, job.nonces)
        assert _LOADED.ordinary is not None
        return packed_tokens(_LOADED.ordinary.encode(job.text), [], [])
    text = job.text if job.second is None else (job.text, job.second)
    tokens = coder.encode(text, add_special_tokens=special, unlocked=False)
    return packed_tokens(tokens.ids, tokens.type_ids, list(tokens.sequence_ids))


def _description(parts: Parts, coder: LibraryCoder) -> Description:
    """Return the tokenizer for the client."""
    vocabulary = coder.vocabulary()
    added_tokens = coder.added()
    texts = {i: coder.text_of(i) or "" for i in {*vocabulary.values(), *added_tokens}}
    return Description(
        scheme=parts.scheme,
        vocab_size=parts.vocab_size,
        special_ids=parts.special_ids,
        bos_id=parts.bos_id,
        special_tokens=parts.special_tokens,
        chat_template=parts.chat_template,
        tool_template=parts.tool_template,
        add_bos=parts.add_bos,
        strips_leading_space=parts.strips_leading_space,
        prompts=parts.prompts,
        texts=texts,
        ids={text: i for text, i in vocabulary.items() if texts[i] != text},
        added={i: AddedEntry(token.content, token.special) for i, token in added_tokens.items()},
        most_bytes=coder.most_bytes(),
    )


if __name__ == "__main__":
    sys.exit(main())
