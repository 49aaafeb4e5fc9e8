"""``freeze``: turns a trained model of Linen or NNX into one for serving; runs frozen Linen models.

The codes of a kernel are where the kernel was. The source of the model declares a float32 kernel, and
casts, reshapes or transposes it before the matmul. So a method that reads a stored kernel gets a
``StandIn`` in front of the codes: it has the kernel's shape and dtype, and no values. The codes move as the
model moves the stand-in, and the op takes them from it. All other code that needs the values raises an
error. (An op that cast a wide kernel back to FP8 would be simpler. But XLA would make all layers of a loop
wide.)
"""

from __future__ import annotations

import dataclasses
import inspect
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import flax.core
import flax.linen as nn
import jax
import jax.numpy as jnp
from flax.traverse_util import flatten_dict, unflatten_dict

from fp8flax._compat.dead_code import needed_inputs
from fp8flax._compat.stand_in import StandIn, read_stored, refuse
from fp8flax._core.names import OVERWRITE_WITH_GRADIENT, PARAMS
from fp8flax._core.options import check_bool, check_params, check_variables, wrong_model
from fp8flax._core.state.tree import path_names
from fp8flax._linen.op import Fp8Op
from fp8flax._model.converted_call import Call, as_own_arrays, as_struct, merged, split
from fp8flax._model.linen import convert, trace_apply
from fp8flax._model.param_origin import Origin
from fp8flax._model.quantize_model import is_nnx
from fp8flax._model.rules import Rules
from fp8flax._serve.stored_op import (
    Path,
    Reading,
    SeenOp,
    ServedOp,
    check_codes,
    computed,
    freeze_ops,
    leaves_of,
    not_seen,
    record,
)

IS_FROZEN = (
    "model must be a model in training; it is frozen already. Pass the original model, or write the frozen "
    "one with save_safetensors."
)
"""The error for a frozen model in the place of one to freeze."""


Calls = dict[str, tuple[tuple[Any, ...], dict[str, Any]]]
"""The positional and the keyword inputs of a call of each method to trace, by the method's name."""


def freeze(
    model: Any,
    *args: Any,
    weight_only: bool = False,
    methods: Mapping[str, Any] | None = None,
    **kwargs: Any,
) -> Any:
    """Returns a model, and for Linen its variables, for serving: kernels in FP8, scales that do not change.

    Each op computes, bit for bit, what it computes in ``model``; with ``form="qdq"``, what its direct form
    computes. (Under ``jax.jit``, XLA may fuse the code between the ops differently.) Delayed scales become
    those that the next step would use. Recipes without state continue to scale inputs from current data.

    A kernel is stored in FP8, at its old place, if it is one whole parameter that a matmul multiplies by,
    at most cast, reshaped or transposed, and nothing else reads it. (Layers of NNX that share a kernel, and
    multiply by it in one way, share its codes.) All other kernels stay wide, and their ops quantize them at
    each call: parts of parameters, an embedding that is tied to the logits, kernels of convolutions, NVFP4
    kernels whose matmul does not sum over a multiple of 16 values, and stacked kernels in Linen whose shape
    does not show the axis of the stack, such as ``(8, 8, 4)``. An op that did not run in the traced calls
    computes as in training. Code that was not traced, and reads a stored kernel in another way, raises
    ``ValueError``.

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
            to trace a call of the model with, arrays or ``jax.ShapeDtypeStruct``.
        weight_only: whether to store kernels in FP8 with a scale for each output feature, and to multiply
            in the inputs' dtype.
        methods: inputs of other methods that will be called, by the names of the methods: a tuple of
            positional inputs, or a mapping of keyword inputs. ``{"decode": (z,)}`` traces
            ``model.decode(z)``. ``__call__`` may be among them, and is not traced if it has no inputs.
        **kwargs: keyword inputs of the model.

    Returns:
        For Linen, the frozen model, called like ``model``, and its variables: of the scaling state only
        that of ops with wide kernels; other collections than this and ``params`` are unchanged. For NNX, a
        frozen copy of the model.

    Raises:
        MissingStateError: an op's scaling state is missing from the variables.
        ValueError: ``model`` is frozen, no FP8 op ran, or FP8 is switched off here.
        TypeError: ``model`` is not a module of Flax; the variables of a Linen model are not a mapping;
            there are no inputs; ``methods`` is not a mapping of tuples and mappings; ``method`` is given;
            or ``weight_only`` is not a bool.

    Warns:
        UserWarning: kernels of FP8 ops stay wide, or ops did not run, with the reason for each; or delayed
            scales have seen no data.

    Example:
        >>> import flax.linen as nn, jax, jax.numpy as jnp, fp8flax as fp8
        >>> model8, x = fp8.quantize_model(nn.Dense(8), include=""), jnp.ones((2, 4))
        >>> variables = fp8.calibrate(model8.apply, model8.init(jax.random.key(0), x), [x])
        >>> serve_model, serve_variables = fp8.freeze(model8, variables, x)
        >>> serve_variables["params"]["kernel"].dtype.name
        'float8_e4m3fn'
        >>> bool((serve_model.apply(serve_variables, x) == model8.apply(variables, x)).all())
        True

    For NNX, see ``fp8flax.nnx.Frozen``.

    Source: torchao, ``Float8StaticActivationFloat8WeightConfig`` and ``Float8WeightOnlyConfig``.
    """
    check_bool("weight_only", weight_only)
    if is_nnx(model):
        from fp8flax._serve import nnx

        return nnx.freeze(model, _calls(model, args, kwargs, methods), weight_only)
    if not isinstance(model, nn.Module):
        raise wrong_model(model, "be a flax.nnx.Module or a flax.linen.Module")
    if isinstance(getattr(model, "_fp8_make_call", None), Serving):
        raise ValueError(IS_FROZEN)
    variables, *inputs = args or (kwargs.pop("variables", None),)
    check_variables(variables)
    check_params(variables)
    return _freeze_linen(model, variables, _calls(model, inputs, kwargs, methods), weight_only)


def described(model: Any, variables: Any) -> tuple[list[ServedOp], dict[Path, Any]]:
    """Returns the ops of a frozen model, and its arrays by their paths, which begin with the collection.

    Scaling state and NNX's random number generators are left out.
    """
    if is_nnx(model):
        from fp8flax._serve import nnx

        return nnx.described(model, variables)
    if not isinstance(getattr(model, "_fp8_make_call", None), Serving):
        raise wrong_model(model, "come from fp8flax.freeze")
    check_variables(variables)
    others = {name: tree for name, tree in variables.items() if name != OVERWRITE_WITH_GRADIENT}
    return list(model._fp8_make_call.ops), leaves_of(nn.meta.unbox(others))


# Freezing.


def _calls(model: Any, inputs: Sequence[Any], keywords: Mapping[str, Any], methods: Any) -> Calls:
    """Returns the calls to trace; raises ``TypeError`` if there are none, or an argument has no meaning."""
    if "method" in keywords and "method" not in inspect.signature(type(model).__call__).parameters:
        raise TypeError(
            f"freeze has no argument method; got {keywords['method']!r}. Give the inputs of each method by "
            "its name: methods={'decode': (z,)}."
        )
    calls: Calls = {"__call__": (tuple(inputs), dict(keywords))} if inputs or keywords else {}
    if not isinstance(methods or {}, Mapping):
        raise TypeError(f"methods must map names of methods to their inputs; got {type(methods).__name__}.")
    for name, given in (methods or {}).items():
        if not isinstance(given, tuple | list | Mapping):
            raise TypeError(
                "methods must have a tuple of positional inputs, or a mapping of keyword inputs, for each "
                f"method; got {type(given).__name__} for {name!r}. Write methods={{{name!r}: (x,)}}."
            )
        if name in calls:
            raise TypeError("The inputs of __call__ are given twice: by themselves, and in methods.")
        calls[name] = ((), dict(given)) if isinstance(given, Mapping) else (tuple(given), {})
    if not calls:
        raise TypeError(
            "freeze needs inputs to trace the model with, arrays or jax.ShapeDtypeStruct; got none. Pass "
            "them: freeze(model, variables, x), or freeze(model, x) in NNX. Inputs of other methods than "
            "__call__ go into methods={'decode': (z,)}; methods={'__call__': ()} is a call without inputs."
        )
    return calls


def _freeze_linen(
    model: nn.Module, variables: Mapping[str, Any], calls: Calls, weight_only: bool
) -> tuple[nn.Module, Mapping[str, Any]]:
    """Returns a frozen Linen model and its variables; see ``freeze``."""
    boxed = flax.core.unfreeze(dict(variables))
    unboxed = nn.meta.unbox(boxed)
    by_hand = not hasattr(model, "_fp8_rules")
    rules = Rules(include=(), allow_unmatched=True) if by_hand else model._fp8_rules
    seen, read = dict[Path, SeenOp](), set[Path]()

    class RecordingCall(Reading, Call):
        """A call in the trace; it records the ops that run."""

        def on_read(self, path: Path) -> None:
            read.add(path)

        def put_in(self, variables: Mapping[str, Any]) -> Mapping[str, Any]:
            return as_own_arrays(variables) if by_hand else super().put_in(variables)

        def on_op(self, op: Fp8Op, recipe: Any, compute: Any, *operands: Any, **keywords: Any) -> Any:
            if recipe is None:  # FP8 is switched off
                return compute(*operands, **keywords)
            found = SeenOp(op.row, recipe.gemms, self.origins.of(operands[1]) or Origin())
            return record(seen, op.path, found, *operands, **keywords)

    recording = convert(model, rules, RecordingCall)
    shapes = jax.tree.map(as_struct, unboxed)  # without shardings
    for name, inputs in calls.items():

        def call(bound: nn.Module, inputs: Any, name: str = name) -> Any:
            args, kwargs = inputs  # some names of the model's keywords may be those of apply
            return getattr(bound, name)(*args, **kwargs)

        needed = needed_inputs(trace_apply(recording, shapes, (inputs,), {"method": call}))
        found = zip(leaves_of(shapes), needed)
        read |= {path[1:] for path, is_needed in found if is_needed and path[0] == PARAMS}
    state = unboxed.get(OVERWRITE_WITH_GRADIENT, {})
    unseen = {path[:-1] for path in leaves_of(state)} - seen.keys()
    ops, codes, scales = freeze_ops(seen, read, leaves_of(unboxed[PARAMS]), state, weight_only, unseen)
    params = flatten_dict(_replaced(boxed[PARAMS], codes), keep_empty_nodes=True)
    served = {**boxed, PARAMS: unflatten_dict({**params, **scales})}
    served.pop(OVERWRITE_WITH_GRADIENT, None)
    # Ops of wide kernels keep their state, if they still compute in FP8; so do ops that did not run.
    wide = unseen | {op.path for op in ops if op.kernel is None and any(op.gemms.quantizers)}
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


@flax.struct.dataclass
class StoredKernel(nn.meta.AxisMetadata[Any]):
    """A box around the codes of a kernel, in the variables that a method sees; it holds a ``StandIn``."""

    value: Any
    codes_dtype: Any = flax.struct.field(pytree_node=False)
    dtype: Any = flax.struct.field(pytree_node=False)
    source: Path = flax.struct.field(pytree_node=False)

    def unbox(self) -> jax.Array:
        """Returns what the method reads."""
        codes, dtype = self.value, self.dtype
        if codes.dtype != self.codes_dtype:  # a function of nn.map_variables has cast all parameters
            codes, dtype = codes.astype(self.codes_dtype), codes.dtype
        return read_stored(codes, dtype, self.source)

    def replace_boxed(self, val: Any) -> StoredKernel:
        """Returns the box with other codes."""
        return dataclasses.replace(self, value=val)

    def add_axis(self, index: int, params: Any) -> StoredKernel:
        """Returns the box of stacked codes, or of the codes of one layer of a stack."""
        return self

    remove_axis = add_axis

    # A module that reads the variables of another one gets the box, and takes it for an array.

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
    """A call of a frozen model, which reads kernels and scales from the variables and changes none."""

    def __init__(self, serving: Serving, model: Any) -> None:
        super().__init__(model)
        self._ops, self._by_hand = {op.path: op for op in serving.ops}, serving.by_hand
        self._shapes = dict[Path, tuple[int, ...]]()
        """The shapes of the scales of one layer, by their paths."""

    def on_read(self, path: Path) -> None:
        """Refuses to read a stored kernel, also by code that finds its codes in the variables."""
        if path in {(*self.path, *op.kernel) for op in self._ops.values() if op.kernel}:
            raise refuse(path)

    def put_in(self, variables: Mapping[str, Any]) -> Mapping[str, Any]:
        """Returns the collections of the caller as the method sees them, with boxes around codes."""
        if self.is_init:
            raise ValueError(
                "A frozen model makes no variables: freeze returns them. Make a fresh cache by init of the "
                "original model, and shapes for a checkpoint library by jax.eval_shape of freeze."
            )
        params = as_own_arrays(variables.get(PARAMS, {}))
        given = leaves_of(nn.meta.unbox(params))
        stored = dict[Path, StoredKernel]()
        for op in self._ops.values():
            if op.kernel in given:
                codes = given[op.kernel]
                check_codes(codes.dtype)
                stored[op.kernel] = StoredKernel(codes, codes.dtype, op.dtype, op.kernel)
        state = variables.get(OVERWRITE_WITH_GRADIENT, {})  # of ops whose kernels are wide
        # The only parameters of an op are its scales.
        scales = {path: x for path, x in given.items() if path[:-1] in self._ops}
        for path, x in scales.items():
            op = self._ops[path[:-1]]
            num = len(op.stack)
            self._shapes[path] = x.shape[num:]
            if op.kernel and op.stack != tuple(range(num)):
                # A loop that slices the kernel slices its scales alike in the dimensions of the kernel,
                # whether it counts its axis from the front or the back.
                ones = (1,) * (given[op.kernel].ndim - num - 1)
                x = x.reshape(*x.shape[:num], -1, *ones)
                scales[path] = jnp.moveaxis(x, range(num), op.stack)
        params = _replaced(params, {**stored, **scales})
        of_ops = {**scales, **({} if self._by_hand else leaves_of(state))}
        seen = merged({PARAMS: params, OVERWRITE_WITH_GRADIENT: unflatten_dict(of_ops)})
        return {**seen, OVERWRITE_WITH_GRADIENT: state} if self._by_hand else seen

    def take_out(self, variables: Mapping[str, Any]) -> Mapping[str, Any]:
        """Returns the parameters; the caller has the other arrays."""
        params = split(variables).get(PARAMS, {})
        is_stored = lambda x: isinstance(x, StoredKernel)  # noqa: E731
        unboxed = jax.tree.map(lambda x: x.value if is_stored(x) else x, params, is_leaf=is_stored)
        return {PARAMS: unboxed}

    def on_op(
        self, op: Fp8Op, recipe: Any, compute: Any, lhs: Any, rhs: Any, *rest: Any, **keywords: Any
    ) -> jax.Array:
        """Computes an op with its stored kernel and its fixed scales, or as in training."""
        above = len(self.path)  # the model may be a part of another one
        served = self._ops.get(op.path[above:])
        kernel = rhs.source if isinstance(rhs, StandIn) else None
        if (served.kernel if served else None) != kernel:
            raise not_seen(op.path)
        if served is None or kernel is None:  # without ``served`` the op did not run in the traced calls
            return op._compute(recipe and served.gemms if served else recipe, lhs, rhs, *rest, **keywords)
        arrays: dict[str, Any] = {name: self.state_of(op, name) for name in served.scales}
        if missing := [name for name, x in arrays.items() if x is None]:
            raise ValueError(
                f"{' and '.join(missing)} of {PARAMS}/{'/'.join(op.path)} are missing from the variables. "
                "Pass the variables that fp8flax.freeze returned."
            )
        arrays = {name: x.reshape(self._shapes[*served.path, name]) for name, x in arrays.items()}
        return computed(op.row, served.gemms, arrays, lhs, rhs, *rest, **keywords)
