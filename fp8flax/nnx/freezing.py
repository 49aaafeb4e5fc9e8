"""Freezes NNX models, and describes frozen ones for files."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, cast

import jax
import jax.numpy as jnp
from flax import nnx
from flax.traverse_util import unflatten_dict

from fp8flax._compat.dead_code import needed_inputs
from fp8flax._core.names import OVERWRITE_WITH_GRADIENT, PARAMS
from fp8flax._core.ops.op import Op, calling
from fp8flax._core.options import wrong_model
from fp8flax._core.recipes import CustomRecipe
from fp8flax._linen.eval_init import program_of
from fp8flax._model.param_origin import Origin, Source
from fp8flax._model.rules import Site
from fp8flax._serve.stored_op import Path, SeenOp, ServedOp, computed, freeze_ops, leaves_of
from fp8flax.nnx.models import layers_of, op_of
from fp8flax.nnx.ops import Fp8Op, state_of, written_variables


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

    def __call__(self, *args: Any, **kwargs: Any) -> jax.Array:
        """Returns the result for the codes of a kernel, called as the op that it replaces."""
        scales = {name: getattr(self, name).get_value() for name in self.served.scales}
        run = partial(computed, self.row, self.served.gemms, scales)
        with jax.named_scope(self.scope) if self.scope else contextlib.nullcontext():
            return calling(self.row, run)(*args, **kwargs)


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
    seen, read = _traced(nnx.clone(model), args, kwargs)
    kernels = {_kernel_of(path): layer.module.kernel.get_value() for path, layer in layers.items()}
    state = {path: state_of(op_of(layer))[OVERWRITE_WITH_GRADIENT] for path, layer in layers.items()}
    present = {tuple(map(str, keys)): op for keys, op in nnx.iter_graph(copy) if isinstance(op, Fp8Op)}
    unseen = ["/".join(path) for path in present if path not in seen]
    ops, codes, scales = freeze_ops(seen, read, kernels, unflatten_dict(state), weight_only, unseen)
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


def _kernel_of(op: Path) -> Path:
    """Returns the path of the kernel of a layer, given that of its op."""
    return *op[:-1], "kernel"


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
"""The metadata of a kernel's variable that identifies it, also in copies of the variable."""


def _traced(model: Any, args: Any, kwargs: Mapping[str, Any]) -> tuple[dict[Path, SeenOp], set[Path]]:
    """Traces a model, and replaces its ops.

    Returns the ops of the layers that run, and the kernels that their layers do not multiply by as they
    are, or that anything else reads or changes.
    """
    seen = dict[Path, SeenOp]()
    got = dict[int, tuple[Any, Any]]()
    """By the identity of each value that a kernel has had: the value, and the mark of the kernel."""
    read = set[Any]()
    """The marks of the kernels that something else reads or changes."""

    def on_get(kernel: Any, value: Any) -> Any:
        got[id(value)] = value, _mark_of(kernel)
        return value

    def on_set(kernel: Any, value: Any) -> Any:
        read.add(_mark_of(kernel))
        return value

    def record(
        path: Path, site: Site, gemms: Any, lhs: Any, rhs: Any, *rest: Any, **keywords: Any
    ) -> jax.Array:
        shapes = (jax.ShapeDtypeStruct(x.shape, lhs.dtype) for x in (lhs, rhs))
        plan = site.op.plan and partial(site.op.plan, *shapes, *rest)
        origin = Origin((Source(_kernel_of(path), rhs.shape),), "", steps=())
        seen[path] = SeenOp(gemms, origin, plan, tuple(range(len(site.stacked))))
        if got.get(id(rhs), (None, None))[1] != marks[path]:
            read.add(marks[path])
        return site.op.plain(lhs, jnp.zeros_like(rhs, lhs.dtype), *rest, **keywords)

    layers = _layers_of(model)
    marks = {path: id(site.module.kernel) for path, site in layers.items()}  # layers may share a kernel
    for path, site in layers.items():
        op, kernel = cast(Fp8Op, op_of(site)), site.module.kernel
        recipe = op._recipe_in_use()
        if recipe is None:  # FP8 is switched off
            continue
        _let_kernel_pass(site.module, kernel.get_value().dtype)
        kernel.set_metadata(**{_MARK: marks[path]}, on_get_value=on_get, on_set_value=on_set)
        run = calling(site.op, partial(record, path, site, recipe.gemms))
        setattr(site.module, site.name, nnx.static(run))
    graphdef, state = nnx.split(model)

    def call(state: Any, *args: Any, **kwargs: Any) -> Any:
        merged: Any = nnx.merge(graphdef, state)
        out = merged(*args, **kwargs)
        # A kernel may remain in its own variable; it must not be in an output or another variable.
        nodes = [node for _, node in nnx.iter_graph(merged) if isinstance(node, nnx.Variable)]
        return out, [node.get_value() for node in nodes if _mark_of(node) is None]

    program = program_of(call, state, args, kwargs)
    variables = jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, nnx.Variable))
    inputs = [_mark_of(x) for x in variables for _ in jax.tree.leaves(x)]
    read.update(mark for mark, is_needed in zip(inputs, needed_inputs(program)) if is_needed)
    return seen, {_kernel_of(path) for path, mark in marks.items() if mark in read}


def _mark_of(x: Any) -> Any:
    """Returns the mark of the variable of a kernel; None for other variables, and for arrays."""
    return x.get_metadata().get(_MARK) if isinstance(x, nnx.Variable) else None
