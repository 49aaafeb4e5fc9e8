"""Lets Qwix add LoRA adapters to the results of FP8 ops.

While a model with adapters runs, Qwix has replaced the code of ``lax.dot_general`` and similar functions.
Its code calls the function of JAX, looks up which module is running, and adds ``x @ lora_a @ lora_b``. An
FP8 op does not call ``lax.dot_general``, so the adapters of its layer would be left out without an error.
So the op calls the function while Qwix runs, and computes the primitive that Qwix's code binds::

    op(x, kernel)                          # in the layer
      lax.dot_general(x, kernel)           # Qwix's code
        dot_general_p.bind(x, kernel)      # comes to the handler below, which runs the op in FP8
        dot_general_p.bind(x, lora_a), …   # other operands: JAX computes these products
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from fp8flax._compat.jaxprs import Compute, Operands, Params, Primitive, Results
from fp8flax._compat.traces import FrontTrace, running_in
from fp8flax._core.ops.einsum import Einsum
from fp8flax._core.ops.op import Op

_CODE_OF_JAX = lax.dot_general.__code__


def is_running() -> bool:
    """Returns whether Qwix has replaced the functions of JAX now."""
    return lax.dot_general.__code__ is not _CODE_OF_JAX


def function_of(op_type: type[Op]) -> Callable[..., jax.Array]:
    """Returns the function of JAX in whose place an op is given to a layer."""
    return jnp.einsum if op_type is Einsum else op_type.plain


class _Replaced:
    """The handler of a ``FrontTrace`` that computes the primitive of two operands by ``compute``."""

    def __init__(self, operands: Sequence[Any], compute: Callable[..., Results]) -> None:
        self.operands, self.compute = {id(x) for x in operands}, compute

    def on_primitive(
        self, front: FrontTrace, primitive: Primitive, operands: Operands, params: Params
    ) -> Results:
        is_it = self.operands <= {id(x) for x in operands}
        return (self.compute if is_it else FrontTrace.compute)(front, primitive, operands, params)

    def on_function(self, is_custom_vjp: bool, operands: Operands, compute: Compute) -> Operands:
        return compute()


def call_replaced(
    op_type: type[Op], compute: Callable[..., Results], *args: Any, **kwargs: Any
) -> jax.Array:
    """Calls the function of JAX, with Qwix's code. Its own primitive is computed by ``compute``.

    ``compute(front, primitive, operands, params)`` is called in the place of ``FrontTrace.compute``.
    """
    first = int(op_type is Einsum)  # an equation comes before the operands
    # The primitive gets the same objects only if they are arrays, and not variables.
    args = *args[:first], *map(jnp.asarray, args[first : first + 2]), *args[first + 2 :]
    with running_in(FrontTrace(_Replaced(args[first : first + 2], compute))):
        return function_of(op_type)(*args, **kwargs)


def with_adapters(call: Callable[..., jax.Array]) -> Any:
    """Returns the ``__call__`` of an op, whose results get what Qwix adds."""

    # Qwix takes the innermost ``self`` that is a module for the layer, so the op is not named ``self``.
    @functools.wraps(call)
    def run(op: Any, *args: Any, **kwargs: Any) -> jax.Array:
        def compute(front: FrontTrace, primitive: Primitive, *_: Any) -> Results:
            with running_in(front.behind):
                out = call(op, *args, **kwargs)
            return [out] if primitive.multiple_results else out  # jnp.einsum is one jitted function

        if is_running():
            return call_replaced(op.op_type, compute, *args, **kwargs)
        return call(op, *args, **kwargs)

    return run
