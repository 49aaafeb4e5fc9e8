"""Chooses what a program contains when JAX lowers it, by the devices that the program is for.

Some GPU kernels, and constraints of memory layouts, cannot be in a program that XLA splits over several
devices. While JAX traces a function, nobody knows whether XLA will split it: a mesh need not be set, and
the devices may be on another machine. When JAX lowers the traced program to StableHLO, it knows.

So each function of this file is a primitive of JAX. A call binds the primitive, which writes one equation
into the traced program. ``def_abstract_eval`` says what types the results have, and ``def_impl`` what runs
if there is no program (outside of jit). The lowering rule makes the choice.

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


def _is_partitioned(axis_context: object) -> bool:
    """Returns whether XLA splits the program that is lowered over several devices.

    In a ``jax.shard_map`` over the axis ``a`` of a mesh ``(a=4, b=2)``, XLA splits over the two devices of
    the axis ``b``, which is automatic. In a ``jax.shard_map`` over both axes XLA splits nothing.
    """
    if isinstance(axis_context, mlir.ShardingContext):  # not in a shard_map
        return axis_context.num_devices > 1
    if isinstance(axis_context, mlir.SPMDAxisContext):  # in a shard_map
        automatic = set(axis_context.mesh.axis_names) - set(axis_context.manual_axes)
        return math.prod(axis_context.mesh.shape[axis] for axis in automatic) > 1
    return False


# A constraint of the memory layout, unless XLA splits the program.

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
    if _is_partitioned(ctx.module_context.axis_context):
        return [x]
    layout = Layout(tuple(range(ctx.avals_in[0].ndim)))
    constrained = mlir.lower_fun(lambda x: with_layout_constraint(x, layout), multiple_results=False)
    return constrained(ctx, x)


_row_major_p.def_impl(lambda x: x)
_row_major_p.def_abstract_eval(lambda x: x)
# Not cached: JAX would take what it lowered for one device for several devices, too.
mlir.register_lowering(_row_major_p, _lower_row_major, cacheable=False)
batching.defvectorized(_row_major_p)


# A function that is lowered for CUDA alone.

_for_cuda_p = Primitive("fp8_for_cuda")


def for_cuda(f: Callable[..., jax.Array], *args: jax.Array) -> jax.Array:
    """Returns ``f(*args)`` in the branch for CUDA of ``lax.platform_dependent``, without a derivative.

    ``jax.export`` lowers a program for several platforms at once. JAX then lowers each branch of
    ``lax.platform_dependent`` for all of them, and refuses FP8 algorithms and GPU kernels for CPUs. So
    ``f`` is lowered here, for CUDA alone.
    """
    (result,) = _for_cuda_p.bind(*args, program=jax.make_jaxpr(f)(*args))
    return result


def _lower_for_cuda(ctx: Context, *args: Value, program: ClosedJaxpr) -> Any:
    module = ctx.module_context
    if len(module.platforms) > 1:
        # Other platforms must not share what is lowered here.
        module = module.replace(platforms=("cuda",), lowering_cache={}, cached_primitive_lowerings={})
        ctx = ctx.replace(module_context=module, platforms=None)
    return mlir.lower_fun(jaxpr_as_fun(program))(ctx, *args)


def _batch_for_cuda(args: list[jax.Array], axes: list[int | None], *, program: ClosedJaxpr) -> Any:
    """Returns the results for a batch of ``jax.vmap``, and the axis of the batch in each result."""
    batched = jax.make_jaxpr(jax.vmap(jaxpr_as_fun(program), axes))(*args)
    return _for_cuda_p.bind(*args, program=batched), [0] * len(batched.out_avals)


_for_cuda_p.multiple_results = True
_for_cuda_p.def_impl(lambda *args, program: jaxpr_as_fun(program)(*args))
_for_cuda_p.def_abstract_eval(lambda *avals, program: program.out_avals)
mlir.register_lowering(_for_cuda_p, _lower_for_cuda)
batching.primitive_batchers[_for_cuda_p] = _batch_for_cuda


# One of three functions, by whether and how XLA splits the program.

_choose_p = Primitive("fp8_choose_at_lowering")


def choose_at_lowering(
    whole: Callable[..., Any], in_parts: Callable[..., Any], in_xla: Callable[..., Any], *args: Any
) -> Any:
    """Returns the result of one of three functions of ``args``, which compute the same.

    The functions take trees of arrays, and return trees of the same structure, shapes and dtypes. There is
    no derivative, and no rule for ``jax.vmap``: callers use ``custom_vmap`` outside.

    Args:
        whole: may contain GPU kernels. It runs in a program that XLA does not split: for one device, or
            inside of a ``jax.shard_map`` over all axes of the mesh.
        in_parts: runs ``whole`` on the part of each device, by ``custom_partitioning``. It runs in a
            program of ``jax.jit`` that XLA splits over a mesh.
        in_xla: plain JAX. It runs where XLA splits the program and has no ``custom_partitioning``: on a
            mesh with explicit axes, by ``jax.export``, and in a ``jax.shard_map`` over some of the axes. It
            also runs outside of jit, because it is right on any number of devices.
    """
    leaves = jax.tree.leaves(args)
    if any(AxisType.Explicit in jax.typeof(x).sharding.mesh.axis_types for x in leaves):
        return in_xla(*args)
    traced, results = jax.make_jaxpr(whole, return_shape=True)(*args)
    # All are traced here, because JAX passes the mesh to the lowering only of a traced program in which it
    # finds ``custom_partitioning``.
    others = {"in_parts": jax.make_jaxpr(in_parts)(*args), "in_xla": jax.make_jaxpr(in_xla)(*args)}
    return jax.tree.unflatten(jax.tree.structure(results), _choose_p.bind(*leaves, whole=traced, **others))


def _lower_choice(
    ctx: Context, *args: Value, whole: ClosedJaxpr, in_parts: ClosedJaxpr, in_xla: ClosedJaxpr
) -> Any:
    module = ctx.module_context
    if not _is_partitioned(module.axis_context):
        return _lower_for_cuda(ctx, *args, program=whole)
    # ``custom_partitioning`` needs a mesh, without explicit axes: if such a mesh is set (``jax.set_mesh``)
    # where the program is compiled, XLA does not recognize the sums over devices, and ends the process.
    mesh = getattr(module.axis_context, "abstract_mesh", None)  # there is none in a shard_map
    has_mesh = mesh is not None and AxisType.Explicit not in mesh.axis_types
    can_split = has_mesh and not module.lowering_parameters.for_export
    return _lower_for_cuda(ctx, *args, program=in_parts if can_split else in_xla)


_choose_p.multiple_results = True
_choose_p.def_impl(lambda *args, in_xla, **others: jaxpr_as_fun(in_xla)(*args))
_choose_p.def_abstract_eval(lambda *avals, whole, **others: whole.out_avals)
mlir.register_lowering(_choose_p, _lower_choice, cacheable=False)  # as for ``row_major``
