"""The transcripts of the pages are what their commands print."""

from __future__ import annotations

from pathlib import Path

import pytest

from processes.transcripts import ROOT, Transcript, pages, run, steady, transcripts
from shoal.runtime.system.local_devices import devices_seen

ALL = [one for page in pages() for one in transcripts(page, Path(ROOT, page).read_text("utf-8"))]

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


@pytest.mark.parametrize("one", ALL, ids=lambda one: f"{one.page}-{one.heading}-{one.commands[0]}")
def test_a_transcript_is_what_its_commands_print(one: Transcript, child_env):
    if "JAX_PLATFORMS=cuda" in one.text and devices_seen("gpu", {})[0]:
        pytest.skip("this host has GPUs")
    printed = run(one, child_env)
    assert steady(printed) == steady(one.text), printed


def test_commands_run_in_a_directory_with_the_files_above_them(child_env):
    first, second = transcripts("page.md", PAGE)
    assert (first.heading, second.heading) == ("Two files", "One of them again")
    assert run(first, child_env) == "$ python one.py\nfirst\n"
    assert run(second, child_env).splitlines()[1::2] == ["second a b", "kept one.py"]


def test_a_mark_that_is_not_above_a_block_is_an_error():
    with pytest.raises(ValueError, match="not directly above"):
        [*transcripts("page.md", PAGE.replace("run -->\n", "run -->\n\n"))]


def test_a_difference_is_noticed_but_for_what_varies():
    text = "p1| read b\np0| read a\nfailed after 1.2 s: pid 11 at 127.0.0.1:41251\n"
    same = "p0| read a\np1| read b\nfailed after 3 ms: pid 9999 at 127.0.0.1:5000\n"
    assert steady(text) == steady(same) != steady(same.replace("read a", "read c"))
