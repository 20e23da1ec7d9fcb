"""Fault points: the places of the server where a test can let a call of the system fail.

A function that sends, receives, maps, starts a process, forks, opens, reads, writes or syncs
calls `fault` with the name of its point just before. In a server this does nothing: the code
that makes calls fail is part of the tests (tests/helpers/faulty), and no package has it.
So no variable of the environment and no client can make a server fail.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

KILL, DELAY, SHORT = "kill", "delay", "short"
# The variable with the failures for the code of the tests; a server ignores it (config/env.py).
VARIABLE = "CPUSERVE_FAULT"


@dataclass(frozen=True, slots=True)
class FaultPoint:
    """A place where a call of the system can fail.

    what: the purpose of the call.
    actions: how it can fail: with an error of the system (its name in errno), KILL (the process
      is killed instead), DELAY (the call takes long) or SHORT (it takes a part of the bytes).
    """

    what: str
    actions: tuple[str, ...]


def _point(what: str, *actions: str) -> FaultPoint:
    return FaultPoint(what, actions)


POINTS = {
    # The engine and its messages.
    "children.start": _point("start an engine or the grammar process", "EAGAIN", DELAY),
    "children.connect": _point("make the sockets to a new engine", "EMFILE"),
    "engine.configure": _point("send its settings to a new engine", "EPIPE"),
    "engine.receive": _point("receive messages in the engine", "EIO", "ECONNRESET", KILL),
    "engine.send": _point("send a message from the engine", "ENOBUFS", "EPIPE", DELAY, KILL),
    "engine.map": _point("map the memory of weights and KV blocks", "ENOMEM", KILL),
    "engine.step": _point("run a step", DELAY, KILL),
    "front_end.receive": _point("receive messages of the engine", "ECONNRESET", DELAY),
    # Grammars: the first four in the engine, the others in the grammar process.
    "grammars.share": _point("share the memory of the bitmasks", "EMFILE", "ENOMEM"),
    "grammars.send": _point("send a message to the grammar process", "EPIPE", DELAY),
    "grammars.receive": _point("receive from the grammar process", "ECONNRESET", DELAY),
    "grammar_process.map": _point("map the bitmasks", "ENOMEM", KILL),
    "grammar_process.receive": _point("receive messages", "ECONNRESET", KILL),
    "grammar_process.send": _point("send a message", "ENOBUFS", "EPIPE", DELAY, KILL),
    "grammar_process.fork": _point("fork to try a grammar", "EAGAIN", "ENOMEM", KILL),
    "grammar_process.thread": _point("make a pipe for the thread that compiles", "EMFILE"),
    "grammar_fork.write": _point("write the result in the fork", "EPIPE", SHORT, KILL),
    "grammar_process.read": _point("read the result of the fork", KILL),
    # Chat templates: the first four in the server, the others in the processes that render.
    "templates.start": _point("start the process for templates", "EAGAIN", DELAY),
    "templates.connect": _point("ask it for a fork", "EPIPE", "EMFILE"),
    "templates.send": _point("send a job to a fork", "EPIPE", DELAY),
    "templates.receive": _point("receive the rendered text", "ECONNRESET"),
    "template_process.accept": _point("receive a connection", SHORT, KILL),
    "template_process.fork": _point("fork to serve a connection", "EAGAIN", DELAY, KILL),
    "template_fork.receive": _point("receive a job", "ECONNRESET", KILL),
    "template_fork.send": _point("send the rendered text", "EPIPE", DELAY, KILL),
    "tokenizers.start": _point("start the process of a tokenizer", "EAGAIN", DELAY),
    "tokenizers.connect": _point("ask it for a fork", "EPIPE", "EMFILE"),
    "tokenizers.send": _point("send a text to a fork", "EPIPE", DELAY),
    "tokenizers.receive": _point("receive the tokens", "ECONNRESET"),
    "tokenizer_process.accept": _point("receive a connection", SHORT, KILL),
    "tokenizer_process.fork": _point("fork to serve a connection", "EAGAIN", DELAY, KILL),
    "tokenizer_fork.receive": _point("receive a text", "ECONNRESET", KILL),
    "tokenizer_fork.send": _point("send the tokens", "EPIPE", DELAY, KILL),
    # Pictures: the first five in the server, the others in the processes that decode.
    "pictures.start": _point("start the process for pictures", "EAGAIN", DELAY),
    "pictures.connect": _point("ask it for a fork", "EPIPE", "EMFILE"),
    "pictures.send": _point("send a file to a fork", "EPIPE", DELAY),
    "pictures.receive": _point("receive the decoded picture", "ECONNRESET"),
    "pictures.read": _point("read the patches", SHORT, "EIO"),
    "picture_process.accept": _point("receive a connection", SHORT, KILL),
    "picture_process.fork": _point("fork to serve a connection", "EAGAIN", DELAY, KILL),
    "picture_fork.receive": _point("receive a file", "ECONNRESET", KILL),
    "picture_fork.map": _point("share the memory of patches", "EMFILE", "ENOMEM"),
    "picture_fork.write": _point("write the patches", SHORT, "ENOSPC", KILL),
    "picture_fork.send": _point("send the decoded picture", "EPIPE", DELAY, KILL),
    "media_file.open": _point("open a picture on this server", "EMFILE", "EIO"),
    "media.connect": _point("connect to the server of a picture", "EMFILE", "ECONNRESET"),
    "processor_file.read": _point("read the settings of a model for pictures", "EIO"),
    # The prefix cache on disk.
    "kv_folder.read": _point("read the mark of the folder", "EIO"),
    "kv_folder.write": _point("write the mark of the folder", "ENOSPC", "EROFS"),
    "kv_block.open": _point("create the file of a block", "EMFILE", "EROFS", KILL),
    "kv_block.read": _point("read a block", "EIO", "EMFILE"),
    "kv_block.write": _point("write a block", KILL, "ENOSPC", "EIO"),
    "kv_scan.read": _point("read the list of blocks", "EIO"),
    "kv_shared.read": _point("read a block of another server", "EIO"),
    "response.list": _point("read the list of kept responses", "EIO"),
    "response.read": _point("read the tokens of a kept response", "EIO", "EMFILE"),
    "response.write": _point("write the tokens of a response", "ENOSPC", "EROFS", "EIO"),
    # Files of the server's own.
    "secret.read": _point("read a secret of the server", "EIO"),
    "secret.write": _point("write a secret of the server", "ENOSPC", "EROFS"),
    "keys.read": _point("read the file of API keys", "EIO", "EMFILE"),
    "audit.open": _point("open the audit file", "EIO"),
    "audit.write": _point("write a line of the audit file", "ENOSPC", "EIO", SHORT),
    "audit.sync": _point("flush the audit file to the disk", "EIO"),
    "audit.rename": _point("rename a full audit file", "EACCES"),
    "certificate.read": _point("read the certificate and its key", "EMFILE", "EIO"),
    "record.read": _point("read a record at the start", "EIO"),
    "record.write": _point("write a record", "ENOSPC", "EROFS", "EIO"),
    "record.sync": _point("flush a record to the disk", "EIO"),
    "content.open": _point("open the content of a file", "EMFILE", "EIO"),
    "content.write": _point("write the content of a file", "ENOSPC", "EIO", SHORT),
    "content.sync": _point("flush the content of a file to the disk", "EIO"),
    "content.cut": _point("remove an incomplete line of a file", "EIO"),
    "content.read": _point("read the content of a file for a client", "EMFILE"),
    "model_file.rename": _point("keep a file that a client has sent", "ENOSPC"),
    "model_file.link": _point("link the files of a created model", "EMLINK", "ENOSPC"),
    # Files of models, and of packed weights.
    "weights.map": _point("open and map a file of weights", "EMFILE", "ENOMEM"),
    "weights.read": _point("read a small file of a model", "EIO"),
    "adapter.read": _point("read a file of an adapter", "EIO", "EMFILE"),
    "source.read": _point("read weights for their digest", "EIO"),
    "source.sample": _point("read samples of weights, to find their digest", "EIO"),
    "mapped.sample": _point("read samples of a file that stays mapped", "EIO"),
    "fingerprint.read": _point("read the files of a model for a fingerprint", "EIO"),
    "source.write": _point("record a digest", "ENOSPC"),
    "packed.open": _point("open packed weights", "EMFILE", "EIO"),
    "packed.read": _point("read the head of packed weights", "EIO"),
    "packed.load": _point("read packed weights", "EIO"),
    "expert.read": _point("read a part of an expert", "EIO", SHORT, DELAY),
    "expert_heat.read": _point("read how often experts were used", "EIO"),
    "expert_heat.write": _point("write how often experts were used", "ENOSPC"),
    "expert_use.read": _point("read which model has the experts", "EIO"),
    "expert_use.write": _point("write which model has the experts", "ENOSPC"),
    "packed.allocate": _point("allocate a file of packed weights", "ENOSPC"),
    "packed.write": _point("write packed weights", "ENOSPC", "EIO", SHORT),
    "packed.sync": _point("flush packed weights to the disk", "EIO"),
    "tuned.read": _point("read the tuned sizes", "EIO"),
    "options.read": _point("read a file of options", "EIO"),
    "template_file.read": _point("read a chat template", "EIO"),
    # Clients, the system and the service manager.
    "client.accept": _point("accept a connection", "EMFILE", "ECONNABORTED"),
    "client.receive": _point("receive from a client", "ECONNRESET", DELAY),
    "page.read": _point("read the files of the web page", "EIO"),
    "system.read": _point("read a file of the system about this machine", "EIO", "EMFILE"),
    "manager.send": _point("send a message to the service manager", "ECONNREFUSED"),
}

_hook: Callable[[str, int], int] | None = None


def fault(point: str, size: int = 0) -> int:
    """Fail at this point if a test wants that; otherwise do nothing and return `size`.

    size: the bytes that the call would take. The result is smaller if a test wants a short call.

    Raises:
        OSError: the failure that a test wants.
    """
    return size if _hook is None else _hook(point, size)


def active() -> bool:
    """Whether a test lets calls of this process fail."""
    return _hook is not None


def install(hook: Callable[[str, int], int]) -> None:
    """Let `hook` decide what `fault` does in this process."""
    global _hook
    _hook = hook


def installed() -> bool:
    """Return whether this process has a hook of a test."""
    return _hook is not None
