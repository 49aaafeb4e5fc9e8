"""What JAX must be told: what layers share, how an amax merges over a batch, what has no forward mode.

Internals: ``jax.extend.core`` and ``jax.interpreters``, to define primitives, and ``jax.experimental``'s
``set_xla_metadata``: shown to other libraries, but under no promise that they stay.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.xla_metadata import set_xla_metadata
from jax.extend.core import Primitive, jaxpr_as_fun
from jax.interpreters import ad, batching, mlir

FORWARD_MODE = (
    "An FP8 matmul cannot be differentiated in forward mode (jax.jvp, jax.jacfwd, jax.hessian, the "
    "function that jax.linearize returns), because its backward pass carries the scaling state. Use "
    "reverse mode (jax.vjp, jax.jacrev, fp8flax.grad), or turn FP8 off for this call with "
    "fp8flax.autocast(enabled=False)."
)

UNCHECKED = (
    "The scaling state was passed into jax.shard_map with check_vma=False. That mode adds up the gradients "
    "of replicated values, but the scaling state must merge by maximum. Leave check_vma at its default, or "
    "take the gradient inside of shard_map and reduce it with fp8flax.pmean_gradients."
)


@jax.tree_util.register_static
@dataclasses.dataclass(frozen=True)
class _Result:
    """How a result is made of the arguments, followed by the arrays that a jitted function returned."""

    tree: Any
    places: tuple[int, ...]


def traced_once(f: Callable[..., Any]) -> Callable[..., Any]:
    """Jits ``f(static, *arrays)``, which is traced and lowered once for all layers that are alike.

    What ``f`` returns as it was given, or twice, does not go through the jitted function, which would make
    arrays of their own of it: residuals that ``jax.checkpoint`` and ``jax.lax.scan`` would keep.
    """

    @functools.partial(jax.jit, static_argnums=0)
    @functools.wraps(f)
    def traced(static: Any, *args: Any) -> tuple[list[Any], _Result]:
        results, tree = jax.tree.flatten(f(static, *args))
        arrays = [*jax.tree.leaves(args)]
        num_given = len(arrays)
        place = {id(x): i for i, x in enumerate(arrays)}
        for x in results:
            if id(x) not in place:
                place[id(x)] = len(arrays)
                arrays.append(x)
        return arrays[num_given:], _Result(tree, tuple(place[id(x)] for x in results))

    @functools.wraps(f)
    def call(static: Any, *args: Any) -> Any:
        new, result = traced(static, *args)
        arrays = [*jax.tree.leaves(args), *new]
        return jax.tree.unflatten(result.tree, [arrays[i] for i in result.places])

    return call


def _lower_apart(ctx: Any, x: Any) -> Any:
    if tuple(ctx.module_context.platforms) != ("cpu",):
        return [x]
    told = functools.partial(set_xla_metadata, inlineable="false")
    return mlir.lower_fun(told, multiple_results=False)(ctx, x)


# An identity that tells XLA not to inline the function whose result it is given. On CPUs alone: a GPU would
# start more kernels. (Its rule is not cached, which would give it an argument in the place of a call.)
_apart_p = Primitive("fp8_apart")
_apart_p.def_impl(lambda x: x)
_apart_p.def_abstract_eval(lambda x: x)
mlir.register_lowering(_apart_p, _lower_apart, cacheable=False)
ad.primitive_jvps[_apart_p] = lambda primals, tangents: (_apart_p.bind(*primals), tangents[0])
batching.primitive_batchers[_apart_p] = lambda args, dims: (_apart_p.bind(*args), dims[0])


def apart(f: Callable[..., Any]) -> Callable[..., Any]:
    """Jits a function of arrays that XLA compiles for CPUs by itself, not as a part of what reads it.

    There XLA computes again in every kernel what is cheap: the arithmetic of scalars then stands in all
    that read them. Kernels that are the same are compiled once, wherever they are called. (Not for what is
    the whole body of a ``lax.while_loop``: with two results or more XLA for CPUs never ends such a loop.)
    """
    jitted = jax.jit(f)

    def call(*args: Any) -> Any:
        (first, *rest), treedef = jax.tree.flatten(jitted(*args))
        return treedef.unflatten([_apart_p.bind(first), *rest])

    return call


# Two functions of which one is for CPUs. That one says what the results are; the other is traced where it
# is lowered, and so never for a CPU. (``lax.platform_dependent`` traces both, and JAX carries both along.)
_unless_cpu_p = Primitive("fp8_unless_cpu")
_unless_cpu_p.multiple_results = True


def unless_cpu(otherwise: Callable[..., Any], on_cpu: Callable[..., Any], *args: Any) -> Any:
    """Returns ``on_cpu(*args)`` where the program is for a CPU, else ``otherwise(*args)``.

    Args:
        otherwise: a function of the arguments alone, which gives a tree of arrays. It is traced when the
            program is lowered: it must not depend on a context of ours, nor multiply, which nobody would
            see.
        on_cpu: likewise, of the same shapes and dtypes.
        *args: trees of arrays.
    """
    leaves, treedef = jax.tree.flatten(args)
    traced, shapes = jax.make_jaxpr(lambda *x: on_cpu(*treedef.unflatten(x)), return_shape=True)(*leaves)
    has_64_bits = jax.config.jax_enable_x64

    def of_leaves(*x: Any) -> list[Any]:
        with jax.enable_x64(has_64_bits):
            return jax.tree.leaves(otherwise(*treedef.unflatten(x)))

    results = _unless_cpu_p.bind(*leaves, on_cpu=traced, otherwise=of_leaves)
    return jax.tree.unflatten(jax.tree.structure(shapes), results)


def _by_platform(on_cpu: Any, otherwise: Callable[..., Any]) -> Callable[..., Any]:
    """Returns a function of both, traced, for any platform."""
    return functools.partial(lax.platform_dependent, cpu=jaxpr_as_fun(on_cpu), default=otherwise)


def _differentiate_unless_cpu(primals: Any, tangents: Any, *, on_cpu: Any, otherwise: Any) -> Any:
    tangents = tuple(map(ad.instantiate_zeros, tangents))
    return jax.jvp(_by_platform(on_cpu, otherwise), tuple(primals), tangents)


def _batch_unless_cpu(args: Any, dims: Any, *, on_cpu: Any, otherwise: Any) -> Any:
    both = (jax.vmap(f, in_axes=dims) for f in (otherwise, jaxpr_as_fun(on_cpu)))
    results = unless_cpu(*both, *args)
    return results, [0] * len(results)


def _lower_unless_cpu(ctx: Any, *args: Any, on_cpu: Any, otherwise: Any) -> Any:
    platforms = tuple(ctx.module_context.platforms)
    chosen: Callable[..., Any] = _by_platform(on_cpu, otherwise)
    if "cpu" not in platforms:
        chosen = otherwise
    elif len(platforms) == 1:
        chosen = jaxpr_as_fun(on_cpu)
    return mlir.lower_fun(chosen)(ctx, *args)


_unless_cpu_p.def_impl(lambda *args, **params: jax.jit(_by_platform(**params))(*args))
_unless_cpu_p.def_abstract_eval(lambda *avals, on_cpu, otherwise: on_cpu.out_avals)
mlir.register_lowering(_unless_cpu_p, _lower_unless_cpu, cacheable=False)
ad.primitive_jvps[_unless_cpu_p] = _differentiate_unless_cpu
batching.primitive_batchers[_unless_cpu_p] = _batch_unless_cpu


def manual_axes(x: Any) -> frozenset[str]:
    """Returns the axes of the mesh over which ``x`` varies inside ``jax.shard_map``.

    None outside of it, and with its ``check_vma=False``, which keeps no account.
    """
    aval = jax.typeof(x)
    if hasattr(aval, "vma"):  # before JAX 0.10
        return aval.vma
    return aval.manual_axis_type.varying


def vary_alike(*arrays: jax.Array) -> list[jax.Array]:
    """Returns the arrays, all varying over the manual axes that any of them varies over."""
    axes = frozenset().union(*map(manual_axes, arrays))

    def vary(x: jax.Array) -> jax.Array:
        more = tuple(sorted(axes - manual_axes(x)))
        return lax.pcast(x, more, to="varying") if more else x

    return [vary(x) for x in arrays]


def shape_varying_as(x: jax.Array, shape: tuple[int, ...], dtype: Any) -> jax.ShapeDtypeStruct:
    """Returns the type of a result that varies over the manual axes that ``x`` varies over."""
    if hasattr(jax.typeof(x), "vma"):  # before JAX 0.10
        return jax.ShapeDtypeStruct(shape, dtype, vma=manual_axes(x))
    return jax.ShapeDtypeStruct(shape, dtype, manual_axis_type=jax.typeof(x).manual_axis_type)


@jax.custom_batching.custom_vmap
def _merge_over_vmap(amax: jax.Array, state: jax.Array) -> jax.Array:
    """Returns ``amax``; under ``jax.vmap`` its maximum over a batch that ``state`` does not have.

    Elementwise in two arrays of one shape, so that it can stand in its own rule, for the next ``vmap``.
    """
    del state
    return amax


@_merge_over_vmap.def_vmap
def _merge_over_vmap_rule(
    size: int, is_batched: list[bool], amax: jax.Array, state: jax.Array
) -> tuple[jax.Array, bool]:
    amax_batched, state_batched = is_batched
    if amax_batched and not state_batched:
        amax = jnp.max(amax, axis=0)
    elif state_batched and not amax_batched:
        amax = jnp.broadcast_to(amax, (size, *amax.shape))
    return _merge_over_vmap(amax, state), state_batched


def merge_amax(amax: jax.Array, state: jax.Array) -> jax.Array:
    """Returns the maximum of ``amax`` over all the data that shares ``state``.

    That is, over every batch of ``jax.vmap`` and every manual axis of ``jax.shard_map`` that ``amax`` has
    and ``state`` has not. The result is batched, and varies, as ``state`` is.

    Args:
        amax: float32 scalar.
        state: float32 scalar out of the state that the amax belongs to; its value does not matter.
    """
    axes = manual_axes(amax) - manual_axes(state)
    if axes:
        amax = lax.pmax(amax, tuple(sorted(axes)))
    # Neither is differentiated, even where the rest is for a second time.
    return _merge_over_vmap(lax.stop_gradient(amax), lax.stop_gradient(state))


merged_in = jax.make_user_context(None)
"""The manual axes of ``shard_map`` where ``fp8flax.value_and_grad`` was called; None outside of it."""


def current_manual_axes() -> frozenset[str]:
    """Returns the axes of the ``shard_map`` that is being traced."""
    return frozenset(jax.sharding.get_abstract_mesh().manual_axes)


def refuse_unchecked_axes() -> None:
    """Raises ``TypeError`` where JAX would add the state's gradients over devices, which it cannot."""
    if merged_in.value is None:
        return
    entered = current_manual_axes() - merged_in.value
    if entered and not manual_axes(lax.axis_index(min(entered))):
        raise TypeError(UNCHECKED)


def sum_to_axes(grad: jax.Array, axes: frozenset[str]) -> jax.Array:
    """Returns the cotangent of a value that varies over ``axes``: summed over all others it varies over."""
    excess = manual_axes(grad) - axes
    return lax.psum(grad, tuple(sorted(excess))) if excess else grad


# The tangent of an operand. Reverse mode only transposes it; forward mode would compute it, and learns
# that it cannot. (JAX's own error for a custom_vjp names neither the op nor a way out.)
_tangent_p = Primitive("fp8_tangent")


def _refuse(*args: Any, **kwargs: Any) -> Any:
    del args, kwargs
    raise TypeError(FORWARD_MODE)


_tangent_p.def_impl(_refuse)
_tangent_p.def_abstract_eval(lambda x: x)
mlir.register_lowering(_tangent_p, _refuse)
ad.deflinear2(_tangent_p, lambda ct, _: [ct])
batching.primitive_batchers[_tangent_p] = lambda args, dims: (_tangent_p.bind(*args), dims[0])


@jax.custom_jvp
def reverse_mode_only(x: jax.Array) -> jax.Array:
    """Returns ``x``; differentiated in forward mode it raises ``TypeError``."""
    return x


@reverse_mode_only.defjvp
def _reverse_mode_only_jvp(primals: tuple[jax.Array], tangents: tuple[jax.Array]) -> Any:
    return reverse_mode_only(primals[0]), _tangent_p.bind(tangents[0])


# A function that must not be partitioned over several devices, beside one that may be. Which of them a
# program has is settled when it is lowered: nothing else knows for how many devices it is compiled, neither
# the trace (a mesh need not be set) nor the host (the devices may be elsewhere). Of the module that is
# lowered, JAX's lowering rules know it as ``axis_context``.
_unless_partitioned_p = Primitive("fp8_unless_partitioned")
_unless_partitioned_p.multiple_results = True


def unless_partitioned(
    whole: Callable[..., Any],
    split: Callable[..., Any],
    *args: Any,
    on_shards: Callable[..., Any] | None = None,
) -> Any:
    """Returns ``whole(*args)``, or ``split(*args)`` where XLA splits the program over several devices.

    It does not inside of ``jax.shard_map``, if that is over all axes of the mesh.

    Args:
        whole: a function of the arguments alone, which gives a tree of arrays.
        split: likewise, of the same shapes and dtypes.
        on_shards: likewise, for programs that are split over a mesh, in the place of ``split``; its rules
            are those of ``custom_partitioning``. Under ``jax.vmap`` it is not asked.
        *args: trees of arrays. Under ``jax.vmap`` results of one array are batched where that is, else
            along the first axis.
    """
    leaves, treedef = jax.tree.flatten(args)
    functions = (whole, split) if on_shards is None else (whole, split, on_shards)
    (one, shapes), (other, _), *rest = (
        jax.make_jaxpr(lambda *x, f=f: f(*treedef.unflatten(x)), return_shape=True)(*leaves)
        for f in functions
    )
    third = rest[0][0] if rest else None
    results = _unless_partitioned_p.bind(*leaves, whole=one, split=other, on_shards=third)
    return jax.tree.unflatten(jax.tree.structure(shapes), results)


def _is_partitioned(context: Any) -> bool:
    """Tells it by the ``axis_context`` of the module that is lowered."""
    if isinstance(context, mlir.ShardingContext):
        return context.num_devices > 1
    if isinstance(context, mlir.SPMDAxisContext):
        automatic = set(context.mesh.axis_names) - set(context.manual_axes)
        return math.prod(context.mesh.shape[axis] for axis in automatic) > 1
    return False


def _lower_unless_partitioned(ctx: Any, *args: Any, whole: Any, split: Any, on_shards: Any) -> Any:
    context = ctx.module_context.axis_context
    chosen = split if _is_partitioned(context) else whole
    if chosen is split and on_shards is not None and getattr(context, "abstract_mesh", None) is not None:
        chosen = on_shards
    return mlir.lower_fun(jaxpr_as_fun(chosen))(ctx, *args)


def _batch_unless_partitioned(args: Any, dims: Any, *, whole: Any, split: Any, on_shards: Any) -> Any:
    del on_shards
    out = dims[0] if len(args) == 1 else 0
    whole, split = (
        jax.vmap(lambda *x, f=f: jaxpr_as_fun(f)(*x), in_axes=dims, out_axes=out) for f in (whole, split)
    )
    results = unless_partitioned(whole, split, *args)
    return results, [out] * len(results)


def _run_unless_partitioned(*args: Any, **params: Any) -> Any:
    if jax.config.jax_disable_jit:
        return jaxpr_as_fun(params["split"])(*args)
    return jax.jit(functools.partial(_unless_partitioned_p.bind, **params))(*args)


_unless_partitioned_p.def_impl(_run_unless_partitioned)
_unless_partitioned_p.def_abstract_eval(lambda *avals, whole, split, on_shards: split.out_avals)
# Not cached, as that would not ask for how many devices.
mlir.register_lowering(_unless_partitioned_p, _lower_unless_partitioned, cacheable=False)
batching.primitive_batchers[_unless_partitioned_p] = _batch_unless_partitioned
