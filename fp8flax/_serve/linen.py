"""Freezes Linen models, and runs and describes frozen ones.

1. ``freeze`` traces the calls that the user names. Each is a ``RecordingCall``, which records the ops that
   run, and the parameters that other code reads.
2. ``freeze_ops`` returns the codes of the kernels that can be stored, and the scales. They go into the
   variables. The descriptions of the ops go into the class of the frozen model, as a ``Serving``.
3. Each call of the frozen model is a ``ServingCall``. Its ``put_in`` puts a box around all codes, and moves
   the axes of the scales, so that the loops of the model slice codes and scales alike.
4. A method that reads a box gets a ``StandIn`` for the wide kernel. It casts and moves the stand-in, and
   ``Reading`` moves the codes.
5. The op gets the stand-in as its kernel. ``on_op`` finds its scales, and ``computed`` multiplies.
"""

from __future__ import annotations

import dataclasses
import operator
from collections.abc import Mapping
from typing import Any

import flax.core
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

from fp8flax._compat.jaxprs import needed_inputs
from fp8flax._compat.stand_in import StandIn, read_stored, refuse
from fp8flax._core.names import OVERWRITE_WITH_GRADIENT, PARAMS
from fp8flax._core.options import check_variables
from fp8flax._core.state.tree import path_names
from fp8flax._core.types import Path, PyTree
from fp8flax._linen.op import Fp8Op
from fp8flax._model.converted_call import Call, as_own_arrays, state_in_params
from fp8flax._model.linen import convert, trace_apply
from fp8flax._model.rules import Rules
from fp8flax._serve.freeze_ops import freeze_ops
from fp8flax._serve.reading import Calls, Reading, Recording, as_struct
from fp8flax._serve.stored_op import Arrays, ServedOp, computed, leaves_of, not_seen


def is_frozen(model: nn.Module) -> bool:
    """Returns whether ``freeze`` returned the model."""
    return isinstance(getattr(model, "_fp8_make_call", None), Serving)


def described(model: nn.Module, variables: PyTree) -> tuple[tuple[ServedOp, ...], Arrays]:
    """Returns the ops and the arrays of a frozen model; see ``_serve.freeze``."""
    check_variables(variables)
    others = {name: tree for name, tree in variables.items() if name != OVERWRITE_WITH_GRADIENT}
    return model._fp8_make_call.ops, leaves_of(nn.meta.unbox(others))


def freeze(
    model: nn.Module, variables: Mapping[str, PyTree], calls: Calls, weight_only: bool
) -> tuple[nn.Module, Mapping[str, PyTree]]:
    """Returns a frozen model and its variables; see ``fp8flax.freeze``."""
    boxed = flax.core.unfreeze(dict(variables))
    unboxed = nn.meta.unbox(boxed)
    by_hand = not hasattr(model, "_fp8_rules")
    rules = Rules(include=(), allow_unmatched=True) if by_hand else model._fp8_rules
    recording = _traced(model, rules, by_hand, unboxed, calls, weight_only)
    state = unboxed.get(OVERWRITE_WITH_GRADIENT, {})
    unseen = {path[:-1] for path in leaves_of(state)} - recording.ops.keys()
    ops, codes, scales = freeze_ops(recording, leaves_of(unboxed[PARAMS]), state, unseen)
    params = flatten_dict(_replaced(boxed[PARAMS], codes), keep_empty_nodes=True)
    served = {**boxed, PARAMS: unflatten_dict({**params, **scales})}
    served.pop(OVERWRITE_WITH_GRADIENT, None)
    # Ops of wide kernels keep their state, if they still compute in FP8; so do ops that did not run.
    wide = unseen | {op.path for op in ops if not op.kernel and any(op.gemms.quantizers)}
    if kept := {path: x for path, x in leaves_of(state).items() if path[:-1] in wide}:
        served[OVERWRITE_WITH_GRADIENT] = unflatten_dict(kept)
    return convert(model, rules, Serving(tuple(ops), by_hand)), served


def _traced(
    model: nn.Module, rules: Rules, by_hand: bool, variables: PyTree, calls: Calls, weight_only: bool
) -> Recording:
    """Returns what the calls of a model run and read."""
    recording = Recording(weight_only)

    class RecordingCall(Reading, Call):
        def __init__(self, model: nn.Module) -> None:
            super().__init__(model)
            self.origins = recording.origins

        def on_read(self, path: Path) -> None:
            recording.read.add(path)

        def put_in(self, variables: Mapping[str, PyTree]) -> Mapping[str, PyTree]:
            return as_own_arrays(variables) if by_hand else super().put_in(variables)

        def on_op(self, op: Fp8Op, recipe: Any, compute: Any, *operands: Any, **keywords: Any) -> Any:
            if recipe is None:  # FP8 is switched off
                return compute(*operands, **keywords)
            return recording.run(op.path, op.op_type, recipe, *operands, **keywords)

    traced, shapes = convert(model, rules, RecordingCall), jax.tree.map(as_struct, variables)
    for name, inputs in calls.items():

        def call(bound: nn.Module, inputs: Any, name: str = name) -> Any:
            args, kwargs = inputs  # some names of the model's keywords may be those of apply
            return getattr(bound, name)(*args, **kwargs)

        needed = needed_inputs(trace_apply(traced, shapes, (inputs,), {"method": call}))
        found = zip(leaves_of(shapes), needed)
        recording.read |= {path[1:] for path, is_needed in found if is_needed and path[0] == PARAMS}
    return recording


def _replaced(params: PyTree, new: Mapping[Path, object]) -> PyTree:
    """Returns parameters with ``new`` arrays, in the boxes of the old ones, such as ``nn.Partitioned``."""
    return jax.tree_util.tree_map_with_path(lambda keys, x: new.get(path_names(keys), x), params)


# Running.


@dataclasses.dataclass(frozen=True)
class Serving:
    """The static description of a frozen model (hashable). It makes the calls of the model."""

    ops: tuple[ServedOp, ...]
    by_hand: bool
    """Whether no op comes from ``quantize_model``. Then the author of the model wrote loops that slice the
    collection of the state, where it stays. Loops of a converted model slice the parameters only."""

    def __call__(self, model: nn.Module) -> Call:
        return ServingCall(self, model)


@flax.struct.dataclass
class StoredKernel(nn.meta.AxisMetadata[Any]):
    """A box around the codes of a kernel, in the variables that a method sees.

    A ``StandIn`` leaves the box in three ways. Linen calls ``unbox`` for ``self.param("kernel", …)``. A
    module that reads the variables of another one gets the box, and takes it for an array. Then JAX calls
    ``__jax_array__`` for ``jnp.dot(x, kernel)`` and ``x @ kernel``. Python calls ``__getattr__`` or an
    operator for ``kernel.T``, ``kernel @ y`` and ``kernel[0]``.
    """

    value: jax.Array
    codes_dtype: np.dtype = flax.struct.field(pytree_node=False)
    dtype: np.dtype | None = flax.struct.field(pytree_node=False)
    source: Path = flax.struct.field(pytree_node=False)

    def unbox(self) -> jax.Array:
        """Returns the ``StandIn`` that the method reads."""
        codes, dtype = self.value, self.dtype
        if codes.dtype != self.codes_dtype:  # a function of nn.map_variables has cast all parameters
            codes, dtype = codes.astype(self.codes_dtype), codes.dtype
        return read_stored(codes, dtype, self.source)

    def replace_boxed(self, val: Any) -> StoredKernel:
        """Returns the box with other codes."""
        return dataclasses.replace(self, value=val)

    def add_axis(self, index: int, params: object) -> StoredKernel:
        """Returns the box of stacked codes, or of the codes of one layer of a stack."""
        return self

    remove_axis = add_axis

    def __jax_array__(self) -> jax.Array:
        return self.unbox()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.unbox(), name)


for _name in ("add", "sub", "mul", "truediv", "pow", "matmul", "neg", "getitem"):
    _operator = getattr(operator, f"__{_name}__")
    setattr(StoredKernel, f"__{_name}__", lambda self, *others, by=_operator: by(self.unbox(), *others))


class ServingCall(Reading, Call):
    """A call of a frozen model, which reads kernels and scales from the variables and changes none.

    For a scan of two ``nn.Dense(8)`` that are stacked along axis 1, ``put_in`` changes ``params/layers``::

                                                  before       after
        Dense_0/kernel                            (4, 2, 8)    StoredKernel of (4, 2, 8)
        Dense_0/Fp8DotGeneralOp_0/kernel_scale    (2, 1)       (1, 2, 1)
        Dense_0/fP8dOTgENERALoP_0/KERNEL_SCALE                 (1, 2, 1), which ``state_of`` reads

    The scan slices all of them along axis 1. Then ``on_op`` gives the scale of one layer the shape (1,).
    """

    def __init__(self, serving: Serving, model: nn.Module) -> None:
        super().__init__(model)
        self._ops, self._by_hand = {op.path: op for op in serving.ops}, serving.by_hand

    def on_read(self, path: Path) -> None:
        """Refuses to read a stored kernel, also by code that finds its codes in the variables."""
        if path in {(*self.path, *op.kernel) for op in self._ops.values() if op.kernel}:
            raise refuse(path)

    def put_in(self, variables: Mapping[str, PyTree]) -> Mapping[str, PyTree]:
        """Returns the collections of the caller as the method sees them, with boxes around codes."""
        if self.is_init:
            raise ValueError(
                "A frozen model makes no variables: freeze returns them. Make a fresh cache by init of the "
                "original model, and shapes for a checkpoint library by jax.eval_shape of freeze."
            )
        params = as_own_arrays(variables.get(PARAMS, {}))
        arrays = leaves_of(nn.meta.unbox(params))
        # The only parameters of an op are its scales.
        owners = {path: self._ops[path[:-1]] for path in arrays if path[:-1] in self._ops}
        scales = {path: _with_axes_of_kernel(arrays[path], op, arrays) for path, op in owners.items()}
        boxes = {
            op.kernel: StoredKernel(arrays[op.kernel], arrays[op.kernel].dtype, op.dtype, op.kernel)
            for op in self._ops.values()
            if op.kernel in arrays
        }
        params = _replaced(params, {**boxes, **scales})
        state = variables.get(OVERWRITE_WITH_GRADIENT, {})  # of ops whose kernels are wide
        moved = scales if self._by_hand else {**scales, **leaves_of(state)}
        seen = state_in_params({PARAMS: params, OVERWRITE_WITH_GRADIENT: unflatten_dict(moved)})
        return {**seen, OVERWRITE_WITH_GRADIENT: state} if self._by_hand else seen

    def take_out(self, variables: Mapping[str, PyTree]) -> Mapping[str, PyTree]:
        """Returns no variables: those of the caller stay as they are."""
        return {}

    def on_op(
        self, op: Fp8Op, recipe: Any, compute: Any, lhs: Any, rhs: Any, *rest: Any, **keywords: Any
    ) -> jax.Array:
        """Computes an op with its stored kernel and its fixed scales, or as in training."""
        served = self._ops.get(op.path[len(self.path) :])  # the model may be a part of another one
        kernel, cut = (rhs.source, rhs.cut) if isinstance(rhs, StandIn) else ((), None)
        if (kernel, cut) != ((served.kernel, served.cut) if served else ((), None)):
            raise not_seen(op.path)
        if not (served and kernel):  # without ``served`` the op did not run in the traced calls
            return op._compute(recipe and served.gemms if served else recipe, lhs, rhs, *rest, **keywords)
        found = {name: self.state_of(op, name) for name, _ in served.scales}
        if missing := [name for name, x in found.items() if x is None]:
            raise ValueError(
                f"{' and '.join(missing)} of {PARAMS}/{'/'.join(op.path)} are missing from the variables. "
                "Pass the variables that fp8flax.freeze returned."
            )
        return computed(op.op_type, served, found, lhs, rhs, *rest, **keywords)


def _with_axes_of_kernel(scale: jax.Array, op: ServedOp, params: Arrays) -> jax.Array:
    """Returns a scale that is stacked along the axes of its kernel, so that loops slice the two alike.

    It gets the number of dimensions of the kernel, since a loop may count its axis from the back.
    """
    num = len(op.stack)
    if not op.kernel or op.stack == tuple(range(num)):
        return scale
    ones = (1,) * (params[op.kernel].ndim - num - 1)
    return jnp.moveaxis(scale.reshape(*scale.shape[:num], -1, *ones), range(num), op.stack)
