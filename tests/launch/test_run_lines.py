"""How output is cut into lines, redrawn, and kept."""

from __future__ import annotations

import itertools
import os
import pty

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from shoal.launch import output
from shoal.launch.output import (
    Exactly,
    Lines,
    LineStream,
    Log,
    Outlet,
    WholeLines,
    paint_prefixes,
)
from shoal.runtime.failures.last_record import BEGIN, END
from terminals import screen

# What matters to the cutting of lines, and characters of one to four bytes.
BYTES = st.lists(st.sampled_from([b"a", b"b", b"\n", b"\r", b"\0", b"\xff", "€".encode()])).map(
    b"".join
)


class Memory(Log):
    """A log that is not a file."""

    def __init__(self) -> None:
        self.data, self.problem, self.tail = b"", "", b""

    def write(self, data: bytes, *, is_of_program: bool = True) -> None:
        self.data += data


def stream(outlet: Outlet | None, prefix: bytes, log: Log) -> LineStream:
    """Return one that is shown line by line; not shown if there is no outlet."""
    return LineStream(Lines(outlet, prefix) if outlet else None, log)


def speak(outlet: Outlet, chunks: list[bytes]) -> tuple[bytes, Memory]:
    """Return what an outlet and a log got from chunks of bytes."""
    log = Memory()
    voice = stream(outlet, b"p0| ", log)
    for chunk in chunks:
        voice.feed(chunk, 0.0)
    voice.close()
    return bytes(outlet.waiting), log


@pytest.fixture
def terminal():
    ours, theirs = pty.openpty()
    yield Outlet(theirs, {"TERM": "xterm"})
    os.close(ours)
    os.close(theirs)


def a_pipe() -> Outlet:
    """Return an outlet that is no terminal; nothing is written to it."""
    return Outlet(-1, {})


@given(data=BYTES, cuts=st.lists(st.integers(0, 30)))
@example(data=b"10%\r20%\r\nend", cuts=[3, 4, 8])
def test_lines_do_not_depend_on_how_they_arrive(data, cuts):
    places = sorted({0, len(data), *(cut for cut in cuts if cut < len(data))})
    chunks = [data[a:b] for a, b in itertools.pairwise(places)]
    shown, log = speak(a_pipe(), chunks)
    assert log.data == data
    ends = data.split(b"\n")
    if not ends[-1]:
        ends.pop()  # the last line was complete
    visible = [line.rstrip(b"\r").rpartition(b"\r")[2] for line in ends]
    if ends and not data.endswith(b"\n") and not ends[-1].strip(b"\r"):
        visible = [*visible[:-1], b""]
    assert shown == b"".join(b"p0| " + line + b"\n" for line in visible)


def test_a_very_long_line_comes_in_pieces_that_split_no_character():
    data = b"x" + "€".encode() * 100_000
    shown, _ = speak(a_pipe(), [data[i : i + 5000] for i in range(0, len(data), 5000)])
    pieces = shown.splitlines()
    assert len(pieces) > 1
    assert b"".join(piece.removeprefix(b"p0| ") for piece in pieces) == data
    assert all(piece.decode() for piece in pieces)


def test_a_progress_bar_in_a_file_leaves_a_line_now_and_then():
    outlet = a_pipe()
    voice = stream(outlet, b"p0| ", Memory())
    voice.feed(b"\r10%", 100.0)
    assert voice.due_s == 105.0
    voice.feed(b"\r20%", 101.0)
    assert voice.due_s == 105.0
    voice.show_unfinished()
    assert bytes(outlet.waiting) == b"p0| 20%\n"
    voice.feed(b"\r20%", 106.0)
    voice.show_unfinished()  # nothing new
    voice.feed(b"\r99%\n", 107.0)
    assert bytes(outlet.waiting) == b"p0| 20%\np0| 99%\n"
    assert voice.due_s is None


def test_an_unfinished_line_without_progress_waits_in_a_file():
    outlet, log = a_pipe(), Memory()
    voice = stream(outlet, b"p0| ", log)
    voice.feed(b"loading", 100.0)
    assert (voice.due_s, log.data) == (105.0, b"")
    voice.show_unfinished()
    assert (voice.due_s, log.data, bytes(outlet.waiting)) == (None, b"loading", b"")
    voice.feed(b" done\n", 106.0)
    assert (voice.due_s, log.data) == (None, b"loading done\n")
    assert bytes(outlet.waiting) == b"p0| loading done\n"


@pytest.mark.parametrize("outlet", [a_pipe(), None])
def test_two_streams_do_not_mix_within_a_line_of_the_log(outlet):
    log = Memory()
    words, errors = stream(outlet, b"", log), stream(outlet, b"", log)
    for piece in (b"a", b" ", b"1", b"\nb"):
        words.feed(piece, 1.0)
        errors.feed(b"x" + piece, 1.0)
    words.close()
    errors.close()
    assert log.data == b"a 1\nxax x1x\nbb"


def test_a_terminal_has_a_row_for_each_bar_below_what_is_written(terminal):
    terminal.bars.share_terminal(24)
    first, second, third = (
        stream(terminal, b"p%d| " % number, Memory()) for number in range(3)
    )  # fmt: skip
    first.feed(b"\r10%", 1.0)
    assert first.due_s == pytest.approx(1.1)
    for one, percent in ((first, 10), (second, 10), (first, 20), (second, 30), (first, 40)):
        one.feed(b"\r%d%%" % percent, 1.0)
        one.show_unfinished()
    assert screen(terminal.waiting) == ["p0| 40%", "p1| 30%"]
    third.feed(b"a line\nand one\n", 3.0)
    assert screen(terminal.waiting) == ["p2| a line", "p2| and one"]
    terminal.bars.draw()
    assert screen(terminal.waiting) == ["p2| a line", "p2| and one", "p0| 40%", "p1| 30%"]
    first.feed(b"\r100%\n", 4.0)
    terminal.bars.draw()
    assert screen(terminal.waiting) == ["p2| a line", "p2| and one", "p0| 100%", "p1| 30%"]
    second.feed(b"\r      \rdone\n", 5.0)
    terminal.bars.draw()
    assert screen(terminal.waiting)[2:] == ["p0| 100%", "p1| done"]


def test_a_bar_wider_than_the_terminal_has_one_row(terminal):
    terminal.bars.share_terminal(24)
    bars = [stream(terminal, b"p%d| " % number, Memory()) for number in range(2)]
    for percent in range(3):
        for one in bars:
            one.feed(b"\r%d%% " % percent + b"x" * 200, 1.0)
            one.show_unfinished()
    assert screen(terminal.waiting, columns=40) == [
        "p0| 2% " + "x" * 33,
        "p1| 2% " + "x" * 33,
    ]


@pytest.mark.parametrize(("lines", "rows"), [(None, 1), (0, 1), (6, 3), (200, 16)])
def test_bars_for_which_there_is_no_room_are_shown_at_their_end(terminal, lines, rows):
    """`lines` of the terminal; None: another program may write there, such as tee."""
    if lines is not None:
        terminal.bars.share_terminal(lines)
    bars = [stream(terminal, b"p%d| " % number, Memory()) for number in range(20)]
    for one in bars:
        one.feed(b"\r10%", 1.0)
        one.show_unfinished()
    assert screen(terminal.waiting) == [f"p{number}| 10%" for number in range(rows)]
    for one in bars:
        one.feed(b"\r100%", 1.0)
        one.close()
    assert screen(terminal.waiting) == [f"p{number}| 100%" for number in range(20)]


def test_a_prompt_and_a_bar_do_not_overwrite_each_other(terminal):
    first, second = (stream(terminal, prefix, Memory()) for prefix in (b"p0| ", b"p1| "))
    for one, data in ((first, b"\r10%"), (second, b"name? "), (first, b"\r20%")):
        one.feed(data, 1.0)
        one.show_unfinished()
    assert screen(terminal.waiting) == ["p1| name?", "p0| 20%"]
    second.feed(b"\n", 2.0)
    first.feed(b"\n", 2.0)
    assert screen(terminal.waiting) == ["p1| name?", "p0| 20%"]


def test_a_line_that_becomes_a_bar_is_redrawn(terminal):
    one = stream(terminal, b"p0| ", Memory())
    for data in (b"loading", b"\r10%", b"\r20%", b"\n"):
        one.feed(data, 1.0)
        one.show_unfinished()
    assert screen(terminal.waiting) == ["p0| 20%"]


@pytest.mark.parametrize("end", [b"\n", b""])
def test_a_line_that_another_has_ended_is_not_shown_twice(terminal, end):
    first, second = (stream(terminal, prefix, Memory()) for prefix in (b"p0| ", b"p1| "))
    first.feed(b"loading", 1.0)
    first.show_unfinished()
    second.feed(b"done\n", 2.0)
    first.feed(end, 3.0)
    first.close()
    assert bytes(terminal.waiting) == b"p0| loading\np1| done\n"


def test_a_terminal_shows_a_prompt_and_goes_on_behind_it(terminal):
    voice = stream(terminal, b"p0| ", Memory())
    for dots in (b".", b"."):
        voice.feed(dots, 1.0)
        voice.show_unfinished()
    voice.feed(b" done\n", 2.0)
    assert bytes(terminal.waiting) == b"p0| .. done\n"


def test_a_colour_that_is_left_on_does_not_run_into_the_next_line(terminal):
    voice = stream(terminal, b"p0| ", Memory())
    voice.feed(b"\x1b[31mred\n", 1.0)
    assert bytes(terminal.waiting) == b"p0| \x1b[31mred\x1b[0m\n"


def test_hidden_output_is_still_logged_and_kept_as_tail(tmp_path):
    log = Log(str(tmp_path / "log"))
    voice = stream(None, b"", log)
    voice.feed(b"one", 1.0)
    voice.feed(b" line\n", 2.0)
    assert voice.due_s is None
    assert log.tail == (tmp_path / "log").read_bytes() == b"one line\n"
    voice.feed(b"x" * 100_000 + b"the end\n", 3.0)
    assert log.tail.endswith(b"the end\n")
    assert len(log.tail) < 1 << 16
    log.close()


def test_lines_of_shoal_for_the_log_are_no_output_of_the_program(tmp_path):
    log = Log(str(tmp_path / "log"))
    stream(None, b"", log).feed(b"loss 1\n" + BEGIN + b"Traceback\n" + END + b"loss 2\n", 1.0)
    assert log.tail == b"loss 1\nloss 2\n"
    assert (tmp_path / "log").read_bytes() == b"loss 1\nTraceback\nloss 2\n"
    log.close()


@given(data=BYTES, rest=BYTES, cuts=st.lists(st.integers(0, 90)))
def test_lines_for_the_log_are_not_shown_however_they_are_cut(data, rest, cuts):
    whole = b"before\n" + BEGIN + b"Traceback\n" + data + b"\n" + END + rest + b"\n"
    places = sorted({0, len(whole), *(cut for cut in cuts if cut < len(whole))})
    shown, log = speak(a_pipe(), [whole[a:b] for a, b in itertools.pairwise(places)])
    assert log.data == b"before\nTraceback\n" + data + b"\n" + rest + b"\n"
    assert shown == speak(a_pipe(), [b"before\n" + rest + b"\n"])[0]


def test_bytes_that_resemble_a_mark_are_shown():
    for data in (b"\x1e\n", BEGIN[:-1], b"a" + BEGIN[:7] + b"b\n", b"\x1b[31mred\n"):
        shown, log = speak(a_pipe(), [data])
        assert log.data == data
        assert shown == b"p0| " + data.rstrip(b"\n") + b"\n"


def test_a_process_that_dies_within_what_is_for_the_log_shows_nothing_of_it():
    shown, log = speak(a_pipe(), [b"before\n" + BEGIN + b"Traceback\nhalf"])
    assert shown == b"p0| before\n"
    assert log.data == b"before\nTraceback\nhalf"


def test_an_unfinished_line_before_what_is_for_the_log_is_shown(terminal):
    shown, log = speak(terminal, [b"10 %", BEGIN + b"Traceback\n" + END, b"next\n"])
    assert shown == b"p0| 10 %\np0| next\n"
    assert log.data == b"10 %Traceback\nnext\n"


def test_a_full_disk_ends_the_log_and_not_the_job():
    log = Log("/dev/full")
    voice = stream(a_pipe(), b"p0| ", log)
    voice.feed(b"a line\n", 1.0)
    voice.feed(b"another\n", 2.0)
    assert "/dev/full ends early: No space left" in log.problem
    log.close()


def test_a_log_is_not_written_through_a_link(tmp_path):
    (tmp_path / "mine").write_text("precious")
    (tmp_path / "p0000.log").symlink_to("mine")
    with pytest.raises(OSError, match=r"p0000\.log: it is a symbolic link to .*: remove the link"):
        Log(str(tmp_path / "p0000.log"))
    assert (tmp_path / "mine").read_text() == "precious"


def test_an_outlet_without_a_reader_is_broken_and_forgets():
    read_fd, write_fd = os.pipe()
    outlet = Outlet(write_fd, {})
    outlet.put(b"x")
    os.close(read_fd)
    outlet.write_some()
    outlet.put(b"more")
    assert (outlet.broken, bytes(outlet.waiting)) == ("the output has no reader", b"")
    os.close(write_fd)


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="it needs /dev/full")
def test_outlet_on_a_full_disk_has_the_reason():
    fd = os.open("/dev/full", os.O_WRONLY)
    outlet = Outlet(fd, {})
    outlet.put(b"x")
    outlet.write_some()
    assert outlet.broken == "the output cannot be written: No space left on device"
    os.close(fd)


def test_prefixes_are_aligned_and_coloured_apart():
    plain = paint_prefixes(11, colour=False)
    assert (plain[0], plain[10]) == (b"p0|  ", b"p10| ")
    coloured = paint_prefixes(3, colour=True)
    assert len({prefix.split(b"p")[0] for prefix in coloured}) == 3


def test_no_prefixes_on_request():
    assert paint_prefixes(3, colour=True, shown=False) == [b"", b"", b""]


def test_gloo_connection_lines_are_logged_and_not_shown():
    text = b"[Gloo] Rank 1 is connected to %d peer ranks. "
    text += b"Expected number of connected peer ranks is : 3"
    shown, log = speak(a_pipe(), [b"a\n", text % 3 + b"\nb\n", text % 2 + b"\n"])
    assert shown == b"p0| a\np0| b\np0| " + text % 2 + b"\n"
    assert text % 3 in log.data


def test_interleaved_gloo_lines_are_not_shown():
    mixed = [
        b"[Gloo] Rank [Gloo] Rank 2 is connected to 3 peer ranks. "
        b"Expected number of connected peer ranks is : 3",
        b"3 is connected to 3 peer ranks. Expected number of connected peer ranks is : 3",
        b" peer ranks. Expected number of connected peer ranks is : 33",
    ]
    told = b"I am connected to 3 peer ranks. "
    shown, log = speak(a_pipe(), [line + b"\n" for line in [*mixed, told, b"12"]])
    assert shown == b"p0| " + told + b"\np0| 12\n"
    assert all(line in log.data for line in mixed)


def test_threads_of_a_process_may_mark_at_the_same_time():
    first, second = BEGIN + b"a\n", BEGIN + b"b\n"
    shown, log = speak(a_pipe(), [first, second + END, b"still a\n" + END, END, b"for all\n"])
    assert shown == b"p0| for all\n"
    assert log.data == b"a\nb\nstill a\nfor all\n"


@pytest.mark.parametrize("on_terminal", [True, False])
def test_rest_of_a_torn_notice_is_not_shown(on_terminal, request):
    words = b"[Gloo] Rank 0 is connected to 1 peer ranks. "
    words += b"Expected number of connected peer ranks is : "
    torn = [words + words + b"1\n", b"1\n"]
    three = [words + words, words + b"11\n\n", b"1\n"]
    early = [words + b"1" + words[:12], b"\n" + words[12:] + b"1\n"]
    outlet = request.getfixturevalue("terminal") if on_terminal else a_pipe()
    for pieces in (torn, three, early):
        shown, log = speak(outlet, [*pieces, b"1\n", b"\n", b"loss 1\n"])
        assert log.data == b"".join(pieces) + b"1\n\nloss 1\n"
        assert shown.splitlines() == [b"p0| 1", b"p0| ", b"p0| loss 1"]
        outlet.waiting = outlet.waiting[:0]


@given(
    texts=st.lists(BYTES, min_size=2, max_size=3),
    cuts=st.lists(st.tuples(st.integers(0, 2), st.integers(1, 9), st.booleans()), max_size=60),
)
def test_whole_lines_of_several_streams_stay_whole_however_they_arrive(texts, cuts):
    """A line longer than 5 bytes is passed on in pieces; `cuts`: of which stream, how much."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(output, "_LINE_BYTES", 5)
        outlet = a_pipe()
        streams = [LineStream(WholeLines(outlet), Memory()) for _ in texts]
        rests, paused = [*texts], False
        for number, size, pauses in cuts:
            which = number % len(texts)
            if not streams[which].waits:
                streams[which].feed(rests[which][:size], 1.0)
                rests[which] = rests[which][size:]
            if pauses and any(rests):
                paused = True
                streams[which].show_unfinished()
        for one, rest in zip(streams, rests, strict=True):
            one.feed(rest, 1.0)
            one.close()
    shown = bytes(outlet.waiting)
    assert sorted(shown.replace(b"\n", b"")) == sorted(b"".join(texts).replace(b"\n", b""))
    if not paused:
        lines = [line for text in texts for line in text.split(b"\n") if line]
        assert sorted(filter(None, shown.split(b"\n"))) == sorted(lines)
        assert 0 <= len(shown) - len(b"".join(texts)) < len(texts)
    assert (outlet.held_by, outlet.waiting_displays) == (None, [])


@given(chunks=st.lists(BYTES))
def test_the_bytes_of_one_process_are_shown_as_they_come(chunks):
    outlet = a_pipe()
    one = LineStream(Exactly(outlet), Memory())
    for number, chunk in enumerate(chunks):
        one.feed(chunk, 1.0)
        assert bytes(outlet.waiting) == b"".join(chunks[: number + 1])
    one.close()
    assert bytes(outlet.waiting) == b"".join(chunks)
