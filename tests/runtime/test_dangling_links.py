"""A symbolic link to a path that does not exist is named as one, with that path."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import partial

import numpy as np
import pytest
from typer.testing import CliRunner

import shoal
from shoal.checkpoint.disk.storage import LocalFolder
from shoal.checkpoint.history.checkpoints import Checkpoints
from shoal.checkpoint.restoring.restore import restore
from shoal.checkpoint.saving.save import save
from shoal.checkpoint.store.step_names import step_name
from shoal.cli.main import build
from shoal.errors import (
    CorruptCheckpointError,
    InitializeError,
    NotCommittedError,
    StorageError,
    UsageError,
)
from shoal.launch.log_dir import open_log_dir
from shoal.paths import dangling_link
from shoal.runtime.client.in_process import LocalJob
from shoal.runtime.doctor.host_state import FolderMarks
from shoal.runtime.startup.rendezvous import Rendezvous, Visit


@pytest.fixture
def link(tmp_path):
    path = tmp_path / "link"
    path.symlink_to("not there/at all")
    return path


@pytest.fixture
def alone():
    return LocalJob(1).clients[0]


def said(link):
    gone = link.parent / "not there" / "at all"
    return f"{link} is a symbolic link to {gone}, which does not exist"


def test_the_first_link_of_a_path_that_leads_nowhere(link, tmp_path):
    assert dangling_link(str(link)) == said(link)
    assert dangling_link(str(link / "in" / "it")) == said(link)
    assert dangling_link(os.path.relpath(link)) == said(link)
    (tmp_path / "chain").symlink_to(link)
    assert dangling_link(str(tmp_path / "chain")) == said(link).replace(
        str(link), str(tmp_path / "chain"), 1
    )
    for path in (tmp_path, tmp_path / "absent", tmp_path / "absent" / "x", "/", ""):
        assert dangling_link(str(path)) == ""
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "fine").symlink_to(tmp_path)
    assert dangling_link(str(tmp_path / "loop")) == ""
    assert dangling_link(str(tmp_path / "fine" / "absent")) == ""
    through = said(tmp_path / "fine" / "link").replace(
        str(tmp_path / "fine" / "not there"), str(tmp_path / "not there")
    )
    assert dangling_link(str(tmp_path / "fine" / "link")) == through


@pytest.mark.parametrize("below", ["", "in/it"])
@pytest.mark.parametrize(
    "use",
    [
        lambda path, client: save.on(client, path, {"w": np.ones(2)}),
        lambda path, client: Checkpoints(path, client=client).save(1, {"w": np.ones(2)}),
        lambda path, client: LocalFolder(path).make(),
        lambda path, client: restore.on(client, path),
        lambda path, client: shoal.checkpoint_info(path),
        lambda path, client: Checkpoints(path, client=client).restore(),
        lambda path, client: Checkpoints(path, client=client).info(),
        lambda path, client: Checkpoints(path, client=client).pin(3),
        lambda path, client: ckpt("ls", path),
    ],
)
def test_checkpoint_functions_name_the_dangling_link(link, alone, use, below):
    with pytest.raises((StorageError, NotCommittedError)) as caught:
        use(link / below, alone)
    assert said(link) in str(caught.value)
    assert "is a file" not in str(caught.value)
    assert "removed concurrently" not in str(caught.value)


def ckpt(*arguments):
    result = CliRunner().invoke(build(["ckpt"]), ["ckpt", *map(str, arguments)])
    raise result.exception


def test_a_step_that_is_such_a_link(link, tmp_path, alone, caplog):
    with Checkpoints(tmp_path / "run", client=alone) as ckpts:
        ckpts.save(1, {"w": np.ones(2)})
    step = tmp_path / "run" / step_name(2)
    step.symlink_to("../archive/2")
    message = f"{step} is a symbolic link to {tmp_path / 'archive' / '2'}, which does not exist"
    for call in (
        ckpts.all_steps,
        ckpts.latest,
        ckpts.restore,
        lambda: ckpts.resume(None, {}),
        *(partial(call, 2) for call in (ckpts.restore, ckpts.pin, ckpts.info, ckpts.delete)),
    ):
        with pytest.raises(StorageError) as caught:
            call()
        assert message in str(caught.value)
    assert restored(ckpts, 1) == [1, 1]
    assert ckpts.all_steps(skip_corrupt=True) == (1,)
    assert ckpts.latest(skip_corrupt=True) == 1
    assert message in caplog.text


def restored(ckpts, step):
    return ckpts.restore(step)["w"].tolist()


def test_an_older_step_that_is_such_a_link_is_left_alone(tmp_path, alone, caplog):
    run = tmp_path / "run"
    with Checkpoints(run, keep=1, client=alone) as ckpts:
        ckpts.save(3, {"w": np.ones(2)})
        ckpts.wait()
        os.symlink("../archive/2", run / step_name(2))
        ckpts.save(4, {"w": np.ones(2)})
    assert sorted(os.listdir(run)) == [step_name(2), step_name(4)]
    assert restored(Checkpoints(run, client=alone), None) == [1, 1]
    assert "step 2 could not be cleaned up" in caplog.text


def test_shoal_ckpt_shows_the_other_steps(tmp_path, alone):
    run = tmp_path / "run"
    with Checkpoints(run, client=alone) as ckpts:
        ckpts.save(1, {"w": np.ones(2)})
    os.symlink("../archive/2", run / step_name(2))
    for command in ("ls", "gc", "recover", "verify"):
        result = CliRunner().invoke(build(["ckpt"]), ["ckpt", command, str(run), "--json"])
        (row,) = [row for row in json.loads(result.output) if row["step"] == 1]
        assert "problem" not in row
        assert "which does not exist" in result.output


def test_a_newest_step_whose_commit_is_such_a_link_is_damaged(tmp_path, alone):
    run = tmp_path / "run"
    with Checkpoints(run, client=alone) as ckpts:
        for step in (1, 2):
            ckpts.save(step, {"w": np.full(2, step)})
    commit = run / step_name(2) / "COMMIT"
    commit.unlink()
    commit.symlink_to("../../blobs/1")
    with pytest.raises(CorruptCheckpointError, match=r"COMMIT is missing: .* is a symbolic link"):
        ckpts.resume(None, {})
    assert ckpts.resume(None, {}, skip_corrupt=True)[1] == 2


@pytest.mark.parametrize("file", ["COMMIT", "manifest-", "index-", "data-"])
def test_a_file_of_a_checkpoint_that_is_such_a_link(tmp_path, alone, file):
    save.on(alone, tmp_path / "one", {"w": np.ones(2)})
    (path,) = (tmp_path / "one").glob(f"{file}*")
    path.unlink()
    path.symlink_to("../blobs/1")
    with pytest.raises((CorruptCheckpointError, NotCommittedError)) as caught:
        restore.on(alone, tmp_path / "one")
    assert f"is a symbolic link to {tmp_path / 'blobs' / '1'}, which does not exist" in str(
        caught.value
    )


def test_other_paths(link, tmp_path):
    with pytest.raises(UsageError) as caught, open_log_dir(str(link), ["x"]):
        pass
    assert said(link) in str(caught.value)
    (finding,) = FolderMarks([str(link)], "1").write().findings
    assert said(link) in finding.words
    for option in ("--svg", "--html"):
        result = CliRunner().invoke(
            build(["mesh"]), ["mesh", "v5p:2x2x1", "x=4", option, str(link / "a.svg")]
        )
        assert said(link) in str(result.exception), result.output


@pytest.mark.parametrize("arguments", [["{}"], ["--log-dir", "{}", "x.py"]])
def test_shoal_run(link, tmp_path, child_env, arguments):
    (tmp_path / "x.py").write_text("")
    filled = [argument.format(link) for argument in arguments]
    command = [sys.executable, "-m", "shoal", "run", "-n", "1", *filled]
    done = subprocess.run(
        command, env=child_env, cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 2
    assert said(link) in " ".join(done.stderr.replace("\n", " ").split())


@pytest.mark.parametrize("below", ["", "in/it"])
def test_rendezvous_names_the_dangling_link(link, below):
    visit = Visit(Rendezvous(str(link / below), "job", on_one_host=False), 0, 1)
    with pytest.raises(InitializeError) as caught:
        visit.announce()
    assert said(link) in str(caught.value)
