"""Frames as a hostile process may send them: right in parts, so that they are read far."""

from __future__ import annotations

from hypothesis import strategies as st

from runtime.bare_sockets import TOKEN
from shoal.runtime.rules.point import Point
from shoal.runtime.server.callers import ProcessCaller
from shoal.runtime.wire.frames import pack_frame

NAMES = ("do", "number", "branches", "limits", "point", "timeout_s", "given_s", "step", "after")
NAMES += ("ticket", "lane", "token", "process", "incarnation", "place", "since_s", "trails")
JUNK = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 9) | st.floats() | st.text(max_size=2),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(NAMES), inner),
    max_leaves=6,
)
POINTS = st.builds(
    Point, st.sampled_from("xy"), group=st.sampled_from([None, (0, 1), (0,), (2,), "g"]),
    lane=st.sampled_from(["main", "side"]), survivors=st.booleans(), follows=st.booleans(),
    call_record=st.sampled_from(["", "1:aa", '1:aa\n"side"\tbase\t1:00', "\n"]),
    fingerprint=st.sampled_from([None, "f", (), ("", "", "x"), ("", "", ["x"])]),
)  # fmt: skip
RIGHT = {
    "number": st.integers(0, 4), "branches": st.sampled_from([[0], [1], [2], [1, 2], [0, 1, 2]]),
    "point": POINTS, "timeout_s": st.sampled_from([None, 1, 0.5, -1]), "step": st.just(1),
    "process": st.integers(0, 1), "token": st.just(TOKEN), "incarnation": st.just("run 0"),
    "lane": st.just("main"), "words": st.just("x"), "place": st.just("'x'"),
    "since_s": st.floats(0, 9), "step_s": st.floats(0, 9), "memory_bytes": st.just(7),
}  # fmt: skip
SOMETIMES = {"ticket": st.integers(0, 1), "after": st.integers(0, 1), "limits": st.just(True)}
FIELDS = st.builds(
    lambda right, wrong: {**right, **wrong},
    st.fixed_dictionaries(RIGHT, optional=SOMETIMES),
    st.just({}) | st.dictionaries(st.sampled_from([*RIGHT, *SOMETIMES]), JUNK, max_size=2),
)
VERBS = [*ProcessCaller.VERBS, "who", "members", "lane", "hello"]
FRAMES = st.builds(
    lambda verb, fields, body: pack_frame({**fields, "do": verb}, body),
    st.sampled_from(VERBS) | JUNK, FIELDS, st.binary(max_size=3),
)  # fmt: skip
