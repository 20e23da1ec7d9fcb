"""Draws the pictures of docs/concepts.md.

`python -m docs.site.drawings docs/images` writes them into that directory.
"""

from __future__ import annotations

import sys
from pathlib import Path

from docs.site.svg import arrow, box, drawing, labelled, text


def step() -> str:
    """Return a drawing of one step, from requests to streams."""
    parts = [
        labelled(16, 40, 130, 50, ["request A", "has 300 tokens"]),
        labelled(16, 104, 130, 50, ["request B", "has 40 tokens"]),
        labelled(16, 168, 130, 50, ["request C", "a new prompt"]),
        labelled(186, 84, 130, 90, ["scheduler", "decode rows first,", "then prompt chunks"]),
        box(356, 40, 150, 178),
        text(431, 62, "one batch", anchor="middle"),
        labelled(372, 76, 118, 26, ["A: 1 row"], colour="blue"),
        labelled(372, 108, 118, 26, ["B: 1 row"], colour="blue"),
        labelled(372, 140, 118, 66, ["C: 128 rows", "of its prompt"], colour="amber"),
        labelled(546, 60, 140, 138, ["one C++ call", "for each layer:", "norm, qkv, attention,",
                                     "output, gate and up,", "down"], colour="green"),
        labelled(726, 64, 118, 34, ["token of A"], colour="blue"),
        labelled(726, 112, 118, 34, ["token of B"], colour="blue"),
        labelled(726, 160, 118, 34, ["C: not yet"], colour="amber"),
        *(arrow(146, y, 184, 129) for y in (65, 129, 193)),
        arrow(316, 129, 354, 129),
        arrow(506, 129, 544, 129),
        *(arrow(686, 129, 724, y) for y in (81, 129, 177)),
        text(431, 246, "every weight is read once for all rows of the batch", anchor="middle"),
    ]  # fmt: skip
    return drawing(860, 264, "A step: the scheduler makes one batch of all requests", parts)


# Bytes of a weight, scales included: groups of 32 have a scale of 16 bits, and int4 a minimum.
FORMATS = {"bf16": 2.0, "int8": 1 + 2 / 32, "int4": 0.5 + 4 / 32}
WEIGHTS = 4e9
BANDWIDTH = 50e9


def bandwidth() -> str:
    """Return a bar for each weight format: the bytes read for a token, and the rate of tokens."""
    gigabytes = WEIGHTS / 1e9
    parts = [text(16, 30, f"A model with {gigabytes:g} billion weights, memory of 50 GB/s")]
    for i, (name, each) in enumerate(FORMATS.items()):
        y, size = 52 + 52 * i, WEIGHTS * each
        width = size / (WEIGHTS * 2) * 420
        parts += [
            text(16, y + 23, name),
            box(70, y, width, 34, colour=("red", "amber", "green")[i]),
            text(80 + width, y + 15, f"{size / 1e9:.1f} GB for each token", size=13),
            text(80 + width, y + 31, f"at most {BANDWIDTH / size:.0f} tokens/s", size=13),
        ]
    words = "rate = bandwidth / bytes. Eight requests in one step share the same bytes."
    parts.append(text(16, 226, words, colour="soft", size=13))
    return drawing(720, 244, "Decode: the bytes of the weights decide the rate", parts)


def paged_kv() -> str:
    """Return two block tables that point to blocks of a KV cache, with a shared beginning."""
    tables = {"request A": (0, 1, 2, 5), "request B": (0, 1, 4)}
    parts = [text(16, 30, "block tables"), text(420, 30, "KV cache: blocks of 32 tokens")]
    places = {i: (420 + 104 * (i % 3), 52 + 64 * (i // 3)) for i in range(9)}
    colours = {0: "green", 1: "green", 2: "blue", 5: "blue", 4: "amber"}
    for number, (x, y) in places.items():
        words = [f"block {number}", "shared" if number < 2 else "" if number in colours else "free"]
        parts.append(labelled(x, y, 92, 48, filter(None, words), colour=colours.get(number, "box")))
    for row, (name, blocks) in enumerate(tables.items()):
        y = 60 + 92 * row
        parts.append(text(16, y + 22, name))
        for column, block in enumerate(blocks):
            parts.append(
                labelled(110 + 62 * column, y, 54, 34, [str(block)], colour=colours[block])
            )
        parts.append(arrow(110 + 62 * len(blocks), y + 17, 412, y + 17))
    words = "Both prompts begin with the same 64 tokens, which are computed and stored once."
    parts.append(text(16, 262, words, colour="soft", size=13))
    return drawing(748, 280, "Paged KV cache: block tables and shared blocks", parts)


def equal_bits() -> str:
    """Return the same row alone and in a batch, with the sums in the same order."""
    parts = [text(16, 30, "alone, one thread"), text(400, 30, "in a batch, many threads")]
    for x, rows in ((16, 1), (400, 4)):
        for row in range(rows):
            y = 48 + 32 * row
            words = ["your request" if row == 0 else "another request"]
            parts.append(labelled(x, y, 140, 26, words, colour="blue" if row == 0 else "box"))
        parts += [
            arrow(x + 142, 61, x + 172, 61),
            labelled(x + 176, 48, 160, 26, ["((a + b) + c) + d"], colour="green"),
        ]
    parts += [
        labelled(16, 186, 720, 40, ["the same bits: each output is summed in one fixed order, "
                                    "whoever else is served"], colour="green"),
        arrow(272, 76, 272, 184), arrow(656, 76, 656, 184),
    ]  # fmt: skip
    return drawing(752, 244, "Batch invariance: the same row has the same bits in any batch", parts)


PICTURES = {"step": step, "bandwidth": bandwidth, "paged-kv": paged_kv, "equal-bits": equal_bits}


def main(directory: Path) -> None:
    """Write all pictures into `directory`."""
    for name, draw in PICTURES.items():
        (directory / f"{name}.svg").write_text(draw(), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
