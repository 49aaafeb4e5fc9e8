"""Contractions, recipes, data and comparisons that several files of tests share."""

import functools
from functools import partial

import flax.linen as nn
import flax.traverse_util
import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType

import fp8flax as fp8
from fp8flax._core.gemm import hopper
from fp8flax._core.gemm.gemm import Gemm
from fp8flax._core.ops.dot_general import DotGeneral
from fp8flax._core.qtensor import Dims
from fp8flax._core.state.state import ScalingState
from fp8flax._core.state.tree import merge_by_max
from tests import reference, reference_recipes

fp8_dot_general = DotGeneral.in_fp8
OWG = fp8.OVERWRITE_WITH_GRADIENT
MATMUL = (((1,), (0,)), ((), ()))
NO_BATCH = ((), ())

# name: (lhs shape, rhs shape, dimension numbers)
CONTRACTIONS = {
    "matmul": ((5, 7), (7, 3), (((1,), (0,)), NO_BATCH)),
    "dense on a sequence": ((2, 5, 7), (7, 3), (((2,), (0,)), NO_BATCH)),
    "rhs transposed": ((5, 7), (3, 7), (((1,), (1,)), NO_BATCH)),
    "two contracting, crossed": ((2, 4, 6), (6, 3, 4), (((1, 2), (2, 0)), NO_BATCH)),
    "two batches, moved": ((5, 2, 7, 4), (4, 7, 3, 2), (((2,), (1,)), ((1, 3), (3, 0)))),
    "outer product": ((5,), (3,), (((), ()), NO_BATCH)),
    "vector": ((7,), (7, 3), (((0,), (0,)), NO_BATCH)),
    "dot to a scalar": ((7,), (7,), (((0,), (0,)), NO_BATCH)),
    "no rows": ((0, 7), (7, 3), (((1,), (0,)), NO_BATCH)),
}

RECIPES = {
    "delayed": fp8.DelayedScaling(amax_history_len=4),
    "current": fp8.Float8CurrentScaling(),
    "axiswise": fp8.Float8CurrentScaling(granularity="axiswise"),
    "mxfp8": fp8.MXFP8BlockScaling(),
    "block128": fp8.Float8BlockScaling(),
}


def name_of(value):
    return getattr(value, "__name__", getattr(value, "name", str(value)))


def normal(seed, *shape, dtype=jnp.float32):
    """Returns normally distributed numbers by NumPy: JAX would compile a program for every shape."""
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def ties(seed, *shape, dtype=jnp.float32):
    """Returns numbers that round differently if multiplied by the reciprocal of their scale, and the scale.

    The first number of each row and column is the amax, from which the scale in e4m3fn follows.
    """
    rng, name = np.random.default_rng(seed), "float8_e4m3fn"
    found, amax, scale = np.zeros(0, np.float32), 0.0, np.float32(1)
    while len(found) < 8:  # some scales have no such numbers
        amax = np.asarray(rng.uniform(0.5, 4), dtype).astype(np.float32)
        scale = reference.next_scale(amax[None], np.float32(1), name)
        grid = np.asarray(np.arange(-448, 448, 0.125, np.float32) * scale, dtype).astype(np.float32)
        codes = (
            reference.quantize(x, "float8_e4m3fn", s) for x, s in [(grid, scale), (grid * (1 / scale), 1)]
        )
        is_tie = np.not_equal(*(code.astype(np.float32) for code in codes))
        found = grid[is_tie & (np.abs(grid) <= amax)]
    x = rng.choice(found, shape)
    x[..., 0] = x[..., :1, :] = amax
    return jnp.asarray(x, dtype), scale


def struct(*shape, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype)


def mesh(kind=AxisType.Auto, **sizes):
    """Returns a mesh of the first devices, with axes of these names and sizes."""
    return jax.make_mesh(tuple(sizes.values()), tuple(sizes), axis_types=(kind,) * len(sizes))


def cells(values, repeated):
    """Returns the parameters of a test; those in ``repeated`` run only with --all-cells.

    They take a path of the code that another parameter takes, too.
    """
    values = list(values)
    assert not [value for value in repeated if value not in values]
    return [
        pytest.param(*(v if isinstance(v, tuple) else (v,)), marks=pytest.mark.all_cells)
        if v in repeated
        else v
        for v in values
    ]


def variables_of(model, *inputs, seed=1, **named):
    """Returns variables of a model without compiling: shapes by tracing ``init``, values by NumPy."""
    rng = np.random.default_rng(seed)

    def fill(path, leaf):
        name = jax.tree_util.keystr(path[-1:], simple=True)
        if name == "var" or name.endswith("scale"):
            drawn = np.ones(leaf.shape)
        elif path[0].key == "params" and leaf.ndim > 1:
            drawn = rng.standard_normal(leaf.shape) / np.prod(leaf.shape[:-1]) ** 0.5
        else:
            drawn = np.zeros(leaf.shape)
        return jnp.asarray(drawn, leaf.dtype)

    shapes = jax.eval_shape(lambda key: model.init(key, *inputs, **named), jax.random.key(0))
    return jax.tree_util.tree_map_with_path(fill, shapes)


def flat(tree):
    return {"/".join(path): leaf for path, leaf in flax.traverse_util.flatten_dict(tree).items()}


def assert_same(actual, expected):
    actual, expected = flat(actual), flat(expected)
    assert list(actual) == list(expected) or sorted(actual) == sorted(expected)
    for path, leaf in expected.items():
        assert actual[path].dtype == leaf.dtype, path
        np.testing.assert_array_equal(actual[path], leaf, err_msg=path)


def assert_same_bits(actual, expected):
    """Equal bit by bit, except that any NaN equals any NaN."""
    actual, expected = np.asarray(actual), np.asarray(expected)
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    bits = f"u{actual.dtype.itemsize}"
    both_nan = np.isnan(actual.astype(np.float64)) & np.isnan(expected.astype(np.float64))
    different = (actual.view(bits) != expected.view(bits)) & ~both_nan
    assert not different.any(), (
        f"{different.sum()} differ, first: {actual[different][0]} != {expected[different][0]}"
    )


def assert_trees_equal(actual, expected, compare=np.testing.assert_array_equal):
    """Compares the structures of two trees, and their leaves."""
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    jax.tree.map(compare, actual, expected)


def data(i, lhs_shape, rhs_shape, dims, dtype):
    """Returns operands and cotangent of step ``i``; their amplitude changes from step to step."""
    out = jax.eval_shape(
        partial(lax.dot_general, dimension_numbers=dims), *map(np.empty, (lhs_shape, rhs_shape))
    )
    rng = np.random.default_rng(i)
    lhs, rhs, g = (
        rng.normal(scale=scale, size=shape)
        for scale, shape in zip((3.0 * 2**i, 0.1, 1e-3 / 2**i), (lhs_shape, rhs_shape, out.shape))
    )
    return jnp.asarray(lhs, dtype), jnp.asarray(rhs, dtype), jnp.asarray(g, jnp.float32)


def make_step(op, dims):
    """Returns the results of a step: the output, the gradients of both operands, and the new variables."""

    @jax.jit
    def step(variables, lhs, rhs, g):
        def loss(variables, lhs, rhs):
            out = op.apply(variables, lhs, rhs, dims)
            return jnp.sum(out.astype(jnp.float32) * g), out

        return jax.grad(loss, (0, 1, 2), has_aux=True)(variables, lhs, rhs)

    return step


def states_of(recipe, scale=1.0):
    """Returns fresh scaling states of a matmul under a recipe."""
    return {
        role: ScalingState(jnp.full((1,), scale), jnp.zeros((quantizer.amax_history_len,)))
        for role, quantizer in recipe.gemms.delayed.items()
    }


def vjp_of(recipe, dims=MATMUL, states=None):
    """Returns a jitted function of operands and cotangent: the result and both gradients."""

    @jax.jit
    def run(states, lhs, rhs, g):
        dot = partial(fp8_dot_general, dimension_numbers=dims, recipe=recipe, states=states)
        out, vjp = jax.vjp(dot, lhs, rhs)
        return out, *vjp(g.astype(out.dtype))

    return partial(run, states_of(recipe) if states is None else states)


def three_products(recipe, x, w, g):
    """Returns the operands of forward, dgrad and wgrad, each quantized by NumPy for its GEMM."""
    forward, dgrad, wgrad = recipe.gemms.forward, recipe.gemms.dgrad, recipe.gemms.wgrad
    return (
        (with_reference(forward.lhs, x, 1), with_reference(forward.rhs, w, 0)),
        (with_reference(dgrad.lhs, g, 1), with_reference(dgrad.rhs, w, 1).T),
        (with_reference(wgrad.lhs, x, 0).T, with_reference(wgrad.rhs, g, 0)),
    )


def error_of_product(actual, expected, *factors):
    """Returns the norm of the difference, relative to the product of the norms of the two factors.

    An error of one smallest subnormal is allowed in each element.
    """
    norm = np.prod([np.linalg.norm(np.asarray(f, np.float64)) for f in factors])
    granted = float(jnp.finfo(actual.dtype).smallest_subnormal) * actual.size**0.5
    error = np.linalg.norm(np.asarray(actual, np.float64) - np.asarray(expected, np.float64))
    return max(error - granted, 0.0) / norm


KINDS = {
    ("float32", "up"): "exact",
    ("power_of_two", "up"): "power_of_two",
    ("e8m0", "up"): "e8m0_up",
    ("e8m0", "floor"): "e8m0_floor",
}


def codes_and_scales(quantizer, x, contract):
    """Returns the codes and scales of a matrix that is contracted along ``contract``, by NumPy.

    With delayed scaling, the past amaxes are the current ones. NVFP4 has the scale of the tensor, too.
    """
    name = quantizer.dtype.name
    if isinstance(quantizer, fp8.NVFP4Quantizer):
        x = reference_recipes.rotated(x, contract) if quantizer.rotation else x
        codes, scale, of_tensor = reference_recipes.nvfp4(np.moveaxis(x, contract, -1), quantizer.block)
        return np.moveaxis(codes, -1, contract), np.moveaxis(scale, -1, contract), of_tensor
    if isinstance(quantizer, fp8.BlockQuantizer):
        matrix = np.moveaxis(x, contract, -1)[None]
        kind = KINDS[quantizer.scale, quantizer.scale_rounding]
        codes, scale = reference_recipes.blockwise(matrix, name, quantizer.block, kind)
        codes = codes[:, : matrix.shape[1], : matrix.shape[2]]  # without padding
        return tuple(np.moveaxis(a[0], -1, contract) for a in (codes, scale))
    kind = "power_of_two" if quantizer.use_power_2_scales else "exact"
    if quantizer.has_one_scale:
        return reference_recipes.tensorwise(x, name, kind)
    return reference_recipes.axiswise(x, name, contract, kind)


def scale_of_each(quantizer, scale, contract, shape):
    """Returns the scale of each value of a matrix, in float64."""
    scale = reference_recipes.as_float64(scale)
    if quantizer.block:
        repeated = reference_recipes.over_blocks(np.moveaxis(scale, contract, -1), quantizer.block)
        scale = np.moveaxis(repeated, -1, contract)[: shape[0], : shape[1]]
    return np.broadcast_to(scale, shape)


def with_reference(quantizer, x, contract):
    """Returns a matrix after quantization along ``contract``, in float64, by NumPy."""
    if quantizer is None:
        return np.asarray(x, np.float64)
    codes, scale, *of_tensor = codes_and_scales(quantizer, x, contract)
    scale = scale_of_each(quantizer, scale, contract, codes.shape)
    values = reference_recipes.dequantize(codes, scale)
    return values * np.float64(of_tensor[0]) if of_tensor else values


def added_up(results):
    values, grads = zip(*results)
    merged = {
        name: jax.tree.map(
            lambda *leaves, name=name: functools.reduce(jnp.maximum if name == OWG else jnp.add, leaves),
            *(g[name] for g in grads),
        )
        for name in grads[0]
    }
    return sum(values), merged


class Block(nn.Module):
    """A linear layer between two layers that return their input, so that only the linear layer counts."""

    features: int
    dot_general_cls: object = None
    dtype: object = jnp.bfloat16

    @nn.compact
    def __call__(self, x, _=None):
        layer = nn.Dense(
            self.features, use_bias=False, dtype=self.dtype, dot_general_cls=self.dot_general_cls
        )
        return layer(x), None


def residual_bytes(loss_fn, variables):
    """Returns the bytes of the arrays that the backward pass of ``loss_fn`` keeps.

    Counted in the jaxpr of the forward half of ``jax.vjp``: each array once, and none that is an argument
    or a constant. A conversion to or from ``fp32_max_grad`` changes no bit, so it makes no new array.
    """
    forward = jax.make_jaxpr(lambda v: jax.tree.leaves(jax.vjp(loss_fn, v)[1]))(variables).jaxpr
    source = {}
    for eqn in forward.eqns:
        variables_of_eqn = [*eqn.invars, *eqn.outvars]
        if len(variables_of_eqn) == 2 and any(v.aval.dtype == fp8.fp32_max_grad for v in variables_of_eqn):
            before, after = variables_of_eqn
            source[after] = source.get(before, before)
    not_kept = {*forward.invars, *forward.constvars}
    handed_over = {var for var in forward.outvars if not isinstance(var, jax.extend.core.Literal)}
    kept = {source.get(var, var) for var in handed_over} - not_kept
    return sum(var.aval.size * var.aval.dtype.itemsize for var in kept)


def kept(model, x, merge=merge_by_max):
    """Returns the bytes that the backward pass keeps, for a bfloat16 input that is computed inside."""
    variables = jax.eval_shape(model.init, jax.random.key(0), x)

    def loss(v):
        variables, x = v
        out = model.apply(merge(variables), x + 1)
        return jnp.sum((out[0] if isinstance(out, tuple) else out).astype(jnp.float32))

    return residual_bytes(loss, (variables, x))


def dense_step(M, K, N, dot_general_cls=None):
    """Returns a Dense layer's forward and backward pass and its arguments."""
    layer = nn.Dense(
        N, use_bias=False, dtype=jnp.bfloat16, param_dtype=jnp.bfloat16, dot_general_cls=dot_general_cls
    )
    variables = jax.eval_shape(layer.init, jax.random.key(0), struct(M, K))

    def step(variables, x, g):
        with jax.numpy_dtype_promotion("standard"):  # which Flax's ops need
            y, vjp = jax.vjp(layer.apply, variables, x)
            return y, vjp(g)

    return step, variables, struct(M, K), struct(M, N)


def hopper_gemm(lhs, rhs, lhs_scale, rhs_scale, *, out_dtype):
    """Multiplies codes by the GPU kernel for Hopper; 128 rows, or each row, have a scale per block."""
    operands = []
    for codes, scale in ((lhs, lhs_scale), (rhs, rhs_scale)):
        height = 1 if scale.shape[1] == codes.shape[1] else 128
        quantizer = fp8.BlockQuantizer(dtype=codes.dtype, block=(height, 128), scale="float32")
        operands.append(fp8.QTensor(codes, scale, quantizer, (1, height, 128)))
    product = Gemm(Dims(3, (2,), 1), Dims(3, (2,), 1), *[np.dtype(out_dtype)] * 3)
    return hopper.compute(product, *operands)


def tiled_gemm_in_jax(left, right, *tables, num_steps, step, shape, out_dtype, skips_rows=False, **options):
    """Returns the result of ``tiled_gemm``, which takes seconds to interpret, by plain JAX."""
    (lhs, lhs_scale), (rhs, rhs_scale) = left, right
    rhs_scale = jnp.repeat(rhs_scale, rhs.shape[0] // rhs_scale.shape[1], axis=1)

    def scaled(codes, scale, row, size, place, scales):
        codes = lax.dynamic_slice(codes, (128 * row, 128 * place.depth), (size, 128)).astype(jnp.float32)
        return codes * lax.dynamic_slice(scale, (place.depth, 128 * scales), (1, size)).T

    def of_tile(t):
        def add(b, total):
            place = step(t, b, *tables)
            left = scaled(lhs, lhs_scale, place.lhs, 128, place, place.scale)
            right = scaled(rhs, rhs_scale, place.rhs, shape[1], place, place.rhs)
            new = total + jnp.dot(left, right.T, precision=lax.Precision.HIGHEST)
            keep = lax.dynamic_slice(lhs_scale, (place.depth, 128 * place.scale), (1, 128)).T != 0
            return jnp.where(keep, new, total) if skips_rows else new

        return lax.fori_loop(0, num_steps(t, *tables), add, jnp.zeros((128, shape[1])))

    return lax.map(of_tile, lax.iota(np.int32, shape[0] // 128)).reshape(shape).astype(out_dtype)


def largest_array(function, *args):
    """Returns the bytes of the largest array that a function makes if it is called without ``jax.jit``."""
    program = jax.make_jaxpr(function)(*args)  # each of its equations is then computed by itself
    made = [var.aval for eqn in program.eqns for var in eqn.outvars]
    return max(aval.size * aval.dtype.itemsize for aval in made)
