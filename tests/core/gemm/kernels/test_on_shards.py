"""GPU kernels on arrays that are split over devices, with a reference in the place of each kernel."""

import dataclasses
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import fp8flax as fp8
from fp8flax._core.gemm.gemm import Gemm, _in_bfloat16
from fp8flax._core.gemm.kernels.on_shards import gemm_on_shards, quantize_on_shards, ragged_on_shards
from fp8flax._core.qtensor import Dims, QTensor

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


@pytest.mark.newest
@pytest.mark.parametrize(
    ("way", "is_square"),
    [*((way, False) for way in SPLITS), *((way, True) for way in ("rows", "summed", "matrices"))],
)
def test_the_gemm_of_split_operands(way, is_square):
    """A reference multiplies on each of eight CPUs; the sizes that are not whole blocks are filled up."""
    quantizers = [
        fp8.BlockQuantizer(dtype=E4M3, block=block, scale="float32")
        for block in ((1, 128), (128, 128) if is_square else (1, 128))
    ]
    # Square blocks are sent in the order of the tensor, which is not the order of its codes here.
    shapes = (2, 8, 512), (2, 512, 200) if is_square else (2, 200, 512)
    contract = (2,), (1,) if is_square else (2,)
    dtype = np.dtype(np.float32)
    gemm = Gemm((contract, ((0,), (0,))), dtype, dtype, dtype)
    rng = np.random.default_rng(0)
    operands = [
        quantizer.quantize(jnp.asarray(rng.normal(size=shape), jnp.float32), Dims(3, axes, 1))
        for quantizer, shape, axes in zip(quantizers, shapes, contract)
    ]
    expected = _in_bfloat16(gemm, *operands)
    specs = SPLITS[way]
    if is_square:
        batch, columns, depth = (*specs[1], None, None, None)[:3]
        specs = specs[0], P(batch, depth, columns)
    # The scales lie as they come.
    shardings = [
        dataclasses.replace(x, codes=NamedSharding(mesh(), spec), scale=None)
        for spec, x in zip(specs, operands)
    ]
    run = jax.jit(partial(gemm_on_shards, _in_bfloat16, gemm, name=""), in_shardings=tuple(shardings))
    np.testing.assert_allclose(run(*operands), expected, rtol=1e-5, atol=1e-4)
    if way in ("rows", "over both axes"):
        text = run.lower(*operands).compile().as_text()
        assert not re.search(r"= \S+,512\]\S* all-gather", text)


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
        return tuple(quantizer.quantize(x, Dims(3, (contract,), 1)) for contract in (2, 1))

    expected = jax.jit(twin)(x)
    run = jax.jit(partial(quantize_on_shards, twin, name=""), in_shardings=NamedSharding(on, spec))
    jax.tree.map(np.testing.assert_array_equal, run(x), expected)
    gathered = re.findall(r"= (\w+\[\S*) all-gather", run.lower(x).compile().as_text())
    assert not any("512,512" in shape for shape in gathered if not any(map(_is_pair, spec)))


@pytest.mark.parametrize(
    ("sizes", "block"),
    [((512, 300), (1, 128)), ((300, 512), (128, 128)), ((200, 300), (1, 128))],
    ids=str,
)
def test_a_dimension_that_ends_in_a_partial_block_is_not_split(sizes, block):
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, *sizes)), jnp.float32)
    quantizer = fp8.BlockQuantizer(dtype=E4M3, block=block, scale="float32")

    def pair(x):
        return tuple(quantizer.quantize(x, Dims(3, (contract,), 1)) for contract in (2, 1))

    split = partial(quantize_on_shards, pair, name="")
    run = jax.jit(split, in_shardings=NamedSharding(mesh(), P(None, "b", "a")))
    jax.tree.map(np.testing.assert_array_equal, run(x), jax.jit(pair)(x))


RAGGED = {
    # The dimensions of the operands and of the result, and how each operand is split.
    "rows and columns": (("mk", "enk", "mn"), P("a"), P(None, "b")),
    "rows over both axes": (("mk", "enk", "mn"), P(("a", "b")), P("a")),
    "blocks of columns": (("mk", "enk", "mn"), P("b"), P(None, "a")),
    "sums of blocks": (("mk", "mn", "ekn"), P("a"), P("a")),
    "sums of fewer blocks than devices": (("mk", "mn", "ekn"), P(("a", "b")), P()),
}


# Experts that are split, and fewer blocks than devices.
GATHERED = {"rows over both axes", "blocks of columns", "sums of fewer blocks than devices"}


@pytest.mark.long
@pytest.mark.parametrize("way", RAGGED)
def test_ragged_dots_of_split_operands(way):
    """A reference computes in the place of the kernel, on eight CPUs, for groups of any sizes."""
    on = mesh()
    dims, *specs = RAGGED[way]
    rng, size_of = np.random.default_rng(0), {"m": 512, "k": 256, "n": 256, "e": 4}
    kinds = fp8.CurrentQuantizer(dtype=E4M3), fp8.BlockQuantizer(dtype=E4M3, block=(1, 128))

    has_blocks = "blocks" in way

    def operand(names):
        shape, is_kernel, block = tuple(size_of[name] for name in names), "e" in names, ()
        if has_blocks:
            places = {"enk": (1, 128, 128), "mk": (1, 128)}
            block = (128, 1) if "sums" in way else places[names]
            scale_shape = tuple(size // width for size, width in zip(shape, block))
        else:
            scale_shape = (*shape[:1], 1, 1) if is_kernel else ()
        scale = jnp.asarray(2.0 ** rng.integers(-3, 3, scale_shape), jnp.float32)
        return QTensor(jnp.asarray(rng.normal(size=shape), E4M3), scale, kinds[has_blocks], block)

    def twin(lhs, rhs, sizes):
        left, right = lhs.dequantize(jnp.float32), rhs.dequantize(jnp.float32)
        sizes = jnp.clip(sizes, 0, 512)[None]
        ends, row = jnp.cumsum(sizes, axis=1), jnp.arange(left.shape[0])[:, None]
        mine = ((row < ends) & (row >= ends - sizes)).astype(jnp.float32)
        return jnp.einsum(f"{dims[0]},{dims[1]},me->{dims[2]}", left, right, mine)

    qs, expected = (operand(dims[0]), operand(dims[1])), jax.jit(twin)
    shardings = [
        dataclasses.replace(x, codes=NamedSharding(on, spec), scale=None) for spec, x in zip(specs, qs)
    ]
    split = jax.jit(partial(ragged_on_shards, twin, dims), in_shardings=(*shardings, None))
    for sizes in ((100, 0, 253, 90), (0, 0, 512, 0), (9, 999, 5, -7)):
        args = *qs, jnp.array(sizes, jnp.int32)
        np.testing.assert_allclose(split(*args), expected(*args), rtol=1e-5, atol=1e-3)
    text = split.lower(*args).compile().as_text()
    assert bool(re.search(r"= f\S+ all-gather", text)) == (way in GATHERED)


def _is_pair(names):
    return isinstance(names, tuple)
