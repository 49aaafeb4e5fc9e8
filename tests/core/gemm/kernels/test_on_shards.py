"""GPU kernels on arrays that are split over devices, with a reference in the place of each kernel."""

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
from fp8flax._core.qtensor import QTensor, View
from tests.cases import block_gemm_in_jax

E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2


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
    """A reference computes in the place of the kernel, on eight CPUs."""
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
    """A reference computes in the place of the kernel, on eight CPUs, for groups of any sizes."""
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
