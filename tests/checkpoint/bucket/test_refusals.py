"""What a refusal means is said, and a right is named as missing only where one is."""

from __future__ import annotations

import contextlib
import http.server
import ssl
import subprocess
import threading
from datetime import timedelta

import pytest

from shoal import Bucket
from shoal.checkpoint.bucket.address import objects_of
from shoal.checkpoint.bucket.objects import UnclearError
from shoal.errors import StorageError, UsageError

KEYS = {"access_key_id": "k", "secret_access_key": "not-to-be-shown", "region": "eu-central-1"}
ONCE = {"retry_config": {"max_retries": 0, "retry_timeout": timedelta(seconds=1)}}
MARKS = {"etag": '"1"', "last-modified": "Sat, 01 Jan 2000 00:00:00 GMT"}


@contextlib.contextmanager
def serving(status, body=b"", certificate=None):
    """Serve one answer to all requests; yield the port."""

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self):
            self.rfile.read(int(self.headers.get("content-length") or 0))
            self.send_response(status)
            for name, value in MARKS.items():
                self.send_header(name, value)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_PUT = do_CONNECT = do_GET

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    if certificate is not None:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(*certificate)
        server.socket = context.wrap_socket(server.socket, server_side=True)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield server.server_port
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch):
    for name in ("HTTPS_PROXY", "HTTP_PROXY", "ALL_PROXY", "AWS_CA_BUNDLE"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.lower(), raising=False)


def objects_at(endpoint, **more):
    return objects_of(Bucket("s3://bucket/run", endpoint=endpoint, **KEYS, **ONCE, **more))


def error_of(*arguments, kind=StorageError, **more):
    with pytest.raises(kind) as caught:
        objects_at(*arguments, **more).read("x")
    assert "not-to-be-shown" not in str(caught.value)
    return str(caught.value)


NO_RIGHT = "these credentials have no right to do that"


@pytest.mark.parametrize(
    ("status", "code", "words"),
    [
        (403, "AccessDenied", NO_RIGHT),
        (403, "RequestTimeTooSkewed", "the clock of this host is wrong"),
        (
            403,
            "InvalidAccessKeyId",
            "does not know this access key; the credentials came from: the",
        ),
        (403, "SignatureDoesNotMatch", "the secret key is not that of the access key"),
        (403, "ExpiredToken", "these credentials have expired"),
        (403, "InvalidObjectState", "the object is in an archive"),
        (403, "QuotaExceeded", "the quota is used up"),
        (403, None, "the answer is a page"),
        (401, None, "the answer is a page"),
    ],
)
def test_each_refusal_has_its_sentence(status, code, words):
    body = f"<Error><Code>{code}</Code></Error>" if code else "<html>by your proxy</html>"
    with serving(status, body.encode()) as port:
        text = error_of(f"http://127.0.0.1:{port}")
    assert words in text
    assert (NO_RIGHT in text) == (words == NO_RIGHT)


def test_wrong_region_of_a_bucket_raises_with_advice():
    with serving(301) as port:
        text = error_of(f"http://127.0.0.1:{port}")
    assert "the bucket is not in the region eu-central-1: set AWS_REGION" in text


def test_a_proxy_that_refuses_is_named(monkeypatch):
    with serving(407) as port:
        monkeypatch.setenv("HTTPS_PROXY", f"http://u:not-to-be-shown@127.0.0.1:{port}")
        text = error_of("https://localhost:1")
        with pytest.raises(UnclearError, match="whether it was written is not known"):
            objects_at("https://localhost:1").put("x", b"1")
    assert f"the proxy 127.0.0.1:{port} (HTTPS_PROXY), which demands a login" in text


def test_an_authority_of_ones_own_is_trusted_by_aws_ca_bundle(tmp_path, monkeypatch):
    certificate, key = str(tmp_path / "certificate"), str(tmp_path / "key")
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-keyout", key, "-out",
         certificate, "-days", "2", "-subj", "/CN=127.0.0.1",
         "-addext", "basicConstraints=critical,CA:FALSE",
         "-addext", "subjectAltName=IP:127.0.0.1"],
        check=True, capture_output=True, timeout=60,
    )  # fmt: skip
    with serving(200, b"data", (certificate, key)) as port:
        text = error_of(f"https://127.0.0.1:{port}")
        assert "invalid certificate: UnknownIssuer" in text
        assert "set AWS_CA_BUNDLE" in text
        monkeypatch.setenv("AWS_CA_BUNDLE", certificate)
        assert objects_at(f"https://127.0.0.1:{port}").read("x")[0] == b"data"


def test_virtual_hosted_style_needs_the_endpoint_of_the_bucket():
    with pytest.raises(UsageError, match="requests would go to another bucket"):
        objects_at("https://s3.host", virtual_hosted_style_request=True)
    objects_at("https://bucket.s3.host", virtual_hosted_style_request=True)
