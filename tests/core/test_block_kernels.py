"""The kernels for scales per block, interpreted step by step, beside what they stand for."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import fp8flax as fp8
from fp8flax._core.gemm import cuda_casts
from fp8flax._core.gemm.gpus import compile_target
from fp8flax._core.gemm.kernels import block_gemm_hopper
from fp8flax._core.gemm.kernels.block_gemm_hopper import HAS_MOSAIC, hopper_block_gemm
from fp8flax._core.gemm.kernels.block_quantize import block_quantize
from fp8flax._core.gemm.kernels.cast_transpose import cast_by_kernel
from fp8flax._core.gemm.kernels.on_shards import gemm_on_shards, quantize_on_shards, ragged_on_shards
from fp8flax._core.gemm.request import CastTranspose
from fp8flax._core.plans.dot_general import fp8_dot_general
from fp8flax._core.qtensor import QTensor, View
from tests.cases import block_gemm_in_jax, error_of_product

E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2


def ugly(dtype, rows=256, columns=384):
    """Two matrices with rows of all magnitudes, blocks of zeros, NaN, Inf and what is no normal number."""
    rng = np.random.default_rng(0)
    x = rng.standard_normal((2, 256, 384)) * np.exp(3 * rng.standard_normal((2, 256, 1)))
    x[0, :130, :130] = 0
    x[0, 200] *= 1e30
    x[0, 201] *= 1e-36
    x[0, 202] *= 1e-39
    x[1, 3, 5], x[1, 4, 5], x[1, 7, 8] = np.inf, -np.inf, np.nan
    return jnp.asarray(x, dtype)[:, :rows, :columns]


@pytest.mark.parametrize("block", [(1, 128), (128, 128)], ids=str)
@pytest.mark.parametrize(
    ("dtype", "scale", "of"),
    [(E4M3, "power_of_two", jnp.float32), (E4M3, "float32", jnp.bfloat16), (E5M2, "float32", jnp.float32)],
    ids=str,
)
@pytest.mark.parametrize(
    ("sizes", "inf_is_nan"),
    [((256, 384), False), ((256, 384), True), ((203, 384), False), ((210, 140), True)],
)
def test_both_orders_are_those_of_the_quantizer(block, dtype, scale, of, sizes, inf_is_nan):
    """To the last bit of codes and scales; of sizes that are no multiples of a block, too."""
    quantizer = fp8.BlockQuantizer(dtype=dtype, block=block, scale=scale)
    x = ugly(of, *sizes)
    kernel = partial(
        block_quantize,
        dtype=dtype,
        is_square=block[0] > 1,
        power_2=scale == "power_of_two",
        inf_is_nan=inf_is_nan,
        interpret=True,
    )
    seen = jnp.where(jnp.isinf(x), jnp.nan, x) if inf_is_nan else x
    for (codes, scales), contract in zip(jax.jit(kernel)(x), (2, 1)):
        view = View(x.shape, (contract,), (0,))
        wanted = jax.jit(lambda x, view=view: quantizer.quantize(x, view))(seen)
        np.testing.assert_array_equal(scales, wanted.scale)
        is_nan = np.isnan(np.asarray(codes, np.float32))
        np.testing.assert_array_equal(is_nan, np.isnan(np.asarray(wanted.codes, np.float32)))
        assert is_nan.sum() == (3 if inf_is_nan else 1)
        np.testing.assert_array_equal(
            np.asarray(codes).view(np.uint8)[~is_nan], np.asarray(wanted.codes).view(np.uint8)[~is_nan]
        )


@pytest.mark.parametrize(
    ("shape", "recipe", "expected"),
    [
        ((256, 384), fp8.Float8BlockScaling(), [(1, 256, 384), (1, 384, 512), (1, 256, 512)]),
        ((2, 128, 384), fp8.Float8BlockScaling(), [(1, 256, 384), (1, 384, 512), (1, 256, 512)]),
        ((200, 384), fp8.Float8BlockScaling(), [(1, 200, 384), (1, 384, 512), (1, 200, 512)]),
        ((256, 384), fp8.MXFP8BlockScaling(), []),
        ((256, 384), fp8.Float8CurrentScaling(), []),
    ],
)
def test_which_tensors_the_kernel_quantizes(shape, recipe, expected, monkeypatch):
    """All of them, where the GPU is of Hopper's kind: the input, the kernel, the gradient."""
    seen = []

    def recorded(x, *args, **kwargs):
        seen.append(x.shape)
        return block_quantize(x, *args, **kwargs)

    monkeypatch.setattr(cuda_casts, "block_quantize", recorded)
    dims = ((len(shape) - 1,), (0,)), ((), ())

    def step(x, w):
        out, vjp = jax.vjp(partial(fp8_dot_general, dimension_numbers=dims, recipe=recipe), x, w)
        return vjp(out)

    for capability in (None, 10.0, 9.0):
        assert not seen
        with compile_target(capability):
            jax.eval_shape(step, jnp.zeros(shape), jnp.zeros((384, 512)))
    assert sorted(set(seen)) == sorted(expected)


@pytest.fixture
def _one_core(monkeypatch):
    """The interpreter compiles the kernel anew for each core that there is. One does all tiles, in turn."""
    monkeypatch.setattr(block_gemm_hopper, "_CORES", 1)


def interpreted(**kwargs):
    from jax._src.pallas.mosaic_gpu.interpret.params import InterpretGPUParams

    return jax.jit(partial(hopper_block_gemm, **kwargs, interpret=InterpretGPUParams()))


@pytest.mark.long
@pytest.mark.skipif(not HAS_MOSAIC, reason="Mosaic GPU of JAX 0.9 lacks what the kernel is written in")
@pytest.mark.usefixtures("_one_core")
@pytest.mark.parametrize("is_square", [True, pytest.param(False, marks=pytest.mark.all_cells)])
@pytest.mark.parametrize(
    ("shape", "out_dtype"),
    [((1, 200, 256, 136), jnp.float32), ((2, 3, 384, 128), jnp.bfloat16), ((1, 130, 128, 1), jnp.float16)],
    ids=str,
)
def test_hoppers_gemm(shape, is_square, out_dtype):
    """Sizes that its tiles do not divide, several matrices, one block; against float64."""
    batch, rows, depth, columns = shape
    rng = np.random.default_rng(0)
    blocks = -(-columns // 128)
    filled = 128 * blocks if is_square else columns
    dtype = E5M2 if out_dtype == jnp.bfloat16 else E4M3
    codes = [jnp.asarray(rng.normal(size=(batch, n, depth)), dtype) for n in (rows, filled)]
    scales = [
        jnp.asarray(2.0 ** rng.uniform(-3, 3, (batch, n, depth // 128)), jnp.float32)
        for n in (rows, blocks if is_square else columns)
    ]
    out = interpreted(out_dtype=out_dtype)(*codes, *scales)
    assert (out.shape, out.dtype) == ((batch, rows, filled), out_dtype)
    wide = [
        np.repeat(np.repeat(s, c.shape[1] // s.shape[1], 1), 128, 2) * np.asarray(c, np.float64)
        for c, s in zip(codes, scales)
    ]
    tolerance = {"float32": 1e-6, "bfloat16": 2**-8, "float16": 2**-11}[jnp.dtype(out_dtype).name]
    assert error_of_product(out, wide[0] @ wide[1].transpose(0, 2, 1), *wide) <= tolerance


@pytest.mark.long
@pytest.mark.skipif(not HAS_MOSAIC, reason="Mosaic GPU of JAX 0.9 lacks what the kernel is written in")
@pytest.mark.usefixtures("_one_core")
def test_hoppers_gemm_in_range():
    """Where one scale is nearly more than float32 holds, or less; and rows of most different magnitudes."""
    rng = np.random.default_rng(0)
    codes = [jnp.asarray(rng.normal(size=(1, n, 256)) * 90, E4M3) for n in (2, 3)]
    cases = []
    for magnitudes in ((1e37, 1e-12), (1e-12, 1e37), (1e-30, 1e-1), (1e30, 1e-30), (1e-35, 1e4)):
        scales = [
            jnp.asarray(magnitude / 448 * rng.uniform(1, 2, (1, n, 2)), jnp.float32)
            for n, magnitude in zip((2, 3), magnitudes)
        ]
        # A block of zeros has the scale 1; the first block of the other row is all but nothing.
        blank = codes[0].at[0, 1, 128:].set(0), scales[0].at[0, :, 1].set([1e-37, 1])
        for lhs, lhs_scale in ((codes[0], scales[0]), blank):
            cases.append((lhs, codes[1], lhs_scale, scales[1]))
    stacks = [jnp.concatenate(one) for one in zip(*cases)]
    for out, lhs, rhs, *of in zip(interpreted(out_dtype=jnp.float32)(*stacks), *stacks):
        wide = [
            np.repeat(np.asarray(s, np.float64), 128, 1) * np.asarray(c, np.float64)
            for c, s in zip((lhs, rhs), of)
        ]
        assert error_of_product(out, wide[0] @ wide[1].T, *wide) <= 2e-6


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


@pytest.mark.oldest
@pytest.mark.parametrize("way", SPLITS)
@pytest.mark.parametrize("is_square", [True, False])
def test_the_gemm_of_split_operands(way, is_square):
    """With its twin in the place of the kernel, on eight CPUs."""
    on = jax.sharding.Mesh(
        np.array(jax.devices()).reshape(4, 2), ("a", "b"), axis_types=(AxisType.Auto,) * 2
    )
    rng = np.random.default_rng(0)
    columns = 256
    codes = [jnp.asarray(rng.normal(size=(2, n, 512)), E4M3) for n in (8, columns)]
    scales = [
        jnp.asarray(2.0 ** rng.uniform(-3, 3, (2, n, 4)), jnp.float32)
        for n in (8, columns // 128 if is_square else columns)
    ]

    def twin(lhs, rhs, lhs_scale, rhs_scale):
        if is_square:
            rhs_scale = jnp.repeat(rhs_scale, 128, axis=1)
        return block_gemm_in_jax(lhs, rhs, lhs_scale, rhs_scale, out_dtype=jnp.float32)

    expected = twin(*codes, *scales)
    lhs, rhs = (NamedSharding(on, spec) for spec in SPLITS[way])
    # The scales lie as they come.
    run = jax.jit(
        gemm_on_shards(twin, name="twin", is_square=is_square), in_shardings=(lhs, rhs, None, None)
    )
    np.testing.assert_allclose(run(*codes, *scales), expected, rtol=1e-5, atol=1e-4)
    if way in ("rows", "over both axes"):
        text = run.lower(*codes, *scales).compile().as_text()
        assert not re.search(r"= f8e4m3fn\S* all-gather", text)


@pytest.mark.oldest
@pytest.mark.parametrize(
    "spec",
    [
        *(P(), P(None, "a"), P(None, "b", "a"), P("b", None, "a")),
        *(P(None, ("a", "b")), P(None, None, ("b", "a"))),
    ],
    ids=str,
)
@pytest.mark.parametrize("block", [(1, 128), (128, 128)], ids=str)
def test_split_tensors_are_quantized_as_whole_ones(spec, block):
    """Four blocks over four devices, and over eight, which takes fewer."""
    on = jax.sharding.Mesh(
        np.array(jax.devices()).reshape(4, 2), ("a", "b"), axis_types=(AxisType.Auto,) * 2
    )
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, 512, 512)), jnp.float32)
    quantizer = fp8.BlockQuantizer(dtype=E4M3, block=block, scale="float32")

    def twin(x):
        pair = [quantizer.quantize(x, View(x.shape, (contract,), (0,))) for contract in (2, 1)]
        return tuple((q.codes, q.scale) for q in pair)

    expected = jax.jit(twin)(x)
    run = jax.jit(quantize_on_shards(twin, is_square=block[0] > 1), in_shardings=NamedSharding(on, spec))
    jax.tree.map(np.testing.assert_array_equal, run(x), expected)
    gathered = re.findall(r"= (\w+\[\S*) all-gather", run.lower(x).compile().as_text())
    assert not any("512,512" in shape for shape in gathered if not any(map(_is_pair, spec)))


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
@pytest.mark.parametrize("way", RAGGED)
def test_ragged_dots_of_split_operands(way):
    """With a twin in the place of the kernel, on eight CPUs; whatever the sizes of the groups."""
    on = jax.sharding.Mesh(
        np.array(jax.devices()).reshape(4, 2), ("a", "b"), axis_types=(AxisType.Auto,) * 2
    )
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


def test_nothing_that_may_be_nan_meets_a_minimum_or_maximum():
    """Those of Pallas's Triton backend prefer a number to a NaN, which no interpreter shows."""
    x = jnp.zeros((1, 128, 128))
    casting = CastTranspose(lambda x: [x], (E4M3,))
    for kernel in (
        partial(block_quantize, dtype=E4M3, is_square=False, power_2=True),
        partial(block_quantize, dtype=E4M3, is_square=True, power_2=False),
        lambda x: cast_by_kernel(casting, [jnp.float32(1)], x[0]),
    ):
        text = str(jax.make_jaxpr(kernel)(x))
        assert "pallas_call" in text
        assert not re.search(r":f32\[(128|64),(128|64)\] = (max|min|clamp)\b", text)
