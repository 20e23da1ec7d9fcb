"""Pictures and PDF documents on the chat page, of a model that reads them."""

import asyncio
import base64
import io
import json

import pytest
from PIL import Image

from cpuserve.engine.ipc import Output
from tests.clients.scripted import scripted_server
from tests.helpers.drawn import SMALL, document, encrypted_document, picture, png, saved
from tests.webui.test_accessibility import check, tab_to
from tests.webui.visit import (
    ALL,
    CHAT,
    LAST,
    LOADED,
    before_scripts,
    browser,
    chats,
    choose_model,
    count_of,
    open_again,
    open_page,
    page,
    say,
    shows,
    write,
)

__all__ = ["browser", "page"]  # fixtures

CHIPS = "[...document.querySelectorAll('.chip')].map(e => e.innerText.trim())"
SHOWN = "[...document.querySelectorAll('.message.user .attachments > *')]"
NOTICE = "document.querySelector('#notice').innerText"
TIMES = "\N{MULTIPLICATION SIGN}"
PAGE = (198, 256)  # the pixels of a page of `document`
SHIFT = 8


@pytest.fixture(scope="module")
def server():
    with scripted_server(pace_s=0.001, names=("scripted", "other"), sees=True) as server:
        server.engine.stats.running = 64
        yield server


def tokens_of(server, *size):
    """The tokens in the prompt of a picture of this size."""
    known = server.context.get_tokenizer()
    return len(known.encode(SMALL.layout(*size).text, add_special_tokens=False, unlocked=True))


def files_of(folder):
    """A small picture, a large one and a document, in files."""
    found = [folder / "a.png", folder / "b.jpg", folder / "scan.pdf"]
    found[0].write_bytes(png())
    found[1].write_bytes(saved(picture(3000, 2000), "JPEG"))
    found[2].write_bytes(document(3))
    return found


def attach(page, *files):
    before = count_of(page, ".chip:not(.reading)")
    page.choose_files("#attach-file", *files)
    page.until(
        f"document.querySelectorAll('.chip:not(.reading)').length === {before + len(files)}"
        " && !document.querySelector('.reading')"
    )


def give(page, kind, files):
    """Paste or drop files: {name: (media type, bytes)}."""
    listed = [[n, m, base64.b64encode(data).decode()] for n, (m, data) in files.items()]
    page.run(f"""(() => {{
      const data = new DataTransfer();
      for (const [name, type, text] of {json.dumps(listed)}) {{
        const bytes = Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
        data.items.add(new File([bytes], name, {{type}}));
      }}
      const made = {json.dumps(kind)} === 'paste'
        ? new ClipboardEvent('paste', {{clipboardData: data, bubbles: true}})
        : new DragEvent('drop', {{dataTransfer: data, bubbles: true}});
      document.querySelector('#input').dispatchEvent(made);
    }})()""")


def sent(page, server):
    """The parts of the user's first message in the last request that succeeded."""
    return chats(page, server)[-1]["messages"][0]["content"]


def test_pictures_and_documents_are_shown_with_their_size_and_tokens(page, server, tmp_path):
    assert page.run("document.querySelector('#attach').ariaLabel").startswith(
        "Attach pictures, PDF"
    )
    attach(page, *files_of(tmp_path))
    sizes = [
        f"100 {TIMES} 60 · {tokens_of(server, 100, 60)} tokens",
        f"3000 {TIMES} 2000 · read at 256 {TIMES} 170 · {tokens_of(server, 2048, 1365)} tokens",
        f"3 pages · {3 * tokens_of(server, *PAGE)} tokens",
    ]
    shown = page.run(CHIPS)
    assert [text.split("\n")[-1] for text in shown] == sizes
    assert shown[2].startswith("scan.pdf")
    say(page, "[[say Three.]] What is it?")
    assert count_of(page, ".chip") == 0
    found = page.run(f"{SHOWN}.map(e => e.innerText)")
    assert [text.split("\n")[-1] for text in found] == sizes
    whole = sum([tokens_of(server, *s) for s in ((100, 60), (2048, 1365))])
    whole += 3 * tokens_of(server, *PAGE)
    assert f"({whole} of pictures)" in page.run(f"{LAST}.querySelector('.figures').innerText")
    first, second, third, text = sent(page, server)
    assert text == {"type": "text", "text": "[[say Three.]] What is it?"}
    for part, kind, size in ((first, "png", (100, 60)), (second, "jpeg", (2048, 1365))):
        data = part["image_url"]["url"].removeprefix(f"data:image/{kind};base64,")
        assert Image.open(io.BytesIO(base64.b64decode(data))).size == size
    assert third["file"]["filename"] == "scan.pdf"
    head, _, data = third["file"]["file_data"].partition(",")
    assert head == "data:application/pdf;base64"
    assert base64.b64decode(data) == (tmp_path / "scan.pdf").read_bytes()


@pytest.mark.deep
@pytest.mark.parametrize("kind", ["paste", "drop"])
def test_pictures_are_pasted_and_dropped(page, server, kind):
    pair = {"a.png": ("image/png", png()), "scan.pdf": ("application/pdf", document())}
    give(page, kind, pair)
    page.until(f"{CHIPS}.length === 2 && !document.querySelector('.reading')")
    # A picture is enough: the model sees it without a text.
    page.run("document.querySelector('#input').focus()")
    page.press("Enter")
    shows(page, "Hello.")
    assert [part["type"] for part in sent(page, server)] == ["image_url", "file"]


@pytest.mark.deep
def test_a_message_that_is_sent_at_once_waits_for_its_pictures(page, server):
    page.run("document.querySelector('#input').value = '[[say Seen.]]'")
    large = saved(picture(3000, 2000), "JPEG")
    give(page, "drop", {"a.jpg": ("image/jpeg", large)})
    page.run("document.querySelector('#composer').requestSubmit()")
    shows(page, "Seen.")
    assert [part["type"] for part in sent(page, server)] == ["image_url", "text"]


@pytest.mark.deep
def test_pictures_stay_with_the_conversation(page, server, tmp_path):
    attach(page, *files_of(tmp_path))
    say(page, "[[say One.]]")
    before = sent(page, server)
    page.click("[aria-label='Regenerate']")
    page.until(f"{LAST}.innerText.includes('2/2') && !document.querySelector('.running')")
    assert sent(page, server) == before
    page.click("[aria-label='Edit the message']")
    page.run("document.activeElement.value = '[[say Two.]]'")
    page.press("Enter")
    shows(page, "Two.")
    assert sent(page, server) == [*before[:-1], {"type": "text", "text": "[[say Two.]]"}]
    sizes = page.run(f"{SHOWN}.map(e => e.innerText)")
    open_again(page, server.url)
    page.until(f"{SHOWN}.length === 3")
    assert page.run(f"{SHOWN}.map(e => e.innerText)") == sizes
    say(page, "[[say Three.]]")
    assert sent(page, server)[:-1] == before[:-1]


@pytest.mark.deep
def test_pictures_are_exported_and_imported(page, server, tmp_path):
    attach(page, *files_of(tmp_path))
    say(page, "[[say One.]]")
    before = sent(page, server)
    exported = page.run(f"import('/webui/transfer.js').then(async (t) => t.exported(await {ALL}))")
    page.run(
        f"{ALL}.then(async (all) => {{ const h = await import('/webui/history.js');"
        " for (const one of all) await h.remove(one.id); })"
    )
    open_page(page, server.url)
    assert page.run(f"{ALL}.then(all => all.length)") == 0
    file = tmp_path / "conversations.json"
    file.write_text(exported, encoding="utf-8")
    page.choose_files("#import-file", file)
    page.click(".conversations .open")
    page.until(f"{SHOWN}.length === 3")
    say(page, "[[say Two.]]")
    assert sent(page, server)[:-1] == before[:-1]
    # A file of somebody else cannot bring other kinds of data.
    for name, bad in (
        ("images", "data:text/html,x"),
        ("documents", {"name": "a", "url": "data:text/html,x"}),
    ):
        wrong = json.loads(exported)
        for message in wrong["conversations"][0]["messages"].values():
            message[name] = [bad]
        given = json.dumps(wrong["conversations"][0])
        assert page.run(f"import('/webui/transfer.js').then(t => t.checked({given}))") is None


def test_files_that_the_server_refuses_are_named_with_the_reason(page, server):
    truncated = saved(picture(300, 300), "JPEG")[:900]
    for name, media, data, why in (
        ("secret.pdf", "application/pdf", encrypted_document(), "is an encrypted PDF document"),
        ("long.pdf", "application/pdf", document(100), "has 100 pages: at most 64"),
        ("cut.pdf", "application/pdf", b"%PDF-1.7", "is a damaged PDF document"),
        ("cut.jpg", "image/jpeg", truncated[:100], "this picture cannot be read"),
        ("a.svg", "image/svg+xml", b"\0", "is neither a picture, nor a PDF"),
    ):
        give(page, "drop", {name: (media, data)})
        page.until(f"{NOTICE}.includes({json.dumps(f'{name}: ')})")
        assert why in page.run(NOTICE)
    page.run(
        "(() => { const data = new DataTransfer(), bytes = new Uint8Array((32 << 20) + 1);"
        "data.items.add(new File([bytes], 'big.png', {type: 'image/png'}));"
        "document.querySelector('#input').dispatchEvent("
        "new DragEvent('drop', {dataTransfer: data, bubbles: true})); })()"
    )
    page.until(f"{NOTICE}.includes('big.png: larger than 32 MB')")
    assert count_of(page, ".chip") == 0
    assert [x for x in server.exchanges if x.path == CHAT] == []


# The second model reads text only.
ONE_SEES = """(() => {
  const real = window.fetch;
  window.fetch = async (path, init) => {
    const response = await real(path, init);
    if (path !== 'v1/models') return response;
    const models = await response.json();
    const other = models.data.find(({id}) => id === 'other');
    other.architecture.input_modalities = ['text'];
    return new Response(JSON.stringify(models));
  };
})()"""


@pytest.mark.deep
def test_pictures_are_not_sent_to_a_model_that_reads_text_only(page, server, tmp_path):
    with before_scripts(page, ONE_SEES):
        open_page(page, server.url)
    attach(page, *files_of(tmp_path))
    choose_model(page, "other")
    write(page, "[[say No.]]")
    page.until(f"{NOTICE}.includes('The chosen model reads no pictures')")
    assert count_of(page, ".chip") == 3
    give(page, "drop", {"more.png": ("image/png", png())})
    page.until(f"{NOTICE}.includes('more.png: the chosen model reads no pictures')")
    choose_model(page, "scripted")
    page.press("Enter")
    shows(page, "No.")
    assert len(sent(page, server)) == 4
    page.until(LOADED)


@pytest.mark.deep
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_a_keyboard_and_a_screen_reader_reach_pictures(page, server, dark, tmp_path):
    page.emulate(dark=dark)
    attach(page, *files_of(tmp_path))
    told = page.run("document.querySelector('#announce').textContent")
    assert f"Picture attached, 100 {TIMES} 60" in told
    assert "scan.pdf attached, 3 pages" in told
    check(page)
    page.run("document.querySelector('#input').focus()")
    tab_to(page, "Remove picture 2", SHIFT)
    page.press("Enter")
    page.until("document.querySelectorAll('.chip').length === 2")
    assert page.run("document.activeElement.id") == "input"
    say(page, "[[say Two.]]")
    alts = page.run("[...document.querySelectorAll('.attachments img')].map(e => e.alt)")
    assert alts == ["Attached picture 1"]
    tab_to(page, f"scan.pdf\n3 pages · {3 * tokens_of(server, *PAGE)} tokens", SHIFT)
    check(page)
    page.emulate()


def test_the_progress_of_pictures_is_in_tiles(page, server, tmp_path):
    real, go = server.engine.script, asyncio.Event()

    def slowly(engine, number, prompt, params):
        yield Output(number, [], cached_tokens=0, scheduled=1.0, processed=len(prompt) // 2)
        yield go
        yield from real(engine, number, prompt, params)

    server.engine.script = slowly
    try:
        attach(page, *files_of(tmp_path)[:2])
        write(page, "[[say Read.]]")
        page.until(f"{LAST}?.querySelector('.progress')?.innerText.includes('tiles of pictures')")
        shown = page.run(f"{LAST}.querySelector('.progress').innerText")
        tiles = [len(SMALL.layout(*size).tiles) for size in ((100, 60), (2048, 1365))]
        assert f"{tiles[0]} of {sum(tiles)} tiles" in shown
        assert " left" not in shown
    finally:
        server.engine.script = real
        go.set()
    shows(page, "Read.")
