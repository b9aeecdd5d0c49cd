"""Topologies from texts, from devices in any order, and to JSON and back."""

import json
import math
import random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from plan.described_devices import as_jax, generated, row
from plan.jax_cases import CASES, devices_of
from shoal.errors import UsageError, UsageTypeError
from shoal.plan.hardware.tpu_generations import GENERATIONS
from shoal.plan.topology import (
    Flat,
    Hosts,
    Slices,
    Torus,
    from_devices,
    from_json,
    parse,
    to_json,
)


@st.composite
def tori(draw):
    generation = draw(st.sampled_from(["", *GENERATIONS]))
    rank = GENERATIONS[generation].dims if generation else draw(st.integers(1, 3))
    host = draw(st.tuples(*[st.integers(1, 3)] * rank))
    shape = tuple(size * draw(st.integers(1, 4)) for size in host)
    return Torus(
        shape,
        generation,
        wrap=draw(st.none() | st.tuples(*[st.booleans()] * rank)),
        host=host,
        cores=draw(st.none() | st.integers(1, 2)),
    )


TOPOLOGIES = st.one_of(
    tori(),
    st.builds(Slices, st.lists(tori(), min_size=2, max_size=3).map(tuple)),
    tori().map(lambda torus: Slices((torus, torus, torus))),
    st.builds(Hosts, st.just(6), st.integers(1, 8), st.sampled_from(["cpu", "gpu"]),
              st.sampled_from([None, 2, 3])),
    st.builds(Flat, st.integers(1, 9), st.sampled_from(["cpu", "tpu"])),
)  # fmt: skip


@given(TOPOLOGIES)
def test_text_goes_there_and_back(topology):
    assert parse(topology.text) == topology
    assert hash(parse(topology.text)) == hash(topology)
    assert from_json(json.loads(json.dumps(to_json(topology)))) == topology


@given(TOPOLOGIES, st.integers(0, 99).map(random.Random))
def test_numbers_of_its_own_go_there_and_back(topology, chance):
    ids = chance.sample(range(9999), topology.num_devices)
    processes = [chance.randrange(9) for _ in ids]
    listed = chance.sample(ids, len(ids))
    own = topology.numbered(ids, processes, listed)
    assert own.device_ids.ravel().tolist() == ids
    assert own.processes.ravel().tolist() == processes
    assert own.listed_ids.tolist() == listed
    assert own.process_of(own.listed_ids).tolist() == [processes[ids.index(i)] for i in listed]
    again = from_json(json.loads(json.dumps(to_json(own))))
    assert again == own
    assert again.listed_ids.tolist() == listed
    assert (own == topology) == (ids == topology.device_ids.ravel().tolist()
                                 and processes == topology.processes.ravel().tolist())  # fmt: skip


@pytest.mark.parametrize(
    "given",
    [(4, 2, 1, "TPU v5 lite"), (2, 2, 4, "TPU v4"), (4, 4, 4, "TPU v5"), (2, 2, 1, "TPU7x", False),
     (4, 4, 1, "TPU v3", False), (2, 4, 1, "TPU v6 lite", True, 3)],
)  # fmt: skip
def test_from_devices_agrees_with_parse(given):
    rows = generated(*given)
    described = from_devices(rows)
    assert parse(described.text) == described  # its ids and processes are those of the rule
    assert described.listed_ids.tolist() == [row["id"] for row in rows]
    shuffled = rows[:]
    random.Random(0).shuffle(shuffled)
    assert from_devices(shuffled) == described == from_devices(as_jax(shuffled))
    assert from_devices(shuffled).listed_ids.tolist() == [row["id"] for row in shuffled]


@pytest.mark.parametrize("case", [c for c in CASES if c["id"].startswith("aot-")],
                         ids=lambda case: case["id"])  # fmt: skip
def test_libtpus_own_numbers_are_those_of_the_rule(case):
    described = from_devices(devices_of(case))
    slices = case["devices"]["topology_kwargs"].get("num_slices", 1)
    name = case["devices"]["libtpu_topology"]
    assert described.text == name + (f" x {slices} slices" if slices > 1 else "")
    first = described if slices == 1 else next(described.parts())
    begin = first.device_ids.min()
    assert (first.device_ids - begin == parse(name).device_ids).all()
    assert (first.processes == parse(name).processes).all()


def test_a_box_begins_anywhere():
    rows = [
        row | {"coords": tuple(c + 3 for c in row["coords"])}
        for row in generated(2, 4, 2, "TPU v4")
    ]
    assert from_devices(rows) == parse("v4:2x4x2")
    assert from_devices(rows).origin == (3, 3, 3)


def test_a_part_of_a_slice_has_no_linked_ends():
    rows = generated(4, 8, 4, "TPU v4")
    assert from_devices(rows).wrap == (True, True, True)
    lower = [row for row in rows if row["coords"][1] < 4]
    upper = [row for row in rows if row["coords"][1] >= 4]
    assert from_devices(lower, within=rows).text == "v4:4x4x4 wrap=xz"
    assert from_devices(upper).text == from_devices(upper, within=rows).text == "v4:4x4x4 wrap=xz"
    assert from_devices(rows[::-1], within=rows) == from_devices(rows)
    assert from_devices(lower, within=rows[:-1]).wrap == (False,) * 3  # whose holes hide the links
    assert from_devices(as_jax(lower), within=as_jax(rows)).wrap == (True, False, True)


def test_a_part_of_several_slices():
    rows = generated(4, 4, 4, "TPU v5p", num_slices=2)
    some = [one for one in rows if one["coords"][2] < 2]
    assert from_devices(some, within=rows).text == "v5p:4x4x2 wrap=xy x 2 slices"
    one = [row for row in rows if row["slice"] == 1]
    assert from_devices(one, within=rows).text == "v5p:4x4x4"


def test_devices_that_are_not_in_the_whole():
    rows = generated(2, 2, 1, "TPU v5p")
    with pytest.raises(UsageError, match=r"devices \[3\] are not in within"):
        from_devices(rows, within=rows[:3])
    with pytest.raises(UsageError, match="within: ids occur twice"):
        from_devices(rows, within=rows + rows)


def test_incomplete_box_of_devices_is_a_flat_topology():
    rows = generated(4, 4, 1, "TPU v5 lite")[1:]
    topology = from_devices(rows)
    assert topology.text == "flat:15 on=tpu"
    assert sorted(topology.device_ids.tolist()) == list(range(1, 16))


def test_hosts_and_devices_without_them():
    rows = [{"id": 10 * p + d, "process": p, "platform": "gpu"} for d in range(4) for p in (5, 2)]
    topology = from_devices(rows)
    assert topology.text == "gpu:2 hosts x 4"
    assert topology.device_ids.tolist() == [[20, 21, 22, 23], [50, 51, 52, 53]]
    assert topology.processes.tolist() == [[2] * 4, [5] * 4]
    assert from_devices(rows[1:]).text == "flat:7 on=gpu"


def test_slices_that_differ():
    topology = parse("v5e:4x4 + v5e:2x4 x 2 slices")
    assert topology.text == "v5e:4x4 + v5e:2x4 + v5e:2x4"
    assert topology.grid == (32,)
    assert [part.device_ids.min() for part in topology.parts()] == [0, 16, 24]
    assert [sorted({*part.processes.ravel().tolist()}) for part in topology.parts()] == [
        [0, 1, 2, 3], [4, 5], [6, 7],
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("text", "wrap"),
    [("v4:4x4x4", "111"), ("v4:2x4x4", "000"), ("v5p:4x4x12", "111"), ("v5p:2x2x2", "000"),
     ("v5e:16x16", "11"), ("v5e:8x16", "01"), ("v6e:8x8", "00"), ("v3:32x32", "11"),
     ("tpu7x:8x8x16", "111"), ("torus:8x8", "00"), ("torus:1x8 wrap=xy", "01"),
     ("v4:2x2x4 wrap=z", "001"), ("v5p:8x8x8 wrap=none", "000")],
)  # fmt: skip
def test_where_dims_wrap_round(text, wrap):
    assert "".join(str(int(one)) for one in parse(text).wrap) == wrap


def test_hosts_of_a_torus_are_blocks():
    torus = parse("v5p:4x4x2")
    assert torus.processes[:, :, 0, 0].tolist() == [
        [0, 0, 2, 2],
        [0, 0, 2, 2],
        [1, 1, 3, 3],
        [1, 1, 3, 3],
    ]
    assert (torus.processes[:, :, 1] - torus.processes[:, :, 0] == 4).all()


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: parse("v5x:4x4"), r"'v5x:4x4' is not a topology; did you mean"),
        (lambda: parse("v5p:4x4x4x4"), "is not a topology"),
        (lambda: parse("v5e-64"), "write the sizes of its dims, not the number of its chips"),
        (lambda: parse("v5p:0x4x4"), "each at least 1"),
        (lambda: parse("v5e:3x4 host=2x2"), "x=3 in blocks of 2"),
        (lambda: parse("v5e:4x4 wraps=x"), "'wraps=x' is not one of wrap=xy"),
        (lambda: Torus((4, 4), wrap=(True,)), "one entry for each dim"),
        (lambda: Torus((4, 2.5)), "2.5 is not a whole number"),
        (lambda: Torus("22"), "is not a whole number"),
        (lambda: Torus((4,), "v9"), "'v9' is not one of v2, v3"),
        (lambda: Hosts(4, 8, switch=3), "4 hosts do not divide into groups of 3"),
        (lambda: Slices(()), "at least one slice"),
        (lambda: Flat(4).numbered([0, 1, 2, 2]), "none may occur twice"),
        (lambda: Flat(4).numbered([0, 1, 2]), "4 whole numbers"),
        (lambda: Flat(4).numbered(listed=[0, 1, 2, 5]), "listed must be the ids"),
        (lambda: from_devices([]), "there are no devices"),
        (lambda: from_devices([{"process": 1}]), "has no id"),
        (lambda: from_devices([{"id": 1, "prozess": 1}]), "did you mean 'process'"),
        (lambda: from_devices([{"id": 1}, {"id": 1}]), "ids occur twice"),
        (lambda: from_devices([{"id": 1}, {"id": 2, "coords": (0, 0, 0)}]), "no coordinates"),
        (lambda: from_devices([row(n, 0, (0, 0, 0), 0, 0, "tpu", "") for n in (1, 2)]),
         "1 place occurs twice"),
        (lambda: parse("torus:4 wrap=z"), "'torus:4 wrap=z': wrap=z: there is no dim z, only x"),
        (lambda: parse("v5e:4x4 wrap=xz"), "there is no dim z, only xy"),
        (lambda: parse("v5e:4x4 wrap=xx"), "wrap=xx names a dim twice"),
        (lambda: parse(f"v5e:4x4 cores={'9' * 5000}"), "'cores=9.*is not one of wrap=xy"),
        (lambda: parse("v5e:4x4 cores=\u0663"), "is not one of wrap=xy"),
        (lambda: parse("v5e:4x\u0663"), "is not a topology"),
        (lambda: from_json({"topology": "v5e:2x2", "origin": 3}), "origin=3 must have a number"),
        (lambda: from_json({"topology": "v5e:2x2", "origin": None}), "must be whole numbers"),
        (lambda: from_json({"topology": "v5e:2x2", "origin": "ab"}), "must be whole numbers"),
        (lambda: from_json({"topology": "v5e:2x2", "origin": [0.5, 0]}), "be whole numbers"),
        (lambda: from_json({"topology": "v5e:2x2", "origin": [1 << 70, 0]}), "be whole numbers"),
        (lambda: from_json({"topology": "v5e:2x2", "origin": [1]}), "each of the 2 dims"),
        (lambda: from_json({"topology": "v5e:2x2 x 2 slices", "origin": [1]}), "the 2 dims"),
        (lambda: from_json({"topology": "v5e:2x2", "kind": 3}), "kind=3 must be a string"),
        (lambda: from_json({"topology": "v5e:2x2", "ids": [[0], [1, 2]]}), "4 whole numbers"),
        (lambda: from_json({"topology": "v5e:2x2", "ids": [1 << 70, 1, 2, 3]}), "4 whole numbers"),
        (lambda: from_json({"topology": "v5e:2x2", "listed": [[0], [1, 2]]}), "4 whole numbers"),
        (lambda: from_json({"ids": [1]}), "has the keys topology"),
        (lambda: from_json({"topology": "flat:1", "id": [1]}), "'id' is not one of"),
    ],
)  # fmt: skip
def test_invalid_topology_raises_with_the_problem(make, words):
    with pytest.raises(UsageError, match=words):
        make()


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=2), inner),
    max_leaves=6,
)


@given(
    st.sampled_from(["v5e:2x2", "v5p:2x2x1", "v5e:2x2 x 2 slices", "gpu:2 hosts x 2", "flat:4"]),
    st.dictionaries(st.sampled_from(["ids", "processes", "listed", "kind", "origin"]), JSON),
)
def test_any_json_is_a_topology_or_a_usage_error(text, facts):
    try:
        topology = from_json({"topology": text, **facts})
    except UsageError:
        return
    assert from_json(json.loads(json.dumps(to_json(topology)))) == topology


@given(st.text("v5e:2x torus+=wraphocsligpun0123 9\u0663", max_size=30))
def test_any_text_is_a_topology_or_a_usage_error(text):
    try:
        topology = parse(text)
    except UsageError:
        return
    assert parse(topology.text) == topology


def test_equal_slices_are_made_once(monkeypatch):
    made = []
    monkeypatch.setattr(Torus, "__post_init__", lambda torus: made.append(torus))
    Slices((Torus((2, 2), wrap=(False, False), host=(2, 2), cores=1),) * 1000)
    assert len(made) == 1
    monkeypatch.undo()
    plain, count = Torus.__post_init__, len(made)
    monkeypatch.setattr(Torus, "__post_init__", lambda torus: made.append(torus) or plain(torus))
    from_json({"topology": "v5e:2x2 x 1000 slices", "origin": [1, 1]})
    parse(" + ".join(["v5e:2x2"] * 1000))
    assert len(made) < count + 10


def test_values_that_are_not_strings_or_devices_raise_type_errors():
    with pytest.raises(UsageTypeError, match="takes the text of"):
        parse(4)
    with pytest.raises(UsageTypeError, match="neither a device"):
        from_devices([3])


def test_a_hundred_thousand_chips_are_described_at_once():
    topology = parse("v5p:16x16x32 x 16 slices")
    assert topology.num_devices == 131_072 == math.prod(topology.grid)
    assert np.unique(topology.device_ids).size == 131_072


def test_facts_that_contradict_each_other_or_are_no_numbers():
    rows = generated(2, 1, 1, "TPU v5p")
    with pytest.raises(UsageError, match="several kinds: 'TPU v4', 'TPU v5p'"):
        from_devices([rows[0], rows[1] | {"kind": "TPU v4"}])
    for wrong in ({"id": 0.2}, {"process": 0.7}, {"coords": (0.5, 0, 0)}, {"coords": "000"}):
        with pytest.raises(UsageTypeError, match="must be whole numbers"):
            from_devices([rows[0] | wrong])
    with pytest.raises(UsageTypeError, match="must be devices"):
        from_devices(None)
