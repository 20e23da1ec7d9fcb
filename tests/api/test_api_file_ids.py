"""Files that parts of messages name by their ids, in each dialect: as if their bytes were sent."""

import base64

import pytest

from cpuserve.api.batches.start import batch_service
from cpuserve.config.server import ServerOptions
from tests.api import sees, tools
from tests.api.sees import picture_api
from tests.api.tools import tool_api
from tests.helpers.drawn import data_url, document, png

ANTHROPIC = {"anthropic-version": "2023-06-01"}
NOTE = b"the note says 7"


def keeps(api, tmp_path, **options):
    """`api` with a directory for files."""
    given = ServerOptions(files_dir=str(tmp_path / "files"), **options)
    api.state.batches = batch_service(api.state, given)
    return api


def stored(api, data, name="a.png", purpose="user_data", headers=None):
    """The id of a file after its upload."""
    sent = api.request(
        "POST",
        "/v1/files",
        data={} if headers else {"purpose": purpose},
        files={"file": (name, data)},
        headers=headers,
    )
    assert sent.status_code == 200, sent.text
    return sent.json()["id"]


def chat(*parts):
    return "/v1/chat/completions", {
        "messages": [{"role": "user", "content": [{"type": "text", "text": "look"}, *parts]}]
    }


def responses(*parts):
    content = [{"type": "input_text", "text": "look"}, *parts]
    return "/v1/responses", {"input": [{"role": "user", "content": content}], "model": "tiny"}


def messages(*parts):
    content = [{"type": "text", "text": "look"}, *parts]
    body = {"messages": [{"role": "user", "content": content}], "max_tokens": 20, "model": "tiny"}
    return "/v1/messages", body


def b64(data):
    return base64.b64encode(data).decode()


# (what names the file, what sends its bytes, the bytes, the name)
PICTURES = {
    "input_image": (
        lambda id_: responses({"type": "input_image", "file_id": id_, "detail": "auto"}),
        lambda data: responses({"type": "input_image", "image_url": data_url(data)}),
        png(),
    ),
    "image": (
        lambda id_: messages({"type": "image", "source": {"type": "file", "file_id": id_}}),
        lambda data: messages(
            {"type": "image", "source": {
                "type": "base64", "media_type": "image/png", "data": b64(data)}}
        ),
        png(),
    ),
    "input_file": (
        lambda id_: responses({"type": "input_file", "file_id": id_}),
        lambda data: responses(
            {"type": "input_file", "file_data": data_url(data, "application/pdf")}
        ),
        document(2),
    ),
    "file": (
        lambda id_: chat({"type": "file", "file": {"file_id": id_}}),
        lambda data: chat(
            {"type": "file", "file": {"file_data": data_url(data, "application/pdf")}}
        ),
        document(2),
    ),
    "document": (
        lambda id_: messages({"type": "document", "source": {"type": "file", "file_id": id_}}),
        lambda data: messages(
            {"type": "document", "source": {
                "type": "base64", "media_type": "application/pdf", "data": b64(data)}}
        ),
        document(2),
    ),
}  # fmt: skip
TEXTS = {
    "input_file": (
        lambda id_: responses({"type": "input_file", "file_id": id_}),
        lambda data: responses(
            {"type": "input_file", "filename": "a.py", "file_data": data_url(data, "text/plain")}
        ),
    ),
    "file": (
        lambda id_: chat({"type": "file", "file": {"file_id": id_}}),
        lambda data: chat({
            "type": "file",
            "file": {"filename": "a.py", "file_data": data_url(data, "text/plain")},
        }),
    ),
    "document": (
        lambda id_: messages({"type": "document", "source": {"type": "file", "file_id": id_}}),
        lambda data: messages({
            "type": "document",
            "title": "a.py",
            "source": {"type": "base64", "media_type": "text/plain", "data": b64(data)},
        }),
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", PICTURES)
def test_a_picture_or_document_by_its_id_is_read_as_its_bytes_are(tmp_path, kind):
    named, sent, data = PICTURES[kind]
    api = keeps(picture_api(), tmp_path)
    path, body = sent(data)
    assert api.post(path, **body).status_code == 200
    path, body = named(stored(api, data, "a.pdf" if data[:4] == b"%PDF" else "a.png"))
    response = api.post(path, **body)
    assert response.status_code == 200, response.text
    assert sees.prompt_of(api) == sees.prompt_of(api, 0)
    assert [each.digest for each in api.engine.media[-1]] == [
        each.digest for each in api.engine.media[0]
    ]


@pytest.mark.parametrize("name", ["a.py", "a"])
@pytest.mark.parametrize("kind", TEXTS)
def test_a_text_file_by_its_id_is_read_as_its_text_is(tmp_path, kind, name):
    named, sent = TEXTS[kind]
    api = keeps(tool_api(tools.says("Fine.")), tmp_path)
    path, body = sent(NOTE)
    assert api.post(path, **body).status_code == 200
    path, body = named(stored(api, b"\xef\xbb\xbf" + NOTE, name))
    response = api.post(path, **body)
    assert response.status_code == 200, response.text
    assert tools.prompt_of(api) == tools.prompt_of(api, 0).replace("a.py\n", f"{name}\n")


def test_one_file_serves_all_dialects(tmp_path):
    api = keeps(picture_api(), tmp_path)
    file_id = stored(api, png(), headers=ANTHROPIC)
    for kind in ("input_image", "image"):
        path, body = PICTURES[kind][0](file_id)
        assert api.post(path, **body).status_code == 200
    assert api.get(f"/v1/files/{file_id}").json()["purpose"] == "user_data"


@pytest.mark.parametrize("kind", PICTURES)
def test_a_file_that_is_gone_is_refused_in_the_own_turn_and_left_out_later(tmp_path, kind):
    api = keeps(picture_api(), tmp_path)
    path, body = PICTURES[kind][0]("file-gone")
    response = api.post(path, **body)
    assert response.status_code == 400
    assert "file-gone" in response.text
    field = "input" if "input" in body else "messages"
    text = "output_text" if field == "input" else "text"
    said = {"role": "assistant", "content": [{"type": text, "text": "I see."}]}
    body[field] += [said, {"role": "user", "content": "and now?"}]
    response = api.post(path, **body)
    assert response.status_code == 200, response.text
    assert "was left out" in sees.prompt_of(api)


def test_files_count_as_bytes_of_the_body(tmp_path):
    api = keeps(tool_api(tools.says("Fine.")), tmp_path)
    most = api.state.models.most_body_bytes
    file_id = stored(api, b"a" * (most // 2), "a.txt")
    part = {"type": "file", "file": {"file_id": file_id}}
    path, body = chat(part, part)
    response = api.post(path, **body)
    assert response.status_code == 400
    assert "--max-body-size" in response.text
    assert api.state.bodies.held == 0


def test_prompts_with_file_ids_are_counted_and_rendered(tmp_path):
    api = keeps(tool_api(tools.says("Fine.")), tmp_path)
    file_id = stored(api, NOTE, "a.txt")
    path, body = chat({"type": "file", "file": {"file_id": file_id}})
    assert api.post(path, **body).status_code == 200
    count = len(api.engine.asked[-1][0])
    assert api.post("/tokenize", **body, model="tiny").json()["count"] == count
    assert NOTE.decode() in api.post("/apply-template", **body, model="tiny").json()["prompt"]
    batch = {"messages": [body["messages"], body["messages"]], "model": "tiny"}
    assert api.post("/v1/chat/completions/batch", **batch).status_code == 200
    assert all(NOTE.decode() in tools.prompt_of(api, which) for which in (-1, -2))


def test_a_file_of_another_caller_is_not_found(tmp_path):
    api = keeps(tool_api(tools.says("Fine.")), tmp_path)
    file_id = stored(api, NOTE, "a.txt")
    api.state.batches.directory._known[file_id].caller = "another"
    path, body = chat({"type": "file", "file": {"file_id": file_id}})
    response = api.post(path, **body)
    assert response.status_code == 400
    assert "was not found" in response.text


def test_an_image_block_of_a_file_needs_no_file_when_the_model_reads_none(tmp_path):
    path, body = PICTURES["image"][0]("file-1")
    api = tool_api(tools.says("Fine."))
    assert "reads text only" in api.post(path, **body).text
    path, body = TEXTS["file"][0]("file-1")
    assert "--files-dir" in api.post(path, **body).text
