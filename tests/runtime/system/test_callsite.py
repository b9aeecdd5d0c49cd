"""Call sites name the user's line, in a way that is equal on every host."""

import sys
import types

import pytest

import shoal.runtime.system.callsite as target


def place_of(file, module, *, spec=None):
    """Return the call site of a function that was compiled as `file` in `module`."""
    scope = {"__name__": module, "callsite": target.callsite}
    if spec is not None:
        scope["__spec__"] = types.SimpleNamespace(name=spec)
    source = "\n\ndef train():\n    return callsite()\n"
    exec(compile(source, file, "exec"), scope)
    return scope["train"]()


@pytest.mark.parametrize(
    ("file", "module", "spec", "told"),
    [
        ("/home/me/run/train.py", "__main__", None, "train.py"),
        ("/opt/site-packages/pkg/sub/train.py", "pkg.sub.train", None, "pkg/sub/train.py"),
        ("/opt/site-packages/pkg/sub/__init__.py", "pkg.sub", None, "pkg/sub/__init__.py"),
        ("/opt/site-packages/pkg/train.py", "__main__", "pkg.train", "pkg/train.py"),
        ("<stdin>", "__main__", None, "<stdin>"),
    ],
)
def test_the_file_is_relative_to_the_import_root(file, module, spec, told):
    assert place_of(file, module, spec=spec) == f"{told}:4 (train)"


def test_shoals_own_frames_and_those_in_between_are_passed_by():
    ours = target.__file__.replace("callsite.py", "barrier.py")
    scope = {"__name__": "shoal.runtime.barrier", "callsite": target.callsite}
    exec(compile("def call():\n    return callsite()\n", ours, "exec"), scope)
    line = sys._getframe().f_lineno + 1
    told = scope["call"]()
    assert told.endswith(f"test_callsite.py:{line} ({sys._getframe().f_code.co_name})")
