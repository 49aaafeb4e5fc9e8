"""``freeze``: turns a trained model of Linen or NNX into one for serving; runs frozen Linen models.

The two sides of a frozen Linen model, with the dtype of each array::

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
import importlib
from collections.abc import Mapping
from typing import Any

import flax.core
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from fp8flax._compat.dead_code import needed_inputs
from fp8flax._core.names import OVERWRITE_WITH_GRADIENT, PARAMS
from fp8flax._core.options import check_bool, check_params, check_variables, wrong_model
from fp8flax._core.state.tree import path_names
from fp8flax._linen.op import Fp8Op
from fp8flax._model.converted_call import CODES, Call, as_own_arrays, as_struct, merged, split
from fp8flax._model.param_origin import Origin
from fp8flax._model.quantize_model import is_nnx
from fp8flax._model.rules import Rules
from fp8flax._model.wrapped_module import convert, inputs_of_calls, trace_apply
from fp8flax._serve.stored_op import Path, SeenOp, ServedOp, beside, computed, freeze_ops, leaves_of, record

IS_FROZEN = (
    "model must be a model in training; it is frozen already. Pass the original model, or write the frozen "
    "one with save_safetensors."
)
"""The error for a frozen model in the place of one to freeze."""


def freeze(model: Any, *args: Any, weight_only: bool = False, **kwargs: Any) -> Any:
    """Returns a model, and for Linen its variables, for serving: kernels in FP8, scales that do not change.

    Each op computes, bit for bit, what it computes in ``model``; with ``form="qdq"``, what its direct form
    computes. (Under ``jax.jit``, XLA may fuse the code between the ops differently.) Delayed scales become
    those that the next step would use. Recipes without state continue to scale inputs from current data.

    A kernel is stored in FP8, at its old place, if it is one whole parameter that a matmul multiplies by,
    at most cast, reshaped or transposed, and nothing else reads it. In NNX the matmul must be that of a
    layer of Flax. All other kernels stay wide, and their ops quantize them at each call: parts of
    parameters, an embedding that is tied to the logits, kernels of convolutions, NVFP4
    kernels whose matmul does not sum over a multiple of 16 values, and stacked kernels in Linen whose shape
    does not show the axis of the stack, such as ``(8, 8, 4)``. A method of a Linen model that was not
    traced, and reads a stored kernel in another way, reads Inf.

    The scales are beside the kernel, in ``params/Dense_0/Fp8DotGeneralOp_0/kernel_scale`` (and
    ``input_scale``, if it is fixed; in NVFP4 ``kernel_scale`` has a scale for 16 values of each output
    feature, and ``kernel_tensor_scale`` multiplies them). Experts and stacked layers have scales of their
    own, along the first axes; in NNX, kernels must be stacked along these, too. There, kernels in FP8 and
    scales have the type ``fp8flax.nnx.Frozen``. Any checkpoint library can save them. For a target to
    restore into, call ``freeze`` under ``jax.eval_shape`` or ``nnx.eval_shape``: a frozen Linen model has
    no ``init``.

    The frozen model has derivatives of any order with respect to its inputs and its wide parameters, as a
    model with the dequantized kernels; FP8 ops of wide kernels have those of training. Differentiation with
    respect to FP8 kernels and to scales raises ``TypeError``.

    Args:
        model: the model that ``quantize_model`` returned, or a model whose layers were given FP8 ops.
        *args: for a Linen model, first all its collections, with trained or calibrated state. Then inputs
            to trace the model with, arrays or ``jax.ShapeDtypeStruct``. Without inputs, a Linen model that
            comes from ``quantize_model`` is traced with the shapes of the last ``apply`` of each method.
        weight_only: whether to store kernels in FP8 with a scale for each output feature, and to multiply
            in the inputs' dtype.
        **kwargs: keyword inputs of the model.

    Returns:
        For Linen, the frozen model, called like ``model``, and its variables: of the scaling state only
        that of ops with wide kernels; other collections than this and ``params`` are unchanged. For NNX, a
        frozen copy of the model.

    Raises:
        MissingStateError: an op's scaling state is missing from the variables.
        ValueError: ``model`` is frozen, no FP8 op ran, or FP8 is switched off here.
        TypeError: ``model`` is not a module of Flax; the variables of a Linen model are not a mapping; or
            ``weight_only`` is not a bool.

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

    For NNX, see ``fp8flax.nnx.Frozen``.

    Source: torchao, ``Float8StaticActivationFloat8WeightConfig`` and ``Float8WeightOnlyConfig``.
    """
    check_bool("weight_only", weight_only)
    if is_nnx(model):
        return importlib.import_module("fp8flax.nnx.freezing").freeze(model, args, kwargs, weight_only)
    if not isinstance(model, nn.Module):
        raise wrong_model(model, "be a flax.nnx.Module or a flax.linen.Module")
    if isinstance(getattr(model, "_fp8_make_call", None), Serving):
        raise ValueError(IS_FROZEN)
    return _freeze_linen(model, args, kwargs, weight_only)


def described(model: Any, variables: Any) -> tuple[list[ServedOp], dict[Path, Any]]:
    """Returns the ops of a frozen model, and its arrays by their paths, which begin with the collection.

    Scaling state and NNX's random number generators are left out.
    """
    if is_nnx(model):
        ops, arrays = importlib.import_module("fp8flax.nnx.freezing").described(model, variables)
        return ops, arrays
    if not isinstance(getattr(model, "_fp8_make_call", None), Serving):
        raise wrong_model(model, "come from fp8flax.freeze")
    check_variables(variables)
    others = {name: tree for name, tree in variables.items() if name != OVERWRITE_WITH_GRADIENT}
    return list(model._fp8_make_call.ops), leaves_of(nn.meta.unbox(others))


# Freezing.


def _freeze_linen(
    model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], weight_only: bool
) -> tuple[nn.Module, Mapping[str, Any]]:
    """Returns a frozen Linen model and its variables; see ``freeze``."""
    variables, *inputs = args or (kwargs.pop("variables", None),)
    check_variables(variables)
    check_params(variables)
    boxed = flax.core.unfreeze(dict(variables))
    unboxed = nn.meta.unbox(boxed)
    rules, calls = Rules(include=(), allow_unmatched=True), {}
    if not (by_hand := not hasattr(model, "_fp8_rules")):
        rules, calls = model._fp8_rules, inputs_of_calls(model)
    if inputs or kwargs:
        calls = {"__call__": (inputs, kwargs)}
    seen, read = dict[Path, SeenOp](), set[Path]()

    class RecordingCall(Call):
        """A call in the trace; it records the ops that run."""

        def put_in(self, variables: Mapping[str, Any]) -> Mapping[str, Any]:
            return as_own_arrays(variables) if by_hand else super().put_in(variables)

        def on_op(self, op: Fp8Op, recipe: Any, compute: Any, *operands: Any, **keywords: Any) -> Any:
            if recipe is None:  # FP8 is switched off
                return compute(*operands, **keywords)
            found = SeenOp(op.row, recipe.gemms, self.origins.of(operands[1]) or Origin())
            return record(seen, op.path, found, *operands, **keywords)

    recording = convert(model, rules, RecordingCall)
    shapes = jax.tree.map(as_struct, unboxed)  # without shardings
    for method, (args, kwargs) in calls.items():
        needed = needed_inputs(trace_apply(recording, shapes, args, {**kwargs, "method": method}))
        found = zip(leaves_of(shapes), needed)
        read |= {path[1:] for path, is_needed in found if is_needed and path[0] == PARAMS}
    state = unboxed.get(OVERWRITE_WITH_GRADIENT, {})
    ops, codes, scales = freeze_ops(seen, read, leaves_of(unboxed[PARAMS]), state, weight_only)
    params = flatten_dict(_replaced(boxed[PARAMS], codes), keep_empty_nodes=True)
    served = {**boxed, PARAMS: unflatten_dict({**params, **scales})}
    served.pop(OVERWRITE_WITH_GRADIENT, None)
    # The ops of wide kernels keep their state, if they still compute in FP8.
    wide = {op.path for op in ops if op.kernel is None and any(op.gemms.quantizers)}
    if kept := {path: x for path, x in leaves_of(state).items() if path[:-1] in wide}:
        served[OVERWRITE_WITH_GRADIENT] = unflatten_dict(kept)
    return convert(model, rules, Serving(tuple(ops), by_hand)), served


def _replaced(params: Any, new: Mapping[Path, Any]) -> Any:
    """Returns parameters with ``new`` arrays, in the boxes of the old ones, such as ``nn.Partitioned``."""
    return jax.tree_util.tree_map_with_path(lambda keys, x: new.get(path_names(keys), x), params)


# Running.


@dataclasses.dataclass(frozen=True)
class Serving:
    """The static description of a frozen model (hashable). It makes the calls of the model."""

    ops: tuple[ServedOp, ...]
    by_hand: bool
    """Whether no op comes from ``quantize_model``: then loops slice scaling state in its own collection."""

    def __call__(self, model: Any) -> Call:
        """Returns a new call of a model."""
        return ServingCall(self, model)


class ServingCall(Call):
    """A call of a frozen model, which reads kernels and scales from the variables and changes none."""

    def __init__(self, serving: Serving, model: Any) -> None:
        super().__init__(model)
        self._ops, self._by_hand = {op.path: op for op in serving.ops}, serving.by_hand
        self._shapes = dict[Path, tuple[int, ...]]()
        """The shapes of the scales of one layer, by their paths."""

    def put_in(self, variables: Mapping[str, Any]) -> Mapping[str, Any]:
        """Returns the right side of the diagram at the top for the left side."""
        if self.is_init:
            raise ValueError(
                "A frozen model makes no variables: freeze returns them. Make a fresh cache by init of the "
                "original model, and shapes for a checkpoint library by jax.eval_shape of freeze."
            )
        params = as_own_arrays(variables.get(PARAMS, {}))
        given = leaves_of(nn.meta.unbox(params))
        stored = {op.kernel: op for op in self._ops.values() if op.kernel in given}
        wide = {path: jnp.full_like(given[path], jnp.inf, op.dtype) for path, op in stored.items()}
        state = variables.get(OVERWRITE_WITH_GRADIENT, {})  # of ops whose kernels are wide
        # The only parameters of an op are its scales.
        scales = {path: x for path, x in given.items() if path[:-1] in self._ops}
        for path, x in scales.items():
            op = self._ops[path[:-1]]
            self._shapes[path] = x.shape[len(op.stack) :]
            if op.kernel and op.stack != tuple(range(len(op.stack))):
                scales[path] = beside(given[op.kernel], x, op.stack)
        params = _replaced(params, {**wide, **scales})
        of_ops = {**scales, **({} if self._by_hand else leaves_of(state))}
        of_ops |= {(*op.path, CODES): given[path] for path, op in stored.items()}
        seen = merged({PARAMS: params, OVERWRITE_WITH_GRADIENT: unflatten_dict(of_ops)})
        return {**seen, OVERWRITE_WITH_GRADIENT: state} if self._by_hand else seen

    def take_out(self, variables: Mapping[str, Any]) -> Mapping[str, Any]:
        """Returns the parameters; the caller has the other arrays."""
        return {PARAMS: split(variables).get(PARAMS, {})}

    def on_op(
        self, op: Fp8Op, recipe: Any, compute: Any, lhs: Any, rhs: Any, *rest: Any, **keywords: Any
    ) -> jax.Array:
        """Computes an op with its stored kernel and its fixed scales, or as in training."""
        above = len(self.path)  # the model may be a part of another one
        served, origin = self._ops.get(op.path[above:]), self.origins.of(rhs) or Origin()
        whole = origin.sources[0].path[above:] if origin.is_whole_parameter else None
        if served is None or served.kernel not in (None, whole):
            raise ValueError(
                f"The FP8 op at {'/'.join(op.path)} did not run with this kernel when the model was "
                "frozen. Freeze the model with inputs that reach the op as it is called here."
            )
        if served.kernel is None:
            return op._compute(recipe and served.gemms, lhs, rhs, *rest, **keywords)
        lhs = lhs.astype(np.promote_types(lhs.dtype, rhs.dtype))  # codes do not widen the result
        arrays: dict[str, Any] = {name: self.state_of(op, name) for name in (*served.scales, CODES)}
        if missing := [name for name, x in arrays.items() if x is None]:
            raise ValueError(
                f"{' and '.join(missing)} of {PARAMS}/{'/'.join(op.path)} are missing from the variables. "
                "Pass the variables that fp8flax.freeze returned."
            )
        codes = origin.rebuild(arrays.pop(CODES), casts=False)  # moved as the model moves the kernel
        arrays = {name: x.reshape(self._shapes[*served.path, name]) for name, x in arrays.items()}
        return computed(op.row, served.gemms, arrays, lhs, codes, *rest, **keywords)
