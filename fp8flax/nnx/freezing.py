"""Freezes NNX models, and describes frozen ones for files.

A kernel can be stored as codes only if nothing but the op of its layer reads it, because only the op knows
the scale. To check this, ``freeze`` traces the model. Each op multiplies there by zeros instead of its
kernel. So if the traced program still needs a kernel after its dead code is removed, something else reads
the kernel, and it stays wide.
"""

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
from fp8flax._core.autocast import recipe_in_use
from fp8flax._core.names import OVERWRITE_WITH_GRADIENT, PARAMS
from fp8flax._core.ops.op import calling
from fp8flax._core.ops.row import OpRow
from fp8flax._core.options import wrong_model
from fp8flax._core.recipes import CustomRecipe
from fp8flax._linen.eval_init import needing_inputs, split_arrays
from fp8flax._serve.stored_op import (
    DAMAGED,
    INPUT_SCALE,
    KERNEL_SCALE,
    WEIGHT_ONLY,
    Layout,
    Path,
    Scales,
    ServedOp,
    check_is_on,
    computed,
    delayed_scales,
    layout_of,
    stored,
)
from fp8flax._train.check import warn_if_damaged
from fp8flax.nnx.models import layers_of
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

    def __init__(self, row: OpRow, gemms: CustomRecipe, scope: str, layout: Layout | None, scales: Scales):
        self.row, self.gemms, self.scope, self.layout = row, gemms, scope, layout
        for name, scale in scales.items():
            setattr(self, name, Frozen(scale))

    def _multiply(self, lhs: jax.Array, codes: jax.Array, *arguments: Any, **keywords: Any) -> jax.Array:
        """Returns the result of the op for the codes of a kernel."""
        check_is_on(recipe_in_use(self.gemms, self.gemms))
        if codes.dtype.itemsize != 1:
            raise TypeError(
                f"The kernel of a frozen model must stay in FP8; got {codes.dtype}. Cast the variables of "
                "nnx.Param alone, not those of fp8flax.nnx.Frozen."
            )
        names = [name for name in (KERNEL_SCALE, INPUT_SCALE) if hasattr(self, name)]
        scales = {name: getattr(self, name).get_value() for name in names}
        with jax.named_scope(self.scope) if self.scope else contextlib.nullcontext():
            return computed(self.row, self.gemms, codes, scales, lhs, *arguments, **keywords)

    def __call__(self, *args: Any, **kwargs: Any) -> jax.Array:
        """Returns the result, called as the op that it replaces."""
        return calling(self.row, self._multiply)(*args, **kwargs)


def is_frozen(model: nnx.Module) -> bool:
    """Returns whether a model, or a part of it, comes from ``freeze``."""
    return any(isinstance(node, FrozenOp) for _, node in nnx.iter_graph(model))


def described(model: nnx.Module, variables: Any) -> tuple[list[ServedOp], dict[str, Any]]:
    """Returns the ops of a frozen model, and the values of its variables in collections, as Linen has them.

    Raises:
        TypeError: nothing in the model is frozen, or there are variables beside it.
    """
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
            ops.append(ServedOp(path, node.gemms, (*path[:-1], "kernel"), node.layout))
        elif isinstance(node, Fp8Op):  # of a wide kernel
            recipe = node._recipe_in_use()
            ops.append(ServedOp(path, CustomRecipe() if recipe is None else recipe.gemms))
    values = {}
    for collection, keys, variable in written_variables(model):
        collection = PARAMS if isinstance(variable, Frozen) else collection
        values[collection, *map(str, keys)] = variable.get_value()
    return ops, nnx.traversals.unflatten_mapping(values)


def freeze(
    model: nnx.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    weight_only: bool,
    wide: dict[str, str],
    fresh: list[str],
) -> Any:
    """Returns a frozen copy of an NNX model; see ``fp8flax._serve.linen.freeze`` for the arguments."""
    warn_if_damaged(state_of(model)[OVERWRITE_WITH_GRADIENT], DAMAGED, stacklevel=4)
    copy: Any = nnx.clone(model)
    layers = {layer.site.path: layer for layer in layers_of(copy) if layer.op is not None}
    paths = {path for path, layer in layers.items() if layer.takes_codes}
    seen, shared = _operands(model, paths, args, kwargs)
    for path, operands in seen.items():
        if path not in shared:
            _freeze(layers[path], operands, weight_only, fresh)
    if not is_frozen(copy):
        tied = f" Something else reads the kernels of {', '.join(sorted(shared))}: give tied layers a copy."
        raise ValueError(
            "There is nothing to freeze: no layer with an FP8 matmul of its own kernel ran with these "
            "inputs. Convert the model by quantize_model(model, include=…), and call freeze outside of "
            f"autocast(enabled=False).{tied if shared else ''}"
        )
    owners = {id(layer.op): path for path, layer in layers.items()}
    for keys, op in nnx.iter_graph(copy):
        if not isinstance(op, Fp8Op):
            continue
        op._reason = ""  # report takes only models that quantize_model returned
        if weight_only:
            op.recipe = CustomRecipe()  # multiplies in the inputs' dtype, also by a wide kernel
        wide["/".join(map(str, keys))] = (
            "something else reads or changes the kernel"
            if owners.get(id(op)) in shared
            else "only a layer of Flax, such as nnx.Linear, stores the whole kernel that it multiplies by"
        )
    return copy


def _freeze(layer: Any, args: tuple[Any, ...], weight_only: bool, fresh: list[str]) -> None:
    """Stores the kernel of a layer in FP8, unless the recipe keeps it wide."""
    recipe, row, module, path = layer.op._recipe_in_use(), layer.site.op, layer.module, layer.site.path
    if recipe is None or recipe.gemms.forward.rhs is None:
        return
    gemms = WEIGHT_ONLY if weight_only else recipe.gemms
    state: dict[Path, Any] = {
        (path, name): x for name, x in state_of(layer.op)[OVERWRITE_WITH_GRADIENT].items()
    }
    scales = delayed_scales((path,), gemms, state, fresh)
    wide = module.kernel.get_value()
    axes, dtype = [0] * len(layer.stacked), args[0].dtype
    codes, scales = stored(
        row, gemms, args, wide, scales, axes, into_op=lambda kernel: kernel.astype(dtype)
    )
    op = FrozenOp(row, gemms, path, layout_of(row, gemms, args), scales)
    setattr(module, layer.site.name, nnx.data(op))
    module.kernel = Frozen(codes)
    _let_kernel_pass(module, wide.dtype)


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
"""The metadata of a kernel's variable with the path of its layer."""


def _operands(
    model: nnx.Module, paths: set[str], args: Any, kwargs: Any
) -> tuple[dict[str, tuple[Any, ...]], set[str]]:
    """Traces the model, and records the operands of the layers at these paths.

    Returns:
        Two results. The first has, for the path of each layer that runs, the arguments of its op, with
        shapes instead of arrays. The second is the set of the layers that multiply by anything but their
        own kernel, or whose kernel anything else reads or changes.
    """
    copy = nnx.clone(model)
    layers = {layer.site.path: layer for layer in layers_of(copy) if layer.site.path in paths}
    seen, shared = dict[str, tuple[Any, ...]](), set[str]()
    got: dict[int, tuple[Any, str]] = {}
    """By the identity of each value that a kernel has had: the value, and the mark of the kernel."""
    changed: set[str] = set()
    """The marks of the kernels that the model sets."""

    def on_get(kernel: Any, value: Any) -> Any:
        got[id(value)] = value, kernel.get_metadata(_MARK)
        return value

    def on_set(kernel: Any, value: Any) -> Any:
        changed.add(kernel.get_metadata(_MARK))
        return value

    def record(path: str, row: OpRow, lhs: Any, rhs: Any, *arguments: Any, **keywords: Any) -> jax.Array:
        shapes = (jax.ShapeDtypeStruct(x.shape, lhs.dtype) for x in (lhs, rhs))
        seen[path] = (*shapes, *arguments)
        _, mark = got.get(id(rhs), (None, None))
        if mark != marks[path]:
            shared.add(path)
        return row.plain(lhs, jnp.zeros_like(rhs, lhs.dtype), *arguments, **keywords)

    for path, layer in layers.items():
        _let_kernel_pass(layer.module, layer.module.kernel.get_value().dtype)
        layer.module.kernel.set_metadata(**{_MARK: path}, on_get_value=on_get, on_set_value=on_set)
        recorder = calling(layer.site.op, partial(record, path, layer.site.op))
        setattr(layer.module, layer.site.name, nnx.static(recorder))
    # Layers that share a kernel have one mark.
    marks = {path: layer.module.kernel.get_metadata(_MARK) for path, layer in layers.items()}
    graphdef, state = nnx.split(copy)
    arrays, fill = split_arrays(args, kwargs)

    def call(state: Any, arrays: Any) -> Any:
        args, kwargs = fill(arrays)
        merged = nnx.merge(graphdef, state)
        out = merged(*args, **kwargs)
        # A kernel may remain in its own variable; it must not be in an output or another variable.
        nodes = [node for _, node in nnx.iter_graph(merged) if isinstance(node, nnx.Variable)]
        held = [node.get_value() for node in nodes if _mark_of(node) is None]
        return [x for x in jax.tree.leaves((out, held)) if isinstance(x, jax.Array)]

    with needing_inputs(args, kwargs):
        program = jax.make_jaxpr(call)(state, arrays)
    variables = jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, nnx.Variable))
    inputs = [_mark_of(x) for x in variables for _ in jax.tree.leaves(x)]
    changed.update(mark for mark, is_needed in zip(inputs, needed_inputs(program)) if is_needed and mark)
    return seen, {path for path in seen if path in shared or marks[path] in changed}


def _mark_of(x: Any) -> str | None:
    """Returns the mark of the variable of a kernel; None for other variables, and for arrays."""
    mark: str | None = x.get_metadata().get(_MARK) if isinstance(x, nnx.Variable) else None
    return mark
