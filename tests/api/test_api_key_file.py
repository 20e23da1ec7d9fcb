"""--api-key-file: its form, every mistake in it, and what a changed file changes."""

import asyncio
import contextlib
import errno
import hashlib
import logging
import os
import stat
from pathlib import Path

import pytest

from cpuserve.api.callers.key_file import MOST_BYTES, MOST_KEYS, owner_of, read_key_file
from cpuserve.api.callers.known_callers import KeyFileWatch, KnownCallers
from cpuserve.api.lifecycle.serve import serve
from cpuserve.base import fault_points
from cpuserve.base.errors import ConfigError
from cpuserve.config.server import ServerOptions
from cpuserve.serving.callers.caller import CallerLimits
from tests.helpers.patience import until

KEY, OTHER, THIRD = "secret-key-of-alice", "secret-key-of-bobby", "secret-key-of-carol"
HASH = "sha256:" + hashlib.sha256(OTHER.encode()).hexdigest()


@pytest.fixture
def path(tmp_path):
    return tmp_path / "keys"


def write(path, text):
    """Replace the file by one that only its owner reads, as secrets are replaced."""
    part = path.with_name("part")
    part.write_bytes(text if isinstance(text, bytes) else text.encode())
    part.chmod(0o600)
    part.replace(path)
    return str(path)


def test_a_file_lists_names_keys_hashes_and_limits(path):
    text = f"""\ufeff# callers
alice {KEY},{THIRD} rpm=60 tpm=100k parallel=4  # two keys
\t
bob-2.x_  {HASH.upper().replace("SHA256", "sha256")} priority=-5 cache=private\r
"""
    found = KnownCallers(file=write(path, text))
    alice, bob = found.find(KEY.encode()), found.find(OTHER.encode())
    assert found.find(THIRD.encode()) == alice
    assert (alice.name, alice.owner) == ("alice", "caller-alice")
    assert alice.limits == CallerLimits(60, 100_000, 4)
    assert (alice.priority, alice.private_cache) == (None, False)
    assert bob.name == "bob-2.x_"
    assert (bob.limits, bob.priority, bob.private_cache) == (CallerLimits(), -5, True)
    assert found.find(b"alice") is found.find(HASH.encode()) is found.find(b"") is None
    assert found.owners == ("caller-alice", "caller-bob-2.x_")


GOOD = "\n".join(f"caller{n} {KEY}{n}" for n in range(1, 7)) + "\n"
# Line 7 of a file, and a part of the error about it.
MISTAKES = {
    "one word": (KEY, "one word"),
    "key first": (f"{KEY} alice", "needs 16 characters"),
    "short key": ("alice secret", "needs 16 characters"),
    "short second key": (f"alice {KEY},secret", "needs 16 characters"),
    "no second key": (f"alice {KEY},", "needs 16 characters"),
    "name with a letter that is none": (f"al:ice {KEY}", "a name begins with a letter"),
    "name of 65 letters": (f"{'a' * 65} {KEY}", "at most 64"),
    "address as a name": (f"10.0.0.7 {KEY}", "a name begins with a letter"),
    "name of a place": (f"key-1 {KEY}", "another meaning"),
    "name of all others": (f"other {KEY}", "another meaning"),
    "key twice": (f"alice {KEY}3", "line 3 has the same key"),
    "key twice in a line": (f"alice {KEY},{KEY}", "line 7 has the same key"),
    "key and its hash": (
        f"alice sha256:{hashlib.sha256(f'{KEY}2'.encode()).hexdigest()}",
        "line 2 has the same key",
    ),
    "name twice": (f"caller5 {KEY}", "line 5 has the same name"),
    "short hash": ("alice sha256:secret", "64 hexadecimal digits"),
    "hash of other digits": (f"alice sha256:{'g' * 64}", "64 hexadecimal digits"),
    "limit 0": (f"alice {KEY} rpm=0", "rpm must be between 1 and 2147483647: leave it out"),
    "tokens 0": (f"alice {KEY} tpm=0", "tpm must be between 1"),
    "parallel 0": (f"alice {KEY} parallel=0", "parallel must be between 1"),
    "negative limit": (f"alice {KEY} rpm=-1", "rpm must be between 1"),
    "too large a limit": (f"alice {KEY} tpm=2147483648", "tpm must be between 1"),
    "fraction": (f"alice {KEY} rpm=1.5", "rpm must be a whole number"),
    "no number": (f"alice {KEY} tpm=many", "tpm must be a whole number"),
    "no value": (f"alice {KEY} rpm=", "rpm must be a whole number"),
    "priority beyond 32 bits": (f"alice {KEY} priority=-2147483649", "priority must be"),
    "limit twice": (f"alice {KEY} rpm=5 rpm=6", "rpm is given twice"),
    "unknown limit": (f"alice {KEY} rate=5", "is no limit"),
    "key after the key": (f"alice {KEY} {OTHER}", "is no limit"),
    "shared cache": (f"alice {KEY} cache=shared", "cache must be private"),
    "other letters": (f"alice {KEY}é", "must be ASCII"),
    "binary": (f"alice {KEY}\0", "printable"),
}


@pytest.mark.parametrize(("line", "part"), MISTAKES.values(), ids=MISTAKES)
def test_the_start_is_refused_with_the_line_and_without_a_key(path, line, part):
    place = write(path, f"{GOOD}{line}\nzoe {THIRD}\n")
    with pytest.raises(ConfigError) as caught:
        serve(None, ServerOptions(api_key_file=place))
    told = str(caught.value)
    assert told.startswith(f"--api-key-file {place}: line 7: ")
    assert part in told
    assert "secret" not in told
    assert "\n" not in told


@pytest.mark.parametrize("text", ["", "\n \n", "# nobody\n   # else"])
def test_a_file_without_callers_is_refused(path, text):
    with pytest.raises(ConfigError, match="lists no callers: write lines NAME KEY"):
        read_key_file(write(path, text))


def test_what_is_no_readable_file_is_refused_without_waiting(path, tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        read_key_file(str(path))
    with pytest.raises(ConfigError, match="not a regular file"):
        read_key_file("/dev/zero")
    os.mkfifo(path)
    with pytest.raises(ConfigError, match="not a regular file"):
        read_key_file(str(path))
    with pytest.raises(ConfigError, match="not a regular file"):
        read_key_file(str(tmp_path))
    path.unlink()
    write(path, GOOD)

    def refuse(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "open", refuse)
    with pytest.raises(ConfigError, match="cannot be read: Permission denied"):
        read_key_file(str(path))


def test_the_largest_file_is_read_and_a_larger_one_is_refused(path):
    lines = "".join(f"c{n} {KEY}{n} rpm={n + 1}\n" for n in range(MOST_KEYS))
    write(path, lines + "#" * (MOST_BYTES - len(lines)))
    found = KnownCallers(file=str(path))
    assert len(found.named()) == MOST_KEYS
    assert found.find(f"{KEY}{MOST_KEYS - 1}".encode()).limits.requests == MOST_KEYS
    with pytest.raises(ConfigError, match=f"more than {MOST_BYTES} bytes"):
        read_key_file(write(path, lines + "#" * (MOST_BYTES - len(lines) + 1)))
    with pytest.raises(ConfigError, match=f"line {MOST_KEYS + 1}: this is key {MOST_KEYS + 1}"):
        read_key_file(write(path, f"{lines}zoe {THIRD}\n"))


def test_a_file_that_every_user_can_read_is_used_with_a_warning(path, caplog):
    write(path, GOOD)
    KnownCallers(file=str(path))
    assert not caplog.records
    path.chmod(0o604)
    KnownCallers(file=str(path))
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "can be read by every user" in caplog.text
    assert "secret" not in caplog.text


def test_a_key_of_a_flag_is_not_one_of_the_file_too(path):
    write(path, GOOD)
    with pytest.raises(ConfigError, match="line 4: a key is one of --api-key") as caught:
        KnownCallers((f"{KEY}4",), str(path))
    assert "secret" not in str(caught.value)
    both = KnownCallers((OTHER,), str(path))
    assert both.find(OTHER.encode()).name == "key-1"
    assert [caller.name for caller in both.named()] == [f"caller{n}" for n in range(1, 7)]


def test_no_text_of_callers_has_a_key(path):
    read = read_key_file(write(path, f"alice {KEY} rpm=5\nbob {HASH}\n"))
    found = KnownCallers((THIRD,), str(path))
    shown = repr([read, found.named(), found.find(THIRD.encode()), found._known, vars(found)])
    assert "secret" not in shown
    for key in (KEY, OTHER, THIRD):
        digest = hashlib.sha256(key.encode())
        assert digest.hexdigest() not in shown
        assert repr(digest.digest()) not in shown


def test_things_of_a_key_belong_to_its_name_when_it_moves_to_the_file(path):
    before = KnownCallers((OTHER, KEY))
    assert before.current_owner("key-2") == before.find(KEY.encode()).owner == owner_of(KEY)
    after = KnownCallers(file=write(path, f"alice {KEY}\n"))
    assert after.current_owner(owner_of(KEY)) == "caller-alice"
    assert after.current_owner("caller-alice") == "caller-alice"
    assert after.of_owner("caller-alice").name == "alice"
    assert after.current_owner("10.0.0.7") == "10.0.0.7"


def test_a_load_keeps_what_was_used_and_the_limits_of_those_who_left(path):
    found = KnownCallers((OTHER,), write(path, f"alice {KEY} rpm=5\nbob {THIRD} rpm=1\n"))
    use = found.find(KEY.encode()).use
    found.load(read_key_file(write(path, f"alice {KEY} rpm=7\n")))
    assert found.find(KEY.encode()).use is use
    assert found.find(KEY.encode()).limits.requests == 7
    assert found.find(THIRD.encode()) is None
    assert found.find(OTHER.encode()).name == "key-1"
    # Batches of bob go on, within his limits.
    assert found.of_owner("caller-bob").limits.requests == 1
    assert found.owners == (owner_of(OTHER), "caller-alice")
    bob = found.of_owner("caller-bob").use
    found.load(read_key_file(write(path, f"bob {THIRD} rpm=2\n")))
    assert found.find(THIRD.encode()).use is bob


def test_the_callers_that_have_left_are_bounded(path):
    found = KnownCallers(file=write(path, GOOD))
    for turn in range(4):
        lines = "".join(f"c{turn}-{n} {KEY}{n}\n" for n in range(MOST_KEYS))
        found.load(read_key_file(write(path, lines)))
    assert len(found._by_owner) <= 2 * MOST_KEYS
    assert found.of_owner("caller-c2-5").use is not None


@contextlib.asynccontextmanager
async def watched(callers):
    """Watch a file, and look at it without long pauses."""
    watch = KeyFileWatch(callers, 0.01)
    running = asyncio.create_task(watch.run())
    try:
        yield watch
    finally:
        running.cancel()
        await asyncio.wait((running,))
        assert running.cancelled()


async def looks(watch, count=4):
    """Wait until the watch has looked several times more."""
    target = watch.looks + count
    await until(lambda: watch.looks >= target)


def test_a_change_is_found_however_the_file_is_replaced(path, tmp_path):
    async def main():
        # Kubernetes mounts keys -> ..data/keys and ..data -> ..day1, and replaces the link ..data.
        for day in (1, 2):
            (tmp_path / f"..day{day}").mkdir()
        for day, text in ((1, f"alice {KEY}\n"), (2, f"alice {THIRD}\n")):
            (tmp_path / f"..day{day}" / "keys").write_text(text)
        (tmp_path / "..data").symlink_to("..day1")
        path.symlink_to("..data/keys")
        callers = KnownCallers(file=str(path))
        async with watched(callers) as watch:
            await looks(watch)
            assert callers.find(KEY.encode()) is not None
            (tmp_path / "..new").symlink_to("..day2")
            (tmp_path / "..new").replace(tmp_path / "..data")
            await until(lambda: callers.find(THIRD.encode()) is not None)
            assert callers.find(KEY.encode()) is None
            write(path, f"alice {OTHER}\n")  # another file has the name
            await until(lambda: callers.find(OTHER.encode()) is not None)
            before = path.stat()
            path.write_text(f"alice {THIRD}\n")  # the same file, size and modification time
            os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
            assert path.stat().st_ino == before.st_ino
            await until(lambda: callers.find(THIRD.encode()) is not None)

    asyncio.run(main())


def test_a_broken_file_changes_nothing_and_is_reported_once(path, caplog):
    async def main():
        callers = KnownCallers((OTHER,), write(path, f"alice {KEY}\n"))
        async with watched(callers) as watch:
            for broken in (f"{GOOD}alice {THIRD} rpm=0\n", "", f"bob {OTHER}\n", b"\xff", None):
                caplog.clear()
                if broken is None:
                    path.unlink()
                else:
                    write(path, broken)
                await until(lambda: caplog.records)
                await looks(watch)
                (record,) = caplog.records
                assert record.levelno == logging.ERROR
                assert "The callers of the earlier file remain" in record.getMessage()
                assert "secret" not in record.getMessage()
                assert callers.find(KEY.encode()).name == "alice"
                assert callers.find(THIRD.encode()) is None
            caplog.clear()
            with caplog.at_level(logging.INFO, logger="cpuserve"):
                write(path, f"bob {THIRD}\ncarl {KEY}\n")
                await until(lambda: callers.find(THIRD.encode()) is not None)
                await until(lambda: caplog.records)
            assert "2 callers, new bob, carl, removed alice" in caplog.text

    asyncio.run(main())


def test_a_file_that_is_incomplete_at_one_look_is_not_loaded(path, monkeypatch):
    """An editor may write the lines of the old file in several steps."""
    callers = KnownCallers(file=write(path, f"alice {KEY}\nbob {OTHER}\n"))
    watch = KeyFileWatch(callers)
    loads = []
    monkeypatch.setattr(callers, "load", loads.append)

    async def main():
        for text in (f"alice {KEY}\n", f"alice {KEY}\nbob {OTHER}\ncarl {THIRD}\n"):
            write(path, text)
            await watch._look()
        assert loads == []
        await watch._look()
        (read,) = loads
        assert [entry.name for entry in read.entries] == ["alice", "bob", "carl"]
        await watch._look()
        assert len(loads) == 1

    asyncio.run(main())


def test_a_file_that_the_system_cannot_read_now_is_read_later(path, caplog, monkeypatch):
    callers = KnownCallers(file=write(path, f"alice {KEY}\n"))
    watch = KeyFileWatch(callers)
    fails = ["keys.read"] * 3

    def hook(point, size):
        if point in fails:
            fails.remove(point)
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return size

    async def main():
        write(path, f"bob {THIRD}\n")
        monkeypatch.setattr(fault_points, "_hook", hook)
        for _ in range(4):  # it sees the change, and fails three times
            await watch._look()
        assert not fails
        assert callers.find(KEY.encode()).name == "alice"
        await watch._look()
        assert callers.find(THIRD.encode()).name == "bob"

    asyncio.run(main())
    said = [text for text in caplog.messages if "The callers of the earlier file remain" in text]
    assert len(said) == 1


def test_a_signal_loads_the_file_at_once(path, caplog):
    async def main():
        callers = KnownCallers(file=write(path, f"alice {KEY}\n"))
        watch = KeyFileWatch(callers, 1e6)
        running = asyncio.create_task(watch.run())
        write(path, f"alice {THIRD}\n")
        watch.ask()
        await until(lambda: callers.find(THIRD.encode()) is not None)
        running.cancel()
        await asyncio.wait((running,))

    asyncio.run(main())


def test_the_example_of_the_page_is_a_file(path):
    page = (Path(__file__).parents[2] / "docs" / "serving.md").read_text()
    text = page.partition("## Callers")[2].partition("```\n")[2].partition("```")[0]
    found = KnownCallers(file=write(path, text))
    assert [caller.name for caller in found.named()] == ["frontend", "agents", "nightly"]
    assert not path.stat().st_mode & stat.S_IROTH
