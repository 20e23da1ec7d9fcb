"""Pictures from other servers: allowed hosts, pinned addresses, no redirects, bounds."""

import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from ipaddress import ip_address

import pytest

from cpuserve.base.errors import InvalidRequest, ServiceUnavailable
from cpuserve.media import sources
from cpuserve.media.sources import SourceRules, is_public, read_source
from tests.helpers.once import Once
from tests.helpers.patience import POLL_S

RULES = SourceRules(domains=("pictures.example", "*.other.example"))
LONG = SourceRules(domains=("*",), timeout_s=60)


class Handler(BaseHTTPRequestHandler):
    """Answers by the path."""

    def do_GET(self):
        self.server.asked.append((self.path, self.headers["Host"]))
        if self.path == "/redirect":
            self.send_response(302)
            self.send_header("Location", "http://169.254.169.254/")
            self.send_header("Content-Length", "0")
            self.end_headers()
        elif self.path == "/slow":
            self.send_response(200)
            self.end_headers()
            try:
                while not self.server.ended.wait(0.05):
                    self.wfile.write(b"x")
            except OSError:
                self.server.cut.set()
        elif self.path == "/large":
            self.send_response(200)
            self.end_headers()
            self.wfile.write(bytes(3000))
        elif self.path.startswith("/a"):
            self.send_response(200)
            self.send_header("Content-Length", "5")
            self.end_headers()
            self.wfile.write(b"hello")
        else:
            self.send_error(404)

    def log_message(self, *_):
        """Say nothing."""


@pytest.fixture
def server(monkeypatch):
    """A server on this machine, which pictures.example and others resolve to."""
    made = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    made.daemon_threads = True
    made.asked, made.ended, made.cut = [], threading.Event(), threading.Event()
    running = threading.Thread(target=made.serve_forever, args=(POLL_S,))
    running.start()
    resolve(monkeypatch, "127.0.0.1")
    monkeypatch.setattr(sources, "is_public", lambda address: str(address) == "127.0.0.1")
    made.url = f"http://pictures.example:{made.server_port}"
    yield made
    made.ended.set()
    made.shutdown()
    running.join()
    made.server_close()


def resolve(monkeypatch, *rounds):
    """Let each look at the resolver have the next addresses, the last ones again and again."""
    left = list(rounds)
    looks = []

    def getaddrinfo(host, port, **_):
        looks.append(host)
        found = left.pop(0) if len(left) > 1 else left[0]
        return [(0, 0, 0, "", (each, port)) for each in found.split()]

    monkeypatch.setattr(sources, "getaddrinfo", getaddrinfo)
    return looks


def refused(url, rules=RULES):
    with pytest.raises(InvalidRequest) as caught:
        read_source(url, rules)
    return caught.value.message


def test_a_picture_of_an_allowed_host_is_fetched(server):
    assert read_source(f"{server.url}/a.png?b=1#c", RULES) == b"hello"
    assert server.asked == [("/a.png?b=1", f"pictures.example:{server.server_port}")]
    assert read_source(f"{server.url}/a".replace("pictures", "x.other"), RULES) == b"hello"
    for host in ("evil.example", "other.example", "pictures.example.evil.example"):
        assert "fetches nothing from there" in refused(f"http://{host}/a")


def test_redirects_errors_and_users_are_refused(server):
    assert "redirects are not followed" in refused(f"{server.url}/redirect")
    assert "sent the status 404" in refused(f"{server.url}/other")
    assert "with a user name" in refused("http://me:secret@pictures.example/a")
    assert [path for path, _ in server.asked] == ["/redirect", "/other"]


def test_paths_are_sent_as_browsers_send_them(server):
    assert read_source(f"{server.url}/a ü%20%C3.png?q=ä b", RULES) == b"hello"
    assert [path for path, _ in server.asked] == ["/a%20%C3%BC%20%C3.png?q=%C3%A4%20b"]


def test_a_url_without_a_host_is_refused():
    for url in ("http:///a", "http://./a", "https:a", "http:\\\\127.0.0.1\\a"):
        assert refused(url).startswith("has a URL without a host")


def test_a_file_that_is_too_large_is_refused(server):
    rules = SourceRules(domains=("*",), most_bytes=2999)
    assert "has more than 2999 bytes" in refused(f"{server.url}/large", rules)


def test_a_server_that_sends_a_byte_now_and_then_is_cut_off(server):
    rules = SourceRules(domains=("*",), timeout_s=0.5)
    assert "within 0.5 s" in refused(f"{server.url}/slow", rules)
    assert server.cut.wait(60)


def test_a_host_that_is_not_there_is_refused(server, monkeypatch):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # nobody listens, and no other process can
        port = taken.getsockname()[1]
        assert "cannot be fetched from" in refused(f"http://pictures.example:{port}/a", LONG)

    def fails(*_, **__):
        raise OSError

    monkeypatch.setattr(sources, "getaddrinfo", fails)
    assert "this name has no address" in refused("http://pictures.example/a")


@pytest.mark.parametrize(
    "addresses",
    [
        *("127.0.0.1", "10.1.2.3", "192.168.1.1", "169.254.169.254", "100.64.0.1", "0.0.0.0"),
        *("::1", "fe80::1", "fd00::1", "::ffff:10.0.0.1", "64:ff9b::a9fe:a9fe", "2002:7f00:1::"),
        *("224.0.0.1", "93.184.216.34 10.0.0.1"),
        *("fec0::1", "::127.0.0.1", "64:ff9b:1::7f00:1", "100::1", "5f00::1", "4000::1"),
        *("2001:db8::5efe:a00:1", "2606:2800:220:1:0:5efe:10.0.0.1", "2606::200:5efe:7f00:1"),
    ],
)
def test_addresses_that_are_not_public_are_refused(addresses, monkeypatch):
    resolve(monkeypatch, addresses)
    assert "is no public address" in refused("http://pictures.example/a")


@pytest.mark.parametrize(
    "address",
    [
        *("93.184.216.34", "2606:2800:220:1::1", "::ffff:8.8.8.8", "64:ff9b::808:808"),
        *("2002:808:808::1", "2606:2800:220:1:0:5efe:8.8.8.8"),
    ],
)
def test_public_addresses_are_known(address):
    assert is_public(ip_address(address))


def test_a_name_is_resolved_once_and_the_checked_address_is_used(monkeypatch):
    looks = resolve(monkeypatch, "93.184.216.34", "127.0.0.1")
    connected = []

    def connect(address, timeout):
        connected.append(address)
        raise ConnectionRefusedError

    monkeypatch.setattr(sources, "create_connection", connect)
    refused("http://pictures.example/a")
    assert (looks, connected) == (["pictures.example"], [("93.184.216.34", 80)])


def test_the_folder_of_pictures_may_be_below_the_home_directory(monkeypatch, tmp_path):
    (tmp_path / "a.png").write_bytes(b"hello")
    monkeypatch.setenv("HOME", str(tmp_path.parent))
    rules = SourceRules(folder=f"~/{tmp_path.name}")
    assert read_source(f"file://{tmp_path}/a.png", rules) == b"hello"


def test_calls_of_the_system_that_fail_fail_one_picture(server, monkeypatch, tmp_path):
    (tmp_path / "a.png").write_bytes(b"hello")
    rules = SourceRules(domains=("*",), folder=str(tmp_path), timeout_s=60)
    for point, action, url in (
        ("media.connect", "EMFILE", f"{server.url}/a"),
        ("media_file.open", "EIO", f"file://{tmp_path}/a.png"),
    ):
        monkeypatch.setattr("cpuserve.base.fault_points._hook", Once(point, action))
        with pytest.raises(ServiceUnavailable, match="the system refuses: "):
            read_source(url, rules)
        assert read_source(url, rules) == b"hello"
