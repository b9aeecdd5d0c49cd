"""`initialize` of a coordinator that the launcher has started says what to write."""

from __future__ import annotations

import socket

import pytest

from shoal.errors import InitializeError
from shoal.runtime.startup import services


@pytest.mark.parametrize("launcher_runs_services", [True, False])
def test_an_address_that_is_taken(launcher_runs_services, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        monkeypatch.setenv(
            "SHOAL_COORDINATOR", f"127.0.0.1:{port if launcher_runs_services else 1}"
        )
        with pytest.raises(InitializeError, match="Address already in use") as caught:
            services.start(
                2, bind="127.0.0.1", port=port, token="t", timeout_s=30.0, job="a job of the test"
            )
    assert ("write shoal.initialize()" in str(caught.value)) is launcher_runs_services
