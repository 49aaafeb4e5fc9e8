"""Freezes NNX models, and describes frozen ones for files."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from fp8flax._compat.dead_code import needed_inputs
from fp8flax._core.names import OVERWRITE_WITH_GRADIENT, PARAMS
from fp8flax._core.ops.op import Op, calling
from fp8flax._core.options import wrong_model
from fp8flax._core.recipes import CustomRecipe
from fp8flax._linen.eval_init import program_of
from fp8flax._model.param_origin import Origin, Source
from fp8flax._serve.stored_op import (
    Path,
    SeenOp,
    ServedOp,
    computed,
    freeze_ops,
    leaves_of,
)
from fp8flax.nnx.models import layers_of, op_of
from fp8flax.nnx.ops import Fp8Op
from fp8flax.nnx.variables import state_of, written_variables


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


class FrozenOp(nnx.Module):
    """An op with a kernel that is stored in FP8, and with fixed scales."""

    def __init__(self, row: type[Op], served: ServedOp, scope: str, scales: Mapping[Path, Any]):
        self.row, self.served, self.scope = row, served, scope
        for name in served.scales:
            setattr(self, name, Frozen(scales[*served.path, name]))

    def _multiply(self, lhs: jax.Array, codes: jax.Array, *arguments: Any, **keywords: Any) -> jax.Array:
        """Returns the result of the op for the codes of a kernel."""
        gemms = self.served.gemms
        if codes.dtype.itemsize != 1:
            raise TypeError(
                f"The kernel of a frozen model must stay in FP8; got {codes.dtype}. Cast the variables of "
                "nnx.Param alone, not those of fp8flax.nnx.Frozen."
            )
        scales = {name: getattr(self, name).get_value() for name in self.served.scales}
        with jax.named_scope(self.scope) if self.scope else contextlib.nullcontext():
            return computed(self.row, gemms, codes, scales, lhs, *arguments, **keywords)

    def __call__(self, *args: Any, **kwargs: Any) -> jax.Array:
        """Returns the result, called as the op that it replaces."""
        return calling(self.row, self._multiply)(*args, **kwargs)


def is_frozen(model: nnx.Module) -> bool:
    """Returns whether a model, or a part of it, comes from ``freeze``."""
    return any(isinstance(node, FrozenOp) for _, node in nnx.iter_graph(model))


def described(model: nnx.Module, variables: Any) -> tuple[list[ServedOp], dict[Path, Any]]:
    """Returns the ops of a frozen model, and its arrays by collection and path; see ``linen.described``."""
    if not is_frozen(model):
        raise wrong_model(model, "come from fp8flax.nnx.freeze")
    if variables is not None:
        raise TypeError(
            f"An NNX model has its variables, so none are passed beside it; got {type(variables).__name__}."
        )
    ops = []
    for keys, node in nnx.iter_graph(model):
        path = tuple(map(str, keys))
        if isinstance(node, FrozenOp):
            ops.append(node.served._replace(path=path, kernel=(*path[:-1], "kernel")))
        elif isinstance(node, Fp8Op):  # of a wide kernel
            recipe = node._recipe_in_use()
            ops.append(ServedOp(path, CustomRecipe() if recipe is None else recipe.gemms))
    arrays = dict[Path, Any]()
    for collection, keys, variable in written_variables(model):
        collection = PARAMS if isinstance(variable, Frozen) else collection
        leaves = leaves_of(variable.get_value())
        arrays |= {(collection, *map(str, keys), *path): x for path, x in leaves.items()}
    return ops, arrays


def freeze(model: nnx.Module, args: tuple[Any, ...], kwargs: dict[str, Any], weight_only: bool) -> Any:
    """Returns a frozen copy of an NNX model; see ``fp8flax.freeze``."""
    copy: Any = nnx.clone(model)
    layers = _layers_of(copy)
    seen, read = _traced(model, args, kwargs)
    kernels = {(*path[:-1], "kernel"): layer.module.kernel.get_value() for path, layer in layers.items()}
    state = {
        (*path, name): x
        for path, layer in layers.items()
        for name, x in state_of(op_of(layer))[OVERWRITE_WITH_GRADIENT].items()
    }
    present = {tuple(map(str, keys)): op for keys, op in nnx.iter_graph(copy) if isinstance(op, Fp8Op)}
    unseen = ["/".join(path) for path in present if path not in seen]
    ops, codes, scales = freeze_ops(seen, read, kernels, state, weight_only, unseen)
    for op in present.values():
        op._reason = ""  # report takes only models that quantize_model returned
        if weight_only:
            op.recipe = CustomRecipe()  # multiplies in the inputs' dtype, also by a wide kernel
    for served in ops:
        if served.kernel is not None:
            site = layers[served.path]
            setattr(site.module, site.name, nnx.data(FrozenOp(site.op, served, site.path, scales)))
            site.module.kernel = Frozen(codes[served.kernel])
            _let_kernel_pass(site.module, served.dtype)
    return copy


def _layers_of(model: nnx.Module) -> dict[Path, Any]:
    """Returns the layers (``Site``) that have an FP8 op, by the paths of their ops."""
    paths = {id(node): tuple(map(str, keys)) for keys, node in nnx.iter_graph(model)}
    layers = [layer for layer in layers_of(model) if op_of(layer) is not None]
    return {(*paths[id(layer.module)], layer.name): layer for layer in layers}


@dataclasses.dataclass(frozen=True)
class _PromoteAllButKernel:
    """Promotes the operands of a layer, except its kernel, which may be FP8 codes."""

    promote: Callable[..., Any]
    kernel_dtype: Any

    def __call__(self, args: Any, /, **kwargs: Any) -> Any:
        inputs, codes, *rest = args
        inputs, _, *rest = self.promote((inputs, jnp.zeros((), self.kernel_dtype), *rest), **kwargs)
        return inputs, codes, *rest


def _let_kernel_pass(module: Any, dtype: Any) -> None:
    """Makes a layer of NNX pass its kernel to its op without a cast. Other modules pass what they hold."""
    if hasattr(module, "promote_dtype"):
        module.promote_dtype = nnx.static(_PromoteAllButKernel(module.promote_dtype, dtype))


# Which kernels nothing but their op reads.

_MARK = "fp8flax_kernel"
"""The metadata of a kernel's variable with the path of the kernel."""


def _traced(
    model: nnx.Module, args: Any, kwargs: Mapping[str, Any]
) -> tuple[dict[Path, SeenOp], set[Path]]:
    """Traces the model.

    Returns the ops of the layers that run, and the kernels that their layers do not multiply by as they
    are, or that anything else reads or changes.
    """
    copy = nnx.clone(model)
    seen = dict[Path, SeenOp]()
    marks: dict[Path, Path] = {}
    """The mark of each kernel: its path, or another one if several layers share the kernel."""
    got: dict[int, tuple[Any, Path]] = {}
    """By the identity of each value that a kernel has had: the value, and the mark of the kernel."""
    read: set[Path | None] = set()
    """The marks of the kernels that something else reads or changes."""

    def on_get(kernel: Any, value: Any) -> Any:
        got[id(value)] = value, kernel.get_metadata(_MARK)
        return value

    def on_set(kernel: Any, value: Any) -> Any:
        read.add(kernel.get_metadata(_MARK))
        return value

    def record(path: Path, found: SeenOp, lhs: Any, rhs: Any, *rest: Any, **keywords: Any) -> jax.Array:
        shapes = (jax.ShapeDtypeStruct(x.shape, lhs.dtype) for x in (lhs, rhs))
        seen[path] = found._replace(args=(*shapes, *rest))
        _, mark = got.get(id(rhs), (None, None))
        if mark != marks[path]:
            read.add(marks[path])
        return found.row.plain(lhs, jnp.zeros_like(rhs, lhs.dtype), *rest, **keywords)

    for path, site in _layers_of(copy).items():
        op: Any = op_of(site)
        recipe, num_stacked = op._recipe_in_use(), len(site.stacked)
        if recipe is None:  # FP8 is switched off
            continue
        name, variable = (*path[:-1], "kernel"), site.module.kernel
        kernel = variable.get_value()
        marks[path] = _mark_of(variable) or name
        variable.set_metadata(**{_MARK: marks[path]}, on_get_value=on_get, on_set_value=on_set)
        _let_kernel_pass(site.module, kernel.dtype)
        origin = Origin((Source(name, kernel.shape[num_stacked:]),), "", steps=())
        found = SeenOp(site.op, recipe.gemms, origin, (), tuple(range(num_stacked)))
        setattr(site.module, site.name, nnx.static(calling(site.op, partial(record, path, found))))
    graphdef, state = nnx.split(copy)

    def call(state: Any, *args: Any, **kwargs: Any) -> Any:
        merged = nnx.merge(graphdef, state)
        out = merged(*args, **kwargs)
        # A kernel may remain in its own variable; it must not be in an output or another variable.
        nodes = [node for _, node in nnx.iter_graph(merged) if isinstance(node, nnx.Variable)]
        held = [node.get_value() for node in nodes if _mark_of(node) is None]
        return out, held

    program = program_of(call, state, args, kwargs)
    variables = jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, nnx.Variable))
    inputs = [_mark_of(x) for x in variables for _ in jax.tree.leaves(x)]
    read.update(mark for mark, is_needed in zip(inputs, needed_inputs(program)) if is_needed)
    return seen, {(*path[:-1], "kernel") for path, mark in marks.items() if mark in read}


def _mark_of(x: Any) -> Path | None:
    """Returns the mark of the variable of a kernel; None for other variables, and for arrays."""
    mark: Path | None = x.get_metadata().get(_MARK) if isinstance(x, nnx.Variable) else None
    return mark
