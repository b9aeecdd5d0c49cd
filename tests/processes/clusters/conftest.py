"""Folders for the files of docs/clusters."""

from __future__ import annotations

import pytest

from processes.clusters.pages import Folder


@pytest.fixture
def folder(tmp_path, child_env):
    """Return a folder; nothing that was started in it outlives the test."""
    folder = Folder(tmp_path, child_env)
    yield folder
    folder.close()
