"""Freezes Linen models, and runs frozen ones.

The two sides of a frozen model, with the dtype of each array::

    the caller has and saves                      a method of the model sees
    ------------------------                      --------------------------
    params/                                       params/
      Dense_0/                                      Dense_0/
        kernel               e4m3  ---------+-----    kernel            float32, all Inf
        bias                 float32        |         bias              float32
        Fp8DotGeneralOp_0/                  |         fP8dOTgENERALoP_0/
          kernel_scale       float32  ---+  +-----      CODES           e4m3
          input_scale        float32  -+ +--------      KERNEL_SCALE    float32
                                       +----------      INPUT_SCALE     float32

The source of the model declares a float32 kernel, and reshapes or transposes it before the matmul. So the
model gets a float32 kernel, and ``Origin.rebuild`` moves the codes as the model moves that kernel. The op
does not read the values of this kernel. They are Inf, so that other code that reads them is loud. (An op
that cast the kernel itself back to FP8 would be simpler. But XLA would make all layers of a loop wide.) The
codes and scales are where a converted model has its scaling state, see ``converted_call``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import partial
from typing import Any

import flax.core
import flax.linen as nn
import flax.traverse_util
import jax
import jax.numpy as jnp
import numpy as np

from fp8flax._compat.dead_code import needed_inputs
from fp8flax._core.names import OVERWRITE_WITH_GRADIENT, PARAMS
from fp8flax._core.options import check_params, check_variables, wrong_model
from fp8flax._core.state.tree import path_names
from fp8flax._linen.op import Fp8Op
from fp8flax._model.converted_call import CODES, Call, as_jax, as_struct, merged, split
from fp8flax._model.param_origin import Origin
from fp8flax._model.rules import Rules
from fp8flax._model.wrapped_module import convert, inputs_of_calls, trace_apply
from fp8flax._serve.stored_op import Path, SeenOp, ServedOp, computed, freeze_ops, leaves_of


@dataclasses.dataclass(frozen=True)
class Serving:
    """The static description of a frozen model (hashable). It makes the calls of the model."""

    ops: tuple[ServedOp, ...]

    def __call__(self, model: Any) -> Call:
        """Returns a new call of a model."""
        return ServingCall(self, model)


def is_frozen(model: nn.Module) -> bool:
    """Returns whether a model comes from ``freeze``."""
    return isinstance(getattr(model, "_fp8_make_call", None), Serving)


def described(model: Any, variables: Any) -> tuple[list[ServedOp], dict[Path, Any]]:
    """Returns the ops of a frozen model, and its arrays by their paths, which begin with the collection."""
    if not is_frozen(model):
        raise wrong_model(model, "come from fp8flax.freeze")
    check_variables(variables)
    return list(model._fp8_make_call.ops), leaves_of(nn.meta.unbox(dict(variables)))


# Freezing.


def freeze(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], weight_only: bool
) -> tuple[nn.Module, Mapping[str, Any]]:
    """Returns a frozen Linen model and its variables; see ``freeze.freeze``."""
    variables, *inputs = args or (kwargs.pop("variables", None),)
    check_variables(variables)
    check_params(variables)
    boxed = flax.core.unfreeze(dict(variables))
    unboxed = nn.meta.unbox(boxed)
    rules, calls = Rules(include=(), allow_unmatched=True), {}
    if hasattr(model, "_fp8_rules"):  # otherwise the ops were given by hand
        rules, calls = model._fp8_rules, inputs_of_calls(model)
    if inputs or kwargs:
        calls = {"__call__": (inputs, kwargs)}
    seen, read = dict[Path, SeenOp](), set[Path]()
    recording = convert(model, rules, partial(RecordingCall, seen))
    shapes = jax.tree.map(as_struct, unboxed)  # without shardings
    for method, (args, kwargs) in calls.items():
        needed = needed_inputs(trace_apply(recording, shapes, args, {**kwargs, "method": method}))
        found = zip(leaves_of(shapes), needed)
        read |= {path[1:] for path, is_needed in found if is_needed and path[0] == PARAMS}
    state = unboxed.get(OVERWRITE_WITH_GRADIENT, {})
    ops, codes, scales = freeze_ops(seen, read, leaves_of(unboxed[PARAMS]), state, weight_only)
    served = {**boxed, PARAMS: _replaced(boxed[PARAMS], codes, scales)}
    served.pop(OVERWRITE_WITH_GRADIENT, None)
    # The ops of wide kernels keep their state, if they still compute in FP8.
    wide = {op.path for op in ops if op.kernel is None and any(op.gemms.quantizers)}
    if kept := {path: x for path, x in leaves_of(state).items() if path[:-1] in wide}:
        served[OVERWRITE_WITH_GRADIENT] = flax.traverse_util.unflatten_dict(kept)
    return convert(model, rules, Serving(tuple(ops))), served


class RecordingCall(Call):
    """A traced call of a model that is to be frozen."""

    def __init__(self, seen: dict[Path, SeenOp], model: Any) -> None:
        super().__init__(model)
        self.seen = seen

    def on_op(
        self, op: Fp8Op, recipe: Any, compute: Any, lhs: Any, rhs: Any, *rest: Any, **keywords: Any
    ) -> jax.Array:
        """Records an op; its result does not depend on the kernel."""
        if recipe is None:
            return compute(lhs, rhs, *rest, **keywords)
        kernel = self.origins.of(rhs)
        # The record outlives the call, so it must not hold arrays.
        plan = op.row.plan and partial(op.row.plan, *jax.tree.map(as_struct, (lhs, rhs, *rest)))
        found = SeenOp(recipe.gemms, kernel, plan)
        before = self.seen.setdefault(op.path, found)
        if before.kernel != kernel:  # one op multiplies by several kernels
            both = [one for one in (before.kernel, kernel) if one is not None]
            sources = tuple(source for each in both for source in each.sources)
            self.seen[op.path] = found._replace(kernel=Origin(sources))
        return op.row.plain(lhs, jnp.zeros_like(rhs), *rest, **keywords)


# Trees of parameters: dicts, and tuples or structs of a user, with boxes such as ``nn.Partitioned``.


def _replaced(params: Any, new: Mapping[Path, Any], more: Mapping[Path, Any]) -> Any:
    """Returns parameters with ``new`` arrays in their boxes, and with ``more`` arrays."""
    unboxed = nn.meta.unbox(params)
    arrays = jax.tree_util.tree_map_with_path(lambda keys, x: new.get(path_names(keys), x), unboxed)
    params = nn.meta.replace_boxed(params, arrays)
    flat = flax.traverse_util.flatten_dict(params, keep_empty_nodes=True)
    return flax.traverse_util.unflatten_dict({**flat, **more})


# Running.


class ServingCall(Call):
    """A call of a frozen model, which reads kernels and scales from the variables and changes none."""

    def __init__(self, serving: Serving, model: Any) -> None:
        super().__init__(model)
        self._ops = {op.path: op for op in serving.ops}

    def put_in(self, variables: Mapping[str, Any]) -> Mapping[str, Any]:
        """Returns the right side of the diagram at the top for the left side."""
        if self.is_init:
            raise ValueError(
                "A frozen model makes no variables: freeze returns them. Make a fresh cache by init of the "
                "original model, and shapes for a checkpoint library by jax.eval_shape of freeze."
            )
        params = jax.tree.map(as_jax, variables.get(PARAMS, {}))
        given = leaves_of(nn.meta.unbox(params))
        wide = dict[Path, Any]()
        of_ops = leaves_of(variables.get(OVERWRITE_WITH_GRADIENT, {}))  # of ops whose kernels are wide
        # The only parameters of an op are its scales.
        of_ops |= {path: x for path, x in given.items() if path[:-1] in self._ops}
        for op in self._ops.values():
            if op.kernel is not None and op.kernel in given:
                of_ops[*op.path, CODES] = given[op.kernel]
                wide[op.kernel] = jnp.full_like(given[op.kernel], jnp.inf, op.dtype)
        state = flax.traverse_util.unflatten_dict(of_ops)
        return merged({PARAMS: _replaced(params, wide, {}), OVERWRITE_WITH_GRADIENT: state})

    def take_out(self, variables: Mapping[str, Any]) -> Mapping[str, Any]:
        """Returns the parameters; the caller has the other arrays."""
        return {PARAMS: split(variables).get(PARAMS, {})}

    def on_op(
        self, op: Fp8Op, recipe: Any, compute: Any, lhs: Any, rhs: Any, *rest: Any, **keywords: Any
    ) -> jax.Array:
        """Computes an op with its stored kernel and its fixed scales, or as in training."""
        served, origin = self._ops.get(op.path), self.origins.of(rhs)
        whole = origin.sources[0].path if origin is not None and origin.is_whole_parameter else None
        if served is None or served.kernel not in (None, whole):
            raise ValueError(
                f"The FP8 op at {'/'.join(op.path)} did not run with this kernel when the model was "
                "frozen. Freeze the model with inputs that reach the op as it is called here."
            )
        if served.kernel is None or origin is None:
            return op._compute(recipe and served.gemms, lhs, rhs, *rest, **keywords)
        lhs = lhs.astype(np.promote_types(lhs.dtype, rhs.dtype))  # codes do not widen the result
        arrays: dict[str, Any] = {name: self.state_of(op, name) for name in (*served.scales, CODES)}
        if missing := [name for name, x in arrays.items() if x is None]:
            raise ValueError(
                f"{' and '.join(missing)} of {PARAMS}/{'/'.join(op.path)} are missing from the variables. "
                "Pass the variables that fp8flax.freeze returned."
            )
        codes = origin.rebuild(arrays.pop(CODES), casts=False)  # moved as the model moves the kernel
        return computed(op.row, served.gemms, arrays, lhs, codes, *rest, **keywords)
