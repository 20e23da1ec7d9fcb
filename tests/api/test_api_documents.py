"""PDF and Word documents give their text to models that see no pictures, in every dialect."""

import base64
import io
import zipfile

import pytest

from tests.api.fakes import Api
from tests.helpers.drawn import data_url, document, encrypted_document

PDF = "application/pdf"
DOCX = "application/vnd.openxmlformats-officedocument.wordprocessingml.document"
W = "http://schemas.openxmlformats.org/wordprocessingml/2006/main"


def written_pdf(*pages):
    """A PDF document with a line of text on each page."""
    objects = [b"<< /Type /Catalog /Pages 2 0 R >>", b""]
    objects.append(b"<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica >>")
    kids = []
    for text in pages:
        stream = b"BT /F1 12 Tf 72 700 Td (%s) Tj ET" % text.encode()
        objects.append(b"<< /Length %d >>\nstream\n%s\nendstream" % (len(stream), stream))
        kids.append(len(objects) + 1)
        objects.append(
            b"<< /Type /Page /Parent 2 0 R /MediaBox [0 0 612 792] /Contents %d 0 R "
            b"/Resources << /Font << /F1 3 0 R >> >> >>" % len(objects)
        )
    named = b" ".join(b"%d 0 R" % kid for kid in kids)
    objects[1] = b"<< /Type /Pages /Kids [%s] /Count %d >>" % (named, len(kids))
    body, places = b"%PDF-1.4\n", []
    for number, each in enumerate(objects, 1):
        places.append(len(body))
        body += b"%d 0 obj\n%s\nendobj\n" % (number, each)
    table = b"".join(b"%010d 00000 n \n" % place for place in places)
    size, start = len(objects) + 1, len(body)
    body += b"xref\n0 %d\n0000000000 65535 f \n%s" % (size, table)
    return body + b"trailer\n<< /Size %d /Root 1 0 R >>\nstartxref\n%d\n%%%%EOF" % (size, start)


def docx(body, name="word/document.xml", head=""):
    """A Word document with this XML in its body."""
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        xml = f'{head}<w:document xmlns:w="{W}"><w:body>{body}</w:body></w:document>'
        archive.writestr(name, xml)
    return file.getvalue()


def line(text):
    return f"<w:p><w:r><w:t>{text}</w:t></w:r></w:p>"


TABLE = "".join(f"<w:tc>{line(cell)}</w:tc>" for cell in ("Sand", "96.00"))
LETTER = docx(line("Dear Ann,") + f"<w:tbl><w:tr>{TABLE}</w:tr></w:tbl>" + line("R &amp; D"))
LETTER_TEXT = "Dear Ann,\nSand\t96.00\nR & D"
REPORT = written_pdf("Gravel costs 164.50 EUR.", "The second page.")


def in_chat(data, media, name):
    part = {"type": "file", "file": {"filename": name, "file_data": data_url(data, media)}}
    return "/v1/chat/completions", {"messages": [{"role": "user", "content": [part]}]}


def in_responses(data, media, name):
    part = {"type": "input_file", "filename": name, "file_data": data_url(data, media)}
    return "/v1/responses", {"input": [{"role": "user", "content": [part]}]}


def in_messages(data, media, name):
    source = {"type": "base64", "media_type": media, "data": base64.b64encode(data).decode()}
    part = {"type": "document", "title": name, "source": source}
    body = {"max_tokens": 5, "messages": [{"role": "user", "content": [part]}]}
    return "/v1/messages", body


DIALECTS = {"chat": in_chat, "responses": in_responses, "messages": in_messages}


def prompt_of(api):
    """The text of the prompt that the engine got last."""
    tokenizer = api.context.get_tokenizer()
    return tokenizer.decode(api.engine.asked[-1][0], skip_special_tokens=False)


@pytest.mark.parametrize("dialect", DIALECTS)
@pytest.mark.parametrize(
    ("data", "media", "name", "texts"),
    [
        (REPORT, PDF, "report.pdf", ["Gravel costs 164.50 EUR.", "The second page."]),
        (LETTER, DOCX, "letter.docx", [LETTER_TEXT]),
    ],
    ids=["pdf", "docx"],
)
def test_a_model_of_texts_gets_the_text_of_a_document(dialect, data, media, name, texts):
    api = Api()
    path, body = DIALECTS[dialect](data, media, name)
    assert api.post(path, **body).status_code == 200
    prompt = prompt_of(api)
    assert name in prompt
    for text in texts:
        assert text in prompt


def test_tokenize_counts_the_text_of_a_document():
    counts = []
    for words in (1, 50):
        _, body = in_chat(docx(line("word " * words)), DOCX, "a")
        counts.append(Api().post("/tokenize", **body).json()["count"])
    assert counts[1] >= counts[0] + 49


BOMB = '<!DOCTYPE a [<!ENTITY a "aaaaaaaaaa">' + "".join(
    f'<!ENTITY {new} "{f"&{old};" * 10}">' for old, new in zip("abcdefgh", "bcdefghi", strict=True)
)
REFUSED = {
    "scan": (document(2), PDF, "has no text, as scans do"),
    "locked": (encrypted_document(), PDF, "is an encrypted PDF document"),
    "cut pdf": (REPORT[:40], PDF, "is a damaged PDF document"),
    "no pdf": (b"hello", PDF, "is neither a PDF nor a Word document"),
    "empty": (docx(""), DOCX, "has no text"),
    "cut docx": (LETTER[:-30], DOCX, "is a damaged Word document"),
    "another archive": (docx("", "other.xml"), DOCX, "is neither a PDF nor a Word document"),
    "bad xml": (docx("<w:p>"), DOCX, "is a damaged Word document"),
    "entities": (docx(line("&i;"), head=BOMB + "]>"), DOCX, "is a damaged Word document"),
    "zeros": (docx(line("0" * (1 << 25))), DOCX, "has more than 16 million characters"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_document_without_a_text_is_refused_with_the_reason(case):
    data, media, why = REFUSED[case]
    api = Api()
    path, body = in_chat(data, media, "a")
    answer = api.post(path, **body)
    assert answer.status_code == 400, answer.text
    message = answer.json()["error"]["message"]
    assert message.startswith("messages[0].content[0] ")
    assert why in message
    # In an earlier turn it does not end the conversation.
    later = [{"role": "assistant", "content": "Hm."}, {"role": "user", "content": "And?"}]
    counted = api.post("/tokenize", messages=[*body["messages"], *later])
    assert counted.status_code == 200, counted.text
    told = api.context.get_tokenizer().decode(counted.json()["tokens"])
    assert "was left out: it" in told
    assert api.alive()
