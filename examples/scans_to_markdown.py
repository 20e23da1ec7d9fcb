"""Write the scans and PDF documents of a folder as Markdown, in batches of a running server.

usage: scans_to_markdown.py FOLDER [URL] [QUESTION]

The server needs a model that reads pictures, and --files-dir. Each NAME.png or NAME.pdf becomes
NAME.md; files that have one already are left out, so a run that was stopped goes on.
"""

import base64
import io
import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from openai import OpenAI

TYPES = {".png": "png", ".jpg": "jpeg", ".jpeg": "jpeg", ".webp": "webp", ".tif": "tiff"}
QUESTION = "Convert this page to Markdown."
MOST_BYTES = 64 << 20  # of the lines of one batch
WAIT_S = 2.0


def pages(path: Path) -> Iterator[dict]:
    """Yield the content part of each page: models for documents read one page at a time."""
    if path.suffix.lower() in TYPES:
        data = base64.b64encode(path.read_bytes()).decode()
        url = f"data:image/{TYPES[path.suffix.lower()]};base64,{data}"
        yield {"type": "image_url", "image_url": {"url": url}}
        return
    from pypdfium2 import PdfDocument  # pip install pypdfium2

    whole = PdfDocument(path)
    for number in range(len(whole)):
        one, file = PdfDocument.new(), io.BytesIO()
        one.import_pages(whole, [number])
        one.save(file)
        data = base64.b64encode(file.getvalue()).decode()
        url = f"data:application/pdf;base64,{data}"
        yield {"type": "file", "file": {"filename": path.name, "file_data": url}}


def lines(folder: Path, model: str, question: str) -> Iterator[str]:
    """Yield a line of a batch for each page of each file without Markdown."""
    for path in sorted(folder.iterdir()):
        known = path.suffix.lower() in (*TYPES, ".pdf")
        if not known or path.with_suffix(".md").exists():
            continue
        for number, part in enumerate(pages(path)):
            content = [part, {"type": "text", "text": question}]
            body = {
                "model": model,
                "messages": [{"role": "user", "content": content}],
                "temperature": 0,
                "max_completion_tokens": 4096,
                # Some models write the structure of a page in special tokens (DocTags).
                "skip_special_tokens": False,
            }
            yield json.dumps({
                "custom_id": f"{number} {path.name}",
                "method": "POST",
                "url": "/v1/chat/completions",
                "body": body,
            })  # fmt: skip


def run(client: OpenAI, batch: list[str]) -> dict[str, dict]:
    """Run one batch, and return the response to each line by its custom_id."""
    file = ("scans.jsonl", "\n".join(batch).encode())
    uploaded = client.files.create(file=file, purpose="batch")
    made = client.batches.create(
        input_file_id=uploaded.id, endpoint="/v1/chat/completions", completion_window="24h"
    )
    while made.status in ("validating", "in_progress", "finalizing"):
        time.sleep(WAIT_S)
        made = client.batches.retrieve(made.id)
    found = {}
    for number in filter(None, (made.output_file_id, made.error_file_id)):
        for line in client.files.content(number).text.splitlines():
            result = json.loads(line)
            found[result["custom_id"]] = result["response"]
        client.files.delete(number)
    client.files.delete(uploaded.id)
    return found


def write(folder: Path, found: dict[str, dict]) -> None:
    """Write the Markdown of each file, if all of its pages were read."""
    texts: dict[str, dict[int, str]] = {}
    refused = set()
    for key, response in found.items():
        number, _, name = key.partition(" ")
        if response["status_code"] == 200:
            text = response["body"]["choices"][0]["message"]["content"]
            texts.setdefault(name, {})[int(number)] = text
        else:
            refused.add(name)
            print(f"{name}: {response['body']['error']['message']}", file=sys.stderr)
    for name, by_page in texts.items():
        if name not in refused:
            whole = "\n\n".join(by_page[number] for number in sorted(by_page))
            (folder / name).with_suffix(".md").write_text(whole, encoding="utf-8")
            print(name, len(by_page), "pages")


def main() -> None:
    """Read the arguments, and run batch after batch."""
    given = dict(enumerate(sys.argv))
    folder, url = given[1], given.get(2, "http://127.0.0.1:8000")
    question = given.get(3, QUESTION)
    client = OpenAI(base_url=f"{url}/v1", api_key="none")
    model, found = client.models.list().data[0].id, {}
    batch: list[str] = []
    for line in lines(Path(folder), model, question):
        if batch and sum(map(len, batch)) + len(line) > MOST_BYTES:
            found |= run(client, batch)
            batch = []
        batch.append(line)
    if batch:
        found |= run(client, batch)
    write(Path(folder), found)


if __name__ == "__main__":
    main()
