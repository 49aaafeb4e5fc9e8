"""Freezes Linen models, and runs frozen ones.

The two sides of a frozen model, with the dtype of each array::

    the caller has and saves                      a method of the model sees
    ------------------------                      --------------------------
    params/                                       params/
      Dense_0/                                      Dense_0/
        kernel               e4m3  ---------+-----    kernel            float32, its values are not used
        bias                 float32        |         bias              float32
        Fp8DotGeneralOp_0/                  |     _fp8_served/
          kernel_scale       float32  ---+  |       Dense_0/
          input_scale        float32  -+ |  |         Fp8DotGeneralOp_0/
                                       | |  +-----      codes           e4m3
                                       | +--------      kernel_scale    float32
                                       +----------      input_scale     float32

For the caller a kernel is one array under its own name. It is saved, sharded and sent like any other. But
the source of the model declares a float32 kernel, and reshapes or transposes it before the matmul. So the
model gets a float32 kernel, and ``Origin.rebuild`` moves the codes as the model moves that kernel. (An op
that cast the kernel itself back to FP8 would be simpler. But XLA would make all layers of a loop wide.) The
codes are in a collection of this package, at the path of the op. Lifted transformations stack and slice
that collection as they do the parameters.

``ServingCall`` converts the variables from left to right when a call of the model begins, and back when it
ends. At ``init`` the left side holds only the parameters that other methods have made, and the parameters
that come back are random.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from typing import Any

import flax.core
import flax.linen as nn
import flax.traverse_util
import jax
import jax.numpy as jnp
import numpy as np

from fp8flax._core.names import OVERWRITE_WITH_GRADIENT, PARAMS, state_leaf_names
from fp8flax._core.ops.contract import States
from fp8flax._core.options import check_params, check_variables, wrong_model
from fp8flax._core.quantize import saturated
from fp8flax._core.recipes import CustomRecipe, Recipe
from fp8flax._core.state.state import ScalingState
from fp8flax._core.state.tree import path_names
from fp8flax._linen.op import Fp8Op
from fp8flax._model.converted_call import Call, Seen, SeenOp, as_jax, seen_of
from fp8flax._model.rules import Rules
from fp8flax._model.state_places import merged, split
from fp8flax._model.wrapped_module import convert, converted_class, trace_apply
from fp8flax._serve.stored_op import (
    DAMAGED,
    KERNEL_SCALE,
    WEIGHT_ONLY,
    Path,
    ServedOp,
    check_is_on,
    computed,
    constant,
    delayed_scales,
    dequantized,
    layout_of,
    stored,
)
from fp8flax._train.check import warn_if_damaged

SERVED, CODES = "_fp8_served", "codes"
"""The names of the collection with the arrays of frozen ops, and of the codes in it."""

CALIBRATE = "fp8flax.calibrate(model.apply, variables, batches)"
"""The call that calibrates a Linen model, for warnings."""


@dataclasses.dataclass(frozen=True)
class Serving:
    """The static description of a frozen model (hashable). It makes the calls of the model."""

    ops: tuple[ServedOp, ...]

    def __call__(self, cls: Any, rules: Rules) -> Call:
        """Returns a new call of a model of this class."""
        return ServingCall(self, cls, rules)


def is_frozen(model: nn.Module) -> bool:
    """Returns whether a model comes from ``freeze``."""
    return getattr(model, "_fp8_serving", None) is not None


def described(model: Any, variables: Any) -> tuple[list[ServedOp], dict[str, Any]]:
    """Returns the ops of a frozen model, and its variables without boxes; see ``freeze.described``."""
    if not is_frozen(model):
        raise wrong_model(model, "come from fp8flax.freeze")
    check_variables(variables)
    return list(model._fp8_serving.ops), nn.meta.unbox(dict(variables))


# Freezing.


def freeze(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    weight_only: bool,
    wide: dict[str, str],
    fresh: list[str],
) -> tuple[nn.Module, Mapping[str, Any]]:
    """Returns a frozen Linen model and its variables; see ``freeze.freeze``.

    Args:
        model: the model in training.
        args: its variables, and the inputs to trace it with.
        kwargs: the keyword inputs.
        weight_only: see ``freeze.freeze``.
        wide: gets the reason for each kernel that stays wide.
        fresh: gets the names of the delayed scales that have seen no data.
    """
    variables, *inputs = args or (kwargs.pop("variables", None),)
    check_variables(variables)
    check_params(variables)
    warn_if_damaged(variables.get(OVERWRITE_WITH_GRADIENT, {}), DAMAGED, stacklevel=4)
    base: Any = model
    if not hasattr(model, "_fp8_rules"):
        # The ops of this model were given by hand. The class records them, and converts nothing.
        base = convert(model, converted_class(type(model), Rules(include=(), allow_unmatched=True), Call))
    boxed = flax.core.unfreeze(dict(variables))
    unboxed = nn.meta.unbox(boxed)
    seen = _record_of(base, unboxed, inputs, kwargs)
    params, state = _leaves(unboxed[PARAMS]), _leaves(unboxed.get(OVERWRITE_WITH_GRADIENT, {}))
    recipes = {path: WEIGHT_ONLY if weight_only else found.gemms for path, found in seen.ops.items()}
    reasons = _left_wide(seen, recipes)
    ops, codes, scales = list[ServedOp](), dict[Path, Any](), dict[Path, Any]()
    for path, found in seen.ops.items():
        gemms = recipes[path]
        own = delayed_scales(path, gemms, state, fresh)
        op = ServedOp(path, CustomRecipe() if weight_only else gemms)
        if path not in reasons:
            assert found.kernel is not None
            kernel = found.kernel.sources[0].path
            parameter, origin = _get(params, kernel), found.kernel
            row, stacked = found.op.row, found.stacked
            new, own = stored(
                *(row, gemms, found.args, parameter, own),
                stacked=stacked,
                into_op=origin.rebuild,
                back=origin.into_parameter,
            )
            codes[kernel] = new
            is_leading = all(stacking.params in (None, 0) for stacking in stacked)
            is_as_stored = is_leading and origin.is_one_parameter
            layout = layout_of(row, found.gemms, found.args) if is_as_stored else None
            # The dtype of the variable, which may have been cast since the model was recorded.
            dtype = np.dtype(jax.dtypes.canonicalize_dtype(parameter.dtype))
            op = ServedOp(path, gemms, kernel, layout, dtype)
        elif reasons[path]:
            sources = found.kernel.sources if found.kernel else ()
            wide.update({"/".join(source.path): reasons[path] for source in sources})
        ops.append(op._replace(scales=tuple((name, x.shape, x.dtype) for name, x in own.items())))
        scales.update({(*path, name): x for name, x in own.items()})
    cls = converted_class(base._fp8_base, base._fp8_rules, Serving(tuple(ops)))
    others = {name: value for name, value in boxed.items() if name != OVERWRITE_WITH_GRADIENT}
    return convert(model, cls), {**others, PARAMS: _replaced(boxed[PARAMS], codes, scales)}


def _record_of(base: Any, variables: Mapping[str, Any], inputs: Any, kwargs: Any) -> Seen:
    """Returns the record of a model's FP8 ops; if there are inputs, traces the model with them before.

    Raises:
        ValueError: no FP8 op was recorded, or layers share a kernel, but each has state of its own.
    """
    if inputs or kwargs:
        trace_apply(base, jax.eval_shape(lambda v: v, variables), inputs, kwargs)
    seen = seen_of(base)
    if not seen.ops:
        raise ValueError(
            f"No FP8 op of {type(base).__name__} ran"
            + (
                " with these inputs. Convert it by fp8flax.quantize_model(model, include=…), or give its "
                "layers FP8 ops; fp8flax.report(model, *inputs) says what is converted."
                if inputs or kwargs
                else " in this process. Pass inputs to trace the model with: freeze(model, variables, x). "
                "If it was not converted, call fp8flax.quantize_model(model)."
            )
        )
    for path, found in seen.ops.items():
        if any(stacking.params is None for stacking in found.stacked):
            raise ValueError(
                f"Layers share the parameters of {'/'.join(path)}, but each has scaling state of its own: "
                "one frozen kernel cannot serve them. Let nn.scan or nn.vmap treat both collections alike."
            )
    return seen


def _left_wide(seen: Seen, recipes: Mapping[Path, CustomRecipe]) -> dict[Path, str]:
    """Returns the ops whose kernels cannot be stored in FP8, each with the reason.

    The reason is empty if the recipe keeps kernels wide, or the kernel does not come from parameters. A
    kernel can be stored if it is one whole parameter, and no other op and nothing else reads it.
    """
    kernels = [found.kernel for found in seen.ops.values() if found.kernel is not None]
    users = Counter(path for kernel in kernels for path in {source.path for source in kernel.sources})

    def reason_of(found: SeenOp, gemms: CustomRecipe) -> str | None:
        quantizer, kernel = gemms.forward.rhs, found.kernel
        if found.has_several_kernels:
            return "one op multiplies by it and by others"
        if quantizer is None or kernel is None:
            return ""
        if not kernel.is_moved:
            return "it is computed from parameters"
        if any(source.path in seen.used_otherwise for source in kernel.sources):
            return "something else than an FP8 op reads it too"
        if len(kernel.sources) > 1:
            return "it is joined with other parameters to one kernel"
        if not kernel.is_whole_parameter:
            return "the kernel is not the whole parameter"
        if users[kernel.sources[0].path] > 1:
            return "several ops multiply by it"
        if not (found.op.row.plan is not None or gemms is WEIGHT_ONLY or quantizer.needs_state):
            return "convolutions and ragged dots store kernels with delayed scales alone"
        return None

    reasons = {path: reason_of(found, recipes[path]) for path, found in seen.ops.items()}
    return {path: reason for path, reason in reasons.items() if reason is not None}


# Trees of parameters: dicts, and tuples or structs of a user, with boxes such as ``nn.Partitioned``.


def _is_box(x: Any) -> bool:
    return isinstance(x, nn.meta.AxisMetadata)


def _leaves(tree: Any) -> dict[Path, Any]:
    """Returns the leaves of a tree without boxes by their paths."""
    found = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {path_names(keys): leaf for keys, leaf in found}


def _get(params: Mapping[Path, Any], path: Path) -> Any:
    """Returns the parameter at ``path``; raises ``ValueError`` if there is none."""
    if path not in params:
        raise ValueError(
            f"{PARAMS}/{'/'.join(path)} is missing from the variables. To freeze, pass the trained "
            "variables of this model; to serve, pass the variables that fp8flax.freeze returned."
        )
    return params[path]


def _replaced(
    params: Any, new: Mapping[Path, Any], more: Mapping[Path, Any], less: Collection[Path] = ()
) -> Any:
    """Returns parameters after changes.

    Args:
        params: the parameters, with boxes or without.
        new: arrays that replace others, in the boxes that are there.
        more: arrays at new places.
        less: places of arrays that are left out.
    """

    def replace(keys: Any, leaf: Any) -> Any:
        array = new.get(path_names(keys), leaf)
        return leaf.replace_boxed(array) if _is_box(leaf) and array is not leaf else array

    params = jax.tree_util.tree_map_with_path(replace, params, is_leaf=_is_box)
    flat = {**flax.traverse_util.flatten_dict(params, keep_empty_nodes=True), **more}
    return flax.traverse_util.unflatten_dict({path: x for path, x in flat.items() if path not in less})


# Running.


class ServingCall(Call):
    """A call of a frozen model, which reads kernels and scales from the variables and changes none."""

    def __init__(self, serving: Serving, cls: Any, rules: Rules) -> None:
        super().__init__(cls, rules)
        self._ops = {op.path: op for op in serving.ops}

    def put_in(self, variables: Mapping[str, Any]) -> Mapping[str, Any]:
        """Returns the right side of the diagram for the left side."""
        params = jax.tree.map(as_jax, variables.get(PARAMS, {}))
        given, wide = _leaves(nn.meta.unbox(params)), dict[Path, Any]()
        scales, served = dict[Path, Any](), dict[Path, Any]()
        for op in self._ops.values():
            places = [(*op.path, name) for name, *_ in op.scales]
            if self.is_init and not all(place in given for place in (op.kernel, *places) if place):
                continue  # no method has made them yet
            if op.kernel is not None:
                codes = served[*op.path, CODES] = _get(given, op.kernel)
                wide[op.kernel] = codes.astype(op.dtype)
            scales.update({place: _get(given, place) for place in places})
        params = _replaced(params, wide, {}, scales)
        return merged({PARAMS: params, SERVED: flax.traverse_util.unflatten_dict(served | scales)}, SERVED)

    def take_out(self, variables: Mapping[str, Any]) -> Mapping[str, Any]:
        """Returns the left side of the diagram for the right side."""
        params = split(variables).get(PARAMS, {})
        if not self.is_init:
            return {PARAMS: params}
        codes, scales = dict[Path, Any](), dict[Path, Any]()
        made = _leaves(nn.meta.unbox(params))
        for op in self._ops.values():
            if op.kernel is not None:
                if op.kernel not in made:
                    continue  # no method has made the kernel yet
                assert op.gemms.forward.rhs is not None
                wide = made[op.kernel].astype(jnp.float32)
                codes[op.kernel] = saturated(wide, op.gemms.forward.rhs.dtype)
            scales.update({(*op.path, name): jnp.ones(shape, dtype) for name, shape, dtype in op.scales})
        return {PARAMS: _replaced(params, codes, scales)}

    def finish(self, model: Any, method: str) -> None:
        stored = {op.kernel for op in self._ops.values() if op.kernel is not None}
        if read := sorted(stored & self.origins.used_otherwise):
            raise ValueError(
                f"{type(model).__name__}.{method} reads {', '.join(map('/'.join, read))} outside of an FP8 "
                "op. These parameters are stored in FP8, because this did not happen when the model was "
                "frozen. Freeze the model after a call of this method, or call the model that was frozen."
            )

    def on_op(
        self,
        op: Fp8Op,
        recipe: Recipe | None,
        compute: Callable[..., jax.Array],
        lhs: Any,
        rhs: Any,
        *rest: Any,
        **keywords: Any,
    ) -> jax.Array:
        """Computes an op with its stored kernel and its fixed scales."""
        if self.is_apart:
            return compute(lhs, rhs, *rest, **keywords)
        if self.is_init:
            return op.row.plain(lhs, rhs, *rest, **keywords)
        check_is_on(recipe)
        if op.path not in self._ops:
            raise ValueError(
                f"The FP8 op at {'/'.join(op.path)} did not run when the model was frozen. Freeze the "
                "model with inputs that reach this op."
            )
        served = self._ops[op.path]
        gemms = served.gemms
        own: Any = {name: self.stored(op, name) for name, *_ in served.scales}
        if served.kernel is not None:
            codes = self._codes(served, op, rhs)
            if op.row.plan is not None:
                return computed(op.row, gemms, codes, own, lhs, *rest, **keywords)
            rhs = dequantized(codes, own[KERNEL_SCALE], rhs.dtype)
        if gemms.forward.lhs is None and (served.kernel is not None or gemms.forward.rhs is None):
            # Nothing is left to quantize.
            return op.row.plain(lhs, rhs, *rest, **keywords)
        return compute(lhs, rhs, *rest, frozen=(_fixed_states(gemms, own), gemms), **keywords)

    def _codes(self, served: ServedOp, op: Fp8Op, rhs: jax.Array) -> jax.Array:
        """Returns the codes for the operand ``rhs``, moved as the model moves the kernel."""
        origin = self.origin_of(rhs)
        if origin is None or not origin.is_whole_parameter or origin.sources[0].path != served.kernel:
            raise ValueError(
                f"The kernel of the FP8 op at {'/'.join(op.path)} comes from other parameters than when "
                "the model was frozen. Freeze it with inputs like those that it serves."
            )
        codes: Any = self.stored(op, CODES)
        return origin.rebuild(codes, casts=False)


def _fixed_states(gemms: CustomRecipe, scales: Mapping[str, jax.Array]) -> States:
    """Returns states with the fixed scales and histories of zeros, so that the scales do not change."""
    states = {}
    for role in gemms.delayed:
        name, _ = state_leaf_names(role)
        scale = constant(scales.get(name, jnp.ones((1,))))
        states[role] = ScalingState(scale, jnp.zeros((*scale.shape[:-1], 1)))
    return States(**states)
