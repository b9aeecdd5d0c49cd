"""How often loops run, by the text of their conditions, against loops that are counted."""

from string import Template

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shoal.plan.compiled import instructions_of, trips_of

COMPARE = {"LT": int.__lt__, "LE": int.__le__, "GT": int.__gt__, "GE": int.__ge__}


SHAPE = "(s32[]{:T(128)}, f32[8]{0:T(128)}, /*index=2*/s32[]{:T(128)})"
LOOP = """%body (b: (s32[], f32[8], s32[])) -> (s32[], f32[8], s32[]) {
  %b = $shape parameter(0)
  %k = s32[]{:T(128)} get-tuple-element(%b), index=0
$adds
  %array = f32[8]{0:T(128)} get-tuple-element(%b), index=1
  %kept = s32[]{:T(128)} get-tuple-element(%b), index=2
  ROOT %after = $shape tuple(%$last, %array, /*index=2*/%kept)
}

%condition (c: (s32[], f32[8], s32[])) -> pred[] {
  %c = $shape parameter(0)
  %i = s32[]{:T(128)} get-tuple-element(%c), index=0
  %limit = s32[]{:T(128)} $limit
  ROOT %test = pred[]{:T(512)} compare($sides), direction=$direction, metadata={}
}
"""
ALONE = """
ENTRY %main (p: f32[8]) -> f32[8] {
  %p = f32[8]{0:T(128)} parameter(0)
  %zero = s32[]{:T(128)} constant($first)
  %copy.1 = s32[]{:T(128)} copy(%zero)
  %last = s32[]{:T(128)} constant($end)
  %t = $shape tuple(%copy.1, %p, /*index=2*/%last)
  %w = $shape while(%t), condition=%condition, body=%body, metadata={op_name="while"}
}
"""
NESTED = """
%outer (o: (s32[], f32[8], s32[])) -> (s32[], f32[8], s32[]) {
  %o = $shape parameter(0)
  %turn = s32[]{:T(128)} get-tuple-element(%o), index=0
  %one = s32[]{:T(128)} constant(1)
  %next = s32[]{:T(128)} add(%turn, %one)
  %given = s32[]{:T(128)} get-tuple-element(%o), index=2
  %zero = s32[]{:T(128)} constant($first)
  %here = f32[8]{0:T(128)} get-tuple-element(%o), index=1
  %t = $shape tuple(%zero, %here, /*index=2*/%given)
  %w = $shape while(%t), condition=%condition, body=%body
  %done = f32[8]{0:T(128)} get-tuple-element(%w), index=1
  ROOT %so = $shape tuple(%next, %done, /*index=2*/%given)
}

%twice (u: (s32[], f32[8], s32[])) -> pred[] {
  %u = $shape parameter(0)
  %round = s32[]{:T(128)} get-tuple-element(%u), index=0
  %two = s32[]{:T(128)} constant(2)
  ROOT %go = pred[]{:T(512)} compare(%round, %two), direction=LT
}

ENTRY %main (p: f32[8]) -> f32[8] {
  %p = f32[8]{0:T(128)} parameter(0)
  %none = s32[]{:T(128)} constant(0)
  %last = s32[]{:T(128)} constant($end)
  %q = $shape tuple(%none, %p, /*index=2*/%last)
  %ww = $shape while(%q), condition=%twice, body=%outer
}
"""
ADD = """  %step.$n = s32[]{:T(128)} constant($step), metadata={op_name="add"}
  %add.$n = s32[]{:T(128)S(6)} add(%$before, %step.$n)"""


def program(direction, first, limit, steps, *, swapped=False, carried=True, nested=False):
    """Return a loop as XLA's compiler for TPUs writes it: the tuple is (counter, array, limit)."""
    numbers = [f"add.{n}" for n in range(len(steps))]
    adds = [
        Template(ADD).substitute(n=n, step=step, before=before)
        for n, (step, before) in enumerate(zip(steps, ["k", *numbers], strict=False))
    ]
    return Template(LOOP + (NESTED if nested else ALONE)).substitute(
        shape=SHAPE,
        adds="\n".join(adds),
        last=numbers[-1],
        limit="get-tuple-element(%c), index=2" if carried else f"constant({limit})",
        sides="%limit, %i" if swapped else "%i, %limit",
        direction=direction,
        first=first,
        end=limit,
    )


def counted(direction, first, limit, step, swapped):
    """Run the loop; None if it never ends."""
    number, trips = first, 0
    while COMPARE[direction](limit, number) if swapped else COMPARE[direction](number, limit):
        number, trips = number + step, trips + 1
        if trips > 100:
            return None
    return trips


@given(
    direction=st.sampled_from([*COMPARE]),
    first=st.integers(-9, 9),
    limit=st.integers(-9, 9),
    steps=st.lists(st.integers(-3, 3), min_size=1, max_size=3),
    swapped=st.booleans(),
    carried=st.booleans(),
    nested=st.booleans(),
)
def test_loops_run_as_often_as_they_do(direction, first, limit, steps, swapped, carried, nested):
    text = program(direction, first, limit, steps, swapped=swapped, carried=carried, nested=nested)
    trips = trips_of(instructions_of(text))
    assert trips.pop("outer", 2) == 2
    wanted = counted(direction, first, limit, sum(steps), swapped)
    if trips:
        assert trips == {"body": wanted}
    else:  # it does not move towards its end
        moves = -sum(steps) if (direction in ("LT", "LE")) == swapped else sum(steps)
        assert moves <= 0
        assert wanted in (0, None)


@pytest.mark.parametrize(
    ("there", "instead"),
    [
        ("direction=LT", "direction=NE"),
        ("add(%k, %step.0)", "multiply(%k, %step.0)"),
        ("add(%k, %step.0)", "add(%k, %k)"),
        ("add(%k, %step.0)", "add(%kept, %step.0)"),
        ("%zero = s32[]{:T(128)} constant(0)", "%zero = s32[]{:T(128)} parameter(1)"),
        ("ROOT %after = ", "ROOT %after = (s32[], f32[8], s32[]) custom-call(%k)\n  %after.1 = "),
        ("ROOT %test = pred[]{:T(512)} compare", "ROOT %test = pred[]{:T(512)} and"),
    ],
)
def test_unrecognized_loops_have_no_trip_count(there, instead):
    text = program("LT", 0, 5, [1])
    assert trips_of(instructions_of(text)) == {"body": 5}
    assert there in text
    assert trips_of(instructions_of(text.replace(there, instead))) == {}
