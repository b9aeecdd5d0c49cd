"""What launchers send to each other arrives as it was; what is not theirs is refused."""

from __future__ import annotations

import math
import signal
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.launch.conclusion import Conclusion
from shoal.launch.environment import Addresses, HostShare, JobStart
from shoal.launch.launchers import JobExit
from shoal.launch.nodes.messages import (
    NodeCard,
    attempt_token,
    card_of,
    end_of,
    first_card,
    pack_end,
    pack_start,
    pack_verdict,
    signal_of,
    start_of,
    verdict_of,
)
from shoal.runtime.exit.first_failure import ProcessExit
from shoal.runtime.failures.facts import JobFailure, Memory, ProcessSet
from shoal.runtime.failures.last_record import LastRecord, cause_of
from shoal.runtime.system.progress_file import StepProgress
from shoal.runtime.wire.frames import Frame, FrameError, FrameReader, pack_frame

SIGNALS = st.lists(st.sampled_from([signal.SIGTERM, signal.SIGINT, signal.SIGKILL])).map(tuple)
TIMES_S = st.floats(0, 1e6)
TEXT = st.text(st.characters(blacklist_categories=["Cs"]))
RECORDS = [
    LastRecord(pid=1, at_s=2.0, cause=cause_of(ValueError("no data"), process=1, step=3)),
    LastRecord(pid=2, at_s=2.0, cause=cause_of(SystemExit(3)), because_of=ProcessSet([0, 1])),
]
EXITS = st.lists(
    st.builds(
        ProcessExit,
        st.integers(0, 99),
        st.integers(-30, 255),
        st.none() | TIMES_S,
        SIGNALS,
        TEXT,
        TEXT,
        st.booleans(),
        gone=st.none(),
        left=st.none(),
        record=st.none() | st.sampled_from(RECORDS),
        threads=st.lists(st.sampled_from(RECORDS)).map(tuple),
        memory=st.none() | st.builds(Memory, peak_bytes=st.integers(1, 1 << 40)),
        ended_s=TIMES_S | st.just(math.inf),
        is_lost=st.booleans(),
        sent_s=st.just(math.inf) | TIMES_S,
        asked_s=st.just(math.inf) | TIMES_S,
        step=st.integers(-1, 1 << 40),
        ran_loaded=st.booleans(),
    )
)


def frame_of(data: bytes) -> Frame:
    reader = FrameReader(max_header_bytes=1 << 16, max_body_bytes=1 << 20)
    reader.feed(data)
    frame = reader.next()
    assert frame is not None
    return frame


@given(EXITS, TEXT, st.floats(-100, 100), st.tuples(*[st.integers(-1)] * 3), TEXT)
def test_exits_arrive_on_the_clock_of_node_0(exits, problem, shift_s, progress, remaining):
    end = JobExit(exits, 0.0, problem, None, StepProgress(*progress), remaining=remaining)
    came = end_of(frame_of(pack_end(end, shift_s)).body, "h")
    assert (came.problem, came.progress, came.remaining) == (problem, progress, remaining)
    for sent, process_exit in zip(exits, came.exits, strict=True):
        failed_s = None if sent.failed_s is None else sent.failed_s + shift_s
        moved = (replace(one, at_s=one.at_s + shift_s) for one in sent.threads)
        sent = sent._replace(threads=tuple(moved))
        times_s = {name: getattr(sent, name) + shift_s for name in ("sent_s", "asked_s", "ended_s")}
        assert process_exit == sent._replace(failed_s=failed_s, host="h", **times_s)


@given(st.integers(-30, 255), st.lists(TEXT).map(tuple), TEXT, st.booleans())
def test_a_verdict_arrives(code, lines, sentence, flag):
    cause = replace(RECORDS[0].cause, words=(sentence,))
    failure = JobFailure(kind="exception", headline=sentence, exit_code=code, causes=(cause,))
    verdict = Conclusion(code, lines, failure if flag else None, has_failed=flag, again=flag)
    assert verdict_of(frame_of(pack_verdict(verdict)).body) == verdict


def test_a_start_arrives():
    token = attempt_token("the launchers' secret", "seed")
    start = JobStart(HostShare(1, 4, 2), 6, Addresses("a:1", "a:2", "a:3"), token, 3)
    packed = pack_start(start, "seed")
    assert token.encode() not in packed
    assert start_of(frame_of(packed).header, "the launchers' secret") == start
    assert start_of(frame_of(packed).header, "another").token != token
    assert attempt_token("the launchers' secret", "next seed") != token


def test_a_card_arrives_fit_to_be_printed():
    card = NodeCard(
        1, 2, 4, "host", "train.py --lr 1", "0a", None, "Python 3.11", -1, "SHOAL_TOKEN"
    )
    assert card_of(frame_of(pack_frame(first_card(card))).header) == card
    strange = card._replace(host="ho\x1b[31mst\n", program="p" * 1000)
    came = card_of(frame_of(pack_frame(first_card(strange))).header)
    assert came.host == "ho?[31mst?"
    assert len(came.program) == 400


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("node", "1"),
        ("processes", None),
        ("processes", -5),
        ("processes", 10**12),
        ("attempt", -1),
        ("attempt", 10**30),
        ("host", 3),
        ("devices", "2"),
        ("highest_shown", None),
    ],
)
def test_a_card_with_a_wrong_field_is_refused(name, value):
    card = NodeCard(1, 2, 4, "host", "train.py", "0a", None, "Python 3.11", -1)
    with pytest.raises(FrameError):
        card_of({**card._asdict(), name: value})


@pytest.mark.parametrize("body", [b"", b"[]", b"{}", b'{"endings": [{}], "trouble": ""}', b"3"])
def test_malformed_exits_and_verdicts_are_refused(body):
    with pytest.raises(FrameError):
        end_of(body, "h")
    with pytest.raises(FrameError):
        verdict_of(body)


def test_malformed_starts_and_signals_are_refused():
    for header in ({}, {"share": [1], "addresses": [], "total": 1, "seed": ""}):
        with pytest.raises(FrameError):
            start_of(header, "")
    with pytest.raises(FrameError):
        signal_of(Frame({"number": 999}, b""))
