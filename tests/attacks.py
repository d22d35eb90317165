"""Ways to ask a server for `refused.test` over a connection that may only be for `allowed.test`."""

from __future__ import annotations

REFUSED = b"GET / HTTP/1.1\r\nHost: refused.test\r\n\r\n"
ALLOWED = b"GET / HTTP/1.1\r\nHost: allowed.test\r\n\r\n"
_POST = b"POST / HTTP/1.1\r\nHost: allowed.test\r\n"

ATTACKS: dict[str, bytes] = {
    "a plain request": REFUSED,
    "a second request": ALLOWED + REFUSED,
    "a leading empty line": b"\r\n" + REFUSED,
    "a leading line feed": b"\n" + REFUSED,
    "a leading space": b" " + REFUSED,
    "an Upgrade without Connection": ALLOWED[:-2] + b"Upgrade: websocket\r\n\r\n" + REFUSED,
    "an Upgrade that is refused": ALLOWED[:-2] + b"Connection: Upgrade\r\nUpgrade: x\r\n\r\n" + REFUSED,
    "an Upgrade to HTTP/2": ALLOWED[:-2] + b"Connection: Upgrade, HTTP2-Settings\r\nUpgrade: h2c\r\n"
    b"HTTP2-Settings: AAMAAABkAAQAAP__\r\n\r\n" + REFUSED,
    "a method in lower case": b"get / HTTP/1.1\r\nHost: refused.test\r\n\r\n",
    "a method with digits": b"G3T / HTTP/1.1\r\nHost: refused.test\r\n\r\n",
    "an empty line and CONNECT": b"\r\nCONNECT refused.test:80 HTTP/1.1\r\nHost: refused.test:80\r\n\r\n",
    "a head without its empty line": REFUSED[:-2],
    "line feeds alone": REFUSED.replace(b"\r\n", b"\n"),
    "tabs for spaces": b"GET\t/\tHTTP/1.1\r\nHost: refused.test\r\n\r\n",
    "two spaces": b"GET  /  HTTP/1.1\r\nHost: refused.test\r\n\r\n",
    "an absolute target": b"GET http://refused.test/ HTTP/1.1\r\nHost: allowed.test\r\n\r\n",
    "HTTP/0.9": b"GET http://refused.test/\r\n",
    "HTTP/0.9 behind a line feed": b"\nGET /\r\n",
    "a Host with a dot at its end": b"GET / HTTP/1.1\r\nHost: allowed.test.\r\n\r\n",
    "a Connection that drops the Host": ALLOWED[:-2] + b"Connection: close, Host\r\n\r\n",
    "no Host": b"GET / HTTP/1.1\r\n\r\n",
    "an empty Host": b"GET / HTTP/1.1\r\nHost:\r\n\r\n",
    "two Hosts": b"GET / HTTP/1.1\r\nHost: allowed.test\r\nHost: refused.test\r\n\r\n",
    "a space before the colon": b"GET / HTTP/1.1\r\nHost : refused.test\r\nHost: allowed.test\r\n\r\n",
    "a folded field": b"GET / HTTP/1.1\r\nX: y\r\n Host: refused.test\r\nHost: allowed.test\r\n\r\n",
    "a length and chunks": _POST + b"Content-Length: 4\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n" + REFUSED,
    "two lengths": _POST + b"Content-Length: 0\r\nContent-Length: 38\r\n\r\n" + REFUSED,
    "an odd length": _POST + b"Content-Length: +0\r\n\r\n" + REFUSED,
    "an odd coding": _POST + b"Transfer-Encoding: xchunked\r\nContent-Length: 38\r\n\r\n" + REFUSED,
    "chunks that end early": _POST + b"Transfer-Encoding: chunked\r\n\r\n0\n\n" + REFUSED,
    "a chunk with a line feed": _POST + b"Transfer-Encoding: chunked\r\n\r\n2;\nxx\r\n0\r\n\r\n" + REFUSED,
    "chunks of HTTP/1.0": _POST.replace(b"1.1", b"1.0") + b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n" + REFUSED,
    "another protocol first": b"hello there\r\n\r\n" + REFUSED,
    "binary first": b"\x00\x00\x00\x08\r\n" + REFUSED,
}

_EVERYWHERE = {"a plain request", "a second request", "an Upgrade without Connection"}
WORKS = {
    "nginx": _EVERYWHERE
    | {"an absolute target", "a leading empty line", "line feeds alone", "HTTP/0.9", "HTTP/0.9 behind a line feed"},
    "node": _EVERYWHERE | {"a Host with a dot at its end"},
    "go": _EVERYWHERE
    | {"an absolute target", "a method in lower case", "a method with digits", "a Host with a dot at its end"},
}
"""What each server answers when it is asked without pier in between, which shows that it has the secret."""
