"""HTTPS: certificates that are replaced, refused and checked, and clients that speak plain HTTP."""

import asyncio
import errno
import functools
import json
import os
import re
import shutil
import socket
import ssl
import subprocess
import sys
import urllib.error
import urllib.request
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import httpx
import openai
import pytest

from cpuserve.api.errors import http_errors as errors
from cpuserve.api.http import server as served
from cpuserve.api.http.listener import open_listener, url_of
from cpuserve.api.http.startup_server import StartupServer
from cpuserve.api.http.tls import certificate_of
from cpuserve.base import fault_points
from cpuserve.base.errors import ConfigError
from cpuserve.bench.http import LoadError, exchange
from cpuserve.cli import healthcheck
from cpuserve.config.load import from_arguments
from cpuserve.config.server import ServerOptions
from cpuserve.engine.ipc import Output
from cpuserve.testing.local_server import serve
from tests.api.fakes import ANSWER
from tests.api.live import STREAM, live, post
from tests.helpers.children import child_options
from tests.helpers.even_loop import run_even
from tests.helpers.patience import PATIENCE_S, until, wait_until
from tests.helpers.tiny import tiny_model

FILES = Path(__file__).parents[1] / "data" / "tls"
AUTHORITY = FILES / "authority.crt"
CHAT = {"messages": [{"role": "user", "content": "hi"}]}
SHORT_S = 0.2  # a limit that the test waits for


def in_loop(test):
    """Return the test as a function that runs it on an event loop."""
    return functools.wraps(test)(lambda *given, **named: run_even(test(*given, **named)))


def options_of(certificate="first.crt", key="first.key", **more):
    return {"ssl_certfile": str(FILES / certificate), "ssl_keyfile": str(FILES / key), **more}


def context_of(client=None, *, newest=ssl.TLSVersion.TLSv1_3):
    """The context of a client that trusts the authority, perhaps with a certificate of its own."""
    context = ssl.create_default_context(cafile=AUTHORITY)
    context.maximum_version = newest
    if client is not None:
        context.load_cert_chain(FILES / f"{client}.crt", FILES / f"{client}.key")
    return context


@pytest.fixture(autouse=True)
def _lines_of_all_levels(caplog):
    caplog.set_level("INFO", logger="cpuserve")


@asynccontextmanager
async def client_of(server, context=None):
    url = f"https://127.0.0.1:{server.port}"
    async with httpx.AsyncClient(
        base_url=url, timeout=PATIENCE_S, verify=context or context_of()
    ) as client:
        yield client


async def connected(server, context=None, **how):
    """A reader and a writer of a TLS connection."""
    return await asyncio.open_connection(
        "127.0.0.1", server.port, ssl=context or context_of(), **how
    )


async def certificate(server, *, name="localhost", newest=ssl.TLSVersion.TLSv1_3):
    """The certificate that a new connection gets; name None = the client names no server."""
    context = context_of(newest=newest)
    context.check_hostname = name is not None
    _, writer = await connected(server, context, server_hostname=name or "")
    found = writer.get_extra_info("ssl_object").getpeercert(binary_form=True)
    writer.close()
    return found


def der(name):
    return ssl.PEM_cert_to_DER_cert((FILES / name).read_text())


@in_loop
async def test_clients_speak_https_with_streams_and_connections_that_stay():
    async with live(**options_of()) as server, client_of(server) as client:
        answers = [await client.post("/v1/chat/completions", json=CHAT) for _ in range(3)]
        assert [a.json()["choices"][0]["message"]["content"] for a in answers] == [ANSWER] * 3
        streams = {id(a.extensions["network_stream"]) for a in answers}
        assert len(streams) == 1
        async with client.stream("POST", "/v1/chat/completions", json=STREAM) as response:
            lines = [line async for line in response.aiter_lines() if line]
        assert len(lines) > 10
        assert lines[-1] == "data: [DONE]"
        sdk = openai.AsyncOpenAI(
            api_key="any", base_url=f"https://127.0.0.1:{server.port}/v1", http_client=client
        )
        made = await sdk.chat.completions.create(model="tiny", **CHAT)
        assert made.choices[0].message.content == ANSWER
        await until(lambda: server.engine.running == 0)


@pytest.mark.parametrize("newest", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
@pytest.mark.parametrize("name", ["localhost", None])
@in_loop
async def test_new_connections_get_the_newest_certificate(tmp_path, caplog, newest, name):
    pair = [tmp_path / "tls.crt", tmp_path / "tls.key"]
    replace(pair, "first")
    files = {"ssl_certfile": str(pair[0]), "ssl_keyfile": str(pair[1])}
    async with live(**files) as server:
        assert await certificate(server, name=name, newest=newest) == der("first.crt")
        replace(pair, "second")
        assert await certificate(server, name=name, newest=newest) == der("first.crt")
        for _ in range(2):
            server.state.certificate.look()
        assert await certificate(server, name=name, newest=newest) == der("second.crt")
        assert caplog.text.count("was replaced") == 1
        server.state.certificate.look()
        assert caplog.text.count("was replaced") == 1


def replace(pair, name):
    """Replace a certificate and its key as Kubernetes does: by other files."""
    for path, suffix in zip(pair, ("crt", "key"), strict=True):
        new = path.with_suffix(".new")
        shutil.copyfile(FILES / f"{name}.{suffix}", new)
        new.replace(path)


@in_loop
async def test_a_mounted_secret_of_kubernetes_is_read_again_when_its_link_is_swapped(tmp_path):
    def swap(name, before=None):
        """Mount another version: files lead to ..data/files, and ..data to a new folder."""
        version = tmp_path / f"..{name}"
        version.mkdir()
        for suffix in ("crt", "key"):
            shutil.copyfile(FILES / f"{name}.{suffix}", version / f"tls.{suffix}")
        (tmp_path / "..data_tmp").symlink_to(version.name)
        (tmp_path / "..data_tmp").replace(tmp_path / "..data")
        if before is not None:
            shutil.rmtree(tmp_path / f"..{before}")

    swap("first")
    pair = [tmp_path / "tls.crt", tmp_path / "tls.key"]
    for path in pair:
        path.symlink_to(f"..data/{path.name}")
    async with live(ssl_certfile=str(pair[0]), ssl_keyfile=str(pair[1])) as server:
        assert await certificate(server) == der("first.crt")
        for before, name in (("first", "second"), ("second", "first")):
            swap(name, before)
            for _ in range(2):
                server.state.certificate.look()
            assert await certificate(server) == der(f"{name}.crt")


BAD_PAIRS = {
    "another key": lambda pair: shutil.copyfile(FILES / "second.crt", pair[0]),
    "no file": lambda pair: pair[1].unlink(),
    "empty": lambda pair: pair[0].write_bytes(b""),
    "half written": lambda pair: pair[0].write_bytes((FILES / "second.crt").read_bytes()[:300]),
}


@pytest.mark.parametrize("fault", BAD_PAIRS)
@in_loop
async def test_a_bad_pair_leaves_the_certificate_that_is_there(tmp_path, caplog, fault):
    pair = [tmp_path / "tls.crt", tmp_path / "tls.key"]
    replace(pair, "first")
    files = {"ssl_certfile": str(pair[0]), "ssl_keyfile": str(pair[1])}
    async with live(**files) as server:
        BAD_PAIRS[fault](pair)
        for _ in range(4):
            server.state.certificate.look()
        assert await certificate(server) == der("first.crt")
        (said,) = [text for text in caplog.messages if "The server keeps the certificate" in text]
        assert str(tmp_path) in said
        replace(pair, "second")
        for _ in range(2):
            server.state.certificate.look()
        assert await certificate(server) == der("second.crt")


@in_loop
async def test_a_certificate_that_the_system_cannot_read_now_is_read_later(
    tmp_path, caplog, monkeypatch
):
    pair = [tmp_path / "tls.crt", tmp_path / "tls.key"]
    replace(pair, "first")
    fails = ["certificate.read"] * 3

    def hook(point, size):
        if point in fails:
            fails.remove(point)
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        return size

    files = {"ssl_certfile": str(pair[0]), "ssl_keyfile": str(pair[1])}
    async with live(**files) as server:
        replace(pair, "second")
        monkeypatch.setattr(fault_points, "_hook", hook)
        for _ in range(4):  # it sees the change, and fails three times
            server.state.certificate.look()
        assert not fails
        assert await certificate(server) == der("first.crt")
        server.state.certificate.look()
        assert await certificate(server) == der("second.crt")
    said = [text for text in caplog.messages if "The server keeps the certificate" in text]
    assert len(said) == 1


@in_loop
async def test_requests_go_on_while_certificates_are_replaced(tmp_path):
    pair = [tmp_path / "tls.crt", tmp_path / "tls.key"]
    replace(pair, "first")
    files = {"ssl_certfile": str(pair[0]), "ssl_keyfile": str(pair[1])}
    async with live(**files) as server, client_of(server) as kept:
        done = asyncio.Event()

        async def ask(client):
            response = await client.post("/v1/chat/completions", json=STREAM)
            assert response.text.endswith("data: [DONE]\n\n")

        async def on_new_connections():
            count = 0
            while not done.is_set():
                async with client_of(server) as client:
                    await ask(client)
                count += 1
            return count

        async def on_one_connection():
            while not done.is_set():
                await ask(kept)

        asking = [on_new_connections(), on_new_connections(), on_one_connection()]
        running = [asyncio.create_task(each) for each in asking]
        for name in ("second", "first") * 5:
            replace(pair, name)
            for _ in range(2):
                await asyncio.to_thread(server.state.certificate.look)
            assert await certificate(server) == der(f"{name}.crt")
        done.set()
        counts = await asyncio.gather(*running)
        assert counts[0] >= 1


@in_loop
async def test_the_watch_reads_files_that_change(tmp_path, monkeypatch):
    monkeypatch.setattr("cpuserve.api.http.tls.LOOK_S", 0.01)
    pair = [tmp_path / "tls.crt", tmp_path / "tls.key"]
    replace(pair, "first")
    found = certificate_of(ServerOptions(ssl_certfile=str(pair[0]), ssl_keyfile=str(pair[1])))
    before = found.context.newest
    watching = asyncio.create_task(found.watch())
    replace(pair, "second")
    await until(lambda: found.context.newest is not before)
    watching.cancel()


@in_loop
async def test_metrics_have_the_end_of_the_certificate():
    async with live(**options_of()) as server, client_of(server) as client:
        text = (await client.get("/metrics")).text
        (end,) = re.findall(
            r"^cpuserve:certificate_end_timestamp_seconds (\S+)$", text, re.MULTILINE
        )
        told = subprocess.run(
            ["openssl", "x509", "-enddate", "-noout", "-in", FILES / "first.crt"],
            capture_output=True,
            text=True,
            check=True,
        ).stdout.strip()
        assert float(end) == ssl.cert_time_to_seconds(told.partition("=")[2])


@in_loop
async def test_a_watch_that_is_asked_reads_the_files_at_once(tmp_path, monkeypatch):
    monkeypatch.setattr("cpuserve.api.http.tls.LOOK_S", 1e6)
    pair = [tmp_path / "tls.crt", tmp_path / "tls.key"]
    replace(pair, "first")
    found = certificate_of(ServerOptions(ssl_certfile=str(pair[0]), ssl_keyfile=str(pair[1])))
    before = found.context.newest
    watching = asyncio.create_task(found.watch())
    replace(pair, "second")
    found.ask()
    await until(lambda: found.context.newest is not before)
    watching.cancel()


@in_loop
async def test_plain_http_on_the_port_gets_a_response_that_says_so(caplog):
    large = post("/v1/chat/completions", b"x" * (1 << 20))
    async with live(**options_of()) as server:
        for sent in (b"GET /health HTTP/1.1\r\nhost: a\r\n\r\n", b"p", large):
            answer = await server.send(sent)
            head, _, body = answer.partition(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 400 Bad Request\r\n")
            assert f"content-length: {len(body)}".encode() in head
            assert body == b"This port speaks TLS: use https://\n"
        assert "plain_http_on_tls_port" in caplog.text
        plain = f"http://127.0.0.1:{server.port}"
        response = await exchange(plain, "/health")
        assert response.code == 400
        for sent in (b"\0\1\2", b"\x16\x03\x01", b""):  # no HTTP: the connection ends
            reader, writer = await server.open()
            writer.write(sent)
            writer.write_eof()
            assert b"HTTP" not in await rest(reader)


async def rest(reader):
    """What comes until the connection ends."""
    try:
        return await asyncio.wait_for(reader.read(), PATIENCE_S)
    except ConnectionError:
        return b""


@in_loop
async def test_slow_handshakes_are_ended():
    async with live(**options_of(), handshake_s=SHORT_S) as server:
        reader, _ = await server.open()
        assert await rest(reader) == b""


@pytest.fixture
def impatient(monkeypatch):
    """A refused connection is closed soon, whatever may still come from it."""
    for module in (errors, served):
        monkeypatch.setattr(module, "LINGER_S", 0.1)


@in_loop
async def test_slow_heads_and_bodies_are_ended(impatient):
    async with live(**options_of(), header_timeout_s=SHORT_S) as server:
        for sent in (b"GET / HT", post("/v1/chat/completions", CHAT)[:-5]):
            reader, writer = await connected(server)
            writer.write(sent)
            assert (await rest(reader)).startswith(b"HTTP/1.1 408 ")


@pytest.mark.parametrize("options", [{}, options_of()], ids=["plain", "TLS"])
@in_loop
async def test_a_client_that_stays_after_a_refusal_is_disconnected(impatient, options):
    async with live(**options) as server:
        reader, writer = await (connected(server) if options else server.open())
        writer.write(b"NONSENSE\r\n\r\n")
        assert (await reader.readline()).startswith(b"HTTP/1.1 400 ")
        await until(lambda: len(server.server.server_state.connections) == 0)
        writer.close()


def flood(_engine, number, _prompt, _params):
    while True:
        yield Output(number, [70] * 64)
        yield 0.0  # others run


@pytest.mark.parametrize("goes", [False, True], ids=["does not read", "disconnects"])
@in_loop
async def test_a_client_that_does_not_read_or_disconnects_aborts_its_request(goes):
    limit = {} if goes else {"write_timeout_s": SHORT_S}
    async with live(flood, **options_of(), **limit) as server:
        sock = socket.socket()
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sock.setblocking(False)
        await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", server.port))
        reader, writer = await asyncio.open_connection(
            sock=sock, ssl=context_of(), server_hostname="localhost", limit=1
        )
        writer.write(post("/v1/chat/completions", STREAM))
        if goes:
            assert (await reader.read(12)) == b"HTTP/1.1 200"
            writer.transport.abort()
        await until(lambda: server.engine.aborted == 1)
        writer.transport.abort()


@pytest.mark.parametrize(
    ("needed", "client", "is_served"),
    [
        ("required", None, False),
        ("required", "client", True),
        ("required", "stranger", False),
        ("optional", None, True),
        ("optional", "client", True),
        ("none", None, True),
    ],
)
@in_loop
async def test_clients_need_the_certificates_that_the_options_ask_for(needed, client, is_served):
    options = options_of(ssl_cert_reqs=needed)
    if needed != "none":
        options["ssl_ca_certs"] = str(AUTHORITY)
    async with live(**options) as server, client_of(server, context_of(client)) as asking:
        if is_served:
            assert (await asking.get("/health")).status_code == 200
        else:
            with pytest.raises(httpx.TransportError):
                await asking.get("/health")


@pytest.mark.parametrize("newest", [ssl.TLSVersion.TLSv1_2, ssl.TLSVersion.TLSv1_3])
@in_loop
async def test_a_session_does_not_outlive_the_authorities_of_its_client(tmp_path, newest):
    """A client that resumes a session shows no certificate, which might be refused by now."""
    authorities = tmp_path / "authorities.crt"
    shutil.copyfile(AUTHORITY, authorities)
    context = context_of("client", newest=newest)

    def ask(server, session):
        """Return the session of a request and whether it was resumed; None if it was refused."""
        plain = socket.create_connection(("127.0.0.1", server.port), PATIENCE_S)
        named = {"server_hostname": "localhost", "session": session}
        with suppress(OSError), plain, context.wrap_socket(plain, **named) as sock:
            sock.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
            return (sock.session, sock.session_reused) if sock.recv(1 << 16) else None
        return None

    options = options_of(ssl_cert_reqs="required", ssl_ca_certs=str(authorities))
    async with live(**options) as server:
        session, _ = await asyncio.to_thread(ask, server, None)
        _, is_resumed = await asyncio.to_thread(ask, server, session)
        assert is_resumed
        authorities.unlink()
        shutil.copyfile(FILES / "second.crt", authorities)
        for _ in range(2):
            server.state.certificate.look()
        for known in (None, session):
            assert await asyncio.to_thread(ask, server, known) is None


@in_loop
async def test_a_certificate_with_the_time_and_size_of_the_last_one_is_read(tmp_path):
    """As `cp -p` and `rsync -t --inplace` write it."""
    pair = [tmp_path / "tls.crt", tmp_path / "tls.key"]
    replace(pair, "first")
    size = max((FILES / f"{name}.crt").stat().st_size for name in ("first", "second")) + 1

    def write(name):
        for path, suffix in zip(pair, ("crt", "key"), strict=True):
            data = (FILES / f"{name}.{suffix}").read_bytes()
            path.write_bytes(data.ljust(size, b"\n"))
            os.utime(path, (1e9, 1e9))

    write("first")
    async with live(ssl_certfile=str(pair[0]), ssl_keyfile=str(pair[1])) as server:
        write("second")
        for _ in range(2):
            server.state.certificate.look()
        assert await certificate(server) == der("second.crt")


REFUSED = {
    "another key": (options_of(key="second.key"), "does not belong to the certificate"),
    "a key with a password": (options_of(key="locked.key"), "CPUSERVE_SSL_KEYFILE_PASSWORD"),
    "a wrong password": (
        options_of(key="locked.key", ssl_keyfile_password="no"),
        "first.crt and --ssl-keyfile",
    ),
    "no key": ({"ssl_certfile": str(FILES / "first.crt")}, "--ssl-certfile"),
    "no file": (options_of("none.crt"), "there is no such file"),
    "a directory": (options_of(key="."), "it is not a file"),
    "no PEM": ({"ssl_certfile": __file__}, "cannot be used"),
    "a key alone": ({"ssl_keyfile": str(FILES / "first.key")}, "set --ssl-certfile"),
    "a password alone": ({"ssl_keyfile_password": "a"}, "set --ssl-certfile"),
    "a socket": (options_of(uds="/tmp/never"), "Leave out"),
    "authorities alone": (options_of(ssl_ca_certs=str(AUTHORITY)), "--ssl-cert-reqs"),
    "no authorities": (options_of(ssl_cert_reqs="required"), "--ssl-ca-certs"),
    "bad authorities": (
        options_of(ssl_cert_reqs="required", ssl_ca_certs=str(FILES / "first.key")),
        "--ssl-ca-certs",
    ),
}


@pytest.mark.parametrize("what", REFUSED)
def test_certificates_that_cannot_be_used_are_refused_in_one_line(what):
    options, said = REFUSED[what]
    with pytest.raises(ConfigError) as raised, open_listener(ServerOptions(port=0, **options)):
        pass
    assert said in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_pipe_and_a_file_that_may_not_be_read_are_refused(tmp_path, monkeypatch):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match="it is not a file"):
        certificate_of(ServerOptions(ssl_certfile=str(tmp_path / "pipe")))

    def denied(*_args):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", denied)
    with pytest.raises(ConfigError, match="cannot be read: Permission denied"):
        certificate_of(ServerOptions(**options_of()))


def test_a_key_opens_with_its_password():
    found = certificate_of(
        ServerOptions(**options_of(key="locked.key", ssl_keyfile_password="pass word"))
    )
    assert found.valid == (1704067200, 4859740800)
    assert found.context.minimum_version == ssl.TLSVersion.TLSv1_2


@pytest.mark.parametrize(
    ("now", "said"),
    [
        (1704067199, "is not valid before 2024-01-01 00:00:00 UTC"),
        (1704067201, ""),
        (4859740800 - 8 * 86400, ""),
        (4859740800 - 6 * 86400, "expires on 2124-01-01 00:00:00 UTC"),
        (4859740801, "expired on 2124-01-01 00:00:00 UTC"),
    ],
)
def test_dates_that_clients_refuse_are_logged_once(monkeypatch, caplog, now, said):
    monkeypatch.setattr("cpuserve.api.http.tls.time.time", lambda: now)
    found = certificate_of(ServerOptions(**options_of()))
    found.look()
    logged = [text for text in caplog.messages if "the certificate" in text]
    assert len(logged) == bool(said)
    assert said in caplog.text


def test_an_expired_certificate_is_served_with_a_warning(caplog):
    certificate_of(ServerOptions(**options_of("expired.crt")))
    assert "expired on 2024-02-01 00:00:00 UTC: replace the file" in caplog.text


def test_options_of_other_servers_are_read():
    asked = from_arguments({"model": "m", "ssl_certfile": "a", "ssl_cert_reqs": 1})
    assert asked.server.ssl_cert_reqs == "optional"
    assert asked.server.ssl_certfile == "a"


def test_the_url_of_a_listener_with_a_certificate_is_https():
    with open_listener(ServerOptions(port=0, **options_of())) as listener:
        assert url_of(listener) == f"https://127.0.0.1:{listener.getsockname()[1]}"


def test_the_server_that_starts_speaks_tls():
    with open_listener(ServerOptions(port=0, **options_of())) as listener:
        starting = StartupServer(listener)
        url = url_of(listener)
        try:
            with urllib.request.urlopen(f"{url}/live", context=context_of()) as response:
                assert response.status == 200
            answer = asyncio.run(exchange(url.replace("https", "http"), "/health"))
            assert answer.code == 400
            with pytest.raises(urllib.error.HTTPError) as raised:
                urllib.request.urlopen(f"{url}/health", context=context_of())
            assert raised.value.code == 503
            assert json.load(raised.value)["status"] == "loading"
        finally:
            starting.stop()


@in_loop
async def test_commands_say_why_they_refuse_a_certificate(monkeypatch):
    async with live(**options_of()) as server:
        url = f"https://127.0.0.1:{server.port}"
        with pytest.raises(LoadError, match=r"certificate is refused: .*SSL_CERT_FILE"):
            await exchange(url, "/v1/models")
        monkeypatch.setenv("SSL_CERT_FILE", str(AUTHORITY))
        assert (await exchange(url, "/v1/models")).code == 200


@pytest.mark.deep
def test_a_server_and_the_commands_speak_https(tmp_path, monkeypatch):
    pair = [tmp_path / "tls.crt", tmp_path / "tls.key"]
    replace(pair, "first")
    monkeypatch.setenv("SSL_CERT_FILE", str(AUTHORITY))
    files = ("--ssl-certfile", str(pair[0]), "--ssl-keyfile", str(pair[1]))

    def command(*arguments):
        return subprocess.run(
            [sys.executable, "-m", "cpuserve", *arguments, "--url", server.url],
            **child_options(),
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
        )

    with serve(tiny_model("llama"), *files) as server:
        assert server.url.startswith("https://127.0.0.1:")
        assert server.model in command("ps").stdout
        assert command("top", "--once").returncode == 0
        assert command("complete", "--prompt", "hi", "--max-tokens", "2").returncode == 0
        flags = ["cpuserve", "serve", "--port", server.url.rsplit(":", 1)[1], *files]
        assert healthcheck.main(flags) == 0
        replace(pair, "second")
        port = int(server.url.rsplit(":", 1)[1])
        wait_until(
            lambda: ssl.get_server_certificate(("127.0.0.1", port))
            == (FILES / "second.crt").read_text()
        )
        assert command("ps").returncode == 0
    refused = subprocess.run(
        [sys.executable, "-m", "cpuserve", "serve", str(tiny_model("llama")), *files[:2]],
        **child_options(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )
    assert refused.returncode == 2
    assert "cannot be used" in refused.stderr.strip().splitlines()[-1]
    assert "Traceback" not in refused.stderr
