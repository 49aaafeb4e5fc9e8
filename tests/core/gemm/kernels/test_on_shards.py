"""GPU kernels on arrays that are split over devices, with a reference in the place of each kernel."""

import itertools
import math
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import fp8flax as fp8
from fp8flax._core.gemm.kernels.on_shards import gemm_on_shards, quantize_on_shards, ragged_on_shards
from fp8flax._core.gemm.request import Gemm
from fp8flax._core.qtensor import QTensor, View
from tests.cases import cells

E4M3 = jnp.float8_e4m3fn

SPLITS = {
    # How the left operand (batch, rows, summed) and the right one (batch, columns, summed) are split.
    "rows": (P(None, "a"), P()),
    "rows and columns": (P(None, "a"), P(None, "b")),
    "summed": (P(None, None, "a"), P(None, None, "a")),
    "rows and summed": (P(None, "b", "a"), P(None, None, "a")),
    "over both axes": (P(None, ("a", "b")), P()),
    "the same axis twice": (P(None, "a"), P(None, "a")),
    "matrices": (P("b", "a"), P("b")),
    "unlike": (P("b", None, "a"), P(None, "a")),
    "summed, fewer blocks than devices": (P(None, None, ("b", "a")), P(None, None, ("b", "a"))),
    "columns, fewer blocks than devices": (P(), P(None, "a")),
}


def mesh():
    return jax.sharding.Mesh(
        np.array(jax.devices()).reshape(4, 2), ("a", "b"), axis_types=(AxisType.Auto,) * 2
    )


def gemm_of(lhs, rhs, dims, out_dtype):
    """Returns the request for a GEMM of two operands of these shapes."""
    views = [View(shape, contract, batch) for shape, contract, batch in zip((lhs, rhs), *dims)]
    dtype = np.dtype(np.float32)
    return Gemm(*views, dtype, dtype, np.dtype(out_dtype))


@pytest.mark.newest
@pytest.mark.parametrize(
    ("way", "is_square"),
    cells(
        itertools.product(SPLITS, [False, True]),
        repeated=[(way, True) for way in SPLITS if way not in ("rows", "summed", "matrices")],
    ),
)
def test_the_gemm_of_split_operands(way, is_square):
    """A reference multiplies on each of eight CPUs; the sizes that are not whole blocks are filled up."""
    quantizers = [
        fp8.BlockQuantizer(dtype=E4M3, block=block, scale="float32")
        for block in ((1, 128), (128, 128) if is_square else (1, 128))
    ]
    # Square blocks are sent in the order of the tensor, which is not the order of its codes here.
    shape, summed = ((2, 512, 200), 1) if is_square else ((2, 200, 512), 2)
    gemm = gemm_of((2, 8, 512), shape, (((2,), (summed,)), ((0,), (0,))), np.float32)
    rng = np.random.default_rng(0)
    operands = [
        quantizer.quantize(jnp.asarray(rng.normal(size=view.shape), jnp.float32), view)
        for quantizer, view in zip(quantizers, (gemm.lhs, gemm.rhs))
    ]
    expected = gemm.reference(*operands)
    # The scales lie as they come.
    shardings = [
        QTensor(NamedSharding(mesh(), spec), None, x.quantizer) for spec, x in zip(SPLITS[way], operands)
    ]
    run = jax.jit(partial(gemm_on_shards, Gemm.reference, gemm), in_shardings=tuple(shardings))
    np.testing.assert_allclose(run(*operands), expected, rtol=1e-5, atol=1e-4)
    if way in ("rows", "over both axes"):
        text = run.lower(*operands).compile().as_text()
        assert not re.search(r"= \S+,512\]\S* all-gather", text)


AS_GIVEN = {
    # Contracted dimensions; how the left operand, the right one and the result are split; what is sent.
    # XLA's programs for CPUs send e4m3 as float16, and bfloat16 as float32.
    "FSDP": (((1,), (0,)), P("a"), P("a"), P("a"), {"all-gather": "f16"}),
    "columns": (((1,), (0,)), P(), P(None, "a"), P(None, "a"), {}),
    "the result decides": (((1,), (0,)), P("a"), P(None, "a"), P(None, "a"), {"all-gather": "f16"}),
    "a part of the result": (((1,), (0,)), P(), P(), P("a", "b"), {}),
    "sum of rounded parts": (((1,), (1,)), P(None, "a"), P(None, "a"), P("a"), {"all-reduce": "f32"}),
    "transposed": (((0,), (1,)), P(None, "b"), P("a"), P("b", "a"), {}),
}


@pytest.mark.parametrize(
    ("way", "granularity"),
    cells(
        itertools.product(AS_GIVEN, ["tensorwise", "axiswise"]),
        repeated=[(way, "axiswise") for way in AS_GIVEN if way not in ("FSDP", "sum of rounded parts")],
    ),
)
def test_devices_send_codes_and_rounded_results(way, granularity):
    """No wide operand is sent. A sum over devices is the sum of their results, each in bfloat16."""
    contract, *specs, sent = AS_GIVEN[way]
    quantizer = fp8.CurrentQuantizer(dtype=E4M3, granularity=granularity, use_power_2_scales=True)
    gemm = gemm_of((256, 256), (256, 256), (contract, ((), ())), jnp.bfloat16)
    # A sum over a quarter of the contraction is about 1,000, so bfloat16 rounds it.
    values = np.random.default_rng(0).integers(0, 9, (2, 256, 256)).astype(np.float32)
    operands = [quantizer.quantize(x, view) for x, view in zip(values, (gemm.lhs, gemm.rhs))]
    parts = 4 if "sum" in way else 1
    lhs, rhs = (
        np.split(np.moveaxis(x, axis, 1), parts, 1) for x, (axis,) in zip(values, contract, strict=True)
    )
    rounded = [np.asarray(x @ y.T, jnp.bfloat16).astype(np.float32) for x, y in zip(lhs, rhs)]
    expected = np.asarray(np.sum(rounded, axis=0), jnp.bfloat16)

    *places, out = (NamedSharding(mesh(), spec) for spec in specs)
    places = tuple(QTensor(place, None, quantizer) for place in places)
    run = jax.jit(partial(gemm_on_shards, Gemm.reference, gemm), in_shardings=places, out_shardings=out)
    np.testing.assert_array_equal(run(*operands), expected)
    text = run.lower(*operands).compile().as_text()
    found = re.findall(r"= \(?(\w+)\[([\d,]*)\].*? (all-[a-z-]+|collective-permute)\(", text)
    # Scales have 256 elements or fewer.
    matrices = {kind: dtype for dtype, dims, kind in found if math.prod(map(int, dims.split(","))) > 256}
    assert matrices == sent


@pytest.mark.newest
@pytest.mark.parametrize(
    ("spec", "block"),
    [
        (P(), (1, 128)),
        (P(None, "a"), (128, 128)),
        (P(None, "b", "a"), (1, 128)),
        (P("b", None, "a"), (128, 128)),
        (P(None, ("a", "b")), (1, 128)),
        (P(None, None, ("b", "a")), (128, 128)),
    ],
    ids=str,
)
def test_split_tensors_are_quantized_as_whole_ones(spec, block):
    """Four blocks over four devices, and over eight, which takes fewer."""
    on = mesh()
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 512, 512)), jnp.float32)
    quantizer = fp8.BlockQuantizer(dtype=E4M3, block=block, scale="float32")

    def twin(x):
        pair = [quantizer.quantize(x, View(x.shape, (contract,), (0,))) for contract in (2, 1)]
        return tuple((q.codes, q.scale) for q in pair)

    expected = jax.jit(twin)(x)
    split = quantize_on_shards(twin, block=block, ranks=(1, 1), are_whole=(True, True), name="")
    run = jax.jit(split, in_shardings=NamedSharding(on, spec))
    jax.tree.map(np.testing.assert_array_equal, run(x), expected)
    gathered = re.findall(r"= (\w+\[\S*) all-gather", run.lower(x).compile().as_text())
    assert not any("512,512" in shape for shape in gathered if not any(map(_is_pair, spec)))


@pytest.mark.parametrize(
    ("sizes", "block"),
    [((512, 300), (1, 128)), ((300, 512), (128, 128)), ((200, 300), (1, 128))],
    ids=str,
)
def test_a_dimension_that_ends_in_a_partial_block_is_not_split(sizes, block):
    on, whole = mesh(), tuple(size % 128 == 0 for size in sizes)
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, *sizes)), jnp.float32)
    quantizer = fp8.BlockQuantizer(dtype=E4M3, block=block, scale="float32")

    def pair(x):
        made = [quantizer.quantize(x, View(x.shape, (contract,), (0,))) for contract in (2, 1)]
        return tuple((q.codes, q.scale) for q in made)

    split = quantize_on_shards(pair, block=block, ranks=(1, 1), are_whole=whole, name="")
    run = jax.jit(split, in_shardings=NamedSharding(on, P(None, "b", "a")))
    jax.tree.map(np.testing.assert_array_equal, run(x), jax.jit(pair)(x))


RAGGED = {
    # The dimensions of the operands and of the result, and how each operand is split.
    "rows": (("mk", "enk", "mn"), P("a"), P()),
    "rows and columns": (("mk", "enk", "mn"), P("a"), P(None, "b")),
    "rows over both axes": (("mk", "enk", "mn"), P(("a", "b")), P("a")),
    "contraction": (("mk", "enk", "mn"), P("b", "a"), P(None, None, "a")),
    "one scale per row": (("mk", "enk", "mn"), P("a"), P(None, "b")),
    "sums": (("mk", "mn", "ekn"), P("a"), P("a", "b")),
    "sums over columns": (("mk", "mn", "ekn"), P(None, "a"), P(None, "b")),
    "blocks": (("-mk", "e-nk", "mn"), P(None, "a", "b"), P(None, None, None, "b")),
    "blocks of columns": (("-mk", "e-nk", "mn"), P(None, "b"), P(None, None, "a")),
    "sums of blocks": (("-km", "-nm", "ekn"), P(None, None, "a"), P(None, None, "a")),
    "sums of fewer blocks than devices": (("-km", "-nm", "ekn"), P(None, None, ("a", "b")), P()),
}


# Experts that are split, and fewer blocks than devices.
GATHERED = {"rows over both axes", "blocks of columns", "sums of fewer blocks than devices"}


@pytest.mark.long
@pytest.mark.parametrize(
    "way",
    cells(
        RAGGED,
        repeated=["rows", "contraction", "sums over columns", "blocks", "one scale per row", "sums"],
    ),
)
def test_ragged_dots_of_split_operands(way):
    """A reference computes in the place of the kernel, on eight CPUs, for groups of any sizes."""
    on = mesh()
    dims, *specs = RAGGED[way]
    rng, size_of = np.random.default_rng(0), {"m": 512, "k": 256, "n": 256, "e": 4, "-": 1}
    kinds = fp8.CurrentQuantizer(dtype=E4M3), fp8.BlockQuantizer(dtype=E4M3, block=(1, 128))

    def operand(names):
        shape, is_kernel = tuple(size_of[name] for name in names), "e" in names
        if "-" in names:
            scale_shape = (*shape[:-2], shape[-2] // 128 if is_kernel else shape[-2], shape[-1] // 128)
        elif way == "one scale per row":
            scale_shape = (*shape[:-1], 1)
        else:
            scale_shape = shape[:1] if is_kernel else ()
        scale = jnp.asarray(2.0 ** rng.integers(-3, 3, scale_shape), jnp.float32)
        return QTensor(jnp.asarray(rng.normal(size=shape), E4M3), scale, kinds["-" in names])

    def wide(x, names):
        scale = x.scale
        if scale.ndim == x.codes.ndim:
            for axis, (size, count) in enumerate(zip(x.codes.shape, scale.shape)):
                scale = jnp.repeat(scale, size // count, axis)
        else:
            scale = scale.reshape(*scale.shape, *[1] * (x.codes.ndim - scale.ndim))
        values = x.codes.astype(jnp.float32) * scale
        return jnp.squeeze(values, [i for i, name in enumerate(names) if name == "-"])

    def twin(lhs, rhs, sizes):
        left, right = wide(lhs, dims[0]), wide(rhs, dims[1])
        names = [name.replace("-", "") for name in dims]
        sizes = jnp.clip(sizes, 0, 512)[None]
        ends, row = jnp.cumsum(sizes, axis=1), jnp.arange(left.shape[names[0].index("m")])[:, None]
        mine = ((row < ends) & (row >= ends - sizes)).astype(jnp.float32)
        return jnp.einsum(f"{names[0]},{names[1]},me->{names[2]}", left, right, mine)

    qs, expected = (operand(dims[0]), operand(dims[1])), jax.jit(twin)
    shardings = [QTensor(NamedSharding(on, spec), None, x.quantizer) for spec, x in zip(specs, qs)]
    split = jax.jit(partial(ragged_on_shards, twin, dims), in_shardings=(*shardings, None))
    for sizes in ((100, 0, 253, 90), (0, 0, 512, 0), (9, 999, 5, -7)):
        args = *qs, jnp.array(sizes, jnp.int32)
        np.testing.assert_allclose(split(*args), expected(*args), rtol=1e-5, atol=1e-3)
    text = split.lower(*args).compile().as_text()
    assert bool(re.search(r"= f\S+ all-gather", text)) == (way in GATHERED)


def _is_pair(names):
    return isinstance(names, tuple)
