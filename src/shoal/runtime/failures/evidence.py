"""The evidence of a report, and what the other processes did.

The evidence is one or several of: a table of the groups that differ or of those that arrived; how
a process died and what was counted; a traceback with its error.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from shoal.errors import counted, inflected
from shoal.runtime.failures.comparison import failed_before
from shoal.runtime.failures.facts import (
    BystanderState,
    CallPlace,
    Cause,
    CheckpointFacts,
    Difference,
    ErrorFacts,
    JobFailure,
    Memory,
    ProcessSet,
    StackFrame,
    Wait,
    Waiting,
)
from shoal.runtime.failures.headline import (
    FILE_COLUMNS,
    HOST_COLUMNS,
    NAME_COLUMNS,
    TYPE_COLUMNS,
    all_processes,
    at_place,
    is_out_of_memory,
    on_host,
    place_words,
    predicate,
    seconds,
    step_words,
)
from shoal.runtime.failures.page import Line, Page, Span, Style
from shoal.runtime.failures.process_text import range_text
from shoal.runtime.failures.shortening import (
    as_one_line,
    capital,
    columns,
    fits,
    message_parts,
    path_end,
    process_ranges,
    shortened,
    shortened_log,
    source_part,
    values_from_difference,
)
from shoal.runtime.failures.stack_text import counted_frames

PATH_COLUMNS = 160  # of the file of a frame
_PLACED_COLUMNS = 30  # of a place and its source, at least
_PATH_LINES, _SAID_LINES = 6, 3  # of a leaf, and of what one group gave of it
_LABEL_COLUMNS = 13  # of a fact of a checkpoint
_DEATHS = ("signal", "exit", "lost", "host_lost", "service_lost")


def evidence(failure: JobFailure, page: Page) -> list[Line]:
    """Return the lines that show the causes."""
    causes = failure.causes
    shown, rest = causes[: page.limits.causes], causes[page.limits.causes :]
    if len(causes) == 1:
        lines = _cause(causes[0], failure, page)
    else:
        lines = [line for cause in shown for line in _one_of_several(cause, failure, page)]
    if rest:
        failed = "; ".join(
            f"{process_ranges(cause.processes)} {predicate(cause)}" for cause in rest
        )
        more = counted(len(rest), "more error")
        lines += page.text(f"{page.style.dots} {more}: {failed}", "quiet", most=1)
    elif shown and _has_traceback(shown[-1]):
        lines.append([])
    return lines


def _one_of_several(cause: Cause, failure: JobFailure, page: Page) -> list[Line]:
    """Return the lines of a cause under a line that names its processes."""
    own = inflected(len(cause.processes), "its own", "their own")
    role, how = "plain", f", on {own}"
    if cause is failure.causes[0]:
        role, how = "cause", ", first"
    if cause.error is None:
        how += f", {predicate(cause)}"
    inner = page._replace(limits=page.limits._replace(frames=min(page.limits.frames, 3)))
    below = _cause(cause, failure, inner.deeper())
    how += ":" if below else "."
    return [*page.spans(Span(process_ranges(cause.processes), role), Span(how)), *below]


def _cause(cause: Cause, failure: JobFailure, page: Page) -> list[Line]:
    lines = []
    if cause.wait is not None:
        lines += _waits(cause, cause.wait, page)
    if cause.difference is not None:
        lines += _difference(cause.difference, cause.processes, failure, page)
    if cause.checkpoint is not None and cause.kind == "checkpoint":
        lines += _checkpoint(cause, cause.checkpoint, failure, page)
    for sentence in _sentences(cause, failure)[: page.limits.groups * 3 // 2]:
        lines += page.text(sentence, most=3)
    if _has_traceback(cause):
        inner = page
        if cause.thread:
            inner = page.deeper()
            lines += page.text(_of_thread(cause), most=2)
        lines += _traceback(cause, inner)
    output = [line for line in cause.last_output if line.strip()][-3:]
    if output and page.limits.output:
        lines += page.text("Its last output:")
        for line in output:
            inner = page.deeper()
            lines += inner.text(shortened_log(line, inner.room, page.style.dots))
    return lines


def _has_traceback(cause: Cause) -> bool:
    return cause.error is not None or bool(cause.frames)


def _of_thread(cause: Cause) -> str:
    name = f"Its thread '{cause.thread}'"
    if cause.wait is None:
        return f"{name} raised:"
    return f"{name} had ended with an exception{_before(cause.thread_age_s)}:"


def _before(age_s: float | None) -> str:
    """Return `, 1.2 s before`; "" if the age is unknown."""
    if age_s is None:
        return ""
    return f", {seconds(age_s)} before"


def _sentences(cause: Cause, failure: JobFailure) -> list[str]:
    """Return the evidence that is neither a traceback nor a table."""
    has_died = cause.kind in _DEATHS and not cause.frames
    ended = ""
    if cause.kind == "deadline" and cause.wait is not None and cause.error is None:
        if cause.wait.limit_s is not None:
            ended = f"The wait ended after {cause.wait.limit_s:g} s."
    if ended and cause.words:
        return [f"{ended} {cause.words[0]}", *cause.words[1:]]
    sentences: list[str] = []
    if has_died and cause.kind == "signal":
        sentences += _signal_sentences(cause, failure)
    if ended:
        sentences.append(ended)
    sentences += cause.words
    if has_died:
        sentences += filter(None, [_last_seen(cause)])
    return sentences


def _signal_sentences(cause: Cause, failure: JobFailure) -> list[str]:
    memory = cause.memory or Memory()
    kills = memory.cgroup_oom_kills
    if is_out_of_memory(cause):
        used, most = memory.cgroup_peak_bytes, memory.cgroup_limit_bytes
        usage = ""
        if used is not None and most is not None:
            usage = f", at {_sizes(used, most)} in use"
        noun = inflected(kills or 0, "kill", "kills")
        sentences = [f"Its cgroup counted {kills} out-of-memory {noun} in this job{usage}."]
        peaks = [(cause.processes, memory.peak_bytes)]
        peaks += [(other.processes, other.peak_bytes) for other in failure.others]
        sizes = [f"{process_ranges(of)} {_size(n)}" for of, n in peaks if n is not None]
        if sizes:
            sentences.append(f"Peak resident size: {', '.join(sizes)}.")
        return sentences
    if cause.sent_by_launcher is None:
        return []
    if cause.sent_by_launcher:
        return ["shoal run sent the signal."]
    if cause.signal == "SIGKILL" and kills == 0:
        return ["shoal run did not send the signal, and the cgroup recorded no OOM kill."]
    return ["shoal run did not send the signal."]


def _last_seen(cause: Cause) -> str:
    place, memory = cause.place, cause.memory
    seen = f"{at_place(place)}{step_words(cause.step)}".lstrip()
    if place is not None and place.age_s is not None and place.age_s >= 1.0:
        seen += _before(place.age_s)
    if seen and cause.kind == "host_lost":
        are = inflected(len(cause.processes), "was", "were")
        return f"{capital(process_ranges(cause.processes))} {are} last seen {seen}."
    parts = []
    if seen:
        parts.append(f"last seen {seen}")
    if cause.last_met is not None:
        parts.append(f"last met the others at {place_words(cause.last_met)}")
    if memory is not None and memory.peak_bytes is not None and not is_out_of_memory(cause):
        parts.append(f"peak resident size {_size(memory.peak_bytes)}")
    if not parts:
        return ""
    return capital("; ".join(parts)) + "."


# Tables.


def _difference(
    difference: Difference, processes: ProcessSet, failure: JobFailure, page: Page
) -> list[Line]:
    sides = sorted(difference.sides, key=lambda side: (len(side.processes), side.processes))
    shown, left_out = _ends(sides, page.limits.groups)
    is_one_place = len({side.place and (side.place.file, side.place.line) for side in sides}) == 1
    lines: list[Line] = []
    inner = page
    if is_one_place:
        inner = page.deeper()
        place = sides[0].place
        if place is not None:
            lines += _place_row(place, page)
    if difference.what == "program" and difference.path:
        lines += page.text(f"first difference, {difference.path}:", most=2)
    elif difference.path:
        lines += inner.text(difference.path, most=_PATH_LINES)
        inner = inner.deeper()
    said = [": ".join(filter(None, (side.path, side.said))) for side in shown]
    labels = [[_label(side.processes, failure, page.style.dots)] for side in shown]

    def values(room: int) -> list[str]:
        if any(side.path for side in shown) or all(fits(text, _SAID_LINES * room) for text in said):
            return said
        return values_from_difference(said, room, page.style.dots)

    def places(room: int) -> list[str]:
        texts = said
        if difference.what == "call":
            sources = [side.place and side.place.source for side in shown]
            texts = [source or text for source, text in zip(sources, said, strict=True)]
        return _placed([side.place for side in shown], texts, room, page.style)

    if shown:
        if is_one_place:
            table = inner.rows(labels, values)
        else:
            table = inner.rows(labels, places, least=_PLACED_COLUMNS)
        lines += _with_note(table, left_out, [side.processes for side in sides], inner)
    if difference.found_at is not None:
        silent = "These calls send"
        if difference.call:
            silent = f"{difference.call} sends"
        where = f"the difference was found at {place_words(difference.found_at)}"
        lines += page.text(f"{silent} nothing; {where}.", most=2)
    known = {process for side in sides for process in side.processes}
    known.update(process for other in failure.others for process in other.processes)
    rest = {*processes} - known
    if rest:
        lines += page.text(f"{capital(process_ranges(rest))} raised the same error.", most=2)
    if difference.failed_since:
        lines += page.text(failed_before(difference.failed_since), most=3)
    return lines


def _ends(items: Sequence[Any], limit: int) -> tuple[list[Any], tuple[int, int]]:
    """Return the first and the last of many, and the slice that is left out between them."""
    if len(items) <= limit:
        return list(items), (0, 0)
    first, last = (limit + 1) // 2, limit // 2
    return [*items[:first], *items[len(items) - last :]], (first, len(items) - last)


def _with_note(
    table: list[list[Line]], left_out: tuple[int, int], groups: Sequence[ProcessSet], page: Page
) -> list[Line]:
    """Return the lines of a table, with a note of the groups left out between its rows."""
    first, after = left_out
    lines = [line for row in table[: first or len(table)] for line in row]
    if after > first:
        lines += page.text(_more_groups(groups[first:after], page), "quiet")
        lines += [line for row in table[first:] for line in row]
    return lines


def _more_groups(groups: Sequence[ProcessSet], page: Page) -> str:
    more = counted(len(groups), "more group")
    of = counted(sum(len(group) for group in groups), "process", "processes")
    return f"{page.style.dots} {more}, {of}"


class _WaitRow(NamedTuple):
    """A row of the table of where processes stood, and the lines below it."""

    labels: list[str]  # the processes last
    place: CallPlace | None
    text: str
    notes: list[str]


def _waits(cause: Cause, wait: Wait, page: Page) -> list[Line]:
    """Return where processes stood: those that arrived, those that are missing."""
    most = max(1, page.limits.groups // 2)
    arrived, missing = wait.arrived[:most], wait.missing[:most]
    if cause.kind == "stalled":
        rows, below = [_stalled_row(group) for group in (*missing, *arrived)], page.deeper(0)
    else:
        rows = [_arrival_row("arrived", group) for group in arrived]
        rows += [_arrival_row("missing", group) for group in missing]
        below = page.deeper(10)
    if not rows:
        return []
    places, texts = [row.place for row in rows], [row.text for row in rows]
    table = page.rows(
        [row.labels for row in rows],
        lambda room: _placed(places, texts, room, page.style),
        label_at=len(rows[0].labels) - 1,
        least=_PLACED_COLUMNS,
    )
    lines: list[Line] = []
    for row, row_lines in zip(rows, table, strict=True):
        lines += row_lines
        for note in row.notes:
            lines += below.text(note, most=2)
    left = [group.processes for group in (*wait.arrived[most:], *wait.missing[most:])]
    if left:
        lines += page.text(_more_groups(left, page), "quiet")
    return lines


def _stalled_row(group: Waiting) -> _WaitRow:
    place = group.place or _innermost(group.frames)
    parts = [group.words]
    if place is not None:
        parts.append(place.source)
    text = ": ".join(filter(None, parts))
    return _WaitRow([_wide_ranges(group.processes)], place, text, _met_before(group))


def _arrival_row(state: str, group: Waiting) -> _WaitRow:
    place = group.place or _innermost(group.frames)
    text = group.words
    if place is not None:
        text = place.source
    notes = _met_before(group)
    if group.frames and group.words:
        notes.insert(0, group.words)
    return _WaitRow([state, _wide_ranges(group.processes)], place, text, notes)


def _met_before(group: Waiting) -> list[str]:
    if group.last_met is None:
        return []
    return [f"last met the others{at_place(group.last_met)}{_before(group.last_met.age_s)}"]


def _innermost(frames: Sequence[StackFrame]) -> CallPlace | None:
    if not frames:
        return None
    last = frames[-1]
    return CallPlace(file=last.file, line=last.line, source=last.source, columns=last.columns)


def _checkpoint(
    cause: Cause, checkpoint: CheckpointFacts, failure: JobFailure, page: Page
) -> list[Line]:
    lines: list[Line] = []
    if cause.place is not None:
        lines += _place_row(cause.place, page)
    file = checkpoint.path
    if checkpoint.file:
        file = os.path.join(file, checkpoint.file)
    block = leaf = ""
    if checkpoint.offset_bytes is not None:
        block = f"the block at byte {checkpoint.offset_bytes:,}"
    if checkpoint.leaf:
        leaf = f"of leaf '{checkpoint.leaf}'"
    where = ", ".join(part for part in (block, leaf) if part)
    damage = ": ".join(part for part in (where, checkpoint.damage) if part)
    finders = process_ranges(cause.processes)
    if len(cause.processes) == failure.num_processes > 1:
        finders = all_processes(failure.num_processes)
    if checkpoint.read_well:
        finders += f"; {process_ranges(checkpoint.read_well)} read it well"
    file = path_end(file, page.room - _LABEL_COLUMNS, page.style.dots)
    for label, text in (("file", file), ("damage", damage), ("found by", finders)):
        if text:
            lines += page.text(f"{label:<{_LABEL_COLUMNS}}{text}", most=3)
    return lines


def _place_row(place: CallPlace, page: Page) -> list[Line]:
    where = f"{path_end(place.file, FILE_COLUMNS, page.style.dots)}:{place.line}"
    if not place.source:
        return page.text(where)

    def source(room: int) -> list[str]:
        return [source_part(place.source, place.columns, room, page.style.dots)]

    return page.rows([[where]], source, label_at=-1)[0]


def _placed(
    places: Sequence[CallPlace | None], texts: Sequence[str], room: int, style: Style
) -> list[str]:
    """Return texts of at most `room` columns, each after its place, if it has one."""
    most = max(12, min(FILE_COLUMNS, room - 28))
    heads = [""] * len(places)
    for n, place in enumerate(places):
        if place is not None and place.file:
            heads[n] = f"{path_end(place.file, most, style.dots)}:{place.line}"
    width = max(map(columns, heads), default=0)
    lines = []
    for place, head, text in zip(places, heads, texts, strict=True):
        before = ""
        if head:
            before = f"{head}{' ' * (width - columns(head))}   "
        expression: tuple[int, ...] = ()
        if place is not None and text == place.source:
            expression = place.columns
        left = room - columns(before)
        if left < 8:
            lines.append(shortened(f"{head} {text}", room, style.dots))
        else:
            lines.append(before + source_part(text, expression, left, style.dots))
    return lines


def _label(processes: ProcessSet, failure: JobFailure, dots: str) -> str:
    """Return processes as the label of a row, with the hosts of which they are all."""
    label = _wide_ranges(processes)
    if len(failure.hosts) > 1:
        whole = [host for host, of in failure.hosts.items() if of and set(of) <= set(processes)]
        count = sum(len(failure.hosts[host]) for host in whole)
        names = ", ".join(shortened(host, HOST_COLUMNS, dots) for host in whole)
        if len(whole) <= 2 and count == len(processes):
            label += f" (all of {names})"
    return label


def _wide_ranges(processes: ProcessSet) -> str:
    text = process_ranges(processes)
    if len(text) <= 28 or len(processes.ranges) == 1:
        return text
    first = range_text(processes.ranges[0])
    return f"{len(processes)} processes ({first} and others)"


# Tracebacks.


def _traceback(cause: Cause, page: Page) -> list[Line]:
    """Return frames as Python prints them, what was left out, and the error."""
    dots = page.style.dots
    frames, left = _frames(cause.frames, page.limits.frames)
    left += cause.more_frames
    lines: list[Line] = []
    gap_at = min(1, len(frames) - 1)  # after the outermost frame
    for index, frame in enumerate(frames):
        if left and index == gap_at:
            lines += page.text(f"{dots} {counted(left, 'frame')} {dots}", "quiet")
        lines += _frame(frame, page)
    if cause.error is not None and cause.error.repeats:
        repeats = cause.error.repeats
        times = inflected(repeats, "time", "times")
        lines += page.text(f"{dots} the same frame {repeats:,} {times}", "quiet")
    lines += _left_out(cause, page)
    if cause.error is not None:
        lines += _error(cause.error, page)
    if cause.is_bug:
        lines += page.text("This is a bug in shoal: please report it, with the log.")
    return lines


def _frames(frames: Sequence[StackFrame], limit: int) -> tuple[list[StackFrame], int]:
    """Return the outermost frame and the innermost ones, and how many are left out."""
    if len(frames) <= limit:
        return list(frames), 0
    inner = min(3, limit - 1)
    shown = [*frames[:1], *frames[-inner:]]
    if not inner:
        shown = list(frames[-1:])
    return shown, len(frames) - len(shown)


def _frame(frame: StackFrame, page: Page) -> list[Line]:
    dots = page.style.dots
    tail = f'", line {frame.line}, in {shortened(frame.function, NAME_COLUMNS, dots)}'
    file = path_end(frame.file, max(PATH_COLUMNS, page.room - 6 - columns(tail)), dots)
    lines = page.text(f'File "{file}{tail}')
    source = source_part(frame.source, frame.columns, page.room - 2, dots)
    if source:
        lines += page.deeper().text(source)
    return lines


def _left_out(cause: Cause, page: Page) -> list[Line]:
    frames = counted_frames(cause.left_out)
    if not frames:
        return []
    text = f"{page.style.dots} {frames}"
    if cause.kind == "signal":
        text += ", then native code"
    if "shoal" in cause.left_out:
        text += " (SHOAL_TRACEBACK=full shows them)"
    return page.text(text, "quiet", most=1)


def _error(error: ErrorFacts, page: Page) -> list[Line]:
    """Return the type and the message, then what caused it, or the leaves of a group."""
    lines = _message(error, page)
    dots = page.style.dots
    for leaf in error.leaves[:2]:
        inner = page.deeper()
        lines += inner.text(_on_one_line(leaf, inner.room, dots), most=1)
    left = len(error.leaves) + error.more_leaves - 2
    if left > 0:
        lines += page.deeper().text(f"{dots} {left} more", "quiet")
    shown = [
        cause
        for cause in error.caused_by
        if not cause.message or cause.message not in error.message
    ]
    for cause in shown[:2]:
        place = ""
        if cause.place:
            place = f" ({cause.place})"
        room = max(20, page.room - len("caused by ") - columns(place))
        lines += page.text(f"caused by {_on_one_line(cause, room, dots)}{place}", most=1)
    return lines


def _on_one_line(error: ErrorFacts, room: int, dots: str) -> str:
    """Return the type, and what fits of the message."""
    message = as_one_line(error.message.splitlines())
    if not message:
        return error.type
    return f"{error.type}: {shortened(message, max(20, room - columns(error.type) - 2), dots)}"


def _message(error: ErrorFacts, page: Page) -> list[Line]:
    """Return the type and the message: all of it, or its beginning and its end."""
    limit = page.limits.message
    text = "\n".join(part for part in (error.message, *error.notes) if part.strip())
    text = re.sub(r"\((\d+) sub-exceptions?\)", _errors, text)
    length = (error.message_characters or len(error.message)) + len(text) - len(error.message)
    if len(text) <= limit * page.room:
        parts = message_parts(text, None, is_whole=True)
        lines = _typed(error.type, parts.head, page)
        if len(lines) <= limit and length <= len(text):
            return lines
    parts = message_parts(text, length, is_whole=False)
    lines = _typed(error.type, parts.head, page)
    if len(lines) > limit:
        lines = _typed(error.type, [as_one_line(parts.head)], page)
    if parts.left_out:
        dots = page.style.dots
        lines += page.deeper().text(f"{dots} {parts.left_out} {dots}", "quiet")
        if parts.tail:
            lines += page.deeper().text(parts.tail, most=2)
    return lines


def _errors(match: re.Match[str]) -> str:
    return f"({counted(int(match[1]), 'error')})"


def _typed(kind: str, message: Sequence[str], page: Page) -> list[Line]:
    """Return lines of a message after the type of its error."""
    bold = Span(shortened(kind, TYPE_COLUMNS, page.style.dots), "cause")
    if not message:
        return page.spans(bold)
    lines = page.spans(bold, Span(f": {message[0]}"))
    for line in message[1:]:
        lines += page.deeper().text(line)
    return lines


# The other processes.


def others(failure: JobFailure, page: Page) -> list[Line]:
    """Return a sentence for each state of the processes that did not fail themselves."""
    lines: list[Line] = []
    rows = _alike(failure.others)
    sentences = [_other(other, failure, page.style.dots) for other in rows]
    step = in_step(failure)
    if step:
        sentences[:1] = [" ".join([step, *sentences[:1]])]
    shown = page.limits.others
    most = 5 if shown > 1 else 3
    for sentence in sentences[:shown]:
        lines += page.text(sentence, most=most)
    left = sum(len(other.processes) for other in rows[shown:])
    if left:
        rest = counted(left, "other process", "other processes")
        lines += page.text(f"{page.style.dots} {rest}", "quiet")
    return lines


def _alike(others: Sequence[BystanderState]) -> list[BystanderState]:
    """Join those of which the sentences are alike: exit codes that follow a wait are not shown."""
    groups: dict[BystanderState, list[int]] = {}
    for other in others:
        shown = dataclasses.replace(
            other, processes=ProcessSet(), exit_code=None, at_s=None, peak_bytes=None
        )
        groups.setdefault(shown, []).extend(other.processes)
    return [
        dataclasses.replace(other, processes=ProcessSet(processes))
        for other, processes in groups.items()
    ]


def in_step(failure: JobFailure) -> str:
    """Return the step of an exception that is the only cause; "" if it is unknown."""
    if len(failure.causes) != 1 or not _has_traceback(failure.causes[0]):
        return ""
    cause = failure.causes[0]
    if cause.step is None or cause.wait is not None:
        return ""
    return f"In step {cause.step}."


def _other(other: BystanderState, failure: JobFailure, dots: str) -> str:
    """Return what processes did when the job failed."""
    host = on_host(other.processes, failure, dots)
    label = f"{capital(process_ranges(other.processes))}{host}"
    if other.words:
        is_open = ":" in other.words or not (other.words[-1].isalnum() or other.words[-1] in "')")
        return f"{label} {other.words}" if is_open else f"{label} {other.words}."
    did = _did(other, failure)
    if not did:
        return f"What {process_ranges(other.processes)}{host} did is unknown."
    return f"{label} {did}."


def _did(other: BystanderState, failure: JobFailure) -> str:
    """Return the predicate of processes in a state; "" if that is unknown."""
    was = inflected(len(other.processes), "was", "were")
    if other.state == "waiting":
        if _is_there(other, failure):
            return f"{was} waiting there{step_words(other.step)}"
        return f"{was} waiting{at_place(other.place)}{step_words(other.step)}"
    if other.state == "running":
        phrase = f"{was} running{at_place(other.place)}{step_words(other.step)}"
        if other.ended_by:
            phrase += f", and {was} ended by shoal run with {other.ended_by}"
        if other.joined_by_jax:
            it = inflected(len(other.processes), "it", "they")
            phrase += f": {it} joined by JAX alone, which takes SIGTERM as a preemption notice"
        return phrase
    if other.state == "stopped":
        return f"learned of it{_at_step(other)}"
    if other.state == "left":
        return "had left the job"
    if other.state == "ended":
        if other.ended_by:
            return f"{was} ended by shoal run with {other.ended_by}"
        return "ended because of it"
    return ""


def _at_step(other: BystanderState) -> str:
    """Return ` at step 3 (train.py:6)`, or as much of it as is known."""
    if other.step is None or (other.place is not None and other.place.call):
        return f"{at_place(other.place)}{step_words(other.step)}"
    if other.place is None:
        return f" at step {other.step}"
    return f" at step {other.step} ({place_words(other.place)})"


def _is_there(other: BystanderState, failure: JobFailure) -> bool:
    """Return whether processes waited at the place that the evidence has named."""
    if len(failure.causes) != 1:
        return False
    (cause,) = failure.causes
    if cause.kind != "signal" or cause.frames:
        return False
    there, place = cause.place, other.place
    if there is None or place is None or cause.kind == "host_lost":
        return False
    key = (place.call, place.name, place.file, place.line)
    return key == (there.call, there.name, there.file, there.line)


def end_of_all(failure: JobFailure) -> str:
    """Return how soon an interrupted job had ended, "" if not all of its processes did."""
    states = {other.state for other in failure.others}
    begin, end = failure.failed_after_s, failure.ended_after_s
    count = sum(len(other.processes) for other in failure.others)
    if any(other.words for other in failure.others):  # some had ended before
        return ""
    if states != {"ended"} or count != failure.num_processes or begin is None or end is None:
        return ""
    all_of_them = "The process"
    if count > 1:
        all_of_them = f"All {count} processes"
    return f"{all_of_them} ended within {seconds(max(0.1, end - begin))}."


def _size(count: int) -> str:
    if count < 10 << 30:
        return f"{count / (1 << 20):.0f} MiB"
    return f"{count / (1 << 30):.1f} GiB"


def _sizes(used: int, limit: int) -> str:
    """Return `900 of 900 MiB`."""
    if _size(used).split()[1] == _size(limit).split()[1]:
        return f"{_size(used).split()[0]} of {_size(limit)}"
    return f"{_size(used)} of {_size(limit)}"
