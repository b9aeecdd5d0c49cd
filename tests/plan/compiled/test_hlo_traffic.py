"""What programs send, read from texts as XLA's compilers print them."""

import pytest

from shoal.plan.compiled import collectives_of, received_bytes_of


def program(*lines, before=""):
    body = "\n".join(f"  {line}" for line in lines)
    return f"HloModule m\n\n{before}ENTRY %main (p: f32[8]) -> f32[8] {{\n{body}\n}}\n"


@pytest.mark.parametrize(
    ("line", "received"),
    [
        ("ROOT %g = f32[64,64]{1,0} all-gather(%p), replica_groups={{0,2,4,6},{1,3,5,7}}", 12288),
        ("%g = f32[64,64]{1,0} all-gather(%p), replica_groups=[2,4]<=[8], dimensions={0}", 12288),
        ("%g = f32[64]{0} all-gather(%p), replica_groups=[4,2]<=[2,2,2]T(0,2,1)", 128),
        ("%g = f32[64]{0} all-gather(%p), replica_groups=mesh['a'=4,'b'=1,'c'=2] {'a'}", 192),
        (
            "%g = f32[64]{0} all-gather(%p), replica_groups=mesh['a'=2,'b'=4], "
            "device_ids=([2,2,2]T(2,1,0)) {'a','b':(1)2}, use_global_device_ids=true",
            192,
        ),
        ("%g = bf16[64]{0} all-gather(%p), channel_id=1, replica_groups={}", 112),
        ("%t = (f32[8]{0}, f32[8]{0}) all-to-all(%a, %b), replica_groups={{0,1},{2,3}}", 32),
        ("%t = pred[8]{0} all-to-all(%a), replica_groups={{0,1},{2,3}}, dimensions={0}", 4),
        ("%r = f32[8]{0} reduce-scatter(%a), replica_groups={{0,1,2,3}}, to_apply=%add", 96),
        ("%r = (f32[8]{0}, f32[]) all-reduce(%a, %b), replica_groups={{0,1,2,3}}", 54),
        ("%c = s4[8]{0} collective-permute(%p), source_target_pairs={{0,1},{1,0},{2,2}}", 4),
        ("%c = f8e4m3fn[8]{0} collective-permute(%p), source_target_pairs={{2,2},{3,3}}", 0),
        ("%s = (f32[2]{0}, f32[8]{0}) all-gather-start(%p), replica_groups={{0,1,2,3}}", 24),
        (
            "%s = ((f32[2], f32[20]), (f32[8], f32[80])) all-gather-start(%p, %q), "
            "replica_groups={{0,1}}",
            176,
        ),
        ("%s = (f32[8], f32[100]) all-reduce-start(%p), replica_groups={{0,1}}", 432),
        ("%g = f32[64]{0} all-gather(%p), replica_groups={{0},{1,2,3,4}}", 192),
        ("%c = f32[8]{0} collective-permute(%p), source_target_pairs={{0,9}}", 0),
        ("%get-tuple-element.2 = f32[8,8]{1,0} get-tuple-element(%all-to-all), index=0", 0),
    ],
)
def test_each_way_of_writing_it(line, received):
    assert received_bytes_of(program(line), 8) == received


def test_a_loop_counts_as_often_as_it_runs():
    body = (
        "%inner (q: f32[8]) -> f32[8] {\n"
        "  %c = f32[8]{0} collective-permute(%q), source_target_pairs={{0,1}}\n}\n\n"
        "%body (q: f32[8]) -> f32[8] {\n  %x = f32[8]{0} call(%q), to_apply=%inner\n}\n\n"
    )
    loop = (
        "%w = f32[8]{0} while(%p), condition=%cond, body=%body, "
        'backend_config={"known_trip_count":{"n":"5"}}'
    )
    text = program(loop, before=body)
    assert [(collective.times, collective.receivers) for collective in collectives_of(text)] == [
        (5, (1,))
    ]
    assert received_bytes_of(text, 8) == 160


def test_the_name_of_an_operation_is_kept():
    line = (
        "%g = f32[8]{0} all-gather(%p), replica_groups={{0,1}}, "
        'metadata={op_name="jit(f)/dot_general" stack_frame_id=5}'
    )
    assert collectives_of(program(line))[0].op_name == "jit(f)/dot_general"
