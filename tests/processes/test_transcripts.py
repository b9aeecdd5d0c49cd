"""The transcripts of the pages are what their commands print."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from processes.transcripts import ROOT, Transcript, pages, run, steady, transcripts
from shoal.runtime.system.local_devices import devices_seen

ALL = [one for page in pages() for one in transcripts(page, Path(ROOT, page).read_text("utf-8"))]
# Those that a newcomer reads first run with the suite, and those that need a package where it is
# installed; the others with `make pages`.
FIRST = ("README.md", "docs/first-job.md", "docs/stopping.md")

PAGE = """
# Two files

```py
# one.py
print("first")
```

<!-- run -->
```console
$ python one.py
something else
```

## One of them again

```py
# one.py
import os, sys; print(os.environ["WORD"], *sys.argv[1:])
open("kept", "w")
```

```console
$ python one.py
not marked
```

<!-- run -->
```console
$ WORD=second python one.py "a b"  # a remark
$ python -c "import os; print(*sorted(os.listdir()))"
```
"""

MARKED = "<!-- run -->\n```console\n$ WORD"


def row(one):
    is_later = one.page not in FIRST and one.package is None
    name = f"{one.page}-{one.heading}-{one.blocks[0].commands[0]}"
    return pytest.param(one, id=name, marks=[pytest.mark.pages] if is_later else [])


@pytest.mark.parametrize("one", [row(one) for one in ALL])
def test_a_transcript_is_what_its_commands_print(one: Transcript, child_env):
    if not one.can_run:
        pytest.skip(f"{one.package} is not installed")
    if sys.version_info >= (3, 12) and one.package is None:
        pytest.skip("compared on the oldest Python")  # minutes
    if "JAX_PLATFORMS=cuda" in one.text and devices_seen("gpu", {})[0]:
        pytest.skip("this host has GPUs")
    printed = "".join(run(one, child_env))
    assert steady(printed) == steady(one.text), printed


def test_commands_run_in_a_directory_with_the_files_above_them(child_env):
    first, second = transcripts("page.md", PAGE)
    assert (first.heading, second.heading) == ("Two files", "One of them again")
    assert run(first, child_env) == ["$ python one.py\nfirst\n"]
    assert run(second, child_env)[0].splitlines()[1::2] == ["second a b", "kept one.py"]


def test_a_reader_goes_on_in_the_same_directory(child_env):
    (one,) = transcripts("page.md", PAGE.replace(MARKED, MARKED.replace("run", "run on")))
    first, second = run(one, child_env)
    assert first == "$ python one.py\nfirst\n"
    assert second.splitlines()[1::2] == ["second a b", "kept one.py"]


def test_commands_run_in_a_copy_of_a_directory_where_a_package_is_installed(child_env):
    page = "<!-- run in examples/why with json -->\n```console\n$ python -c 'import alone'\n```\n"
    (one,) = transcripts("page.md", page)
    assert one.can_run
    assert run(one, child_env) == ["$ python -c 'import alone'\n"]
    (one,) = transcripts("page.md", page.replace("json", "no_such_package"))
    assert not one.can_run


def test_a_mark_that_is_not_above_a_block_is_an_error():
    with pytest.raises(ValueError, match="not directly above"):
        [*transcripts("page.md", PAGE.replace("run -->\n", "run -->\n\n", 1))]


def test_a_difference_is_noticed_but_for_what_varies():
    text = "p1| read b\np0| read a\nfailed after 1.2 s: pid 11 at 127.0.0.1:41251\n"
    same = "p0| read a\np1| read b\nfailed after 3 ms: pid 9999 at 127.0.0.1:5000\n"
    assert steady(text) == steady(same) != steady(same.replace("read a", "read c"))
