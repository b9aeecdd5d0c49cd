"""What programs for TPUs send, read from texts of XLA's compiler for them (`tpu_programs.py`)."""

import pytest

from plan.tpu_programs import FILES
from shoal.plan.compiled import collectives_of, flow_of, frames_of, received_bytes_of


def text_of(name):
    return (FILES / f"{name}.txt").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("name", "sent"),
    [
        # of 256 x 512 float32, three quarters; 3 times 4 of them
        ("chunks", [("all-to-all", 12, 12 * 256 * 512 * 4 // 4 * 3)]),
        # XLA sums 2112 rows instead of the 2048 that a device has, and sends 48 on to where they
        # belong: so no part of a ring is smaller than the others
        (
            "scattered_sum",
            [
                ("reduce-scatter", 1, 2112 * 8192 * 4 // 4 * 3),
                ("collective-permute", 1, 48 * 8192 * 4),
            ],
        ),
        # one that stands in five fusions
        ("gather_beside_products", [("all-gather", 1, 4096 * 4096 * 2 // 4 * 3)]),
        ("gathered_and_cut", [("all-gather", 1, 4096 * 3)]),
    ],
)
def test_collectives(name, sent):
    collectives = collectives_of(text_of(name))
    assert [(c.opcode, c.times, int(c.received_bytes(8).max())) for c in collectives] == sent
    assert received_bytes_of(text_of(name), 8) == sum(received for *_, received in sent)


def test_gather_that_is_cut_again_is_found_with_its_source_line():
    text = text_of("gathered_and_cut")
    (gather,) = collectives_of(text)
    assert flow_of(text).is_cut_again(gather.name)
    assert gather.op_name == "jit(gathered)/sin"
    innermost = frames_of(text)[gather.frame][0]
    assert (innermost.file, "gathered_and_cut" in innermost.function) == ("tpu_programs.py", True)
    text = text_of("gather_beside_products")
    assert not flow_of(text).is_cut_again(collectives_of(text)[0].name)
