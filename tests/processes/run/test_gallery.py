"""docs/gallery.md: each error class has a program there, which prints what the page says."""

from __future__ import annotations

import pytest

import shoal.errors
from processes.run.gallery import Exhibit, exhibits, report_of, steady
from shoal.runtime.system.local_devices import devices_seen

NEEDS_MORE = {
    "DeviceStartError",
    "StorageFullError",
    "UnsupportedCheckpointError",
}  # than a program
ROOTS = {"ShoalError", "CheckpointError"}


def test_each_error_class_is_there():
    classes = {
        name for name, one in vars(shoal.errors).items()
        if isinstance(one, type) and issubclass(one, shoal.errors.ShoalError)
    }  # fmt: skip
    assert [one.name for one in exhibits()] == sorted(
        classes - NEEDS_MORE - ROOTS, key=[one.name for one in exhibits()].index
    )


@pytest.mark.parametrize("one", exhibits(), ids=lambda one: one.name)
def test_its_program_prints_what_the_page_says(one: Exhibit, child_env):
    if one.name == "NoDevicesError" and devices_seen("gpu", {})[0]:
        pytest.skip("this host has GPUs")
    printed = report_of(one, {**child_env, "SHOAL_FAILURE_GRACE_S": "3"})
    # Where lines are broken depends on the length of names.
    assert steady(printed).split() == steady(one.report).split(), printed
