"""Random pictures for benchmarks: PNG files of noise, which no cache of the server knows."""

from __future__ import annotations

import ast
import base64
import random
import struct
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from cpuserve.base.errors import ConfigError

# The sizes of vLLM: half of the pictures are small, and half have 720 lines of 1,280 pixels.
BUCKETS: Mapping[tuple[int, int], float] = {(256, 256): 0.5, (720, 1280): 0.5}
_MOST_SIDE = 8192


@dataclass(frozen=True, slots=True)
class Noise:
    """A picture of noise, which is drawn when it is sent; sizes are in pixels."""

    height: int
    width: int
    seed: int

    @property
    def url(self) -> str:
        """The picture as a data: URL."""
        row = 1 + 3 * self.width
        pixels = bytearray(random.Random(self.seed).randbytes(row * self.height))
        pixels[::row] = bytes(self.height)  # no row has a filter
        head = struct.pack(">IIBBBBB", self.width, self.height, 8, 2, 0, 0, 0)
        chunks = (b"IHDR", head), (b"IDAT", zlib.compress(pixels, 1)), (b"IEND", b"")
        file = b"\x89PNG\r\n\x1a\n" + b"".join(_chunk(*chunk) for chunk in chunks)
        return "data:image/png;base64," + base64.b64encode(file).decode()


def _chunk(name: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + name + data + struct.pack(">I", zlib.crc32(name + data))


def buckets_of(text: str | None) -> Mapping[tuple[int, int], float]:
    """Return the probability of each (height, width); None = BUCKETS.

    text: as in vLLM, a dict of (height, width, frames) and probabilities; frames must be 1.

    Raises:
        ConfigError: the text is no such dict, or a size or probability is wrong.
    """
    if text is None:
        return BUCKETS
    try:
        shares: Any = ast.literal_eval(text)
        buckets = {
            (int(height), int(width)): float(share)
            for (height, width, frames), share in shares.items()
            if share and int(frames) == 1
        }
        videos = any(share for (_, _, frames), share in shares.items() if int(frames) != 1)
    except (AttributeError, MemoryError, RecursionError, SyntaxError, TypeError, ValueError):
        msg = "flag --random-mm-bucket-config must be a dict such as {(256, 256, 1): 1.0}"
        raise ConfigError(msg) from None
    sides = {side for size in buckets for side in size}
    if (
        videos
        or not buckets
        or min(buckets.values()) < 0
        or not sides <= {*range(1, _MOST_SIDE + 1)}
    ):
        msg = (
            "flag --random-mm-bucket-config must have sizes of 1 frame, sides of 1 to "
            f"{_MOST_SIDE} pixels and probabilities above 0: videos are not read"
        )
        raise ConfigError(msg)
    return buckets


def noise(rng: random.Random, count: int, buckets: Mapping[tuple[int, int], float]) -> list[Noise]:
    """Return `count` random pictures with these probabilities of their sizes."""
    sizes = rng.choices(list(buckets), list(buckets.values()), k=count)
    return [Noise(*size, rng.getrandbits(32)) for size in sizes]
