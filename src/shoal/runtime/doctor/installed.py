"""Versions of this process's packages, found without importing them, and its program."""

from __future__ import annotations

import platform
import sys
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

from shoal.hashing import short_digest
from shoal.runtime.doctor.findings import CheckResult, Finding

_PACKAGES = ("shoal", "jax", "jaxlib", "numpy")
_DRIVERS = (
    "libtpu", "jax-cuda13-plugin", "jax-cuda12-plugin", "jax-rocm7-plugin", "jax-rocm60-plugin",
)  # fmt: skip
_VARIABLES = ("JAX_PLATFORMS", "JAX_ENABLE_X64", "XLA_FLAGS", "LIBTPU_INIT_ARGS")


def check_versions(env: Mapping[str, str]) -> CheckResult:
    """Return the versions of Python and its packages, and the variables that change programs."""
    found = {name: _version(name) for name in (*_PACKAGES, *_DRIVERS)}
    missing = [name for name in _PACKAGES if found[name] is None and name != "shoal"]
    facts = {"python": platform.python_version()}
    facts |= {name: version for name, version in found.items() if version is not None}
    facts |= {name: env[name] for name in _VARIABLES if env.get(name)}
    findings = [
        Finding("versions", f"{name} is not installed in {sys.executable}", f"pip install {name}")
        for name in missing
    ]
    return CheckResult(facts, tuple(findings))


def check_program(path: str) -> CheckResult:
    """Return the digest of a program, to compare between processes."""
    try:
        data = Path(path).read_bytes()
    except OSError as error:
        problem = f"the program {path} cannot be read: {error.strerror}"
        return CheckResult({"path": path}, (Finding("program", problem),))
    digest = short_digest(data).hex()
    return CheckResult({"path": path, "digest": digest, "size_bytes": len(data)})


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
