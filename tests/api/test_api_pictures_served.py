"""A small SmolVLM behind a whole server: the tokens of transformers, batches, and bad pictures."""

import base64
import json
import subprocess
import sys
import urllib.error
from pathlib import Path

import numpy as np
import openai
import pytest

from cpuserve.media.pictures.families.checkpoint import family_of
from tests.api.sees import IMAGE, tokenizer, write_served_model
from tests.helpers.children import child_options
from tests.helpers.drawn import data_url, document, picture, png, saved
from tests.helpers.mmproj import write_ggufs
from tests.helpers.patience import PATIENCE_S, wait_until
from tests.helpers.served import running_server

TOKENS, BLOCK = 8, 32
QUESTION = "what is this, and why is it here? " * 3
pytestmark = pytest.mark.deep
OPTIONS = ("--served-model-name", "m", "--dtype", "float32", "--max-model-len", "512")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_served_model(tmp_path_factory.mktemp("sees"))


@pytest.fixture(scope="module")
def server(model, tmp_path_factory):
    files = str(tmp_path_factory.mktemp("files"))
    with running_server(model.path, *OPTIONS, "--files-dir", files) as made:
        yield made


def body(parts, **more):
    """A request; parts: texts and images of Pillow, as in Seeing.answer, or whole parts."""
    made = [
        {"type": "text", "text": each}
        if isinstance(each, str)
        else each
        if isinstance(each, dict)
        else {"type": "image_url", "image_url": {"url": data_url(saved(each))}}
        for each in parts
    ]
    turn = [{"role": "user", "content": made}]
    fixed = {"model": "m", "temperature": 0, "max_tokens": TOKENS, "return_token_ids": True}
    return {**fixed, "messages": turn, "ignore_eos": True, **more}


def pdf(data):
    file = {"filename": "a.pdf", "file_data": data_url(data, "application/pdf")}
    return {"type": "file", "file": file}


def ask(server, parts, **more):
    return server.post("/v1/chat/completions", **body(parts, **more))


def check(model, reply, parts):
    """The reply is the one of transformers; return its tokens."""
    prompt, tokens = model.answer(parts, TOKENS)
    assert reply["prompt_token_ids"] == prompt
    assert reply["choices"][0]["token_ids"] == tokens
    return tuple(tokens)


SEVERAL = [picture(30, 70, seed=1), picture(128, 128, seed=2), picture(20, 20, seed=3)]
CASES = {
    "first": [picture(100, 60), QUESTION],
    "last": [QUESTION, *SEVERAL],
    "none": [QUESTION],
    "one": [SEVERAL[0], QUESTION],
}


def test_pictures_are_read_as_by_transformers(server, model):
    tokens = {check(model, ask(server, parts), parts) for parts in CASES.values()}
    assert len(tokens) > 1, "the case itself"


def test_a_gguf_file_reads_pictures_with_the_mmproj_file_beside_it(model, tmp_path):
    file, _ = write_ggufs(model.path, tmp_path)
    with running_server(file, *OPTIONS, "--tokenizer", str(model.path)) as server:
        for parts in CASES.values():
            check(model, ask(server, parts), parts)


def test_no_picture_has_more_tokens_than_the_server_allows(model):
    with running_server(model.path, *OPTIONS, "--image-max-tokens", "4") as server:
        for more in ({}, {"mm_processor_kwargs": {"max_tokens": 1000}}):
            reply = ask(server, CASES["one"], **more)
            found = reply["usage"]["prompt_tokens_details"]["multimodal_tokens"]
            assert found == {"image": 7}, "4 tokens, and 3 around them"


def test_a_picture_is_encoded_once_and_found_in_the_prefix_cache(server, model):
    def counted():
        names = "mm_cache_queries_total", "prefix_cache_hits_total"
        return np.array([server.metric(name) for name in names])

    cases = [[picture(200, 120, seed=seed), QUESTION] for seed in (11, 12)]
    before = counted()
    found = [ask(server, parts) for parts in cases]
    assert len({check(model, *pair) for pair in zip(found, cases, strict=True)}) == 2
    encoded, _ = counted() - before
    assert encoded == 2
    before = counted()
    again = [ask(server, parts) for parts in cases]
    assert [each["choices"][0]["token_ids"] for each in again] == [
        each["choices"][0]["token_ids"] for each in found
    ]
    encoded, cached = counted() - before
    assert encoded == 0
    counts = [each["usage"]["prompt_tokens"] for each in found]
    assert cached == sum((count - 1) // BLOCK * BLOCK for count in counts)


def test_lines_of_a_batch_have_pictures(server, model):
    lines = [
        {"custom_id": name, "method": "POST", "url": "/v1/chat/completions", "body": body(parts)}
        for name, parts in CASES.items()
    ]
    bad = body([{"type": "image_url", "image_url": {"url": data_url(b"hello")}}])
    lines.append({"custom_id": "bad", "method": "POST", "url": "/v1/chat/completions", "body": bad})
    file = "\n".join(map(json.dumps, lines)).encode()
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
        uploaded = client.files.create(file=("lines.jsonl", file), purpose="batch")
        made = client.batches.create(
            input_file_id=uploaded.id, endpoint="/v1/chat/completions", completion_window="24h"
        )
        wait_until(lambda: client.batches.retrieve(made.id).status == "completed")
        done = client.batches.retrieve(made.id)
        results = {}
        for number in (done.output_file_id, done.error_file_id):
            for line in client.files.content(number).text.splitlines():
                found = json.loads(line)
                results[found["custom_id"]] = found["response"]
    for name, parts in CASES.items():
        check(model, results[name]["body"], parts)
    assert results["bad"]["status_code"] == 400
    assert "is no picture" in results["bad"]["body"]["error"]["message"]


def test_a_served_model_says_that_it_reads_pictures_and_refuses_bad_ones(server, model):
    assert json.loads(server.get("/props"))["modalities"]["vision"] is True
    for data, why in ((b"hello", "is no picture"), (png(300, 300)[:9000], "is damaged")):
        with pytest.raises(urllib.error.HTTPError) as caught:
            ask(server, [{"type": "image_url", "image_url": {"url": data_url(data)}}])
        assert caught.value.code == 400
        assert why in json.loads(caught.value.read())["error"]["message"]
    reply = ask(server, [pdf(document(2))])
    rows = 2 * family_of(model.path).layout(198, 256).rows
    assert reply["prompt_token_ids"].count(tokenizer().token_id(IMAGE)) == rows


def test_a_folder_of_scans_becomes_markdown(server, model, tmp_path):
    """The program of docs/guides/pictures.md."""
    (tmp_path / "a.png").write_bytes(saved(SEVERAL[0]))
    (tmp_path / "c.pdf").write_bytes(document(2))
    (tmp_path / "bad.png").write_bytes(b"hello")
    (tmp_path / "done.png").write_bytes(png())
    (tmp_path / "done.md").write_text("kept")
    program = Path(__file__).parents[2] / "examples" / "scans_to_markdown.py"

    def run():
        command = [sys.executable, program, tmp_path, server.url, QUESTION]
        options = {"capture_output": True, "text": True, "timeout": PATIENCE_S, "check": True}
        return subprocess.run(command, **child_options(), **options)

    before = json.loads(server.get("/v1/files"))["data"]
    ran = run()
    assert "bad.png: messages[0].content[0] is no picture" in ran.stderr
    assert sorted(path.name for path in tmp_path.glob("*.md")) == ["a.md", "c.md", "done.md"]
    assert (tmp_path / "done.md").read_text() == "kept"
    whole = {"max_tokens": 4096, "skip_special_tokens": False, "ignore_eos": False}
    reply = ask(server, [SEVERAL[0], QUESTION], **whole)
    assert (tmp_path / "a.md").read_text() == reply["choices"][0]["message"]["content"]
    page = ask(server, [pdf(document()), QUESTION], **whole)
    text = page["choices"][0]["message"]["content"]
    assert (tmp_path / "c.md").read_text() == f"{text}\n\n{text}"
    again = run()
    assert again.stdout == ""
    assert json.loads(server.get("/v1/files"))["data"] == before


def test_a_plain_prompt_of_ollama_has_pictures(server, model):
    parts = [SEVERAL[0], QUESTION]  # Ollama shows pictures before the text
    reply = server.post(
        "/api/generate",
        model="m",
        stream=False,
        prompt=QUESTION,
        images=[base64.b64encode(saved(SEVERAL[0])).decode()],
        options={"temperature": 0, "num_predict": TOKENS},
    )
    prompt, tokens = model.answer(parts, TOKENS)
    assert reply["prompt_eval_count"] == len(prompt)
    end = tokens.index(2) if 2 in tokens else len(tokens)
    assert reply["response"] == tokenizer().decode(tokens[:end])
