"""Read --api-key-file: a caller in each line, with its name, its keys and its limits.

No error message has a word of the file that may be a key.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
from dataclasses import dataclass, field, replace
from pathlib import Path

from cpuserve.base.errors import ConfigError
from cpuserve.base.fault_points import fault
from cpuserve.config.values import parse_count
from cpuserve.serving.callers.caller import NO_LIMITS, CallerLimits

MOST_BYTES = 1 << 20
# Each request compares its key with all of these, which takes 0.2 ms for so many.
MOST_KEYS = 1000
# A name in the place of a key is usually shorter, and a shorter key can be guessed.
LEAST_KEY = 16
HASH = "sha256:"

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9._-]{0,63}")
# Logs and metrics call other callers so: keys of --api-key, offline batches, Unix sockets,
# and all callers together that have no metrics of their own.
_TAKEN = re.compile(r"key-\d+|offline|local|other")
_COMMENT = re.compile(r"(^|\s)#.*")
_LIMITS = "rpm=60 tpm=100k parallel=4 priority=10 cache=private"
_MOST = 2**31 - 1


@dataclass(frozen=True, slots=True)
class KeyFileEntry:
    """A line of the file.

    digests: the SHA-256 of each key.
    former: the owners of the things that the keys stored without a name (owner_of).
    """

    line: int
    name: str
    digests: tuple[bytes, ...] = field(repr=False)
    former: tuple[str, ...] = ()
    limits: CallerLimits = NO_LIMITS
    priority: int | None = None
    private_cache: bool = False


@dataclass(frozen=True, slots=True)
class KeyFile:
    """The callers in the file, its state (state_of), and whether every user may read it."""

    entries: tuple[KeyFileEntry, ...]
    state: tuple[int, ...]
    is_public: bool


def digest_of(key: bytes) -> bytes:
    """Return the SHA-256 of an API key."""
    return hashlib.sha256(key).digest()


def owner_of(key: str) -> str:
    """Return the owner id of an API key without a name; it does not depend on other keys."""
    digest = hashlib.sha256(b"cpuserve owner\0" + key.encode()).hexdigest()
    return f"key-{digest[:32]}"


def state_of(found: os.stat_result) -> tuple[int, ...]:
    """Return values that differ if a file was changed or replaced."""
    return (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns)


def read_key_file(path: str) -> KeyFile:
    """Return the callers in a file.

    Raises:
      ConfigError: the file cannot be read, has no caller, or has an error, with its line.
    """
    what = f"--api-key-file {path}"
    data, found = _read(path, what)
    entries: list[KeyFileEntry] = []
    lines: dict[str, int] = {}
    keys: dict[bytes, int] = {}
    # Other characters than \n that Python counts as line breaks would shift the numbers of lines.
    for number, line in enumerate(data.removeprefix(b"\xef\xbb\xbf").split(b"\n"), 1):
        try:
            entry = _entry(number, line)
            if entry is not None:
                _check_new(entry, lines, keys)
                entries.append(entry)
        except ValueError as error:
            msg = f"{what}: line {number}: {error}"
            raise ConfigError(msg) from None
    if not entries:
        msg = f"{what} lists no callers: write lines NAME KEY, then limits such as {_LIMITS}"
        raise ConfigError(msg)
    return KeyFile(tuple(entries), state_of(found), bool(found.st_mode & stat.S_IROTH))


def _read(path: str, what: str) -> tuple[bytes, os.stat_result]:
    try:
        # Without O_NONBLOCK, opening a FIFO would wait for a writer.
        flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_CLOEXEC", 0)
        fault("keys.read")
        handle = os.open(Path(path).expanduser(), flags)
        try:
            found = os.fstat(handle)
            if not stat.S_ISREG(found.st_mode):
                msg = f"{what} is not a regular file: give the path of a text file"
                raise ConfigError(msg)
            with os.fdopen(handle, "rb", closefd=False) as source:
                data = source.read(MOST_BYTES + 1)
        finally:
            os.close(handle)
    except OSError as error:
        msg = f"{what} cannot be read: {error.strerror}"
        raise ConfigError(msg) from None
    if len(data) > MOST_BYTES:
        msg = f"{what} has more than {MOST_BYTES} bytes: at most {MOST_KEYS} keys are allowed"
        raise ConfigError(msg)
    return data, found


def _entry(number: int, line: bytes) -> KeyFileEntry | None:
    """Return the caller of a line, or None for a blank line; ValueError has the mistake."""
    if not line.isascii():
        msg = "the line must be ASCII text"
        raise ValueError(msg)
    words = _COMMENT.sub("", line.decode().rstrip("\r")).split()
    if not words:
        return None
    if len(words) == 1:
        msg = f"the line has one word: write NAME KEY, then limits such as {_LIMITS}"
        raise ValueError(msg)
    name, keys, *limits = words
    if not _NAME.fullmatch(name):
        msg = "a name begins with a letter, and has at most 64 letters, digits, '.', '_' and '-'"
        raise ValueError(msg)
    if _TAKEN.fullmatch(name):
        msg = f"{name} has another meaning in logs and metrics: choose another name"
        raise ValueError(msg)
    digests, former = zip(*map(_key, keys.split(",")), strict=True)
    made = KeyFileEntry(number, name, digests, tuple(owner for owner in former if owner))
    return _limited(made, limits)


def _key(text: str) -> tuple[bytes, str]:
    """Return the digest of a key, and its owner_of; "" if only its hash is known."""
    if text.lower().startswith(HASH):
        if not re.fullmatch(r"[0-9a-fA-F]{64}", text[len(HASH) :]):
            msg = "sha256: needs 64 hexadecimal digits, as `printf %s KEY | sha256sum` prints them"
            raise ValueError(msg)
        return bytes.fromhex(text[len(HASH) :]), ""
    if not text.isprintable():
        msg = "a key must be printable ASCII text"
        raise ValueError(msg)
    if len(text) < LEAST_KEY:
        msg = (
            f"a key (the second word; commas separate several) needs {LEAST_KEY} characters or "
            "more: make one with `openssl rand -hex 24`"
        )
        raise ValueError(msg)
    return digest_of(text.encode()), owner_of(text)


def _limited(made: KeyFileEntry, words: list[str]) -> KeyFileEntry:
    """Return the entry with the limits in `words`; ValueError says which is wrong."""
    given: dict[str, str] = {}
    for word in words:
        name, _, value = word.partition("=")
        if name not in ("rpm", "tpm", "parallel", "priority", "cache"):
            msg = f"a word after the key is no limit: write limits such as {_LIMITS}"
            raise ValueError(msg)
        if name in given:
            msg = f"{name} is given twice"
            raise ValueError(msg)
        given[name] = value
    if given.get("cache", "private") != "private":
        msg = "cache must be private, or be left out"
        raise ValueError(msg)
    limits = CallerLimits(
        *(_count(name, given[name], 1) if name in given else None for name in _COUNTED)
    )
    priority = _count("priority", given["priority"], -_MOST - 1) if "priority" in given else None
    return replace(made, limits=limits, priority=priority, private_cache="cache" in given)


# The limits in the order of CallerLimits.
_COUNTED = ("rpm", "tpm", "parallel")


def _count(name: str, text: str, least: int) -> int:
    try:
        value = parse_count(text)
    except ValueError as error:
        msg = f"{name} {error}, such as 60 or 100k"
        raise ValueError(msg) from None
    if not least <= value <= _MOST:
        msg = f"{name} must be between {least} and {_MOST}"
        if value == 0:
            msg += ": leave it out for no limit, or remove the line to refuse the caller"
        raise ValueError(msg)
    return value


def _check_new(entry: KeyFileEntry, lines: dict[str, int], keys: dict[bytes, int]) -> None:
    """Raise ValueError if an earlier line has the name or a key of `entry`; else note them."""
    if entry.name in lines:
        msg = f"line {lines[entry.name]} has the same name: a caller has one line"
        raise ValueError(msg)
    lines[entry.name] = entry.line
    for digest in entry.digests:
        if digest in keys:
            msg = f"line {keys[digest]} has the same key: each caller needs its own"
            raise ValueError(msg)
        keys[digest] = entry.line
    if len(keys) > MOST_KEYS:
        msg = f"this is key {len(keys)}: at most {MOST_KEYS} are allowed"
        raise ValueError(msg)
