"""Annotations of public functions state dtypes and shapes, and the functions obey them."""

import inspect
import subprocess
import sys
import typing
from functools import partial

import jax
import jax.numpy as jnp
import jaxtyping
import numpy as np
import pytest
from beartype import beartype
from jax import lax

import fp8flax as fp8
from fp8flax._core import (
    amax,
    quantize,
    scaling,
)
from fp8flax._core.plans import contraction, conv, dot_general, einsum, ragged_dot
from fp8flax._core.qtensor import View
from fp8flax._core.state import state


def hints_of(thing):
    return typing.get_type_hints(inspect.unwrap(thing), localns=vars(jaxtyping))


def checked(function):
    """Returns a function that raises if an argument or the result does not match its annotation."""
    hints, signature = hints_of(function), inspect.signature(function)
    parameters = [p.replace(annotation=hints.get(p.name, p.empty)) for p in signature.parameters.values()]

    def call(*args, **kwargs):
        return function(*args, **kwargs)

    call.__signature__ = signature.replace(parameters=parameters, return_annotation=hints["return"])
    return jaxtyping.jaxtyped(call, typechecker=beartype)


def public(name):
    """Returns a function of the root, or a method of a class there."""
    thing, *method = name.split(".")
    return getattr(getattr(fp8, thing), *method) if method else getattr(fp8, thing)


def f32(*shape):
    return np.linspace(-1, 1, np.prod(shape, dtype=int), dtype=np.float32).reshape(shape)


def ints(*shape):
    return np.zeros(shape, np.int32)


def max_grad(*shape):
    return jnp.asarray(f32(*shape)).astype(fp8.fp32_max_grad)


def quantized(quantizer):
    return quantizer.quantize(jnp.asarray(MATRIX), VIEW, jnp.asarray(ONE))


def on_device(x):
    """Returns an argument of the tables below, which hold no arrays of JAX: collecting tests takes none."""
    x = x() if isinstance(x, partial) else x
    return jnp.asarray(x) if isinstance(x, np.ndarray) else x


E4M3, F32, BF16, F16, ONE = (
    jnp.float8_e4m3fn,
    jnp.float32,
    jnp.bfloat16,
    jnp.float16,
    np.ones(1, np.float32),
)
VIEW = View((2, 3), (1,), ())
DELAYED, CURRENT, BLOCK = (
    kind(dtype=E4M3) for kind in (fp8.DelayedQuantizer, fp8.CurrentQuantizer, fp8.BlockQuantizer)
)
MATRIX, KERNEL, CODES = f32(2, 3), f32(3, 4), f32(2, 3).astype(E4M3)
IMAGE, WINDOW, STRIDES = (
    f32(1, 4, 4, 2),
    f32(1, 1, 2, 4),
    ((1, 1), "SAME", None, None, ("NHWC", "HWIO", "NHWC")),
)
EXPERTS = f32(6, 3), f32(2, 3, 4), np.array([4, 2], np.int32)
MATMUL = (((1,), (0,)), ((), ()))

# For each function valid arguments, and by name of an array argument values of a wrong dtype or rank.
FUNCTIONS = {
    "quantize": ((MATRIX, E4M3, f32(2, 1) + 2), {"x": ints(2, 3), "scale": ints(1), "q_dtype": 8}),
    "dequantize": ((CODES, BF16, 2.0), {"x": ints(2, 3), "scale": ints(1)}),
    "quantize_dequantize": ((MATRIX.astype(BF16), E4M3, ONE, BF16), {"x": ints(2, 3), "scale": 2}),
    "qdq": ((f32(), jnp.float8_e5m2, np.float32(1)), {"x": ints(), "scale": ints()}),
    "cast_to_representable": ((f32(0, 3),), {"x": [0.0], "scale": ints(1)}),
    "compute_scale": (
        (f32(2, 1), ONE, 448.0, 1),
        {"amax": ints(2, 1), "scale": ints(1), "fp8_max": f32(3, 3)},
    ),
    "compute_amax_history": ((MATRIX, f32(4)), {"x": ints(2), "amax_history": f32(2, 4)}),
    "in_qdq": (
        (F32, E4M3, MATRIX, ONE, f32(4)),
        {"inp": ints(2), "scale": [1.0], "amax_history": f32(2, 4)},
    ),
    "out_qdq": (
        (F32, E4M3, MATRIX, partial(max_grad, 1), partial(max_grad, 4)),
        {"out": ints(2), "scale": [1.0], "amax_history": partial(max_grad)},
    ),
    "in_q": ((F32, E4M3, 2.0, 1.0, f32(4)), {"inp": 2, "scale": [1.0], "amax_history": 1.0}),
    "out_dq": (
        (BF16, partial(max_grad, 1), np.float32(2), MATRIX),
        {"out": ints(2), "lhs_scale": [1.0], "rhs_scale": [1.0]},
    ),
    "dot_general_with_precision": (
        (MATRIX, KERNEL, MATMUL, "highest", BF16),
        {"lhs": ints(2, 3), "rhs": 3},
    ),
    "plot_histogram": ((MATRIX, E4M3, 0.01), {"x": ints(2, 3)}),
    "QTensor.dequantize": ((partial(quantized, BLOCK), VIEW, F16), {"dtype": 16}),
    "DelayedQuantizer.quantize": (
        (DELAYED, MATRIX, VIEW, ONE),
        {"x": ints(2, 3), "delayed_scale": ints(1)},
    ),
    "CurrentQuantizer.quantize": ((CURRENT, MATRIX, VIEW), {"x": ints(2, 3)}),
    "BlockQuantizer.quantize": ((BLOCK, MATRIX, VIEW), {"x": ints(2, 3)}),
    "BlockQuantizer.mx_scale": ((BLOCK, partial(quantized, BLOCK)), {"q": CODES}),
    "BlockQuantizer.block_scale": ((BLOCK, partial(quantized, BLOCK), 1), {"q": CODES}),
    "BlockQuantizer.dequantize": ((BLOCK, partial(quantized, BLOCK), VIEW, BF16), {"q": CODES}),
}
OPS = {
    "Fp8DotGeneralOp": ({}, (MATRIX, KERNEL, MATMUL), {"lhs": ints(2, 3), "rhs": ints(3, 4)}),
    "Fp8Einsum": ({}, ("ab,bc->ca", MATRIX, KERNEL), {"lhs": ints(2, 3), "rhs": ints(3, 4)}),
    "Fp8ConvGeneralDilatedOp": ({}, (IMAGE, WINDOW, *STRIDES), {"lhs": ints(1), "rhs": ints(1)}),
    "Fp8RaggedDotOp": ({}, EXPERTS, {"lhs": f32(3), "rhs": f32(3, 3, 4), "group_sizes": f32(2)}),
    "Einsum": ({"shape": (3, 4), "einsum_str": "ab,bc->ac"}, (MATRIX,), {"inputs": ints(2, 3)}),
}
RECIPE = {"recipe": fp8.Float8CurrentScaling()}
INNER = [
    (dot_general.fp8_dot_general, (MATRIX, KERNEL, MATMUL), RECIPE),
    (einsum.einsum_with, (lax.dot_general, "ab,bc->ca", MATRIX, KERNEL), {}),
    (conv.fp8_conv_general_dilated, (IMAGE, WINDOW, *STRIDES), RECIPE),
    (ragged_dot.fp8_ragged_dot, EXPERTS, RECIPE | {"states": contraction.STATELESS}),
    (scaling.finite_amax, (MATRIX.astype(BF16), (1,)), {}),
    (scaling.scale_exponent, (f32(2, 3), 448.0, "up"), {}),
    (scaling.power_of_two, (ints(2, 3),), {}),
    (scaling.floor_power_of_two, (f32(2, 3),), {}),
    (scaling.current_scale, (f32(2, 3), 448.0), {"power_2": True}),
    (scaling.e8m0_scale, (ints(2, 3),), {}),
    (scaling.e8m0_factors, (np.ones((2, 3), jnp.float8_e8m0fnu),), {}),
    (scaling.push_amax, (f32(2, 3), f32(2, 3, 4)), {}),
    (scaling.apply_scales, (f32(2, 3), f32(2, 1), f32()), {}),
    (quantize.inf_to_nan, (MATRIX.astype(BF16),), {}),
    (amax.delayed_amax, (MATRIX.astype(BF16),), {}),
]


@pytest.mark.oldest
@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_keep_to_their_annotations(name):
    args, others = FUNCTIONS[name]
    keep_to_annotations(public(name), checked(public(name)), args, others)


def keep_to_annotations(function, call, args, others):
    args = [on_device(arg) for arg in args]
    call(*args)
    names = list(inspect.signature(function).parameters)
    for other, value in others.items():
        keywords = dict(zip(names, args)) | {other: on_device(value)}
        with pytest.raises(jaxtyping.TypeCheckError, match=other):
            call(**keywords)


@pytest.mark.oldest
@pytest.mark.parametrize("name", OPS)
def test_ops_keep_to_their_annotations(name):
    fields, args, others = OPS[name]
    op = getattr(fp8, name)(**fields)

    def call(self=op, *args, **kwargs):
        def init(*args, **kwargs):
            return self.init_with_output(
                jax.random.key(0), *args, method=checked(type(op).__call__), **kwargs
            )

        return jax.eval_shape(lambda: init(*args, **kwargs))

    keep_to_annotations(type(op).__call__, call, (op, *args), others)


@pytest.mark.parametrize(("function", "args", "kwargs"), INNER, ids=lambda x: getattr(x, "__name__", ""))
def test_what_they_are_made_of(function, args, kwargs):
    """In the shapes that JAX sees."""
    jax.eval_shape(lambda: checked(function)(*map(on_device, args), **kwargs))


@pytest.mark.parametrize("quantizer", [DELAYED, CURRENT, BLOCK], ids=lambda q: type(q).__name__)
def test_fields_of_a_quantized_tensor(quantizer):
    q = quantized(quantizer)
    for tensor in (q, q.as_bits()):
        for name, hint in hints_of(fp8.QTensor).items():
            assert hint is typing.Any or isinstance(getattr(tensor, name), hint)
    assert not isinstance(jnp.zeros(2, np.int32), hints_of(fp8.QTensor)["codes"])


@pytest.mark.parametrize("array", [f32, max_grad])
def test_fields_of_scaling_state(array):
    checked_state = state.as_state(array(2, 1), array(2, 4), (2,))
    for name, hint in hints_of(state.ScalingState).items():
        assert isinstance(getattr(checked_state, name), hint)
    assert not isinstance(on_device(array()), hints_of(state.ScalingState)["amax_history"])


def arrays_in(hint):
    """Yields the types of arrays in an annotation: ``jax.Array``, and those with dtypes and shapes."""
    if isinstance(hint, type) and issubclass(hint, jax.Array | jaxtyping.AbstractArray):
        yield hint
    for part in hint if isinstance(hint, list) else typing.get_args(hint):
        yield from arrays_in(part)


def public_functions():
    for name, thing in vars(fp8).items():
        if inspect.isclass(thing):
            for method, function in inspect.getmembers(thing, inspect.isfunction):
                is_public = method == "__call__" or not method.startswith("_")
                if is_public and function.__qualname__ == f"{thing.__name__}.{method}":
                    yield f"{name}.{method}", function
        elif callable(thing) and not name.startswith("_"):
            yield name, thing


def test_every_public_function_of_arrays_says_their_shapes():
    found = {
        name: [a for h in hints_of(f).values() for a in arrays_in(h)] for name, f in public_functions()
    }
    assert [name for name, arrays in found.items() if jax.Array in arrays] == []
    ops = {f"{name}.__call__" for name in OPS}
    assert {name for name, arrays in found.items() if arrays} == FUNCTIONS.keys() | ops


def test_what_is_not_as_annotated_is_found():
    matrix = jaxtyping.Float[jax.Array, "rows columns"]

    def transposed(x: matrix) -> matrix:
        return x.T

    def plain(f: typing.Callable[[jax.Array], int | None], x: matrix): ...

    with pytest.raises(jaxtyping.TypeCheckError, match="return value"):
        checked(transposed)(jnp.asarray(MATRIX))
    assert [list(arrays_in(hint)) for hint in hints_of(plain).values()] == [[jax.Array], [matrix]]


@pytest.mark.long
@pytest.mark.oldest
def test_users_need_no_type_checker():
    code = "import sys, fp8flax; assert not {'jaxtyping', 'beartype'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
