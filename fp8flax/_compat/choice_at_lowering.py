"""Chooses between two functions when a program is lowered, by the number of devices it is for.

Why: some GPU kernels, and constraints of memory layouts, cannot be in a program that XLA splits over
several devices. While JAX traces a program, the package cannot know whether XLA will split it: a mesh need
not be set, and the devices may be on another machine. JAX has no public way to choose by the number of
devices.

Internals: ``jax.extend.core`` and ``jax.interpreters``, to define a primitive and to lower it, and the
``axis_context`` of the module that is lowered. JAX exposes them to libraries, but does not promise to keep
them.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
from jax.experimental.layout import Layout, with_layout_constraint
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import batching, mlir
from jax.sharding import AxisType

_unless_partitioned_p = Primitive("fp8_unless_partitioned")


def unless_partitioned(
    whole: Callable[..., Any],
    split: Callable[..., Any],
    *args: Any,
    on_shards: Callable[..., Any] | None = None,
) -> Any:
    """Returns ``split(*args)`` if XLA splits the program over several devices, ``whole(*args)`` if not.

    XLA does not split the code inside of a ``jax.shard_map`` over all axes of the mesh, so that code gets
    ``whole``. JAX cannot differentiate the result: no derivative is defined.

    Args:
        whole: a function of trees of arrays that returns a tree of arrays. The result must depend only on
            these arrays.
        split: a function with results of the same shapes and dtypes. It is traced when the program is
            lowered. So it must not depend on contexts such as ``autocast``.
        on_shards: a third function with results of the same shapes and dtypes, or None. It replaces
            ``split`` in programs that are split over a mesh. It uses ``custom_partitioning``. It is not
            used on a mesh with explicit axes, by ``jax.export``, and in a ``jax.shard_map`` over some of
            the axes of a mesh.
        *args: trees of arrays. ``jax.vmap`` has no rule for this: callers use ``custom_vmap`` outside.
    """
    whole_jaxpr, shapes = jax.make_jaxpr(whole, return_shape=True)(*args)
    # JAX must find custom_partitioning in the traced program. Then it passes the mesh to the lowering.
    on_shards_jaxpr = None if on_shards is None else jax.make_jaxpr(on_shards)(*args)
    split_of_leaves = _of_leaves(split, args)
    results = _unless_partitioned_p.bind(
        *jax.tree.leaves(args), whole=whole_jaxpr, split=split_of_leaves, on_shards=on_shards_jaxpr
    )
    return jax.tree.unflatten(jax.tree.structure(shapes), results)


def _of_leaves(function: Callable[..., Any], args: tuple[Any, ...]) -> Callable[..., list[Any]]:
    """Returns a function of the leaves of ``args`` that returns the leaves of ``function(*args)``.

    The function keeps the current x64 setting, because JAX may lower it under another one.
    """
    treedef, has_64_bits = jax.tree.structure(args), jax.config.jax_enable_x64

    def of_leaves(*leaves: Any) -> list[Any]:
        with jax.enable_x64(has_64_bits):
            return jax.tree.leaves(function(*treedef.unflatten(leaves)))

    return of_leaves


def _is_partitioned(context: Any) -> bool:
    """Returns whether XLA splits a module over several devices, by its ``axis_context``."""
    if isinstance(context, mlir.ShardingContext):
        return context.num_devices > 1
    if isinstance(context, mlir.SPMDAxisContext):
        automatic = set(context.mesh.axis_names) - set(context.manual_axes)
        return math.prod(context.mesh.shape[axis] for axis in automatic) > 1
    return False


def _allows_custom_partitioning(context: Any) -> bool:
    """Returns whether a module may contain ``custom_partitioning``, which needs a mesh.

    On a mesh with explicit axes it may not: if such a mesh is set (``jax.set_mesh``) where the program is
    compiled, XLA does not recognize the sums over devices, and ends the process.
    """
    mesh = getattr(context, "abstract_mesh", None)
    return mesh is not None and AxisType.Explicit not in mesh.axis_types


def _lower_unless_partitioned(ctx: Any, *args: Any, whole: Any, split: Any, on_shards: Any) -> Any:
    """Lowers ``unless_partitioned`` to one of the three functions."""
    module = ctx.module_context
    context, is_exported = module.axis_context, module.lowering_parameters.for_export
    chosen: Callable[..., Any] = split if _is_partitioned(context) else jaxpr_as_fun(whole)
    if (
        chosen is split
        and on_shards is not None
        and _allows_custom_partitioning(context)
        and not is_exported
    ):
        chosen = jaxpr_as_fun(on_shards)
    return mlir.lower_fun(chosen)(ctx, *args)


def _run_unless_partitioned(*args: Any, **params: Any) -> Any:
    """Runs ``unless_partitioned`` outside of jit: compiles the primitive by itself.

    If jit is switched off, ``jax.jit`` would call this rule again. In this case ``split`` runs, because it
    is right on any number of devices.
    """
    if jax.config.jax_disable_jit:
        return params["split"](*args)
    return jax.jit(functools.partial(_unless_partitioned_p.bind, **params))(*args)


_unless_partitioned_p.multiple_results = True
_unless_partitioned_p.def_impl(_run_unless_partitioned)
_unless_partitioned_p.def_abstract_eval(lambda *avals, whole, split, on_shards: whole.out_avals)
# Not cached, because what the rule lowers depends on the number of devices.
mlir.register_lowering(_unless_partitioned_p, _lower_unless_partitioned, cacheable=False)


_row_major_p = Primitive("fp8_row_major")


def row_major(x: jax.Array) -> jax.Array:
    """Returns FP8 codes in the row-major memory layout, unless XLA splits the program.

    cublasLt needs some operands transposed. Without the constraint XLA prefers the transposed layout for
    all arrays that an operand is computed from, back to the float32 kernels that ``nn.scan`` stacks, and
    copies those. With the constraint XLA transposes the FP8 codes. In a program for several devices XLA's
    partitioner would gather a constrained array.
    """
    result: jax.Array = _row_major_p.bind(x)
    return result


def _lower_row_major(ctx: Any, x: Any) -> Any:
    """Lowers ``row_major`` to a constraint, or to nothing."""
    if _is_partitioned(ctx.module_context.axis_context):
        return [x]
    layout = Layout(tuple(range(ctx.avals_in[0].ndim)))
    constrained = mlir.lower_fun(lambda x: with_layout_constraint(x, layout), multiple_results=False)
    return constrained(ctx, x)


_row_major_p.def_impl(lambda x: x)
_row_major_p.def_abstract_eval(lambda x: x)
mlir.register_lowering(_row_major_p, _lower_row_major, cacheable=False)
batching.defvectorized(_row_major_p)
