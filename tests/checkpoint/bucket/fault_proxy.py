"""An HTTP proxy that harms one request, and says that it did."""

from __future__ import annotations

import contextlib
import http.client
import threading
import time
from collections.abc import Iterator, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlsplit

KINDS = ("cut before", "cut after", "busy", "conflict", "error in body", "silent", "stalled",
         "truncated", "short", "slow")  # fmt: skip
OF_ANSWERS = ("stalled", "truncated", "short", "slow")  # to a GET with a body
CONFLICT = b"<Error><Code>ConditionalRequestConflict</Code><Message>again</Message></Error>"
BUSY = b"<Error><Code>SlowDown</Code><Message>Please reduce your request rate.</Message></Error>"
INTERNAL = b'<?xml version="1.0"?>\n<Error><Code>InternalError</Code><Message>no</Message></Error>'


PAGE = b"<!DOCTYPE html><html><body>Sign in to this network</body></html>"
NO_KEY = b"<Error><Code>NoSuchKey</Code><Message>no such key</Message></Error>"
# Answers that are wrong: nothing was asked of the server.
WRONG = {
    "page": (200, PAGE),
    "nothing": (200, b""),
    "json": (200, b'{"status": "ok"}'),
    "error of 200": (200, INTERNAL),
    "empty listing": (200, b"<ListBucketResult><KeyCount>0</KeyCount></ListBucketResult>"),
    "no key": (404, NO_KEY),
    "page of 404": (404, PAGE),
    "conflict anywhere": (409, CONFLICT),
    "condition failed": (412, b"<Error><Code>PreconditionFailed</Code></Error>"),
    "forbidden": (403, PAGE),
    "moved": (301, b"<Error><Code>PermanentRedirect</Code></Error>"),
}
FLIPPED = "flipped"  # the server's answer, with a bit of its body flipped
MARKS = [("etag", '"wrong"'), ("last-modified", "Sat, 01 Jan 2000 00:00:00 GMT")]


class Fault:
    """What happens to which request."""

    def __init__(self, kind: str = "", at: int = 0, times: int = 1) -> None:
        self.kind, self.at, self.times = kind, at, times
        self.lock = threading.Lock()
        self.requests: list[str] = []
        self.fired = 0
        self.is_over = threading.Event()  # ends silences

    def of(self, request: str) -> str:
        """Return what is done to this request; "" if nothing."""
        with self.lock:
            self.requests.append(request)
            is_hit = self.at <= len(self.requests) < self.at + self.times
        return self.kind if is_hit else ""


class Away(Fault):
    """From the first request of a kind on, a server is away for some seconds."""

    def __init__(self, kind: str, request: str, seconds: float) -> None:
        super().__init__(kind)
        self.request, self.seconds, self.until_s = request, seconds, 0.0

    def of(self, request: str) -> str:
        now = time.monotonic()
        with self.lock:
            self.requests.append(request)
            if not self.until_s and request == self.request:
                self.until_s = now + self.seconds
            return self.kind if now < self.until_s else ""


REQUESTS = ("list", "head", "get", "range", "put", "put-if-absent", "put-if-match",
            "begin multipart", "put part", "complete multipart", "delete")  # fmt: skip


def kind_of(command: str, path: str, headers: Mapping[str, str]) -> str:
    """Return which of these a request of S3 is."""
    if command == "GET":
        return "list" if "list-type=" in path else "range" if headers.get("range") else "get"
    if command == "PUT":
        if "partNumber=" in path:
            return "put part"
        if headers.get("if-none-match"):
            return "put-if-absent"
        return "put-if-match" if headers.get("if-match") else "put"
    if command == "POST" and "delete" not in path:
        return "complete multipart" if "uploadId=" in path else "begin multipart"
    return "head" if command == "HEAD" else "delete"


@contextlib.contextmanager
def proxy(address: str) -> Iterator[ThreadingHTTPServer]:
    """Start a proxy before a server; its `fault` is to be set. `url` is where it is."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    server.target = urlsplit(address).netloc
    server.fault = Fault()
    server.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.fault.is_over.set()
        server.shutdown()
        thread.join()
        server.server_close()


class Handler(BaseHTTPRequestHandler):
    """One connection of a client."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def setup(self) -> None:
        super().setup()
        self.line = http.client.HTTPConnection(self.server.target)

    def finish(self) -> None:
        self.line.close()
        super().finish()

    def log_message(self, *_: object) -> None:
        pass

    def serve(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length") or 0))
        fault = self.server.fault
        is_away = isinstance(fault, Away)
        asked = kind_of(self.command, self.path, self.headers) if is_away else ""
        kind = fault.of(asked or f"{self.command} {self.path}")
        if kind and not self.is_hit(kind):
            kind = ""
        if kind and kind not in OF_ANSWERS:
            fault.fired += 1
        if kind == "cut before":
            self.close_connection = True
        elif kind == "silent":
            fault.is_over.wait(30)
            self.close_connection = True
        elif kind == "busy":
            self.answer(503, [], BUSY)
        elif kind == "conflict":
            self.answer(409, [], CONFLICT)
        elif kind == "error in body":
            self.answer(200, [], INTERNAL)
        elif kind in WRONG:
            status, data = WRONG[kind]
            self.answer(status, MARKS if status == 200 else [], data)
        else:
            answer, data = self.forward(body)
            if kind == FLIPPED and data:
                middle = len(data) // 2
                data = data[:middle] + bytes([data[middle] ^ 4]) + data[middle + 1 :]
            if kind == "cut after":
                self.close_connection = True
            else:
                self.answer(answer.status, answer.getheaders(), data, kind)

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = serve

    def is_hit(self, kind: str) -> bool:
        """Does this kind of fault exist for such a request?"""
        if kind == "conflict":
            return bool(self.headers.get("if-none-match") or self.headers.get("if-match"))
        if kind == "error in body":  # of CompleteMultipartUpload alone
            return self.command == "POST" and "uploadId=" in self.path
        return kind not in OF_ANSWERS or self.command == "GET"

    def forward(self, body: bytes) -> tuple[http.client.HTTPResponse, bytes]:
        headers = {name: value for name, value in self.headers.items() if name != "connection"}
        self.line.request(self.command, self.path, body, headers)
        answer = self.line.getresponse()
        return answer, answer.read()

    def answer(
        self, status: int, headers: list[tuple[str, str]], data: bytes, kind: str = ""
    ) -> None:
        if kind and len(data) < 2:
            kind = ""
        self.server.fault.fired += bool(kind)
        cut = len(data) // 2 if kind in ("stalled", "truncated", "short") else len(data)
        self.send_response_only(status)
        for name, value in headers:
            if name.lower() not in ("content-length", "connection", "transfer-encoding"):
                self.send_header(name, value)
        length = {name.lower(): value for name, value in headers}.get("content-length")
        told = cut if kind == "short" else len(data)
        if self.command == "HEAD" and length is not None:
            told = int(length)
        if status != 204:
            self.send_header("content-length", str(told))
        self.end_headers()
        if self.command == "HEAD":
            return
        if kind == "slow":
            for begin in range(0, len(data), -(-len(data) // 8)):
                self.wfile.write(data[begin : begin + -(-len(data) // 8)])
                self.wfile.flush()
                self.server.fault.is_over.wait(0.02)
            return
        self.wfile.write(data[:cut])
        if kind == "stalled":
            self.server.fault.is_over.wait(30)
        if kind in ("stalled", "truncated"):
            self.close_connection = True
