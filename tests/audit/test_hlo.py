import math

import pytest

from fp8flax._audit.hlo import Array, parse
from fp8flax._audit.kernels import read

HEADER = 'HloModule jit_f, is_scheduled=true\n\nFileNames\n1 "f.py"\n\n'
FUSED_DOT = """%fused (a: f8e4m3fn[8,16], b: f8e4m3fn[16,4]) -> bf16[8,4] {
  %a = f8e4m3fn[8,16]{1,0} parameter(0)
  %b = f8e4m3fn[16,4]{1,0} parameter(1)
  %dot.1 = f32[8,4]{1,0} dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}, \
metadata={op_name="jit(f)/v[\\'a\\']/dot_general" stack_frame_id=5}
  ROOT %convert.1 = bf16[8,4]{1,0} convert(%dot.1)
}
"""
TRITON = 'backend_config={"fusion_backend_config":{"kind":"__triton_nested_gemm_fusion"}}'


def entry(*lines, parameters="x: f32[8]", result="f32[8]"):
    """Returns the text of an entry computation; the last line is its root."""
    body = [f"  {line}" for line in lines[:-1]] + [f"  ROOT {lines[-1]}"]
    return f"ENTRY %main ({parameters}) -> {result} {{\n" + "\n".join(body) + "\n}\n"


def kernels(*computations):
    return read(HEADER + "\n".join(computations)).kernels


@pytest.mark.parametrize(
    ("array", "size"),
    [
        (Array("bf16", (8, 4)), 64),
        (Array("f8e4m3fn", (8,)), 8),
        (Array("f4e2m1fn", (3,)), 2),
        (Array("pred", (3,)), 3),
        (Array("u32", ()), 4),
        (Array("c64", (2,)), 16),
        (Array("token", ()), 0),
    ],
)
def test_size_of_an_array(array, size):
    assert array.bytes == size


def test_types_layouts_and_comments_are_parsed():
    program = parse(
        HEADER
        + entry(
            "%x = f32[8]{0:T(256)S(1)} parameter(0), metadata={op_name=\"x[\\'a\\']\"}",
            '%y.1 = (f32[8]{0}, (bf16[2,3]{1,0}, pred[])) custom-call(%x), custom_call_target="a(b"',
            "%tuple = ((f32[8]{0}), /*index=1*/f32[8]{0}) tuple(%y.1, /*index=1*/%x)",
        )
    )
    instructions = program.computations[program.entry].instructions
    assert instructions["y.1"].results == (Array("f32", (8,)), Array("bf16", (2, 3)), Array("pred", ()))
    assert instructions["y.1"].attribute("custom_call_target") == "a(b"
    assert instructions["tuple"].operands == ("y.1", "x")
    assert instructions["x"].op_name == "x['a']"


def test_text_without_an_entry_is_refused():
    with pytest.raises(ValueError, match="no entry computation"):
        parse("hello")


def test_elementwise_kernel_reads_operands_and_writes_results():
    (kernel,) = kernels(entry("%x = f32[8]{0} parameter(0)", "%y = f32[8]{0} add(%x, %x)"))
    assert (kernel.bytes, kernel.trip_count, kernel.dots) == (64, 1, ())


def test_what_launches_nothing_is_free():
    lines = (
        "%x = f32[8]{0} parameter(0)",
        "%c = f32[] constant(1)",
        "%b = f32[2,4]{1,0} bitcast(%x)",
        "%t = (f32[2,4]{1,0}, f32[]) tuple(%b, %c)",
        "%g = f32[2,4]{1,0} get-tuple-element(%t), index=0",
    )
    assert kernels(entry(*lines)) == ()


@pytest.mark.parametrize(
    ("line", "size"),
    [
        ("%y = f32[2]{0} dynamic-slice(%x, %i), dynamic_slice_sizes={2}", 2 * 8 + 4),
        ("%y = f32[2]{0} slice(%x), slice={[0:2]}", 2 * 8),
        ("%y = f32[8]{0} dynamic-update-slice(%x, %u, %i)", 2 * 8 + 4),
        ("%y = f32[8]{0} copy(%x)", 2 * 32),
        ("%y = f32[8]{0} all-reduce-start(%x), to_apply=%add", 2 * 32),
        ("%y = (f32[8]{0}, f32[16]{0}) all-gather-start(%x), dimensions={0}", 32 + 64),
    ],
)
def test_slices_count_what_they_move(line, size):
    parameters = ("%x = f32[8]{0} parameter(0)", "%u = f32[2]{0} parameter(1)", "%i = s32[] parameter(2)")
    (kernel,) = kernels(entry(*parameters, line))
    assert kernel.bytes == size


def test_fusion_that_slices_its_parameter_reads_the_slice():
    fused = """%fused (p: bf16[8,1024], i: s32[]) -> f32[1024] {
  %p = bf16[8,1024]{1,0} parameter(0)
  %i = s32[] parameter(1)
  %z = s32[] constant(0)
  %wide = f32[8,1024]{1,0} convert(%p)
  %slice = f32[1,1024]{1,0} dynamic-slice(%wide, %i, %z), dynamic_slice_sizes={1,1024}
  ROOT %flat = f32[1024]{0} bitcast(%slice)
}
"""
    lines = (
        "%x = bf16[8,1024]{1,0} parameter(0)",
        "%i = s32[] parameter(1)",
        "%y = f32[1024]{0} fusion(%x, %i), kind=kLoop, calls=%fused",
    )
    (kernel,) = kernels(fused, entry(*lines))
    assert kernel.bytes == 2 * 1024 + 4 + 4 * 1024


def test_fusion_that_uses_its_parameter_whole_as_well_reads_all_of_it():
    fused = """%fused (p: f32[8]) -> (f32[2], f32[8]) {
  %p = f32[8]{0} parameter(0)
  %slice = f32[2]{0} slice(%p), slice={[0:2]}
  %negate = f32[8]{0} negate(%p)
  ROOT %tuple = (f32[2]{0}, f32[8]{0}) tuple(%slice, %negate)
}
"""
    lines = (
        "%x = f32[8]{0} parameter(0)",
        "%y = (f32[2]{0}, f32[8]{0}) fusion(%x), kind=kLoop, calls=%fused",
    )
    (kernel,) = kernels(fused, entry(*lines))
    assert kernel.bytes == 32 + 8 + 32


def test_update_in_place_moves_the_update():
    fused = """%fused (p: f32[8,1024], u: bf16[1024], i: s32[]) -> f32[8,1024] {
  %p = f32[8,1024]{1,0} parameter(0)
  %u = bf16[1024]{0} parameter(1)
  %i = s32[] parameter(2)
  %z = s32[] constant(0)
  %wide = f32[1024]{0} convert(%u)
  %row = f32[1,1024]{1,0} bitcast(%wide)
  ROOT %update = f32[8,1024]{1,0} dynamic-update-slice(%p, %row, %i, %z)
}
"""
    lines = (
        "%x = f32[8,1024]{1,0} parameter(0)",
        "%u = bf16[1024]{0} parameter(1)",
        "%i = s32[] parameter(2)",
        "%y = f32[8,1024]{1,0} fusion(%x, %u, %i), kind=kLoop, calls=%fused",
    )
    (kernel,) = kernels(fused, entry(*lines))
    assert kernel.bytes == 2 * 1024 + 4 + 4 * 1024


LOOP = """%body (p: (s32[], f32[8])) -> (s32[], f32[8]) {
  %p = (s32[], f32[8]{0}) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %x = f32[8]{0} get-tuple-element(%p), index=1
  %y = f32[8]{0} negate(%x)
  ROOT %t = (s32[], f32[8]{0}) tuple(%i, %y)
}

%condition (q: (s32[], f32[8])) -> pred[] {
  %q = (s32[], f32[8]{0}) parameter(0)
  %j = s32[] get-tuple-element(%q), index=0
  %n = s32[] constant(5)
  ROOT %less = pred[] compare(%j, %n), direction=LT
}
"""


@pytest.mark.parametrize(
    ("config", "counts", "unknown"),
    [
        (', backend_config={"known_trip_count":{"n":"5"},"known_init_step":{"init":"0"}}', {"y": 5}, False),
        ("", {"y": 1}, True),
    ],
)
def test_loops_multiply_by_their_trip_count(config, counts, unknown):
    lines = (
        "%x = (s32[], f32[8]{0}) parameter(0)",
        f"%w = (s32[], f32[8]{{0}}) while(%x), condition=%condition, body=%body{config}",
    )
    summary = read(HEADER + LOOP + entry(*lines))
    assert {k.name: k.trip_count for k in summary.kernels} == counts
    assert summary.unknown_trip_counts == unknown


@pytest.mark.parametrize(
    "line",
    [
        "%y = f32[8]{0} call(%x), to_apply=%one",
        "%y = ((f32[8]{0}), f32[8]{0}, u32[]) async-start(%x), calls=%one",
        "%y = f32[8]{0} conditional(%x, %x, %x), branch_computations={%one, %two}",
        "%y = f32[8]{0} conditional(%x, %x, %x), true_computation=%one, false_computation=%two",
    ],
)
def test_calls_and_every_branch_are_followed(line):
    branches = [
        f"%{name} (p: f32[8]) -> f32[8] {{\n  %p = f32[8]{{0}} parameter(0)\n"
        f"  ROOT %negate.{name} = f32[8]{{0}} negate(%p)\n}}\n"
        for name in ("one", "two")
    ]
    names = [k.name for k in kernels(*branches, entry("%x = f32[8]{0} parameter(0)", line))]
    assert names == ["negate.one", "negate.two"][: 1 + ("conditional" in line)]


@pytest.mark.parametrize(
    ("kind", "line", "sent"),
    [
        # 32 bytes on each of four devices.
        ("all-gather", "%y = f32[32] all-gather(%x), replica_groups=[2,4]<=[8]", 3 * 32),
        ("all-gather", "%y = (f32[8], f32[32]) all-gather-start(%x), replica_groups={{0,1,2,3}}", 3 * 32),
        ("reduce-scatter", "%y = f32[2] reduce-scatter(%x), replica_groups={{0,2,4,6},{1,3,5,7}}", 3 * 8),
        ("all-to-all", "%y = ((f32[8]), f32[8]) all-to-all-start(%x), replica_groups=[2,4]<=[8]", 3 * 8),
        ("all-reduce", "%y = f32[8] all-reduce(%x), replica_groups=mesh['a'=4,'b'=2] {'a'}", 2 * 3 * 8),
        ("all-reduce", "%y = f32[8] all-reduce(%x), replica_groups=mesh['a'=8] {'a':(2)2}", 2 * 16),
        ("all-reduce", "%y = (f32[8], f32[8]) all-reduce(%x, %x), replica_groups={}", 2 * 2 * 7 * 4),
        ("collective-permute", "%y = f32[8] collective-permute(%x), source_target_pairs={{0,1}}", 32),
        ("ragged-all-to-all", "%y = f32[8] ragged-all-to-all(%x, %x, %x), replica_groups={{0,1}}", 16),
        ("", "%y = f32[8] all-gather-done(%x)", 0),
        ("", "%y = f32[8] negate(%x)", 0),
    ],
)
def test_bytes_that_a_device_sends(kind, line, sent):
    """``n`` devices of a group; an all-gather sends ``n - 1`` times the operand, and so on."""
    header = HEADER.replace("\n", ", num_partitions=8\n", 1)
    found = read(header + entry("%x = f32[8]{0} parameter(0)", line)).kernels
    assert [(k.collective, k.bytes_sent) for k in found if k.collective] == ([(kind, sent)] if kind else [])


def test_collectives_in_loops_and_called_computations_count():
    gather = LOOP.replace("negate(%x)", "all-reduce(%x), replica_groups={{0,1}}")
    called = "%one (p: f32[8]) -> f32[4] {\n  %p = f32[8]{0} parameter(0)\n"
    called += "  ROOT %s = f32[4]{0} reduce-scatter(%p), replica_groups={{0,1}}\n}\n"
    lines = (
        "%x = (s32[], f32[8]{0}) parameter(0)",
        "%z = f32[8]{0} get-tuple-element(%x), index=1",
        "%a = ((f32[8]{0}), f32[4]{0}, u32[]) async-start(%z), calls=%one",
        "%w = (s32[], f32[8]{0}) while(%x), condition=%condition, body=%body, "
        'backend_config={"known_trip_count":{"n":"5"}}',
    )
    found = {k.collective: (k.bytes_sent, k.trip_count) for k in kernels(gather, called, entry(*lines))}
    assert found == {"reduce-scatter": (16, 1), "all-reduce": (32, 5)}


def test_groups_in_an_unknown_form_are_refused():
    line = "%y = f32[8] all-reduce(%x), replica_groups=<new>"
    with pytest.raises(ValueError, match="not in a known form: <new>"):
        kernels(entry("%x = f32[8]{0} parameter(0)", line))


def test_dot_in_a_triton_fusion():
    lines = (
        "%x = f8e4m3fn[8,16]{1,0} parameter(0)",
        "%w = f8e4m3fn[16,4]{1,0} parameter(1)",
        f"%y = bf16[8,4]{{1,0}} fusion(%x, %w), kind=kCustom, calls=%fused, {TRITON}",
    )
    (kernel,) = kernels(FUSED_DOT, entry(*lines))
    (dot,) = kernel.dots
    assert (dot.batch, dot.m, dot.k, dot.n) == (1, 8, 16, 4)
    assert (dot.lhs_dtype, dot.rhs_dtype, dot.out_dtype) == ("f8e4m3fn", "f8e4m3fn", "bf16")
    assert dot.backend == "Triton"
    assert dot.op_name == "jit(f)/v['a']/dot_general"
    assert kernel.bytes == 8 * 16 + 16 * 4 + 2 * 8 * 4


@pytest.mark.parametrize(
    ("target", "precision", "accumulation"),
    [
        ("$f8", '"operand_precision":["DEFAULT"],"algorithm":"ALG_DOT_ANY_F8_ANY_F8_F32"', "exact"),
        (
            "$f8",
            '"operand_precision":["DEFAULT"],"algorithm":"ALG_DOT_ANY_F8_ANY_F8_F32_FAST_ACCUM"',
            "fast",
        ),
        ("$f8", '"operand_precision":["DEFAULT","DEFAULT"],"algorithm":"ALG_UNSET"', "fast"),
        ("$f8", '"operand_precision":["HIGHEST","HIGHEST"],"algorithm":"ALG_UNSET"', "exact"),
        ("", '"operand_precision":["DEFAULT","DEFAULT"],"algorithm":"ALG_UNSET"', "default"),
    ],
)
def test_cublaslt_call(target, precision, accumulation):
    config = (
        '{"gemm_backend_config":{"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"],'
        '"rhs_contracting_dimensions":["1"],"lhs_batch_dimensions":[],"rhs_batch_dimensions":[]},'
        f'"precision_config":{{{precision}}}}}}}'
    )
    lines = (
        "%x = f8e4m3fn[8,16]{1,0} parameter(0)",
        "%w = f8e5m2[4,16]{1,0} parameter(1)",
        "%s = f32[] constant(1)",
        "%y = (bf16[8,4]{1,0}, s8[4096]{0}) custom-call(%x, %w, %s, %s), "
        f'custom_call_target="__cublas$lt$matmul{target}", backend_config={config}',
        "%z = bf16[8,4]{1,0} get-tuple-element(%y), index=0",
    )
    (kernel,) = kernels(entry(*lines))
    (dot,) = kernel.dots
    assert (dot.m, dot.k, dot.n, dot.backend) == (8, 16, 4, "cublasLt")
    assert dot.accumulation == accumulation
    assert kernel.bytes == 8 * 16 + 4 * 16 + 4 + 2 * 8 * 4  # not the workspace


def test_block_scaled_call():
    lines = (
        "%x = f8e4m3fn[1,8,64]{2,1,0} parameter(0)",
        "%w = f8e4m3fn[1,4,64]{2,1,0} parameter(1)",
        "%s = f8e8m0fnu[1,8,2]{2,1,0} parameter(2)",
        "%y = (bf16[1,8,4]{2,1,0}, u8[0]{0}) custom-call(%x, %w, %s, %s), "
        'custom_call_target="__cudnn$blockScaledDot"',
    )
    ((dot,),) = [k.dots for k in kernels(entry(*lines))]
    assert (dot.batch, dot.m, dot.k, dot.n, dot.backend) == (1, 8, 64, 4, "cuDNN")


@pytest.mark.parametrize(("summed", "batch", "k"), [(0, 3, 2 * 5), (1, 2, 3 * 5), (2, 6, 5)])
def test_split_sums_count_as_one_product(summed, batch, k):
    dims = [2, 3, 8, 4]
    reduced = ",".join(str(d) for i, d in enumerate(dims) if i != summed)
    lines = (
        "%x = bf16[2,3,8,5]{3,2,1,0} parameter(0)",
        "%w = bf16[2,3,5,4]{3,2,1,0} parameter(1)",
        "%y = f32[2,3,8,4]{3,2,1,0} dot(%x, %w), lhs_batch_dims={0,1}, lhs_contracting_dims={3}, "
        "rhs_batch_dims={0,1}, rhs_contracting_dims={2}",
        "%z = f32[] constant(0)",
        f"%r = f32[{reduced}]{{2,1,0}} reduce(%y, %z), dimensions={{{summed}}}, to_apply=%add",
    )
    (dot,) = kernels(entry(*lines))[0].dots
    assert (dot.batch, dot.m, dot.k, dot.n) == (batch, 8, k, 4)


def test_fp8_sources_are_found_through_the_kernels_before():
    producer = """%dequantize (q: f8e5m2[8,16], s: bf16[]) -> (f32[8], bf16[8,16]) {
  %q = f8e5m2[8,16]{1,0} parameter(0)
  %s = bf16[] parameter(1)
  %wide = bf16[8,16]{1,0} convert(%q)
  %scale = bf16[8,16]{1,0} broadcast(%s), dimensions={}
  %zero = f32[8]{0} constant({...})
  %product = bf16[8,16]{1,0} multiply(%wide, %scale)
  ROOT %t = (f32[8]{0}, bf16[8,16]{1,0}) tuple(%zero, %product)
}
"""
    lines = (
        "%x = f8e5m2[8,16]{1,0} parameter(0)",
        "%s = bf16[] parameter(1)",
        "%w = bf16[16,4]{1,0} parameter(2)",
        "%d = (f32[8]{0}, bf16[8,16]{1,0}) fusion(%x, %s), kind=kLoop, calls=%dequantize",
        "%g = bf16[8,16]{1,0} get-tuple-element(%d), index=1",
        "%y = bf16[8,4]{1,0} dot(%g, %w), lhs_contracting_dims={1}, rhs_contracting_dims={0}",
    )
    summary = read(HEADER + producer + entry(*lines))
    (dot,) = summary.kernels[-1].dots
    assert dot.fp8_sources == ("f8e5m2", "")


def test_sizes_of_a_dot_follow_its_dimension_numbers():
    lines = (
        "%x = bf16[2,8,3,5]{3,2,1,0} parameter(0)",
        "%w = bf16[5,2,4,3]{3,2,1,0} parameter(1)",
        "%y = bf16[2,8,4]{2,1,0} dot(%x, %w), lhs_batch_dims={0}, lhs_contracting_dims={2,3}, "
        "rhs_batch_dims={1}, rhs_contracting_dims={3,0}",
    )
    ((dot,),) = [k.dots for k in kernels(entry(*lines))]
    assert (dot.batch, dot.m, dot.k, dot.n) == (2, 8, 15, 4)
    assert math.prod((dot.batch, dot.m, dot.n)) == 2 * 8 * 4
