"""No module reads the wording of another, and each check of that can fail."""

from __future__ import annotations

import pytest

from meta import wording
from meta.source import package_tree


@pytest.mark.parametrize("check", [wording.unlisted, wording.outdated])
def test_the_library_keeps(check):
    problems = check(package_tree())
    assert not problems, "\n".join(problems)


MAKER = 'def say(place):\n    return f"{place} cannot complete: it left the job"\n'
READERS = {
    "in": 'def f(text):\n    return "cannot complete" in text',
    "startswith": 'def f(text):\n    return text.startswith(("it left", "left the job"))',
    "a constant": '_GONE = "left the job"\ndef f(text):\n    return text.partition(_GONE)[2]',
    "a pattern of words": 'import re\n_AT = re.compile(r"\\): (.+?) cannot complete: it .*")',
    "several": '_ENDS = ("left the job", "x")\ndef f(t):\n    return any(e in t for e in _ENDS)',
    "a word between blanks": 'def f(text):\n    return " left " in text',
    "a text with values": 'def f(text, p):\n    return text.partition(f"{p} cannot complete: ")[2]',
    "equal": 'def f(text):\n    return text == "left the job"',
}


@pytest.mark.parametrize("how", READERS)
def test_a_module_that_reads_the_wording_of_another_is_found(how):
    tree = {"a.py": MAKER, "b.py": READERS[how]}
    found = wording.unlisted(tree)
    assert [text.partition(": reads ")[0].partition(":")[0] for text in found][:1] == ["b.py"]


def test_a_constant_that_one_module_makes_and_another_reads_is_found():
    tree = {
        "a.py": 'GONE = "left the job"\ndef say():\n    return GONE\n',
        "b.py": "from shoal.a import GONE\ndef f(text):\n    return GONE in text",
    }
    assert wording.own_texts_read(tree) == {
        ("b.py", "GONE"): "b.py:3: reads 'left the job', made at a.py:3"
    }


def test_docstrings_and_compared_strings_are_not_flagged():
    tree = {
        "a.py": MAKER,
        "b.py": '"""It left the job."""\ndef f(one):\n    return one.state == "left"',
    }
    assert wording.unlisted(tree) == []


def test_a_row_of_a_list_that_is_read_no_more_has_to_go():
    assert len(wording.outdated({"a.py": ""})) == len({**wording.FOREIGN, **wording.STILL_READ})
