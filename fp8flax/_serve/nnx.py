"""Freezes NNX models, and describes frozen ones for files."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import jax
import numpy as np
from flax import nnx
from flax.traverse_util import unflatten_dict

from fp8flax._compat.flax_internals import change_class
from fp8flax._compat.jaxprs import needed_inputs
from fp8flax._compat.stand_in import StandIn, read_stored, refuse
from fp8flax._compat.traces import is_watched, unwatched
from fp8flax._core.names import OVERWRITE_WITH_GRADIENT, PARAMS
from fp8flax._core.ops.op import Op, calling
from fp8flax._core.recipes import Recipe
from fp8flax._core.types import Path, PyTree
from fp8flax._model.module_call import ModuleCall, has_methods, nodes_of, watch
from fp8flax._model.tracing import program_of
from fp8flax._nnx.ops import Fp8Op, OverwriteWithGradient, state_of
from fp8flax._serve.freeze_ops import freeze_ops
from fp8flax._serve.reading import Calls, Reading, Recording
from fp8flax._serve.stored_op import INPUT_SCALE, Arrays, ServedOp, computed, leaves_of, not_seen


class Frozen(nnx.Variable[Any]):
    """Variable of a frozen model that is not trained: a kernel in FP8, or a scale.

    Example:
        >>> from flax import nnx
        >>> import jax.numpy as jnp
        >>> import fp8flax as fp8, fp8flax.nnx as fp8nnx
        >>> op = fp8nnx.Fp8DotGeneralOp(recipe=fp8.Float8CurrentScaling())
        >>> layer = nnx.Linear(4, 8, dot_general=op, rngs=nnx.Rngs(0))
        >>> sorted(nnx.state(fp8nnx.freeze(layer, jnp.ones((2, 4))), fp8nnx.Frozen))
        ['dot_general', 'kernel']
    """

    def __getattr__(self, name: str) -> Any:
        """Returns an attribute of the array that ``get_value`` returns, such as ``T``."""
        value = self.get_value()
        return super().__getattr__(name) if value is self.get_raw_value() else getattr(value, name)


@dataclasses.dataclass(frozen=True)
class ReadStored:
    """The hook by which the code of a frozen model reads a stored kernel; other code reads its codes."""

    dtype: np.dtype | None
    source: Path

    def __call__(self, variable: nnx.Variable[jax.Array], codes: jax.Array) -> jax.Array:
        """Returns what ``variable.get_value()`` returns."""
        return read_stored(codes, self.dtype, self.source) if is_watched() else codes


class ServingCall(Reading, ModuleCall):
    """One call of a method of a frozen module, which has stored kernels."""

    can_be_off = False
    kernels = nnx.Param, Frozen

    def on_read(self, path: Path) -> None:
        """Refuses to read a stored kernel, also by code that finds its codes in the variables."""
        hook = self.variables[path].get_metadata().get("on_get_value")
        if isinstance(hook, ReadStored):
            raise refuse(hook.source)


class FrozenOp(nnx.Module):
    """An op with a kernel that is stored in FP8, and with fixed scales."""

    def __init__(self, op_type: type[Op], served: ServedOp, scales: Mapping[str, Frozen]):
        self.op_type, self.served = op_type, served
        for name, scale in scales.items():
            setattr(self, name, scale)

    def __call__(self, *args: Any, **kwargs: Any) -> jax.Array:
        """Returns the result for a stored kernel, called as the op that it replaces."""
        args = _values(args)  # before the hooks of variables return codes
        with unwatched(), jax.named_scope("/".join(self.served.path[:-1]) or "model"):
            return calling(self.op_type, self._computed)(*args, **kwargs)

    def _computed(self, lhs: Any, rhs: Any, *arguments: Any, **keywords: Any) -> jax.Array:
        served = self.served
        if not isinstance(rhs, StandIn) or (rhs.source, rhs.cut) != (served.kernel, served.cut):
            raise not_seen(served.path)
        scales = {name: getattr(self, name).get_value() for name, _ in served.scales}
        return computed(self.op_type, served, scales, lhs, rhs, *arguments, **keywords)


def is_frozen(model: nnx.Module) -> bool:
    """Returns whether ``freeze`` returned the model."""
    return bool(getattr(model, "_fp8_is_frozen", False) or nodes_of(model, FrozenOp))


def described(model: nnx.Module, variables: None) -> tuple[list[ServedOp], Arrays]:
    """Returns the ops of a frozen model, and its arrays as parameters; see ``_serve.freeze``."""
    if variables is not None:
        raise TypeError(
            f"An NNX model has its variables, so none are passed beside it; got {type(variables).__name__}."
        )
    ops, stored = list[ServedOp](), {id(x): path for path, x in nodes_of(model, Frozen).items()}
    for path, parent, op in _ops_of(model, FrozenOp | Fp8Op):
        if isinstance(op, Fp8Op):  # of a wide kernel
            ops.append(ServedOp(path, op.recipe.gemms))  # type: ignore[union-attr]
            continue
        kernel = op.served.kernel
        for place, x in nodes_of(parent, Frozen).items():
            if getattr(x.get_metadata().get("on_get_value"), "source", None) == op.served.kernel:
                # The first op of a shared kernel has it; the paths of the others are not among the arrays.
                kernel = stored.pop(id(x), (*path[:-1], *place))
        ops.append(op.served._replace(path=path, kernel=kernel))
    state = nnx.state(model, nnx.Not(nnx.Any(nnx.RngState, OverwriteWithGradient)))
    return ops, {(PARAMS, *path): x for path, x in leaves_of(nnx.to_pure_dict(state)).items()}


def freeze(model: nnx.Module, calls: Calls, weight_only: bool) -> nnx.Module:
    """Returns a frozen copy of an NNX model; see ``fp8flax.freeze``."""
    copy: Any = nnx.clone(model)
    recording = _traced(model, calls, weight_only)
    sites = {path: (module, op) for path, module, op in _ops_of(copy, Fp8Op)}
    variables, present = nodes_of(copy, nnx.Variable), nodes_of(copy, Fp8Op)
    params = {path: x.get_raw_value() for path, x in variables.items()}
    state = unflatten_dict({path: state_of(op)[OVERWRITE_WITH_GRADIENT] for path, (_, op) in sites.items()})
    unseen = present.keys() - recording.ops
    ops, codes, scales = freeze_ops(recording, params, state, unseen, is_nnx=True)
    gemms = {op.path: op.gemms for op in ops}
    for path, op in present.items():
        op._reason = ""  # report takes only models that quantize_model returned
        op.recipe = gemms.get(path) or op._recipe_in_use()
    made = dict[Any, Frozen]()
    for served in ops:
        if not served.kernel:
            continue
        kernel: Any = variables[served.kernel]
        change_class(kernel, Frozen)  # at all places that share it
        kernel.set_raw_value(codes[served.kernel])
        kernel.set_metadata(on_get_value=ReadStored(served.dtype, served.kernel))
        (module, op), own = sites[served.path], {}
        for name, _ in served.scales:
            owner = served.path if name == INPUT_SCALE else (served.kernel, served.cut)
            own[name] = made.setdefault((owner, name), Frozen(scales[*served.path, name]))
        setattr(module, served.path[-1], nnx.data(FrozenOp(op.op_type, served, own)))
    for module in nodes_of(copy, nnx.Module).values():
        if has_methods(module) and nodes_of(module, FrozenOp):
            watch(module, ServingCall)
    copy._fp8_is_frozen = True  # also if all kernels stay wide
    return copy


def _values(args: Iterable[Any]) -> tuple[Any, ...]:
    """Returns the arguments of an op, of which some may be variables, as arrays."""
    return tuple(x.get_value() if isinstance(x, nnx.Variable) else x for x in args)


def _ops_of(model: Any, cls: Any) -> Iterator[tuple[Path, Any, Any]]:
    """Yields the path, the module and the op for each op that is an attribute of a module."""
    for path, module in nodes_of(model, nnx.Module).items():
        for name, op in vars(module).items():
            if isinstance(op, cls):
                yield (*path, name), module, op


def _traced(model: nnx.Module, calls: Calls, weight_only: bool) -> Recording:
    """Returns what the calls of a model run and read."""
    recording = Recording(weight_only)
    graphdef, state = nnx.split(_recording_copy(model, recording))

    def call(state: nnx.State, calls: Calls) -> PyTree:
        """Returns the results of all calls, and what they leave in the variables of the model."""
        out, left = list[PyTree](), list[tuple[Path, jax.Array]]()
        for name, (args, kwargs) in calls.items():
            merged: Any = nnx.merge(graphdef, state)
            out.append(getattr(merged, name)(*args, **kwargs))
            left += ((path, x.get_raw_value()) for path, x in nodes_of(merged, nnx.Variable).items())
        # A kernel may remain in its own variable; it must not be in an output or another variable.
        kernels = {source.path for op in recording.ops.values() for source in op.kernel.sources}
        return out, [x for path, x in left if path not in kernels]

    needed = needed_inputs(program_of(call, state, (calls,), {}))
    recording.read |= {path for path, is_needed in zip(leaves_of(state), needed) if is_needed}
    return recording


def _recording_copy(model: nnx.Module, recording: Recording) -> Any:
    """Returns a copy of a model that records its ops, and the parameters that other code reads or sets."""
    copy = nnx.clone(model)

    class RecordingCall(Reading, ModuleCall):
        """A call of a method; all calls in the trace know parameters by their paths in the model."""

        def __init__(self, module: nnx.Module) -> None:
            super().__init__(module)
            self.origins = recording.origins
            variables = self.variables.items()
            self.variables = {x.get_metadata().get("fp8_path", path): x for path, x in variables}

        def on_read(self, path: Path) -> None:
            recording.read.add(path)

    def on_op(path: Path, op: Fp8Op, recipe: Recipe, *operands: Any, **keywords: Any) -> jax.Array:
        operands = _values(operands)
        with unwatched():
            return recording.run(path, op.op_type, recipe, *operands, **keywords)

    def on_set(variable: Any, value: Any) -> Any:
        recording.read.add(variable.fp8_path)
        return value

    for path, module, op in [*_ops_of(copy, Fp8Op)]:
        if (recipe := op._recipe_in_use()) is not None:  # otherwise FP8 is switched off
            run = calling(op.op_type, partial(on_op, path, op, recipe))
            setattr(module, path[-1], nnx.static(run))
    for path, x in nodes_of(copy, nnx.Param).items():  # one that modules share has its first path
        x.set_metadata(fp8_path=path, on_set_value=on_set)
    for bridge in nodes_of(copy, nnx.bridge.ToNNX).values():  # its Linen module looks for kernels in params
        recording.read |= {x.fp8_path for x in nodes_of(bridge, nnx.Param).values()}
    for module in nodes_of(copy, nnx.Module).values():
        if has_methods(module):
            watch(module, RecordingCall)
    return copy
