"""Chooses between functions when a program is lowered, by the devices it is for.

Some GPU kernels, and constraints of memory layouts, cannot be in a program that XLA splits over several
devices. While JAX traces a program, nobody knows whether XLA will split it: a mesh need not be set, and the
devices may be on another machine.

``jax.export`` lowers a program for several platforms at once. JAX then lowers each branch of
``lax.platform_dependent`` for all of them, and refuses GPU kernels and FP8 algorithms for CPUs. So these
are lowered here, for CUDA alone.

Internals: ``jax.extend.core`` and ``jax.interpreters``, to define primitives, and to batch and lower them,
and the ``axis_context``, the ``platforms`` and the caches of the module that is lowered.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, TypeAlias

import jax
from jax.experimental.layout import Layout, with_layout_constraint
from jax.extend.core import ClosedJaxpr, Primitive, jaxpr_as_fun
from jax.interpreters import batching, mlir
from jax.sharding import AxisType

Context: TypeAlias = mlir.LoweringRuleContext
Value: TypeAlias = mlir.ir.Value

_for_cuda_p, _unless_partitioned_p = Primitive("fp8_for_cuda"), Primitive("fp8_unless_partitioned")


def for_cuda(f: Callable[..., jax.Array], *args: jax.Array) -> jax.Array:
    """Returns ``f(*args)`` in the branch for CUDA of ``lax.platform_dependent``; lowers it for CUDA alone.

    There is no derivative.
    """
    result: jax.Array = _for_cuda_p.bind(*args, program=jax.make_jaxpr(f)(*args))
    return result


def _lower_for_cuda(ctx: Context, *args: Value, program: ClosedJaxpr) -> Any:
    """Lowers a program inline."""
    module = ctx.module_context
    if len(module.platforms) > 1:
        # Other platforms must not share what is lowered here.
        module = module.replace(platforms=("cuda",), lowering_cache={}, cached_primitive_lowerings={})
        ctx = ctx.replace(module_context=module, platforms=None)
    return mlir.lower_fun(jaxpr_as_fun(program))(ctx, *args)


def _batch_for_cuda(
    args: list[jax.Array], axes: list[int | None], *, program: ClosedJaxpr
) -> tuple[jax.Array, int]:
    """Returns a batch of results of ``for_cuda``."""
    return for_cuda(jax.vmap(lambda *args: jaxpr_as_fun(program)(*args)[0], axes), *args), 0


_for_cuda_p.def_impl(lambda *args, program: jaxpr_as_fun(program)(*args)[0])
_for_cuda_p.def_abstract_eval(lambda *avals, program: program.out_avals[0])
mlir.register_lowering(_for_cuda_p, _lower_for_cuda)
batching.primitive_batchers[_for_cuda_p] = _batch_for_cuda


def unless_partitioned(
    whole: Callable[..., Any], on_shards: Callable[..., Any], split: Callable[..., Any], *args: Any
) -> Any:
    """Returns ``whole(*args)``, or what another function returns if XLA splits the program over devices.

    The functions take trees of arrays, and return trees of the same structure, shapes and dtypes. There is
    no derivative, and no rule for ``jax.vmap``: callers use ``custom_vmap`` outside.

    Args:
        whole: runs in programs for one device, and inside of a ``jax.shard_map`` over all axes of the mesh,
            which XLA does not split.
        on_shards: runs in programs that are split over a mesh. It uses ``custom_partitioning``.
        split: runs in the other programs that are split: on a mesh with explicit axes, by ``jax.export``,
            and in a ``jax.shard_map`` over some of the axes of a mesh. It also runs outside of jit.
    """
    leaves = jax.tree.leaves(args)
    if any(AxisType.Explicit in jax.typeof(x).sharding.mesh.axis_types for x in leaves):
        return split(*args)
    traced, shapes = jax.make_jaxpr(whole, return_shape=True)(*args)
    # JAX must find custom_partitioning in the traced program. Then it passes the mesh to the lowering.
    others = {"on_shards": jax.make_jaxpr(on_shards)(*args), "split": jax.make_jaxpr(split)(*args)}
    results = _unless_partitioned_p.bind(*leaves, whole=traced, **others)
    return jax.tree.unflatten(jax.tree.structure(shapes), results)


def _is_partitioned(context: object) -> bool:
    """Returns whether XLA splits a module over several devices, by its ``axis_context``."""
    if isinstance(context, mlir.ShardingContext):
        return context.num_devices > 1
    if isinstance(context, mlir.SPMDAxisContext):
        automatic = set(context.mesh.axis_names) - set(context.manual_axes)
        return math.prod(context.mesh.shape[axis] for axis in automatic) > 1
    return False


def _lower_unless_partitioned(
    ctx: Context, *args: Value, whole: ClosedJaxpr, on_shards: ClosedJaxpr, split: ClosedJaxpr
) -> Any:
    """Lowers ``unless_partitioned`` to one of the three functions."""
    module = ctx.module_context
    # ``custom_partitioning`` needs a mesh, without explicit axes: if such a mesh is set (``jax.set_mesh``)
    # where the program is compiled, XLA does not recognize the sums over devices, and ends the process.
    mesh = getattr(module.axis_context, "abstract_mesh", None)
    has_mesh = mesh is not None and AxisType.Explicit not in mesh.axis_types
    can_split = has_mesh and not module.lowering_parameters.for_export
    chosen = (on_shards if can_split else split) if _is_partitioned(module.axis_context) else whole
    return _lower_for_cuda(ctx, *args, program=chosen)


_unless_partitioned_p.multiple_results = True
# If jit is switched off, ``split`` runs, because it is right on any number of devices.
_unless_partitioned_p.def_impl(lambda *args, split, **others: jaxpr_as_fun(split)(*args))
_unless_partitioned_p.def_abstract_eval(lambda *avals, whole, **others: whole.out_avals)
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


def _lower_row_major(ctx: Context, x: Value) -> Any:
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
