"""How many processes of a control group were killed for want of memory."""

from __future__ import annotations

import pytest

from shoal.runtime.system.process_status import memory_limit, oom_kills

V2, V1 = "low 0\noom 3\noom_kill 2\noom_group_kill 0\n", "under_oom 0\noom_kill 5\n"


@pytest.mark.parametrize(
    ("rows", "files", "count"),
    [
        ("0::/a/b\n", {"a/b/memory.events": V2}, 2),
        ("0::/a/b\n", {"memory.events": V2}, 2),  # in a container
        ("0::/../b\n", {"memory.events": V2}, 2),
        ("9:name=systemd:/\n4:cpu,memory:/job\n0::/\n", {"memory/job/memory.oom_control": V1}, 5),
        ("4:memory:/job\n", {"memory/memory.oom_control": V1}, 5),
        ("4:memory:/job\n0::/\n", {"memory.events": V2}, 2),
        ("0::/a\n", {"a/memory.events": "oom 3\n"}, None),  # an old kernel
        ("0::/a\n", {}, None),
        ("", {}, None),
        ("strange\n", {"memory.events": V2}, None),
    ],
)
def test_oom_kills_are_read_from_the_cgroup_files(tmp_path, rows, files, count):
    (tmp_path / "cgroup").write_text(rows)
    for name, text in files.items():
        (tmp_path / "fs" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "fs" / name).write_text(text)
    assert oom_kills(str(tmp_path / "cgroup"), str(tmp_path / "fs")) == count


@pytest.mark.parametrize(
    ("rows", "name", "text", "limit"),
    [
        ("0::/a\n", "a/memory.max", "943718400\n", 943718400),
        ("0::/a\n", "a/memory.max", "max\n", None),
        ("4:memory:/a\n", "memory/a/memory.limit_in_bytes", "943718400\n", 943718400),
        ("4:memory:/a\n", "memory/a/memory.limit_in_bytes", "9223372036854771712\n", None),
        ("4:memory:/a\n", "memory/a/memory.limit_in_bytes", "9223372036854710272\n", None),
    ],
)
def test_a_group_without_a_limit_has_none(tmp_path, rows, name, text, limit):
    (tmp_path / "cgroup").write_text(rows)
    (tmp_path / "fs" / name).parent.mkdir(parents=True)
    (tmp_path / "fs" / name).write_text(text)
    assert memory_limit(str(tmp_path / "cgroup"), str(tmp_path / "fs")) == limit


def test_oom_kills_are_unknown_without_a_cgroup_file(tmp_path):
    assert oom_kills(str(tmp_path / "none")) is None
    assert (oom_kills() or 0) >= 0
