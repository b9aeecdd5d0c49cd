"""A small stand-in for Google Cloud Storage's XML API, as obstore uses it.

It proves our reading of https://cloud.google.com/storage/docs/xml-api/reference-headers, and
nothing of the service itself, which these tests never reach.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import re
import secrets
import threading
import time
from collections.abc import Iterator
from email.utils import formatdate
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import NamedTuple
from urllib.parse import parse_qs, unquote, urlsplit
from xml.sax.saxutils import escape


class Kept(NamedTuple):
    data: bytes
    generation: int
    modified: float

    @property
    def etag(self) -> str:
        return f'"{self.generation:x}"'


@contextlib.contextmanager
def gcs() -> Iterator[str]:
    """Start it; yield its address. Every bucket exists."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    server.lock, server.kept, server.parts = threading.Lock(), {}, {}
    server.generations = itertools.count(1)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def options(address: str) -> dict[str, object]:
    """Return the options of a Bucket there."""
    account = {"gcs_base_url": address, "disable_oauth": True}
    account |= dict.fromkeys(("client_email", "private_key", "private_key_id"), "")
    return {"service_account_key": json.dumps(account), "client_options": {"allow_http": True}}


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def log_message(self, *_: object) -> None:
        pass

    def serve(self) -> None:
        body = self.rfile.read(int(self.headers.get("content-length") or 0))
        parts = urlsplit(self.path)
        query = {name: values[0] for name, values in
                 parse_qs(parts.query, keep_blank_values=True).items()}  # fmt: skip
        bucket, _, key = unquote(parts.path).lstrip("/").partition("/")
        path = f"{bucket}/{key}"
        with self.server.lock:
            if not key:
                self.answer(200, self.listed(bucket, query))
            elif self.command == "POST":
                self.post(path, query, body)
            elif self.command == "PUT" and "uploadId" in query:
                self.server.parts[query["uploadId"]][int(query["partNumber"])] = body
                self.answer(200, headers={"etag": f'"{query["partNumber"]}"'})
            elif self.command == "PUT":
                self.put(path, body)
            elif self.command == "DELETE":
                self.server.parts.pop(query.get("uploadId"), None)
                found = "uploadId" in query or self.server.kept.pop(path, None)
                self.answer(204 if found else 404)
            else:
                self.get(path)

    do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = serve

    def put(self, path: str, body: bytes) -> None:
        kept, wanted = self.server.kept.get(path), self.headers.get("x-goog-if-generation-match")
        if wanted is not None and int(wanted) != (kept.generation if kept else 0):
            self.answer(412, b"<Error><Code>PreconditionFailed</Code></Error>")
            return
        self.write(path, body)

    def write(self, path: str, body: bytes, answer: bytes = b"") -> None:
        kept = Kept(body, next(self.server.generations), time.time())
        self.server.kept[path] = kept
        self.answer(200, answer, {"etag": kept.etag, "x-goog-generation": str(kept.generation)})

    def post(self, path: str, query: dict[str, str], body: bytes) -> None:
        if "uploads" in query:
            upload = secrets.token_hex(8)
            self.server.parts[upload] = {}
            self.answer(
                200,
                f"<InitiateMultipartUploadResult><UploadId>{upload}</UploadId>"
                "</InitiateMultipartUploadResult>".encode(),
            )
            return
        parts = self.server.parts.pop(query["uploadId"], None)
        if parts is None:
            self.answer(404, b"<Error><Code>NoSuchUpload</Code></Error>")
            return
        numbers = [int(one) for one in re.findall(rb"<PartNumber>(\d+)</PartNumber>", body)]
        whole = b"".join(parts[number] for number in numbers)
        etag = f'"{len(numbers)}"'
        self.write(
            path,
            whole,
            f"<CompleteMultipartUploadResult><ETag>{escape(etag)}</ETag>"
            "</CompleteMultipartUploadResult>".encode(),
        )

    def get(self, path: str) -> None:
        kept = self.server.kept.get(path)
        if kept is None:
            self.answer(404, b"<Error><Code>NoSuchKey</Code></Error>")
            return
        if self.headers.get("if-match", kept.etag) != kept.etag:
            self.answer(412, b"<Error><Code>PreconditionFailed</Code></Error>")
            return
        headers = {
            "etag": kept.etag,
            "x-goog-generation": str(kept.generation),
            "last-modified": formatdate(kept.modified, usegmt=True),
            "content-type": "application/octet-stream",
        }
        data, status = kept.data, 200
        if match := re.fullmatch(r"bytes=(\d+)-(\d+)", self.headers.get("range", "")):
            begin, end = int(match[1]), min(int(match[2]) + 1, len(data))
            if begin >= len(data):
                self.answer(416, b"<Error><Code>InvalidRange</Code></Error>")
                return
            headers["content-range"] = f"bytes {begin}-{end - 1}/{len(data)}"
            data, status = data[begin:end], 206
        self.answer(status, data, headers)

    def listed(self, bucket: str, query: dict[str, str]) -> bytes:
        prefix, cut = query.get("prefix", ""), query.get("delimiter", "")
        after = query.get("continuation-token") or query.get("start-after", "")
        rows, folders = [], set()
        for path in sorted(self.server.kept):
            there, _, key = path.partition("/")
            if there != bucket or not key.startswith(prefix) or key <= after:
                continue
            folder, found, _ = key[len(prefix) :].partition(cut) if cut else ("", "", "")
            if found:
                folders.add(f"{prefix}{folder}{cut}")
                continue
            kept = self.server.kept[path]
            when = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(kept.modified))
            fraction = f"{kept.modified % 1:.3f}"[1:]
            rows.append(
                f"<Contents><Key>{escape(key)}</Key><Size>{len(kept.data)}</Size>"
                f"<LastModified>{when}{fraction}Z</LastModified>"
                f"<ETag>{escape(kept.etag)}</ETag></Contents>"
            )
        most = int(query.get("max-keys", 1000))
        more = len(rows) > most
        rows += [f"<CommonPrefixes><Prefix>{escape(one)}</Prefix></CommonPrefixes>"
                 for one in sorted(folders)]  # fmt: skip
        assert not more, "pages are not needed here"
        inner = "".join(rows)
        return (
            f"<ListBucketResult><IsTruncated>false</IsTruncated>{inner}</ListBucketResult>".encode()
        )

    def answer(self, status: int, data: bytes = b"", headers: dict[str, str] | None = None) -> None:
        self.send_response_only(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        if status != 204:
            self.send_header("content-length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD" and status != 204:
            self.wfile.write(data)
