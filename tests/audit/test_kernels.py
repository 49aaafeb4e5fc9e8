"""Programs, written by hand as XLA's text: their kernels, bytes and GEMMs."""

import pytest

from fp8flax._audit.gemms import gemms_of
from fp8flax._audit.program import Array, bytes_moved, bytes_sent, collective_of, parse

HEADER = 'HloModule jit_f, is_scheduled=true, num_partitions=8\n\nFileNames\n1 "f.py"\n\n'


def computation(name, types, *lines):
    """Returns the text of a computation with parameters ``%p0``, ``%p1``, …; its last line is the root."""
    *body, root = [f"%p{i} = {dtype} parameter({i})" for i, dtype in enumerate(types)] + list(lines)
    return "".join(
        [f"{name} (p: f32[]) -> f32[] {{\n", *(f"  {x}\n" for x in body), f"  ROOT {root}\n}}\n"]
    )


def kernels(types, *lines, called=()):
    """Returns the kernels of a program; ``called`` are the texts of further computations."""
    return parse(HEADER + "\n".join([*called, computation("ENTRY %main", types, *lines)])).kernels


def gemm_of(*args, **keywords):
    """Returns the only GEMM of the kernels."""
    (found,) = [gemm for kernel in kernels(*args, **keywords) for gemm in gemms_of(kernel)]
    return found


def sizes(gemm):
    return gemm.batch, gemm.m, gemm.k, gemm.n


def test_types_layouts_and_comments_are_parsed():
    lines = (
        '%y.1 = (f32[8]{0}, (bf16[2,3]{1,0}, pred[])) custom-call(%p0), custom_call_target="a(b"',
        "%tuple = ((f32[8]{0}), /*index=1*/f32[8]{0}) tuple(%y.1, /*index=1*/%p0), "
        "metadata={op_name=\"x[\\'a\\']\"}",
    )
    program = parse(HEADER + computation("ENTRY %main", ["f32[8]{0:T(256)S(1)}"], *lines))
    assert program.num_devices == 8
    x, y, both = program.instructions
    assert y.results == (Array("f32", (8,)), Array("bf16", (2, 3)), Array("pred", ()))
    assert (y.target, both.op_name) == ("a(b", "x['a']")
    assert both.operands == [y, x]
    assert x.users == [y, both]
    with pytest.raises(ValueError, match="<new>"):
        parse(HEADER + computation("ENTRY %main", [], "%x = <new>"))


# Bytes that a kernel moves.

SLICED = (
    "%z = s32[] constant(0)",
    "%wide = f32[8,1024]{1,0} convert(%p0)",
    "%slice = f32[1,1024]{1,0} dynamic-slice(%wide, %p1, %z), dynamic_slice_sizes={1,1024}",
    "%flat = f32[1024]{0} bitcast(%slice)",
)
SLICED_AND_WHOLE = (
    "%slice = f32[2]{0} slice(%p0), slice={[0:2]}",
    "%negate = f32[8]{0} negate(%p0)",
    "%tuple = (f32[2]{0}, f32[8]{0}) tuple(%slice, %negate)",
)
UPDATED = (
    "%z = s32[] constant(0)",
    "%wide = f32[1024]{0} convert(%p1)",
    "%row = f32[1,1024]{1,0} bitcast(%wide)",
    "%update = f32[8,1024]{1,0} dynamic-update-slice(%p0, %row, %p2, %z)",
)
MADE = (
    "%z = s32[] constant(0)",
    "%zeros = f32[8,1024]{1,0} broadcast(%z)",
    "%update = f32[8,1024]{1,0} dynamic-update-slice(%zeros, %p0, %p1, %z)",
)


@pytest.mark.parametrize(
    ("types", "line", "fused", "size"),
    [
        (["f32[8]"], "%y = f32[8]{0} add(%p0, %p0)", (), 64),
        (["f32[8]", "s32[]"], "%y = f32[2]{0} dynamic-slice(%p0, %p1), sizes={2}", (), 2 * 8 + 4),
        (["f32[8]"], "%y = f32[2]{0} slice(%p0), slice={[0:2]}", (), 2 * 8),
        (["f32[8]", "f32[2]", "s32[]"], "%y = f32[8] dynamic-update-slice(%p0, %p1, %p2)", (), 2 * 8 + 4),
        (["f32[8]"], "%y = f32[8]{0} all-reduce-start(%p0), to_apply=%add", (), 64),
        (["f32[8]"], "%y = (f32[8]{0}, f32[16]{0}) all-gather-start(%p0), dimensions={0}", (), 32 + 64),
        # A fusion reads only the slice that it uses; all of what it uses whole as well.
        (
            ["bf16[8,1024]", "s32[]"],
            "%y = f32[1024]{0} fusion(%p0, %p1), calls=%fused",
            SLICED,
            6 * 1024 + 4,
        ),
        (["f32[8]"], "%y = (f32[2], f32[8]) fusion(%p0), calls=%fused", SLICED_AND_WHOLE, 32 + 8 + 32),
        # An update in place moves the update.
        (
            ["f32[8,1024]", "bf16[1024]", "s32[]"],
            "%y = f32[8,1024]{1,0} fusion(%p0, %p1, %p2), calls=%fused",
            UPDATED,
            6 * 1024 + 4,
        ),
        (["f32[1,1024]", "s32[]"], "%y = f32[8,1024] fusion(%p0, %p1), calls=%fused", MADE, 9 * 4096 + 4),
    ],
)
def test_bytes_of_a_kernel(types, line, fused, size):
    called = [computation("%fused", types, *fused)] if fused else []
    (kernel,) = kernels(types, line, called=called)
    assert (bytes_moved(kernel), kernel.trip_count, list(gemms_of(kernel))) == (size, 1, [])


# Loops and calls.

STATE = "(s32[], f32[8]{0})"


def loop(name, line):
    """Returns the text of the body of a loop, in which ``line`` reads ``%x``."""
    first, last = ("get-tuple-element(%p0), index=0", "get-tuple-element(%p0), index=1")
    lines = f"%i = s32[] {first}", f"%x = f32[8]{{0}} {last}", line
    return computation(name, [STATE], *lines, f"%t = {STATE} tuple(%i, {line.split()[0]})")


def while_(name, body, trips):
    known = "" if trips is None else f', backend_config={{"known_trip_count":{{"n":"{trips}"}}}}'
    return f"%{name} = {STATE} while(%p0), condition=%condition, body=%{body}{known}"


CONDITION = computation("%condition", [STATE], "%less = pred[] negate(%p0)")


@pytest.mark.parametrize(
    ("outer", "inner", "counts"),
    [(5, 3, (5, 15)), (5, None, (5, 5)), (None, 3, (1, 3))],
)
def test_loops_multiply_by_their_trip_counts(outer, inner, counts):
    """Also in a loop inside of a loop. A loop of unknown length counts once."""
    within = computation(
        "%outer",
        [STATE],
        while_("w", "inner", inner),
        "%x = f32[8]{0} get-tuple-element(%w), index=1",
        "%z = f32[8]{0} negate(%x)",
        f"%t = {STATE} tuple(%p0, %z)",
    )
    called = [loop("%inner", "%y = f32[8,8]{1,0} dot(%x, %x)"), CONDITION, within]
    found = {k.name: k for k in kernels([STATE], while_("v", "outer", outer), called=called)}
    assert (found["z"].trip_count, found["y"].trip_count) == counts
    (gemm,) = gemms_of(found["y"])
    assert (gemm.trip_count, gemm.bytes) == (counts[1], counts[1] * 4 * (8 + 8 * 8))


@pytest.mark.parametrize(
    "line",
    [
        "%y = f32[8]{0} call(%p0), to_apply=%one",
        "%y = ((f32[8]{0}), f32[8]{0}, u32[]) async-start(%p0), calls=%one",
        "%y = f32[8]{0} conditional(%p0, %p0, %p0), branch_computations={%one, %two}",
        "%y = f32[8]{0} conditional(%p0, %p0, %p0), true_computation=%one, false_computation=%two",
    ],
)
def test_calls_and_every_branch_are_followed(line):
    branches = [
        computation(f"%{name}", ["f32[8]"], f"%in.{name} = f32[8] negate(%p0)") for name in ("one", "two")
    ]
    names = [k.name for k in kernels(["f32[8]"], line, called=branches)]
    assert names == ["in.one", "in.two"][: 1 + ("conditional" in line)]


# Bytes that a device sends.


@pytest.mark.parametrize(
    ("kind", "line", "sent"),
    [
        # 32 bytes on each of four devices.
        ("all-gather", "%y = f32[32] all-gather(%p0), replica_groups=[2,4]<=[8]", 3 * 32),
        ("all-gather", "%y = (f32[8], f32[32]) all-gather-start(%p0), replica_groups={{0,1,2,3}}", 3 * 32),
        ("reduce-scatter", "%y = f32[2] reduce-scatter(%p0), replica_groups={{0,2,4,6},{1,3,5,7}}", 3 * 8),
        ("all-to-all", "%y = ((f32[8]), f32[8]) all-to-all-start(%p0), replica_groups=[2,4]<=[8]", 3 * 8),
        ("all-reduce", "%y = f32[8] all-reduce(%p0), replica_groups=mesh['a'=4,'b'=2] {'a'}", 2 * 3 * 8),
        ("all-reduce", "%y = f32[8] all-reduce(%p0), replica_groups=mesh['a'=8] {'a':(2)2}", 2 * 16),
        ("all-reduce", "%y = (f32[8], f32[8]) all-reduce(%p0, %p0), replica_groups={}", 2 * 2 * 7 * 4),
        ("collective-permute", "%y = f32[8] collective-permute(%p0), source_target_pairs={{0,1}}", 32),
        ("ragged-all-to-all", "%y = f32[8] ragged-all-to-all(%p0, %p0, %p0), replica_groups={{0,1}}", 16),
        ("", "%y = f32[8] all-gather-done(%p0)", 0),
    ],
)
def test_bytes_that_a_device_sends(kind, line, sent):
    """``n`` devices of a group; an all-gather sends ``n - 1`` times the operand, and so on."""
    found = kernels(["f32[8]"], line)
    assert [(collective_of(k), bytes_sent(k, 8)) for k in found] == ([(kind, sent)] if kind else [])


def test_groups_in_an_unknown_form_are_refused():
    (kernel,) = kernels(["f32[8]"], "%y = f32[8] all-reduce(%p0), replica_groups=<new>")
    with pytest.raises(ValueError, match="no known syntax: <new>"):
        bytes_sent(kernel, 8)


# GEMMs.


@pytest.mark.parametrize(
    ("target", "precision", "accumulation"),
    [
        ("$f8", '"operand_precision":["DEFAULT"],"algorithm":"ALG_DOT_ANY_F8_ANY_F8_F32"', "exact"),
        ("$f8", '"algorithm":"ALG_DOT_ANY_F8_ANY_F8_F32_FAST_ACCUM"', "fast"),
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
        "%y = (bf16[8,4]{1,0}, s8[4096]{0}) custom-call(%p0, %p1, %p2, %p2), "
        f'custom_call_target="__cublas$lt$matmul{target}", backend_config={config}',
        "%z = bf16[8,4]{1,0} get-tuple-element(%y), index=0",
    )
    gemm = gemm_of(["f8e4m3fn[8,16]{1,0}", "f8e5m2[4,16]{1,0}", "f32[]"], *lines)
    assert (*sizes(gemm), gemm.backend) == (1, 8, 16, 4, "cublasLt")
    assert gemm.accumulation == accumulation
    assert gemm.bytes == 8 * 16 + 4 * 16 + 4 + 2 * 8 * 4  # not the workspace


@pytest.mark.parametrize(("summed", "batch", "k"), [(1, 2, 3 * 5), (2, 6, 5)])
def test_split_sums_count_as_one_product(summed, batch, k):
    reduced = ",".join(str(d) for i, d in enumerate([2, 3, 8, 4]) if i != summed)
    lines = (
        "%y = f32[2,3,8,4]{3,2,1,0} dot(%p0, %p1), lhs_batch_dims={0,1}, lhs_contracting_dims={3}, "
        "rhs_batch_dims={0,1}, rhs_contracting_dims={2}",
        "%z = f32[] constant(0)",
        f"%r = f32[{reduced}]{{2,1,0}} reduce(%y, %z), dimensions={{{summed}}}, to_apply=%add",
    )
    assert sizes(gemm_of(["bf16[2,3,8,5]", "bf16[2,3,5,4]"], *lines)) == (batch, 8, k, 4)


def test_an_operand_that_a_fusion_casts_beside_another():
    both = "(bf16[8,8], bf16[8,8])"
    casts = "%a = bf16[8,8] negate(%p1)", "%b = bf16[8,8] convert(%p0)", f"%t = {both} tuple(%a, %b)"
    types = ["f8e4m3fn[8,8]", "bf16[8,8]"]
    lines = (
        f"%f = {both} fusion(%p0, %p1), calls=%fused",
        *(f"%x{i} = bf16[8,8] get-tuple-element(%f), index={i}" for i in range(2)),
        "%y = bf16[8,8] dot(%x0, %x1), lhs_contracting_dims={1}, rhs_contracting_dims={0}",
    )
    found = gemm_of(types, *lines, called=[computation("%fused", types, *casts)])
    assert found.fp8_sources == ("", "float8_e4m3fn")


def test_sizes_of_a_dot_follow_its_dimension_numbers():
    line = (
        "%y = bf16[2,8,4]{2,1,0} dot(%p0, %p1), lhs_batch_dims={0}, lhs_contracting_dims={2,3}, "
        "rhs_batch_dims={1}, rhs_contracting_dims={3,0}"
    )
    assert sizes(gemm_of(["bf16[2,8,3,5]", "bf16[5,2,4,3]"], line)) == (2, 8, 15, 4)
