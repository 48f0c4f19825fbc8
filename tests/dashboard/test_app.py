"""Requests to the dashboard: accepted paths, rejected hosts and tokens, and the headers of every response."""

import gzip
import http.client
import threading

import pytest
import waitress

from runner.dashboard.app import DashboardApp, ResponseBody, is_loopback, make_access_policy
from runner.dashboard.report import encode_json
from runner.errors import InvalidError

RUN = "0123456789abcdef"
TOKEN = "a-token-of-some-length"
HOSTILE = "</script><script>alert(1)</script> \u2028 \u2029 &amp; <!-- \udcff \"'\\"


def get_data_path(name: str) -> ResponseBody | None:
    return (
        ResponseBody.from_text("application/json", encode_json({"title": HOSTILE}))
        if name in ("", "hosts", RUN)
        else None
    )


def get_media(run: str, name: str) -> bytes | None:
    return b"content" if (run, name.rpartition(".")[0]) == (RUN, "media/00000008/val~x") else None


def send_request(host="127.0.0.1", token=None, path="/", method="GET", **headers):
    """Return status, headers and content of a response; `headers` are named as in WSGI."""
    path, _, query = path.partition("?")
    environ = {"REQUEST_METHOD": method, "PATH_INFO": path, "QUERY_STRING": query, "HTTP_HOST": "localhost:80"}
    found = []
    body = DashboardApp(make_access_policy(host, token), get_data_path, get_media)(
        environ | headers, lambda status, given: found.append((int(status[:3]), dict(given)))
    )
    ((status, given),) = found
    return status, given, b"".join(body)


@pytest.mark.parametrize(
    "path",
    ["/", "/data", "/hosts", "/data/hosts", f"/run/{RUN}", f"/data/{RUN}", "/static/page.js", "/static/page.css"],
)
def test_existing_paths_are_served_with_restrictive_headers(path):
    status, headers, content = send_request(path=path)
    assert (status, int(headers["Content-Length"])) == (200, len(content))
    assert "default-src 'none'" in headers["Content-Security-Policy"]
    assert "unsafe-inline" not in headers["Content-Security-Policy"].partition("script-src")[2].partition(";")[0]
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert b"<script>alert" not in content
    assert send_request(path=path, method="HEAD")[1:] == (headers, b"")
    assert gzip.decompress(send_request(path=path, HTTP_ACCEPT_ENCODING="gzip")[2]) == content
    assert send_request(path=path, HTTP_IF_NONE_MATCH=headers["ETag"])[::2] == (304, b"")


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("x.png", "image/png"),
        ("x.wav", "audio/wav"),
        ("x.html", None),
        ("x.svg", None),
        ("x.PNG", None),
        ("y.png", None),
    ],
)
def test_images_and_audio_have_the_type_of_their_suffix(name, kind):
    path = f"/media/{RUN}/00000008/val~{name}"
    status, headers, content = send_request(path=path, HTTP_ACCEPT_ENCODING="gzip")
    assert status == (404 if kind is None else 200)
    assert headers["X-Content-Type-Options"] == "nosniff"
    if kind is not None:
        assert (headers["Content-Type"], content, "Content-Encoding" in headers) == (kind, b"content", False)
        assert headers["Content-Security-Policy"].startswith("default-src 'none'; sandbox")
        assert send_request(path=path, HTTP_IF_NONE_MATCH=headers["ETag"])[::2] == (304, b"")
        assert send_request(path=path, method="HEAD")[2] == b""
        assert send_request("0.0.0.0", TOKEN, path)[0] == 401


def test_a_report_allows_only_its_own_scripts_and_links_back():
    status, headers, content = send_request(path=f"/report/{RUN}")
    policy = headers["Content-Security-Policy"]
    page = content.decode()
    assert (status, send_request(path="/report/0123456789abcdee")[0]) == (200, 404)
    assert "script-src 'sha256-" in policy
    assert "unsafe-inline" not in policy.partition("script-src")[2].partition(";")[0]
    assert "frame-ancestors 'none'" in policy
    assert f'"live":"../run/{RUN}"' in page
    assert "<script>alert" not in page


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "CONNECT", "PROPFIND"])
@pytest.mark.parametrize("path", ["/", "/data", f"/data/{RUN}", "/static/page.js", "/nowhere"])
def test_only_reading_methods_are_allowed(path, method):
    status, headers, _ = send_request(path=path, method=method)
    assert (status, headers["Allow"]) == (405, "GET, HEAD")


@pytest.mark.parametrize(
    "path",
    [
        "/run/", "/run/0000", "/data/", "/data/0000", "/report/", "/report/..", f"/run/{RUN},", f"/run/{RUN},..",
        "/run/" + ",".join([RUN] * 11), f"/data/{RUN}/", f"/data/{RUN}/..", "/static/", "/run/..",
        "/static/page.html", "/static/../app.py", "/static/../../../../etc/passwd", "/static/page.js\0",
        "/../../etc/passwd", "/%2e%2e/etc/passwd", "//evil.example", "/data/../../etc/passwd", "/data/\xff\xfe",
        "", "data", "/index.html", "/metrics.jsonl", f"/media/{RUN}/00000008", f"/media/{RUN}/00000008/a/val~x.png",
        f"/media/{RUN},{RUN}/00000008/val~x.png", f"/media/{RUN}/../job.json", "/media/0000/00000008/val~x.png",
        "/hosts/", "/run/hosts", "/report/hosts",
    ],
)  # fmt: skip
def test_other_paths_are_not_found(path):
    assert send_request(path=path)[0] == 404
    status, headers, _ = send_request("0.0.0.0", TOKEN, f"{path}?token={TOKEN}")
    assert (status, "Location" in headers) == (404, False)


@pytest.mark.parametrize(
    ("host", "header", "status"),
    [
        ("127.0.0.1", "localhost", 200),
        ("127.0.0.1", "localhost:8642", 200),
        ("127.0.0.1", "LOCALHOST:1", 200),
        ("127.0.0.1", "127.0.0.1:8642", 200),
        ("127.0.0.1", "[::1]:8642", 200),
        ("::1", "[::1]", 200),
        ("127.0.0.1", "evil.example", 421),
        ("127.0.0.1", "localhost.evil.example:80", 421),
        ("127.0.0.1", "192.168.0.7:8642", 421),
        ("127.0.0.1", "", 421),
        ("127.0.0.1", "localhost:80@evil.example", 421),
        ("127.0.0.1", "evil.example:localhost", 421),
        ("0.0.0.0", "192.168.0.7:8642", 200),
        ("0.0.0.0", "evil.example", 421),
        ("node7.example", "Node7.Example:80", 200),
    ],
)
def test_host_names_of_other_machines_are_rejected(host, header, status):
    assert send_request(host, TOKEN, HTTP_HOST=header, HTTP_AUTHORIZATION=f"Bearer {TOKEN}")[0] == status


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 401),
        ({"HTTP_AUTHORIZATION": f"Bearer {TOKEN}"}, 200),
        ({"HTTP_AUTHORIZATION": f"Bearer {TOKEN}x"}, 401),
        ({"HTTP_AUTHORIZATION": f"Basic {TOKEN}"}, 401),
        ({"HTTP_AUTHORIZATION": "Bearer \xff"}, 401),
        ({"HTTP_COOKIE": f"a=b; runner_token={TOKEN}"}, 200),
        ({"HTTP_COOKIE": "runner_token="}, 401),
        ({"QUERY_STRING": f"token={TOKEN}"}, 303),
        ({"QUERY_STRING": "token=wrong"}, 401),
        ({"QUERY_STRING": "&".join("a=b" for _ in range(99))}, 400),
    ],
)
@pytest.mark.parametrize("path", ["/", f"/data/{RUN}", "/static/page.js"])
def test_remote_clients_need_the_token_and_keep_it_in_a_cookie(path, headers, status):
    found, given, content = send_request("0.0.0.0", TOKEN, path, **headers)
    assert found == status
    assert (TOKEN in str(given)) == (status == 303)
    if status == 303:
        assert given["Location"] == path
        assert "HttpOnly" in given["Set-Cookie"]
        assert "SameSite=Strict" in given["Set-Cookie"]
    if status != 200:
        assert len(content) < 100


@pytest.mark.parametrize(
    ("host", "is_own"),
    [("127.0.0.1", True), ("127.9.9.9", True), ("localhost", True), ("::1", True), ("0.0.0.0", False), ("::", False),
     ("192.168.0.7", False), ("node7", False), ("localhost.evil.example", False)],
)  # fmt: skip
def test_a_token_is_generated_if_the_server_is_reachable_remotely(host, is_own):
    assert is_loopback(host) == is_own
    assert (make_access_policy(host, None).token is None) == is_own
    assert make_access_policy(host, TOKEN).token == TOKEN
    assert is_own or make_access_policy(host, None).token != make_access_policy(host, None).token


@pytest.mark.parametrize(
    "token", ["", "short", "sixteen letters and blanks", "x" * 15, "ü" * 20, "x" * 20 + "\r\nA: b"]
)
def test_a_token_that_is_invalid_in_a_url_is_rejected(token):
    with pytest.raises(InvalidError, match="--token needs"):
        make_access_policy("127.0.0.1", token)


def test_the_server_sends_no_version_headers():
    server = waitress.create_server(
        DashboardApp(make_access_policy("127.0.0.1", None), get_data_path), host="127.0.0.1", port=0, ident=None
    )
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    connection = http.client.HTTPConnection("127.0.0.1", server.effective_port, timeout=60)
    try:
        for path, status in (("/data", 200), ("/static/%2e%2e/%2e%2e/etc/passwd", 404), ("http://evil.example/", 200)):
            connection.putrequest("GET", path, skip_host=True)
            connection.putheader("Host", "localhost")
            connection.endheaders()
            answer = connection.getresponse()
            assert answer.status == status, path
            assert "Server" not in answer.headers
            answer.read()
    finally:
        connection.close()
        server.close()
