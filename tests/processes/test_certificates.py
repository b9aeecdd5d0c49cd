"""Mutual TLS of JAX's service, with certificates made by openssl: an error instead of an abort."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import jax
import pytest

from shoal.runtime.jax_service.certificates import (
    CA,
    CERT,
    KEY,
    MUTUAL_TLS,
    NO_SHIELD,
    PREFIX,
    VERIFY,
)

HAS_TLS = hasattr(jax.config, CERT)
pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl")
needs_tls = pytest.mark.skipif(not HAS_TLS, reason="JAX 0.12 has mutual TLS")
KEYS = ("ec", "-pkeyopt", "ec_paramgen_curve:prime256v1")
SCRIPT = """
initialize(timeout_s=20)
say("sum", global_sum())
"""


class Authority:
    """Makes keys and certificates in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._openssl("req", "-x509", "-newkey", *KEYS, "-nodes", "-keyout", "ca.key",
                      "-out", "ca.pem", "-days", "2", "-subj", "/CN=authority")  # fmt: skip

    def _openssl(self, *arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=self.folder, check=True, capture_output=True)

    def variables(self, name: str, alternative: str, days: int = 2) -> dict[str, str]:
        """Return the variables for a certificate with this alternative name."""
        (self.folder / f"{name}.ext").write_text(f"subjectAltName={alternative}\n")
        self._openssl("req", "-newkey", *KEYS, "-nodes", "-keyout", f"{name}.key",
                      "-out", f"{name}.csr", "-subj", f"/CN={name}")  # fmt: skip
        self._openssl("x509", "-req", "-in", f"{name}.csr", "-CA", "ca.pem", "-CAkey", "ca.key",
                      "-CAcreateserial", "-out", f"{name}.pem", "-days", str(days),
                      "-extfile", f"{name}.ext")  # fmt: skip
        paths = {CERT: f"{name}.pem", KEY: f"{name}.key", CA: "ca.pem"}
        return {option.upper(): str(self.folder / path) for option, path in paths.items()}


@pytest.fixture(scope="module")
def authority(tmp_path_factory):
    return Authority(tmp_path_factory.mktemp("authority"))


@pytest.fixture
def here(job):
    """Return the name that a certificate must have: the address of the job's coordinator."""
    return f"IP:{job.address.rpartition(':')[0]}"


@pytest.fixture
def right(authority, here):
    """Return the variables for a certificate that fits."""
    return authority.variables("right", f"{here},URI:spiffe://job/one")


def run(job, *rows):
    """Run two processes, each with these variables."""
    for index, row in enumerate(rows):
        job.start(index, 2, SCRIPT, **row)
    return job.wait()


def refused(job, *rows) -> list[str]:
    """Run two processes that are both refused; return their errors, each on one line."""
    ended = run(job, *rows)
    assert [one.code for one in ended] == [74] * 2, ended
    assert not any("sum" in one.out for one in ended)
    return [" ".join(one.err.split()) for one in ended]


@needs_tls
def test_the_right_certificates(job, right):
    ended = run(job, right, right)
    assert [one.code for one in ended] == [0, 0], ended
    assert all("> sum 6.0" in one.out for one in ended)
    assert [NO_SHIELD in one.err for one in ended] == [True, False]


@needs_tls
def test_the_certificates_as_arguments(job, right):
    """As those of `jax.distributed.initialize`; a repeated call compares them."""
    given = {name: right[option.upper()] for name, option in MUTUAL_TLS.items()
             if option.upper() in right}  # fmt: skip
    script = f"""
    given = {given!r}
    initialize(timeout_s=20, **given)
    initialize(**given)
    try:
        initialize(mtls_ca_file="other.pem")
    except InitializeError as error:
        say(str(error).splitlines()[3])
    say("sum", global_sum())
    """
    ended = job.run(2, script)
    assert [one.code for one in ended] == [0, 0], ended
    for one in ended:
        assert f"mtls_ca_file: {given['mtls_ca_file']} before, other.pem now" in one.out
        assert "> sum 6.0" in one.out
    assert NO_SHIELD in ended[0].err


@needs_tls
def test_an_address_among_the_names_of_hosts_is_as_good_for_jax(job, authority, here):
    row = authority.variables("named", here.replace("IP:", "DNS:"))
    assert [one.code for one in run(job, row, row)] == [0, 0]


@needs_tls
def test_certificates_with_a_prefix_keep_the_proxies(job, right):
    row = {**right, PREFIX.upper(): "spiffe://job/"}
    ended = run(job, row, row)
    assert [one.code for one in ended] == [0, 0], ended
    assert not any(NO_SHIELD in one.err for one in ended)


@needs_tls
@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda a, right, here: {**right, KEY.upper(): "/no"}, f"{KEY}=/no: No such file"),
        (lambda a, right, here: {**right, CERT.upper(): ""}, f"mutual TLS also needs {CERT}"),
        (lambda a, right, here: a.variables("b", "DNS:elsewhere"), "for elsewhere, not for 127"),
        # OpenSSL 3.5 refuses days=-1; a process takes over a second to import JAX.
        (lambda a, right, here: a.variables("old", here, days=0), "expired"),
        (lambda a, right, here: {**right, PREFIX.upper(): "spiffe://another/"},
         f"no URI of its certificate begins with {PREFIX}=spiffe://another/"),
        (lambda a, right, here: {VERIFY.upper(): "1"}, f"{VERIFY} is set, but {CERT}"),
        (lambda a, right, here: {PREFIX.upper(): "spiffe://job/"}, f"{PREFIX} is set, but {CERT}"),
    ],
)  # fmt: skip
def test_wrong_ones_are_an_error_on_all(job, authority, right, here, spoil, words):
    row = spoil(authority, right, here)
    for said in refused(job, row, row):
        assert words in said, said


@needs_tls
def test_an_authority_that_the_service_does_not_know(job, right, here, tmp_path):
    stranger = Authority(tmp_path).variables("right", here)
    first, second = refused(job, right, stranger)
    assert "unable to get local issuer certificate" in second
    assert "process 1" in first


@needs_tls
def test_a_process_without_certificates(job, right):
    said = refused(job, right, {})
    assert any("mutual TLS" in one for one in said), said


@pytest.mark.skipif(HAS_TLS, reason="this JAX has mutual TLS")
@pytest.mark.parametrize("option", [CERT, VERIFY])
def test_a_jax_without_it_refuses(job, option):
    row = {option.upper(): "1"}
    for said in refused(job, row, row):
        words = "this JAX has no mutual TLS, for which the environment asks: install JAX 0.12 or "
        assert f"{words}newer, or unset {option.upper()}" in said
