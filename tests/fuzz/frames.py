"""Targets: bytes that arrive in pieces: frames between processes, and uploads."""

from __future__ import annotations

import random
import re
import tempfile
from pathlib import Path
from typing import Any, TypedDict

import msgspec

from cpuserve.api.batches.upload import _Parts
from cpuserve.base.errors import RequestError
from cpuserve.engine import ipc
from cpuserve.sampling.params import SamplingParams
from cpuserve.sampling.structured import StructuredOutputs
from tests.fuzz.edits import apply, draw
from tests.fuzz.texts import line

_LOGPROB = ipc.TokenLogprob(5, -0.5, 1, [(5, -0.5), (6, -1.5)])
_FULL = SamplingParams(
    n=2, temperature=0.5, stop=["a"], logit_bias={3: 1.5}, cache_salt="s", logprobs=2,
    seed=2**63 - 1,
    structured_outputs=StructuredOutputs(json={"type": "object"}), samplers=["top_k", "min_p"],
    dry_sequence_breakers=["\n"], adapter="a", bad_words=["b"],
)  # fmt: skip
INBOUND = (
    ipc.AddRequest(1, b"\5\0\0\0" * 9, _FULL, 1.5, priority=-1, progress=True),
    ipc.AddRequest(2, b"", SamplingParams(), 0.0),
    ipc.Abort([1, 2, 2**40]),
    ipc.Ask(3, "report", {"a": [1, None, {"b": 1.5}]}),
    ipc.Ping(),
    ipc.Shutdown(),
)
OUTBOUND = (
    ipc.StageProgress("load", 1, 2**40),
    ipc.Ready({"vocab_size": 512, "labels": ["a"]}),
    ipc.StepOutput(
        [
            ipc.Output(1, [5, 6], "stop", 6, [_LOGPROB, _LOGPROB], [None, _LOGPROB], 32),
            ipc.Output(2, [], "error", error="e", fault="stop", vector=b"\0" * 16),
        ],
        ipc.Stats(tiers={"memory": ipc.TierStats(1, 2, 3)}),
    ),
    ipc.Reply(3, {"ok": True}),
    ipc.Pong(True),
    ipc.Fatal("no", startup=True),
)
SIDES = {"in": (INBOUND, ipc.decode_inbound), "out": (OUTBOUND, ipc.decode_outbound)}


class FrameCase(TypedDict):
    """side: who reads ("in": the engine). data: the bytes as hex. cut: the seed of the pieces."""

    side: str
    data: str
    cut: int


class FrameBench:
    """Frames between front end and engine: messages, or a FrameError; the pieces do not matter."""

    most_bytes, most_cpu_s = 1 << 29, 5.0

    def draw(self, rng: random.Random) -> FrameCase:
        """Return a random case."""
        side = rng.choice([*SIDES])
        some = [
            bytes(ipc.encode_frame(rng.choice(SIDES[side][0]))) for _ in range(rng.randint(1, 4))
        ]
        if rng.random() < 0.7:  # a body is changed, and its length fits
            number = rng.randrange(len(some))
            body = some[number][ipc.LENGTH_BYTES :]
            body = apply(draw(rng, {"a.gguf": body}), "a.gguf", body)
            some[number] = len(body).to_bytes(ipc.LENGTH_BYTES, "little") + body
        data = b"".join(some)
        if rng.random() < 0.3:
            data = apply(draw(rng, {"a.gguf": data}), "a.gguf", data)
        return {"side": side, "data": data.hex(), "cut": rng.getrandbits(32)}

    def outcome(self, case: FrameCase) -> str:
        """How many messages the bytes have, and why the reader stops.

        Raises:
            Exception: the pieces have other messages, or a message is another after it was sent on.
        """
        data = bytes.fromhex(case["data"])
        whole = _read([data], case["side"])
        assert _read(pieces(data, case["cut"]), case["side"]) == whole, "another cut"
        return f"{case['side']}: {min(len(whole[0]), 2)} messages, {whole[1]}"

    def close(self) -> None:
        """Nothing is kept."""


def _read(parts: list[bytes], side: str) -> tuple[list[bytes], str]:
    """Return the messages as they are sent on, and why the reader stops."""
    reader, found, decode = ipc.FrameReader(), [], SIDES[side][1]
    bodies: list[bytes] = []
    try:
        for part in parts:
            bodies += reader.feed(part)
    except ipc.FrameError:
        return [], "invalid length"
    for body in bodies:
        try:
            message = decode(body)
        except ipc.FrameError:
            return found, "invalid message"
        sent = msgspec.msgpack.encode(message)
        assert msgspec.msgpack.encode(decode(sent)) == sent
        found.append(sent)
    return found, "partial" if reader.partial else "end"


def pieces(data: bytes, seed: int) -> list[bytes]:
    """Return `data` in pieces of random lengths."""
    rng, found = random.Random(seed), []
    while data:
        length = rng.choice((1, 2, 3, 7, 30, 1000))
        found.append(data[:length])
        data = data[length:]
    return found


# --- uploads --------------------------------------------------------------------------------------
_BOUNDARY = b"bound"
_NUMBER = re.compile(r"\d+")
_UPLOAD = (
    b'--bound\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--bound\r\n'
    b'Content-Disposition: form-data; name="file"; filename="a/b.jsonl"\r\n'
    b"Content-Type: application/jsonl\r\n\r\n"
    b'{"custom_id": "a", "body": {"prompt": "\xc3\xa9 \xf0\x9f\x98\x80"}}\n'
    b"\r\n--boun not yet\r\n\r\n--bound--\r\n"
)
_SIGNS = (
    b"\r\n", b"\n", b"\r", b"--", b"--bound", b"--bound--", b"\r\n--bound\r\n", b"\r\n\r\n", b":",
    b";",
    b"name=", b'filename="', b"filename*=utf-8''%ff", b"\0", b"\xff", b"\xf0\x9f", b"a" * 300,
    b"a: b\r\n",
    b"Content-Transfer-Encoding: base64\r\n", b"--bound\r\n\r\n" * 20, b"=" * 80, b'"' * 9, b"\\",
    b'\r\n--bound\r\nContent-Disposition: form-data; name="file"; filename=""\r\n\r\n',
)  # fmt: skip


class UploadCase(TypedDict):
    """data: the bytes of the body as hex. cut: the seed of the pieces in which it arrives."""

    data: str
    cut: int


class UploadBench:
    """Uploads: a file and fields, or an error of one line; the pieces do not matter."""

    most_bytes, most_cpu_s = 1 << 29, 5.0

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory()

    def draw(self, rng: random.Random) -> UploadCase:
        """Return a random case."""
        data = _UPLOAD
        for _ in range(rng.randint(1, 4)):
            at = rng.randrange(len(data) + 1)
            if rng.random() < 0.6:
                data = data[:at] + rng.choice(_SIGNS) + data[at:]
            else:
                edits = draw(rng, {"a.json": data})
                data = apply(edits, "a.json", data) or b"-"
        return {"data": data.hex(), "cut": rng.getrandbits(32)}

    def outcome(self, case: UploadCase) -> str:
        """What an upload comes to.

        Raises:
            Exception: something else than a file or one line, or another result in pieces.
        """
        data = bytes.fromhex(case["data"])
        whole = self._read([data])
        cut = self._read(pieces(data, case["cut"]))
        # Positions in the text of an error count from the beginning of a piece.
        assert _NUMBER.sub("", cut[0]) == _NUMBER.sub("", whole[0]), (cut, whole)
        assert cut[1] == whole[1] or whole[1] is None, "another content of the file"
        return whole[0]

    def _read(self, parts: list[bytes]) -> tuple[str, Any]:
        """Return what an upload comes to, and the bytes of its file, None if it was refused."""
        path, written = Path(self._folder.name, "file"), 0

        def reserve(count: int) -> None:
            nonlocal written
            written += count

        reader = _Parts(_BOUNDARY, path, reserve)
        try:
            for part in parts:
                reader.feed(part)
            sent = reader.end()
        except RequestError as error:
            return line(error), None
        finally:
            reader.close()
            content = path.read_bytes() if path.exists() else b""
            path.unlink(missing_ok=True)
            assert len(content) == written
        assert "/" not in sent.name, sent.name
        return f"a file with {len(sent.fields)} fields", (sent, content)

    def close(self) -> None:
        """Remove the folder."""
        self._folder.cleanup()
