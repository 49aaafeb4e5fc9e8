"""What an elementwise function of a jaxpr is at given points, in float64: what it computes, as numbers.

Internals: ``jax.extend.core``, for the classes of jaxprs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

from fp8flax._model.jaxprs import CAST

_FUNCTIONS: dict[str, Callable[..., Any]] = {
    "abs": np.abs,
    "add": np.add,
    "add_any": np.add,
    "and": np.logical_and,
    "clamp": lambda low, x, high: np.clip(x, low, high),
    "div": np.divide,
    "eq": np.equal,
    "erf": np.vectorize(math.erf),
    "erfc": np.vectorize(math.erfc),
    "exp": np.exp,
    "exp2": np.exp2,
    "expm1": np.expm1,
    "ge": np.greater_equal,
    "gt": np.greater,
    "integer_pow": lambda x, y: np.power(x, float(y)),
    "is_finite": np.isfinite,
    "le": np.less_equal,
    "log": np.log,
    "log1p": np.log1p,
    "logistic": lambda x: 1 / (1 + np.exp(-x)),
    "lt": np.less,
    "max": np.maximum,
    "min": np.minimum,
    "mul": np.multiply,
    "ne": np.not_equal,
    "neg": np.negative,
    "not": np.logical_not,
    "one_minus_square": lambda x: 1 - np.square(x),
    "or": np.logical_or,
    "pow": np.power,
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "select_n": lambda which, *cases: np.choose(np.asarray(which, int), cases),
    "sign": np.sign,
    "sqrt": np.sqrt,
    "square": np.square,
    "sub": np.subtract,
    "tanh": np.tanh,
}
"""By primitive; booleans are the only integers among what is not a number in the source."""

_AS_IT_IS = (
    *("copy", "copy_p", "name", "optimization_barrier"),
    *("pcast", "pvary", "reduce_precision", "reshard", "sharding_constraint"),
)
"""What leaves all values as they are, but for rounding or where they lie."""


_CALLS = ("checkpoint", "closed_call", "custom_jvp_call", "custom_vjp_call", "jit", "remat2")
"""What computes its jaxpr, once."""


class Unknown(NamedTuple):
    """A value that is no elementwise function of the arguments."""

    why: str
    """What it is, or what computes it."""


Value = np.ndarray | np.generic | Unknown


def at_points(closed: ClosedJaxpr, points: Sequence[np.ndarray]) -> list[Value]:
    """Returns the results of a jaxpr, as a function of each element of its arguments.

    Args:
        closed: its arguments have one shape.
        points: values of each argument, ``(points,)``.

    Returns:
        Of each result the values at these points, in float64; or ``Unknown``, where it depends on anything
        else than the elements at the same place and numbers.
    """
    with np.errstate(all="ignore"):
        return _run(closed.jaxpr, closed.consts, list(points))


def _run(jaxpr: Jaxpr, consts: Sequence[Any], args: Sequence[Value]) -> list[Value]:
    known: dict[Any, Value] = dict(zip(jaxpr.invars, args))
    known.update((var, _constant(value)) for var, value in zip(jaxpr.constvars, consts))

    def read(var: Any) -> Value:
        return _constant(var.val) if isinstance(var, Literal) else known[var]

    for eqn in jaxpr.eqns:
        known.update(zip(eqn.outvars, _results(eqn, [read(var) for var in eqn.invars])))
    return [read(var) for var in jaxpr.outvars]


def _constant(value: Any) -> Value:
    if isinstance(value, jax.core.Tracer):
        return Unknown("a value that is not theirs")
    if np.ndim(value):
        return Unknown(f"an array of shape {np.shape(value)} that is not theirs")
    number = np.asarray(value)
    return number if number.dtype == bool else number.astype(np.float64)


def _results(eqn: Any, operands: list[Value]) -> list[Value]:
    name, num = eqn.primitive.name, len(eqn.outvars)
    if name in _CALLS:
        inner = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
        return _run(getattr(inner, "jaxpr", inner), getattr(inner, "consts", ()), operands)
    unknown = next((x for x in operands if isinstance(x, Unknown)), None)
    if unknown is not None:
        return [unknown] * num
    if name == CAST and np.dtype(eqn.params["new_dtype"]).itemsize == 1 and not _is_bool(eqn):
        return [Unknown(f"a cast to {eqn.params['new_dtype']}")] * num
    if name == CAST and not np.issubdtype(eqn.params["new_dtype"], np.integer):
        return [np.asarray(operands[0], np.bool_ if _is_bool(eqn) else np.float64)]
    over_nothing = name == "reduce_sum" and not eqn.params["axes"]  # on meshes with explicit axes
    if name in _AS_IT_IS or over_nothing:
        return operands
    shapes = {var.aval.shape for var in (*eqn.invars, *eqn.outvars)} - {()}
    if name in ("broadcast_in_dim", "reshape") and (len(shapes) == 1 or not np.ndim(operands[0])):
        return operands  # of a number, or to the shape that it has
    if name not in _FUNCTIONS or len(shapes) > 1:
        return [Unknown(f"the primitive {name}")] * num
    params = {"y": eqn.params["y"]} if name == "integer_pow" else {}
    return [_FUNCTIONS[name](*operands, **params)]


def _is_bool(cast: Any) -> bool:
    return bool(cast.params["new_dtype"] == np.bool_)
