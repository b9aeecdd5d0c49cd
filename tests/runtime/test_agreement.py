"""Agreement: what differs first is told to all, and then nothing is delivered."""

import gc
import itertools
import json
import re
import weakref

import pytest
from hypothesis import given
from hypothesis import strategies as st

from runtime.coordinator_contract import PATIENCE_S, meet, run_together
from shoal.errors import DeadlineError, DivergenceError
from shoal.runtime.agreement import Call, agree, fingerprint_of
from shoal.runtime.client.in_process import LocalJob
from shoal.runtime.failures.comparison import compare_lines, shown_line
from shoal.runtime.rules import first_difference
from shoal.runtime.rules.point import Fingerprint
from shoal.runtime.rules.spec_lines import SpecLine

LINES = tuple(
    SpecLine(path=f"['layer{i}']['w']", dtype="float32", shape=f"[{i},8]").packed
    for i in range(1000)
)
VALUE = SpecLine(path="the value", dtype="int32")


def agree_all(calls, payloads=None, job=None, **more):
    """Let each process make its call; return what each got or raised."""
    job = job or LocalJob(len(calls), hosts=[f"h{i}" for i in range(len(calls))])
    payloads = payloads or [b""] * len(calls)
    more = {"timeout_s": PATIENCE_S, **more}
    return run_together(
        *(
            lambda c=c, call=call, payload=payload: agree(c, call, payload, **more)
            for c, call, payload in zip(job.clients, calls, payloads, strict=True)
        )
    )


ENDED = "(nothing: it ends before)"
SAME_CALLS = "All processes of a group must make the same collective calls, in the same order."
SAME_LEAVES = "broadcast needs the same tree, shapes and dtypes on every process."
SAME_OR_NONE = (
    SAME_LEAVES,
    "Receivers can pass None: broadcast(x if process_index() == 0 else None).",
)


def texts(errors, heading="processes made different calls"):
    """Check that all have the same error but for who speaks; return its lines after the first."""
    assert [type(error) for error in errors] == [DivergenceError] * len(errors)
    bodies, headings = set(), set()
    for process, error in enumerate(errors):
        first, *lines = str(error).splitlines()
        me = f"process {process} of {len(errors)} (h{process})"
        assert first.startswith(f"{me}: processes ")
        headings.add(first.removeprefix(me))
        bodies.add(tuple(lines))
        assert error.sides == errors[0].sides
        assert sorted(sum(error.sides.values(), ())) == list(range(len(errors)))
        assert error.difference == errors[0].difference
    assert headings == {f": {heading}"}
    assert len(bodies) == 1
    return list(bodies.pop())


def test_equal_calls_return_the_payload_of_every_process():
    call = Call("broadcast", None, "a.py:1 (f)", ("source=0", *LINES))
    results = agree_all([call] * 3, [b"a", b"", b"c"])
    assert [dict(result) for result in results] == [{0: b"a", 1: b"", 2: b"c"}] * 3


def test_few_long_calls_are_remembered():
    """Each of them takes megabytes, and each save of a step is another."""

    class Line(str):
        pass

    alive = weakref.WeakSet()
    job = LocalJob(1)
    for step in range(20):
        lines = [Line(f"{step}: {line}") for line in LINES]
        alive |= {*lines}
        agree_all([Call("save", None, "a.py:1 (f)", tuple(lines))], job=job)
    del lines
    gc.collect()
    assert len(alive) <= 4 * len(LINES)


def test_different_operations_are_shown_with_their_call_sites():
    calls = [Call("broadcast", None, "a.py:1 (f)"), Call("allgather", None, "a.py:2 (f)")]
    assert texts(agree_all(calls, [b"secret"] * 2)) == [
        "  process 0: broadcast at a.py:1 (f)",
        "  process 1: allgather at a.py:2 (f)",
        SAME_CALLS,
    ]


def test_different_operations_with_one_name_are_shown():
    calls = [Call("broadcast", "w", "a.py:1 (f)"), Call("allgather", "w", "a.py:2 (f)")]
    assert texts(agree_all(calls)) == [
        "  process 0: broadcast 'w' at a.py:1 (f)",
        "  process 1: allgather 'w' at a.py:2 (f)",
        SAME_CALLS,
    ]


def test_different_names_of_one_operation_are_shown():
    calls = [Call("broadcast", name, "a.py:1 (f)") for name in ("w", "b")]
    assert texts(agree_all(calls), "processes gave a broadcast different names") == [
        "  broadcast at a.py:1 (f)",
        "    process 0: 'w'",
        "    process 1: 'b'",
        "broadcast needs the same name= on every process.",
    ]


def test_where_only_the_call_sites_differ_a_name_is_advised_and_helps():
    calls = [Call("broadcast", None, f"a.py:{n} (f)", LINES) for n in (1, 2)]
    assert texts(agree_all(calls)) == [
        "  process 0: broadcast at a.py:1 (f)",
        "  process 1: broadcast at a.py:2 (f)",
        "If these are one call made at several places, pass the same name= in each.",
    ]
    assert agree_all([call._replace(name="w") for call in calls]) == [{0: b"", 1: b""}] * 2


def test_name_is_not_advised_if_the_values_differ_too():
    calls = [
        Call("allgather", None, f"a.py:{n} (f)", (VALUE._replace(shape=f"[{n}]").packed,))
        for n in (1, 2)
    ]
    assert texts(agree_all(calls), "processes gave allgather different shapes") == [
        "  process 0: allgather at a.py:1 (f): int32[1]",
        "  process 1: allgather at a.py:2 (f): int32[2]",
        SAME_LEAVES.replace("broadcast", "allgather"),
    ]


def test_the_first_line_that_differs_is_shown():
    specs = [("source=0", *LINES[:3]), ("source=0", LINES[0])]
    errors = agree_all([Call("broadcast", "w", "a.py:1 (f)", spec) for spec in specs])
    assert texts(errors, "processes gave broadcast 'w' different trees") == [
        "  broadcast 'w' at a.py:1 (f)",
        "    process 0: ['layer1']['w']: float32[1,8]",
        f"    process 1: {ENDED}",
        *SAME_OR_NONE,
    ]


@pytest.mark.parametrize("at", [0, 7, 8, 500, 999])
def test_a_long_specification_shows_its_first_difference_too(at):
    other = (*LINES[:at], LINES[at].replace("8", "16"), *LINES[at + 1 : 999], "the last")
    calls = [Call("broadcast", None, "a.py:1 (f)", spec) for spec in (LINES, other)]
    what = "trees" if at == 8 else "shapes"
    assert texts(agree_all(calls), f"processes gave broadcast different {what}") == [
        "  broadcast at a.py:1 (f)",
        f"    process 0: {shown_line(LINES[at])}",
        f"    process 1: {shown_line(other[at])}",
        *SAME_OR_NONE,
    ]


def test_longer_list_differs_where_the_shorter_ends():
    calls = [Call("broadcast", None, "a.py:1 (f)", LINES[:end]) for end in (900, 1000)]
    assert texts(agree_all(calls), "processes gave broadcast different trees") == [
        "  broadcast at a.py:1 (f)",
        f"    process 0: {ENDED}",
        f"    process 1: {shown_line(LINES[900])}",
        *SAME_OR_NONE,
    ]


def test_the_search_works_over_either_coordinator(make_job):
    job = make_job(3)
    specs = [LINES, (*LINES[:-1], "the last")]

    def call(client):
        spec = specs[client.process]
        return agree(client, Call("x", "w", "a.py:1 (f)", spec), timeout_s=PATIENCE_S)

    first = [job.start(lambda c=c: call(c)) for c in job.clients[:2]]
    for error in [wait() for wait in first]:
        assert type(error) is DivergenceError
        assert f"  x 'w' at a.py:1 (f)\n    process 0: {shown_line(LINES[-1])}\n" in str(error)
        assert "    process 1: the last" in str(error)
    here = "x 'w' at a.py:1 (f)"
    told = f"  {here}\n    process 0: {shown_line(LINES[-1])}\n    process 1: the last\n"
    with pytest.raises(DivergenceError, match=re.escape(told)):
        agree(job.clients[2], Call("x", "w", "", ()), timeout_s=PATIENCE_S)
    assert [set(r) for r in job.on_all(lambda c: meet(c, "next"))] == [{0, 1, 2}] * 3


def test_next_call_works_after_a_difference_and_a_repeat_is_reported_again():
    job = LocalJob(2, hosts=["h0", "h1"])
    calls = [Call("broadcast", None, "a.py:1 (f)", LINES[:end]) for end in (900, 1000)]
    first = agree_all(calls, job=job)
    assert agree_all(calls[:1] * 2, job=job) == [{0: b"", 1: b""}] * 2
    heading = "processes gave broadcast different trees"
    assert texts(agree_all(calls, job=job), heading) == texts(first, heading)


def test_divergence_is_raised_without_the_first_difference_if_the_search_fails():
    class Deaf:
        """A process that cannot meet any more after its first point."""

        def __init__(self, client):
            self.client, self.points, self.process = client, 0, client.process
            self.call, self.explain = client.call, client.explain
            self.num_processes = client.num_processes

        def arrive(self, point, payload=b"", *, timeout_s):
            self.points += 1
            if self.points > 1:
                job.lose(self.process)
            return self.client.arrive(point, payload, timeout_s=timeout_s)

    job = LocalJob(2)
    calls = [Call("broadcast", None, "a.py:1 (f)", LINES[:end]) for end in (900, 1000)]
    errors = run_together(
        lambda: agree(job.clients[0], calls[0], timeout_s=PATIENCE_S),
        lambda: agree(Deaf(job.clients[1]), calls[1], timeout_s=PATIENCE_S),
    )
    for error in errors:
        assert type(error) is DivergenceError
        assert [side.partition(" lines, ")[0] for side in error.sides] == [
            "900",
            "1000",
        ]


def test_late_process_gets_the_same_difference_and_is_not_waited_for():
    job = LocalJob(3, hosts=["h0", "h1", "h2"])
    calls = [Call("broadcast", None, "a.py:1 (f)", LINES[:end]) for end in (900, 1000, 1000)]
    early = run_together(
        *(lambda c=c, call=call: agree(c, call, timeout_s=PATIENCE_S)
          for c, call in zip(job.clients[:2], calls, strict=False))
    )  # fmt: skip
    with pytest.raises(DivergenceError) as late:
        agree(job.clients[2], calls[2], timeout_s=PATIENCE_S)
    assert type(late.value) is DivergenceError
    assert f"process 1: {shown_line(LINES[900])}" in str(early[0])
    assert str(late.value).splitlines()[1:] == str(early[0]).splitlines()[1:]
    assert late.value.sides == early[0].sides
    difference, side = early[0].difference, late.value.difference.late
    assert (difference.late, side.processes, side.said) == (None, (2,), difference.sides[1].said)


def test_the_deadline_is_the_callers():
    with pytest.raises(DeadlineError):
        agree(LocalJob(2).clients[0], Call("x", None, "a.py:1 (f)"), timeout_s=0.05)


def test_long_names_are_shown_where_they_differ():
    calls = [Call("broadcast", "x" * 5000 + n, "a.py:1 (f)") for n in "ab"]
    for error in agree_all(calls):
        assert sorted(error.sides.values()) == [(0,), (1,)]
        assert len(str(error)) < 1500


def test_a_message_stays_short():
    calls = [Call("broadcast", n * 5000, f"{n * 5000}:1 (f)", (n * 10**6,)) for n in "ab"]
    for error in agree_all(calls):
        assert len(str(error)) < 1500
    calls = [Call("broadcast", "w", "a:1 (f)", ("x" * 10**6 + n + "y" * 10**6,)) for n in "ab"]
    for line in texts(agree_all(calls), "processes gave broadcast 'w' different values")[1:-1]:
        assert len(line) < first_difference._WIDTH + 40
        excerpt = line.rpartition(": ")[2]
        assert excerpt.count("a") + excerpt.count("b") == 1


# the pure parts, against brute force

versions = st.lists(
    st.lists(st.sampled_from(["a", "b", "\n", "", "a" * 300 + "b"]), max_size=90),
    min_size=2, max_size=4,
)  # fmt: skip


def brute_force(lists):
    for index in itertools.count():
        row = [tuple(lines[index : index + 1]) for lines in lists]
        if len(set(row)) > 1:
            return index
        if not any(row):
            return None
    raise AssertionError


@given(versions)
def test_the_first_difference_is_that_of_brute_force(lists):
    assert first_difference.first_difference(lists) == brute_force(lists)


@given(versions, st.integers(0, 3), st.data())
def test_the_search_finds_what_brute_force_finds(lists, same, data):
    lists = [["same"] * data.draw(st.sampled_from([0, 63, 4000])) + lines for lines in lists]
    silent = len(lists) + 1  # a process that has nothing to compare, and takes part

    def search(client):
        process = client.process
        mine = lists[process] if process < len(lists) else None

        def meet(payload):
            return agree(client, Call("x", None, "s"), payload, timeout_s=PATIENCE_S)

        return first_difference.find_line(meet, mine, range(len(lists)))

    job = LocalJob(silent)
    results = run_together(*(lambda c=c: search(c) for c in job.clients))
    expected = brute_force(lists)
    for result in results:
        assert result == results[0]
    if results[0] is None:
        assert expected is None
    elif expected is None:  # one line each, all equal: who asks knows that they differ
        assert max(map(len, lists)) == 1
    else:
        index, shown = results[0]
        assert index == expected
        assert len({*shown.values()}) == len({tuple(lines[index : index + 1]) for lines in lists})


@given(st.text(max_size=20), st.text(max_size=20), st.text(max_size=400), st.text(max_size=400))
def test_excerpts_of_lines_that_differ_differ(begin, end, one, other):
    lines = [(begin * 30 + text + end).replace("\x01", "") for text in (one, other)]
    shown = first_difference.excerpts(lines)
    assert (shown[0] == shown[1]) == (lines[0] == lines[1])
    assert max(map(len, shown)) <= first_difference._WIDTH + 6


@given(
    st.integers(0, 2000), st.sampled_from(["path", "dtype", "shape", "layout", "value", "digest"])
)
def test_an_excerpt_of_a_packed_line_keeps_its_fields(length, field):
    leaf = SpecLine(path="['" + "x" * length + "']", dtype="float32", shape="[3]", layout="(x)")
    lines = [leaf._replace(**{field: getattr(leaf, field) + end}) for end in ("a", "b")]
    shown = [SpecLine.of(text) for text in first_difference.excerpts([a.packed for a in lines])]
    differing = [
        name for name in SpecLine._fields if len({getattr(line, name) for line in shown}) > 1
    ]
    assert differing == [field]
    assert max(len(line.packed) for line in shown) < 700


def test_static_data_far_in_a_tree_are_a_different_tree():
    lines = [SpecLine("tree", value="*, " * 500 + f"Model[{n}]").packed for n in range(2)]
    kind, said = compare_lines(first_difference.excerpts(lines), first_difference.ENDED)
    assert kind == ("tree", "")
    assert [shown_line(line)[-8:] for line in said] == ["Model[0]", "Model[1]"]


@given(st.text(max_size=5), st.lists(st.text("ab: ", max_size=200), max_size=5))
def test_a_fingerprint_travels_as_it_is(site, lines):
    fingerprint = fingerprint_of(Call("broadcast", None, site, tuple(lines)))
    assert Fingerprint.of(json.loads(json.dumps(fingerprint))) == fingerprint
    assert sum(map(len, fingerprint)) < 400
    assert fingerprint_of(Call("broadcast", "w", site, tuple(lines))) == fingerprint._replace(
        site=""
    )
