"""GPU kernels on arrays that are split over devices, with a reference in the place of each kernel."""

import dataclasses
import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import fp8flax as fp8
from fp8flax._core.gemm import emulated
from fp8flax._core.gemm.dispatch import named_dims
from fp8flax._core.gemm.gemm import Gemm
from fp8flax._core.gemm.on_shards import NamedDims, on_shards
from fp8flax._core.qtensor import Dims
from tests.cases import mesh

E4M3 = jnp.float8_e4m3fn

SPLITS = {
    # How the left operand (batch, rows, summed) and the right one (batch, columns, summed) are split.
    "summed": (P(None, None, "a"), P(None, None, "a")),
    "rows and summed": (P(None, "b", "a"), P(None, None, "a")),
    "over both axes": (P(None, ("a", "b")), P()),
    "the same axis twice": (P(None, "a"), P(None, "a")),
    "matrices": (P("b", "a"), P("b")),
    "unlike": (P("b", None, "a"), P(None, "a")),
    "summed, fewer blocks than devices": (P(None, None, ("b", "a")), P(None, None, ("b", "a"))),
    "columns, fewer blocks than devices": (P(), P(None, "a")),
}


def on(spec):
    return NamedSharding(mesh(a=4, b=2), spec)


def has_gathered(run, *args, shape):
    """Returns whether the compiled program gathers an array whose shape ends so."""
    return bool(re.search(rf"= \w+\[[\d,]*{shape}\]\S* all-gather", run.lower(*args).compile().as_text()))


@pytest.mark.newest
@pytest.mark.parametrize(
    ("way", "is_square"),
    [*((way, False) for way in SPLITS), ("summed", True), ("matrices", True)],
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
    gemm = Gemm(*(Dims(3, axes, 1) for axes in contract), dtype, dtype, dtype)
    rng = np.random.default_rng(0)
    operands = [
        quantizer.quantize(jnp.asarray(rng.normal(size=shape), jnp.float32), Dims(3, axes, 1))
        for quantizer, shape, axes in zip(quantizers, shapes, contract)
    ]
    specs = SPLITS[way]
    if is_square:
        batch, columns, depth = (*specs[1], None, None, None)[:3]
        specs = specs[0], P(batch, depth, columns)
    # The scales lie as they come.
    shardings = [dataclasses.replace(x, codes=on(spec), scale=None) for spec, x in zip(specs, operands)]
    of_parts = on_shards(partial(emulated.compute, gemm), *named_dims(gemm, *operands))
    run = jax.jit(of_parts, in_shardings=tuple(shardings))
    np.testing.assert_allclose(run(*operands), emulated.compute(gemm, *operands), rtol=1e-5, atol=1e-4)
    if way == "over both axes":
        assert not has_gathered(run, *operands, shape=",512")


@pytest.mark.newest
@pytest.mark.parametrize(
    ("sizes", "spec", "block"),
    [
        ((512, 512), P(None, "b", "a"), (1, 128)),
        ((512, 512), P("b", None, "a"), (128, 128)),
        ((512, 512), P(None, ("a", "b")), (1, 128)),  # fewer blocks than devices
        ((512, 512), P(None, None, ("b", "a")), (128, 128)),
        # The last block of a dimension is partial, although devices could split the number of blocks.
        ((512, 500), P(None, "b", "a"), (1, 128)),
        ((200, 512), P(None, "b", "a"), (128, 128)),
    ],
    ids=str,
)
def test_split_tensors_are_quantized_as_whole_ones(sizes, spec, block):
    x = jnp.asarray(np.random.default_rng(0).normal(size=(2, *sizes)), jnp.float32)
    quantizer = fp8.BlockQuantizer(dtype=E4M3, block=block, scale="float32")

    def pair(x):
        return tuple(quantizer.quantize(x, Dims(3, (contract,), 1)) for contract in (2, 1))

    named = NamedDims(("batch", "rows", "columns"))
    run = jax.jit(on_shards(pair, [named], [named, named]), in_shardings=on(spec))
    jax.tree.map(np.testing.assert_array_equal, run(x), jax.jit(pair)(x))
    is_gathered = sizes != (512, 512) or any(isinstance(names, tuple) for names in spec)
    assert is_gathered or not has_gathered(run, x, shape="512,512")


def test_sums_of_parts_that_know_their_place():
    """An array that does not decide is split as the others are; a dimension without a name is whole."""
    x, w = (jnp.asarray(np.random.default_rng(0).integers(-4, 5, (64, 3)), jnp.float32) for _ in "xw")

    def weighted(x, w, rows):
        return jnp.einsum("mk,mn,m->kn", x, w, rows.astype(jnp.float32))

    rows = jnp.arange(64)
    run = jax.jit(
        on_shards(
            weighted,
            [NamedDims(("m", None)), NamedDims(("m", "n")), NamedDims(("m",), decides=False)],
            [NamedDims((None, "n"))],
        ),
        in_shardings=(on(P(("a", "b"))), on(P(("a", "b"))), on(P())),
    )
    np.testing.assert_array_equal(run(x, w, rows), weighted(x, w, rows))
    assert not has_gathered(run, x, w, rows, shape=",3")
