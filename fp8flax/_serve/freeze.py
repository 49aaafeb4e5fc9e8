"""``freeze``: a trained model for serving, with kernels in FP8 and scales that no longer change."""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import flax.core
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from fp8flax._dot_general import DotStates, delayed_scale, frozen_dot_general, quantize_kernel
from fp8flax._formats import as_fp8_dtype, float8_e4m3fn, fp8_max
from fp8flax._model.calls import Call, SeenOp, as_jax, seen_of
from fp8flax._model.conversion import reporting
from fp8flax._model.converted import convert, converted_class, trace_apply
from fp8flax._model.provenance import Derived, Source
from fp8flax._model.rules import Rules
from fp8flax._modules import Fp8DotGeneralOp, Fp8Einsum, Fp8Op
from fp8flax._operands import Quantized
from fp8flax._quantize import quantize
from fp8flax._recipes import CurrentQuantizer, CustomRecipe, DelayedQuantizer, GemmRecipe, Recipe
from fp8flax._scaling import current_scale, finite_amax
from fp8flax._state import (
    OVERWRITE_WITH_GRADIENT,
    PARAMS,
    MissingStateError,
    ScalingState,
    key_name,
    state_leaf_names,
)

_CACHE = "cache"
_DTYPE_OF = "_dtype"
"""Ending of the variable beside an FP8 cache: a zero in the dtype that the model knows it in."""
_SERVED = "_fp8_served"
"""The collection in which a method's ops find the codes of their kernels and their scales."""
_CODES = "codes_"
_KERNEL_SCALE, _INPUT_SCALE = (state_leaf_names(role)[0] for role in ("kernel", "input"))
_WEIGHT_ONLY = CustomRecipe(
    forward=GemmRecipe(rhs=CurrentQuantizer(dtype=float8_e4m3fn, granularity="axiswise"))
)
Path = tuple[str, ...]


class ServedOp(NamedTuple):
    """An op as a serving model computes it (hashable)."""

    path: Path
    gemms: CustomRecipe
    kernels: tuple[tuple[Path, np.dtype], ...]
    """The parameters that its kernel is made of, where they are stored in FP8, with the dtypes that the
    model knows them in."""
    scales: tuple[tuple[str, tuple[int, ...], np.dtype], ...] = ()
    """Names, shapes and dtypes of its scales."""
    layout: tuple[tuple[int, ...], tuple[int, ...]] | None = None
    """Where the kernel is one parameter as it is: its dimensions that the output has, and that are summed
    over, those by which it is stacked left out."""


class Serving(NamedTuple):
    """What a serving model must know statically (hashable)."""

    ops: tuple[ServedOp, ...]
    cache_dtype: np.dtype | None


@dataclasses.dataclass(frozen=True)
class MakeServingCall:
    """Makes the calls of a serving model; equal for equal ones."""

    serving: Serving

    def __call__(self, cls: Any, rules: Rules) -> Call:
        """Returns one call of the model of this class."""
        return ServingCall(self.serving, cls, rules)


class ServingCall(Call):
    """A call of a serving model: kernels and scales come from the variables, none of them mutable."""

    def __init__(self, serving: Serving, cls: Any, rules: Rules) -> None:
        super().__init__(cls, rules)
        self._serving = serving
        self._ops = {op.path: op for op in serving.ops}
        self.collections = (PARAMS, _SERVED) if serving.cache_dtype is None else (PARAMS, _SERVED, _CACHE)

    beside_params = _SERVED

    def put_in(self, variables: Mapping[str, Any]) -> Mapping[str, Any]:
        """Gives each op the codes of its kernel, and the model wide arrays of which nothing is read."""
        variables = jax.tree.map(as_jax, nn.meta.unbox(variables))
        params, served = variables.get(PARAMS, {}), dict[str, Any]()
        # At init there is what its other methods have made, if anything.
        ops = [op for op in self._serving.ops if not self.is_init or _is_made(params, op)]
        for op in ops:
            for i, (path, dtype) in enumerate(op.kernels):
                codes = _get(params, path)
                served = _set(served, (*op.path, f"{_CODES}{i}"), codes)
                params = _set(params, path, codes.astype(dtype))
            for name, scale in _get(params, op.path).items() if op.scales else ():
                served = _set(served, (*op.path, name), scale)
        for op in ops:
            if op.scales:
                params = _without(params, op.path)
        result = {**variables, PARAMS: params, _SERVED: served}
        if _CACHE in variables and self._serving.cache_dtype is not None:
            result[_CACHE] = _widened(variables[_CACHE])
        return result

    def take_out(self, variables: Mapping[str, Any]) -> Mapping[str, Any]:
        variables = {name: value for name, value in variables.items() if name != _SERVED}
        if self.is_init:
            variables = {**variables, PARAMS: self._as_served(variables.get(PARAMS, {}))}
        if _CACHE not in variables or self._serving.cache_dtype is None:
            return variables
        return {**variables, _CACHE: _narrowed(variables[_CACHE], self._serving.cache_dtype)}

    def _as_served(self, params: Mapping[str, Any]) -> Mapping[str, Any]:
        """Returns the parameters that ``init`` made, in the shapes and dtypes of those that are served."""
        boxed, params = params, nn.meta.unbox(params)
        for op in self._serving.ops:
            if not all(_has(params, path) for path, _ in op.kernels):  # which no method has made yet
                continue
            for path, _ in op.kernels:
                assert op.gemms.forward.rhs is not None
                params = _set(params, path, quantize(_get(params, path), op.gemms.forward.rhs.dtype, 1.0))
            for name, shape, dtype in op.scales:
                params = _set(params, (*op.path, name), jnp.ones(shape, dtype))
        return _reboxed(params, boxed)

    def finish(self, model: Any, method: str) -> None:
        stored = {path for op in self._serving.ops for path, _ in op.kernels}
        if read := sorted(stored & self.provenance.used_otherwise):
            raise ValueError(
                f"{type(model).__name__}.{method} reads {', '.join(map('/'.join, read))}, stored in FP8, "
                "other than by an FP8 op, which it did not when the model was frozen. Freeze the model "
                "after it has been called like this, or call the model that was frozen."
            )

    def on_op(
        self, op: Fp8Op, recipe: Recipe | None, compute: Any, lhs: Any, rhs: Any, *rest: Any
    ) -> jax.Array:
        """Computes what an op computes, with a kernel and scales that are fixed."""
        if self.interception.is_apart:
            return compute(lhs, rhs, *rest)
        if self.is_init:
            return op.plain(lhs, rhs, *rest)
        if recipe is None:
            raise ValueError(
                "fp8flax.autocast(enabled=False) cannot turn FP8 off in a frozen model, whose kernels are "
                "stored in FP8. Call it outside of that context, or call the model that was frozen."
            )
        served = self._ops.get(op.path)
        if served is None:
            raise ValueError(
                f"fp8flax.freeze did not see the FP8 op at {'/'.join(op.path)}: the model computes "
                "something else than before. Freeze it with inputs that reach this op."
            )
        gemms = served.gemms
        if not served.kernels:
            if gemms.forward.lhs is None and gemms.forward.rhs is None:
                return op.plain(lhs, rhs, *rest)
            return compute(lhs, rhs, *rest, fixed=(_fixed_states(op, gemms), gemms))
        derived = self.provenance.of(rhs, op.scope)
        stored = [path for path, _ in served.kernels]
        if derived is None or derived.rebuild is None or [s.path for s in derived.sources] != stored:
            raise ValueError(
                f"The kernel of the FP8 op at {'/'.join(op.path)} comes from other parameters than when "
                "the model was frozen. Freeze it with inputs like those that it serves."
            )
        names = [f"{_CODES}{i}" for i in range(len(served.kernels))]
        codes = derived.rebuild(tuple(_constant(op.get_variable(_SERVED, name)) for name in names), False)
        scale: Any = _constant(op.get_variable(_SERVED, _KERNEL_SCALE))
        if not _is_dot(type(op)):
            rhs = (codes.astype(scale.dtype) * _beside(scale, codes)).astype(rhs.dtype)
            if gemms.forward.lhs is None:
                return op.plain(lhs, rhs, *rest)
            return compute(lhs, rhs, *rest, fixed=(_fixed_states(op, gemms), gemms))
        delayed = isinstance(gemms.forward.lhs, DelayedQuantizer)
        return frozen_dot_general(
            lhs,
            rhs,
            *rest,
            kernel=Quantized(codes, scale.reshape(()) if scale.shape == (1,) else scale),
            input_scale=_constant(op.get_variable(_SERVED, _INPUT_SCALE)) if delayed else None,
            recipe=gemms,
            form=op.form,
        )


@jax.custom_jvp
def _constant(x: jax.Array) -> jax.Array:
    """Returns codes or scales, which have no derivative: that of casts and roundings means nothing."""
    return x


@_constant.defjvp
def _constant_jvp(primals: Any, tangents: Any) -> Any:
    del primals, tangents
    raise TypeError(
        "The FP8 kernels of a frozen model, and its scales, have no gradient. Differentiate with respect "
        "to the inputs, or to wide parameters alone, with the other variables closed over; to train the "
        "kernels, train the model that was frozen."
    )


def _is_dot(op: type[Fp8Op]) -> bool:
    return issubclass(op, Fp8DotGeneralOp | Fp8Einsum)


def _fixed_states(op: Fp8Op, gemms: CustomRecipe) -> DotStates:
    """Returns states of which a matmul uses the scale as it is: no amax was ever seen."""
    states = {}
    for role in gemms.delayed:
        name, _ = state_leaf_names(role)
        scale = _constant(op.get_variable(_SERVED, name, jnp.ones((1,))))
        states[role] = ScalingState(scale, jnp.zeros((*scale.shape[:-1], 1)))
    return DotStates(**states)


def _widened(cache: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a cache in the dtypes that the model knows, from what ``_narrowed`` returned."""
    wide = {}
    for name, value in cache.items():
        if isinstance(value, Mapping):
            wide[name] = _widened(value)
        elif not name.endswith(_DTYPE_OF):
            like = cache.get(name + _DTYPE_OF)
            wide[name] = value if like is None else value.astype(like.dtype)
    return wide


def _narrowed(cache: Mapping[str, Any], dtype: np.dtype) -> dict[str, Any]:
    """Returns a cache with its floats in FP8, and an empty array beside each that has its dtype."""
    narrow: dict[str, Any] = {}
    for name, value in cache.items():
        if isinstance(value, Mapping):
            narrow[name] = _narrowed(value, dtype)
        elif jnp.issubdtype(value.dtype, jnp.floating):
            narrow[name] = quantize(value, dtype, 1.0)
            narrow[name + _DTYPE_OF] = jnp.zeros((), value.dtype)
        else:
            narrow[name] = value
    return narrow


def _children(node: Any) -> Mapping[str, Any]:
    """Returns what a dict, a tuple or a struct of parameters holds, by name."""
    if isinstance(node, Mapping):
        return node
    children = jax.tree_util.tree_flatten_with_path(node, is_leaf=lambda x: x is not node)[0]
    return {str(key_name(path[0])): child for path, child in children if path}


def _get(tree: Mapping[str, Any], path: Path) -> Any:
    node: Any = tree
    for name in path:
        children = _children(node)
        if name not in children:
            raise ValueError(
                f"{PARAMS}/{'/'.join(path)} is missing from the variables. Pass those of this model: "
                "to freeze, the trained ones; to serve, those that fp8flax.freeze returned."
            )
        node = children[name]
    return node


def _is_made(params: Mapping[str, Any], op: ServedOp) -> bool:
    """Tells whether the kernels of an op and its scales are there."""
    return all(_has(params, path) for path in (*(path for path, _ in op.kernels), op.path))


def _has(tree: Mapping[str, Any], path: Path) -> bool:
    node: Any = tree
    for name in path:
        children = _children(node)
        if name not in children:
            return False
        node = children[name]
    return True


def _set(tree: Any, path: Path, value: Any) -> Any:
    name, *rest = path
    children = _children(tree)
    value = _set(children.get(name, {}), tuple(rest), value) if rest else value
    if isinstance(tree, Mapping):
        return {**tree, name: value}
    treedef = jax.tree.structure(tree, is_leaf=lambda x: x is not tree)
    return treedef.unflatten({**children, name: value}.values())


def _without(tree: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Returns a tree without this node, nor what held nothing else."""
    name, *rest = path
    others = {key: value for key, value in tree.items() if key != name}
    below = _without(tree[name], tuple(rest)) if rest else {}
    return {**others, name: below} if below else others


def _per_slice(
    f: Callable[..., Any], shape: tuple[int, ...], slice_shape: tuple[int, ...]
) -> Callable[..., Any]:
    """Returns ``f`` mapped over the axes by which arrays of ``shape`` exceed the slices that it takes.

    ``nn.scan`` and ``nn.vmap`` stacked a layer along these; where several fit, the first is taken.
    """
    if shape == slice_shape:
        return f
    for axis in range(len(shape)):
        rest = (*shape[:axis], *shape[axis + 1 :])
        if len(rest) >= len(slice_shape):
            inner = _per_slice(f, rest, slice_shape)
            if inner is not None:
                return jax.vmap(inner, in_axes=axis, out_axes=axis)
    return None  # type: ignore[return-value]  # of the recursion


def _is_on_several_devices(x: Any) -> bool:
    is_here = isinstance(x, jax.Array) and not isinstance(x, jax.core.Tracer)
    return is_here and len(x.sharding.device_set) > 1


def _stacked_axis(kernel: Derived, ops: Mapping[Path, SeenOp], params: Any) -> int | None:
    """Returns the axis by which one transformation stacked a kernel's parameters; None if it is not one.

    Where the shapes leave several, those of the other kernels under the same module decide.
    """

    def candidates(source: Source) -> set[int]:
        whole = _get(params, source.path).shape
        if len(whole) != len(source.shape) + 1:
            return set()
        fits = [i for i in range(len(whole)) if (*whole[:i], *whole[i + 1 :]) == source.shape]
        return {*fits, *(i - len(whole) for i in fits)}

    own = set.intersection(*map(candidates, kernel.sources))
    others = (
        candidates(source)
        for found in ops.values()
        if found.kernel is not None
        for source in found.kernel.sources
        if source.path[0] == kernel.sources[0].path[0]
    )
    agreed = own.intersection(*(axes for axes in others if axes & own))
    # Scales have one dimension, so they are stacked along 0, 1 or from the end.
    return min(agreed or own, key=lambda axis: (axis > 1, axis < 0, abs(axis)), default=None)


def _reboxed(params: Any, boxed: Any) -> Any:
    """Returns parameters in the boxes that they came in, such as those of ``nn.with_partitioning``."""

    def is_box(x: Any) -> bool:
        return isinstance(x, nn.meta.AxisMetadata)

    for keys, box in jax.tree_util.tree_flatten_with_path(boxed, is_leaf=is_box)[0]:
        if is_box(box):
            path = tuple(str(key_name(key)) for key in keys)
            params = _set(params, path, box.replace_boxed(_get(params, path)))
    return params


def _into_sources(kernel: Derived, values: jax.Array) -> tuple[jax.Array, ...]:
    """Returns values that lie as a kernel does in the places of the parameters that it was made of.

    By the transpose of what was done to them: a place of which the kernel has nothing is 0, and one that
    it has twice the sum. The values are whole numbers up to 256, which bfloat16 holds.
    """
    rebuild = kernel.rebuild
    assert rebuild is not None
    like = [jax.ShapeDtypeStruct(source.shape, jnp.bfloat16) for source in kernel.sources]
    transpose = jax.linear_transpose(lambda *arrays: rebuild(arrays, False), *like)
    return tuple(x.astype(jnp.uint8) for x in transpose(values.astype(jnp.bfloat16)))


def _counts(kernel: Derived, shape: tuple[int, ...]) -> list[Any]:
    """Returns how often each element of a kernel's parameters is in it."""
    if kernel.is_one_parameter:
        return [np.ones(shape, np.uint8)]
    with jax.ensure_compile_time_eval():
        ones = jax.device_put(np.ones(shape, np.float32))
    count = jax.jit(functools.partial(_into_sources, kernel)).lower(ones).compile()
    return list(jax.device_get(count(ones)))


def _left_wide(
    ops: Mapping[Path, SeenOp], recipes: Mapping[Path, CustomRecipe], seen: Any
) -> dict[Path, str]:
    """Returns the ops whose kernels cannot be stored in FP8, and why."""
    reasons: dict[Path, str] = {}
    for path, found in ops.items():
        gemms = recipes[path]
        if found.others:
            reasons[path] = "one op multiplies by it and by others"
        elif gemms.forward.rhs is None or found.kernel is None:
            reasons[path] = ""  # of which nobody expects it
        elif found.kernel.rebuild is None:
            reasons[path] = "it is computed from parameters"
        elif any(s.path in seen.used_otherwise for s in found.kernel.sources):
            reasons[path] = "something else than an FP8 op reads it too"
        elif _kernel_quantizer(found, gemms) is None:
            reasons[path] = "convolutions and ragged dots store kernels with delayed scales alone"
    while True:
        # Every element of a parameter in the kernel of one op, and all of these stored.
        coverage: dict[Path, Any] = {}
        dtypes: dict[Path, set[Any]] = {}
        for path, found in ops.items():
            kernel, quantizer = found.kernel, recipes[path].forward.rhs
            if path in reasons or kernel is None or quantizer is None:
                continue
            for source, count in zip(kernel.sources, _counts(kernel, found.args[1].shape)):
                coverage[source.path] = coverage.get(source.path, 0) + count
                dtypes.setdefault(source.path, set()).add(quantizer.dtype)
        more: dict[Path, str] = {}
        for path, found in ops.items():
            for source in found.kernel.sources if found.kernel and path not in reasons else ():
                if np.max(coverage[source.path]) > 1:
                    more[path] = "several ops multiply by it"
                elif np.min(coverage[source.path], initial=1) < 1:
                    more[path] = "not all of it is stored in FP8"
                elif len(dtypes[source.path]) > 1:
                    more[path] = "it would be stored in two formats"
        if not more:
            return reasons
        reasons |= more


def _kernel_quantizer(found: SeenOp, gemms: CustomRecipe) -> Any:
    """Returns the quantizer with which an op's kernel is stored, None if it is not stored in FP8."""
    quantizer = gemms.forward.rhs
    if _is_dot(found.op) or gemms is _WEIGHT_ONLY or isinstance(quantizer, DelayedQuantizer):
        return quantizer
    return None


def _quantized(found: SeenOp, gemms: CustomRecipe, kernel: jax.Array, scale: jax.Array | None) -> Quantized:
    """Returns an op's kernel as it is stored: codes of its shape, scales as the recipe has them."""
    lhs, _, *rest = found.args
    if _is_dot(found.op):
        return quantize_kernel(lhs, kernel, rest[0], gemms, scale)
    if scale is None:  # weights alone; per output feature, the last dimension of convolutions and experts
        axes = tuple(range(kernel.ndim - 1)) if kernel.ndim != 3 else (1,)
        quantizer = gemms.forward.rhs
        assert isinstance(quantizer, CurrentQuantizer)
        scale = current_scale(finite_amax(kernel, axes), fp8_max(quantizer.dtype))
        return Quantized(quantize(kernel, quantizer.dtype, scale), scale)
    quantizer = gemms.forward.rhs
    assert quantizer is not None
    return Quantized(quantize(kernel, quantizer.dtype, _beside(scale, kernel)), scale)


def _beside(scale: jax.Array, kernel: jax.Array) -> jax.Array:
    """Returns a scale of shape ``(..., 1)``, as in states, with as many dimensions as a kernel."""
    if scale.ndim == kernel.ndim:
        return scale
    return scale.reshape((*scale.shape[:-1], *(1,) * (kernel.ndim - scale.ndim + 1)))


def freeze(
    model: nn.Module,
    variables: Mapping[str, Any],
    *args: Any,
    weight_only: bool = False,
    kv_cache_dtype: Any = None,
    **kwargs: Any,
) -> tuple[nn.Module, Mapping[str, Any]]:
    """Returns a model and its variables for serving: kernels in FP8, scales that no longer change.

    Each op computes, bit for bit, what it computes in ``model`` from ``variables``. (So do the models,
    where XLA compiles what lies between the ops alike: under ``jax.jit`` it may fuse it otherwise, and
    round differently in the last bit.) Delayed scales become those that the next step would use; recipes
    without state go on to scale inputs as they come. There is no state left, and nothing to mutate.

    The serving model can be differentiated with respect to its inputs and its wide parameters, in forward
    and reverse mode, any number of times (forces, guidance, saliency). The derivative is that of a model
    with the dequantized kernels, where quantizing an input passes it on as it is; tangents and cotangents
    stay wide. With respect to FP8 kernels and to scales it raises ``TypeError``.

    Its ``init`` gives a fresh KV cache, as decoding loops ask of it (``init(rng, tokens)["cache"]``). The
    parameters beside it are random, in the shapes and dtypes of those returned here: a target for restoring
    a checkpoint, under ``jax.eval_shape``.

    Kernels are stored where they were, under their names, in FP8, and their scales beside them, under the
    name of the op: ``params/Dense_0/kernel`` and ``params/Dense_0/Fp8DotGeneralOp_0/kernel_scale`` (and
    ``input_scale``, where that is fixed). One parameter may hold several kernels, such as fused queries,
    keys and values: each part then has the scale of its own op. A parameter stays wide if it is used for
    something else too (an embedding that is tied to the logits), by several ops, or after arithmetic; so do
    kernels of convolutions and ragged dots if their scales are not delayed. Their ops quantize them at each
    call.

    Args:
        model: what ``quantize_model`` returned, or a model whose layers were given FP8 ops.
        variables: all its collections, with trained or calibrated state.
        *args: inputs, to trace the model with; in the place of arrays ``jax.ShapeDtypeStruct`` will do. May
            be left out if ``model`` comes from ``quantize_model`` and was called before, by ``init`` for
            instance.
        weight_only: store kernels in FP8 with a scale for each output feature, multiply in the inputs'
            dtype.
        kv_cache_dtype: an FP8 dtype for the floats in the collection ``cache`` between calls, such as the
            keys and values of Linen's attention with ``decode=True``. Their scale is 1: values are to lie
            within the dtype's range, 448 for e4m3fn, and saturate outside of it.
        **kwargs: keyword inputs.

    Returns:
        The serving model, called like ``model``; and its variables, with the other collections as they
        were.

    Raises:
        MissingStateError: an op's scaling state is missing from ``variables``.
        ValueError: ``model`` has no FP8 op, or inputs are needed; or a parameter is missing.
        TypeError: ``kv_cache_dtype`` is not an FP8 dtype.

    Warns:
        UserWarning: kernels of FP8 ops stay wide, with the reason for each; or delayed scales have seen no
            data.

    Example:
        >>> import flax.linen as nn, jax, jax.numpy as jnp, fp8flax as fp8
        >>> model8, x = fp8.quantize_model(nn.Dense(8), include=""), jnp.ones((2, 4))
        >>> variables = fp8.calibrate(model8.apply, model8.init(jax.random.key(0), x), [x])
        >>> serve_model, serve_variables = fp8.freeze(model8, variables)
        >>> serve_variables["params"]["kernel"].dtype.name
        'float8_e4m3fn'
        >>> bool((serve_model.apply(serve_variables, x) == model8.apply(variables, x)).all())
        True

    Source: names of the scales as in the FP8 checkpoints of inference servers, see ``save_safetensors``.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"model must be a flax.linen.Module; got {type(model).__name__}.")
    cache_dtype = None if kv_cache_dtype is None else as_fp8_dtype(kv_cache_dtype, "kv_cache_dtype")
    base: Any = model
    if not hasattr(model, "_fp8_rules"):
        cls = converted_class(type(model), Rules(include=(), allow_unmatched=True), Call)
        base = convert(model, cls)
    boxed = flax.core.unfreeze(dict(variables))
    variables = nn.meta.unbox(boxed)
    if args or kwargs:
        with reporting():
            trace_apply(base, jax.eval_shape(lambda v: v, variables), args, kwargs)
    seen = seen_of(base)
    if not seen.ops:
        raise ValueError(
            f"{type(model).__name__} has not been seen to compute anything in FP8"
            + (
                " with these inputs. Convert it by fp8flax.quantize_model(model, include=…), or give its "
                "layers FP8 ops; fp8flax.report(model, *inputs) says what is converted."
                if args or kwargs
                else ". Give freeze inputs to trace it with, freeze(model, variables, *inputs); "
                "fp8flax.report says what is converted."
            )
        )
    params, state = variables.get(PARAMS, {}), variables.get(OVERWRITE_WITH_GRADIENT, {})
    recipes = {path: _WEIGHT_ONLY if weight_only else found.gemms for path, found in seen.ops.items()}
    left_wide = _left_wide(seen.ops, recipes, seen)
    served = []
    fresh: list[str] = []
    stored: dict[Path, tuple[jax.Array, Any]] = {}
    scales_in_params: list[tuple[Path, jax.Array]] = []
    for path, found in seen.ops.items():
        gemms, kernel = recipes[path], found.kernel
        scales = {} if weight_only else _fixed_scales(path, gemms, state, fresh)
        kernels: tuple[Any, ...] = ()
        layout = None
        if path not in left_wide:
            assert kernel is not None
            assert gemms.forward.rhs is not None
            wide = [_get(params, s.path) for s in kernel.sources]
            axis = _stacked_axis(kernel, seen.ops, params)
            bits, scales["kernel"] = _store(found, gemms, wide, scales.get("kernel"), axis)
            for source, part in zip(kernel.sources, bits):
                if source.path in stored:
                    part = part + stored[source.path][0]
                stored[source.path] = part, gemms.forward.rhs.dtype
            kernels = tuple((s.path, np.dtype(s.dtype)) for s in kernel.sources)
            layout = _layout(found, wide[0].shape)
        elif weight_only:
            gemms = CustomRecipe()
        for role, scale in scales.items():
            scales_in_params.append(((*path, state_leaf_names(role)[0]), scale))
        fixed = ((state_leaf_names(role)[0], scale.shape, scale.dtype) for role, scale in scales.items())
        served.append(ServedOp(path, gemms, kernels, tuple(fixed), layout))
    for path, (part, dtype) in stored.items():
        codes, like = jax.lax.bitcast_convert_type(part, dtype), _get(params, path)
        if _is_on_several_devices(like):
            codes = jax.device_put(codes, like.sharding)
        params = _set(params, path, codes)
    for path, scale in scales_in_params:
        params = _set(params, path, scale)
    if said := _said(left_wide, seen.ops):
        warnings.warn(f"These kernels of FP8 ops stay wide: {said}.", stacklevel=2)
    if fresh:
        warnings.warn(
            f"These scales are frozen as they are, though they have seen no data: {', '.join(fresh)}. "
            "fp8flax.calibrate(model.apply, variables, batches) takes them from sample batches.",
            stacklevel=2,
        )
    others = {name: value for name, value in variables.items() if name != OVERWRITE_WITH_GRADIENT}
    if _CACHE in others and cache_dtype is not None:
        others[_CACHE] = _narrowed(others[_CACHE], cache_dtype)
    serving = Serving(tuple(served), cache_dtype)
    cls = converted_class(base._fp8_base, base._fp8_rules, MakeServingCall(serving))
    return convert(model, cls), {**others, PARAMS: _reboxed(params, boxed.get(PARAMS, {}))}


def serving_ops(model: Any) -> tuple[ServedOp, ...]:
    """Returns the ops of a model that ``freeze`` returned, or raises ``TypeError``."""
    serving: Serving | None = getattr(model, "_fp8_serving", None)
    if serving is None:
        raise TypeError(f"model must come from fp8flax.freeze; got {type(model).__name__}.")
    return serving.ops


def _said(left_wide: Mapping[Path, str], ops: Mapping[Path, SeenOp]) -> str:
    """Returns the parameters that stay wide, with the reasons."""
    reasons = {}
    for path, reason in left_wide.items():
        kernel = ops[path].kernel
        for source in ops[path].others or (s.path for s in (kernel.sources if kernel else ())):
            if reason:
                reasons["/".join(source)] = reason
    return "; ".join(f"{name} ({reason})" for name, reason in sorted(reasons.items()))


def _layout(found: SeenOp, whole: tuple[int, ...]) -> Any:
    kernel = found.kernel
    assert kernel is not None
    shape = kernel.sources[0].shape
    is_leading = whole[len(whole) - len(shape) :] == shape
    if not (_is_dot(found.op) and kernel.is_one_parameter and is_leading):
        return None
    (_, contract), (_, batch) = found.args[2]
    if batch:
        return None
    return tuple(i for i in range(len(shape)) if i not in contract), tuple(map(int, contract))


def _fixed_scales(path: Path, gemms: CustomRecipe, state: Any, fresh: list[str]) -> dict[str, jax.Array]:
    """Returns the scales of input and kernel in the next forward pass, where they are delayed.

    The names of those that have seen no data go into ``fresh``.
    """
    scales = {}
    for role in ("input", "kernel"):
        quantizer = gemms.delayed.get(role)
        used = gemms.forward.lhs if role == "input" else gemms.forward.rhs
        if quantizer is None or not isinstance(used, DelayedQuantizer):
            continue
        node = state
        for name in path:
            node = node.get(name, {})
        names = state_leaf_names(role)
        if not all(name in node for name in names):
            raise MissingStateError(
                f"{OVERWRITE_WITH_GRADIENT}/{'/'.join((*path, names[0]))} is missing from the variables: "
                "freeze needs the scales that training or fp8flax.calibrate left, or fresh ones from "
                "fp8flax.add_fp8_state."
            )
        scale, history = (jnp.asarray(node[name]) for name in names)
        if not isinstance(history, jax.core.Tracer) and not np.any(jax.device_get(history)):
            fresh.append("/".join((*path, names[0])))
        one = functools.partial(_scale_of, quantizer)
        scales[role] = jax.jit(functools.partial(_per_slice_of_state, one))(scale, history)
    return scales


def _scale_of(quantizer: DelayedQuantizer, scale: jax.Array, history: jax.Array) -> jax.Array:
    return delayed_scale(quantizer, ScalingState(scale, history)).reshape((1,))


def _per_slice_of_state(f: Callable[..., Any], scale: jax.Array, history: jax.Array) -> jax.Array:
    """Returns ``f`` of a scale of shape (1,) and its history, for each of those that are stacked."""
    if scale.ndim == 1:
        return f(scale, history)
    own = [i for i, (a, b) in enumerate(zip(scale.shape, history.shape)) if a != b] or [scale.ndim - 1]
    axis = next(i for i in range(scale.ndim) if i not in own[-1:])
    return jax.vmap(lambda s, h: _per_slice_of_state(f, s, h), in_axes=axis, out_axes=axis)(scale, history)


def _store(
    found: SeenOp,
    gemms: CustomRecipe,
    wide: list[Any],
    scale: jax.Array | None,
    axis: int | None,
) -> tuple[tuple[jax.Array, ...], jax.Array]:
    """Returns the codes of an op's kernel, as bytes in the parameters' shapes, and the kernel's scales."""
    kernel = found.kernel
    assert kernel is not None
    rebuild = kernel.rebuild
    assert rebuild is not None

    def one(wide: tuple[jax.Array, ...], scale: jax.Array | None) -> tuple[Any, jax.Array]:
        stored = _quantized(found, gemms, rebuild(wide, True), scale)
        stored_scale = stored.scale.reshape((1,)) if stored.scale.ndim == 0 else stored.scale
        bits = jax.lax.bitcast_convert_type(stored.codes, jnp.uint8)
        return _into_sources(kernel, bits), stored_scale

    whole, part = wide[0].shape, kernel.sources[0].shape
    one = _per_slice(one, whole, part) if axis is None else jax.vmap(one, in_axes=axis, out_axes=axis)
    if one is None:
        raise ValueError(
            f"The parameter {'/'.join(kernel.sources[0].path)} has shape {whole}, but the model was seen "
            f"to use slices of shape {part} of it. Pass the variables of this model."
        )
    return jax.jit(one)(tuple(map(jnp.asarray, wide)), scale)
