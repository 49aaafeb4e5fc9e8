"""Freezes NNX models, and describes frozen ones for files."""

from __future__ import annotations

import collections
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

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
from fp8flax._serve.freeze import IS_FROZEN, Calls
from fp8flax._serve.stored_op import Path, SeenOp, ServedOp, computed, freeze_ops, leaves_of, record
from fp8flax.nnx.models import layers_of, nodes_of, op_of
from fp8flax.nnx.ops import Fp8Op, OverwriteWithGradient, state_of


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

    def __init__(self, row: type[Op], served: ServedOp, scales: Mapping[Path, Any]):
        self.row, self.served = row, served
        for name in served.scales:
            setattr(self, name, Frozen(scales[*served.path, name]))

    def __call__(self, *args: Any, **kwargs: Any) -> jax.Array:
        """Returns the result for the codes of a kernel, called as the op that it replaces."""
        scales = {name: getattr(self, name).get_value() for name in self.served.scales}
        run = partial(computed, self.row, self.served.gemms, scales)
        with jax.named_scope("/".join(self.served.path[:-1]) or "model"):
            return calling(self.row, run)(*args, **kwargs)


def described(model: nnx.Module, variables: Any) -> tuple[list[ServedOp], dict[Path, Any]]:
    """Returns the ops of a frozen model, and its arrays as parameters; see ``_serve.freeze``."""
    if variables is not None:
        raise TypeError(
            f"An NNX model has its variables, so none are passed beside it; got {type(variables).__name__}."
        )
    if not nodes_of(model, FrozenOp):
        raise wrong_model(model, "come from fp8flax.freeze")
    ops = []
    for path, op in nodes_of(model, FrozenOp, Fp8Op).items():
        if isinstance(op, FrozenOp):
            ops.append(op.served._replace(path=path, kernel=_kernel_of(path)))
        else:  # of a wide kernel
            ops.append(ServedOp(path, op.recipe.gemms))
    state = nnx.state(model, nnx.Not(nnx.Any(nnx.RngState, OverwriteWithGradient)))
    return ops, {(PARAMS, *path): x for path, x in leaves_of(nnx.to_pure_dict(state)).items()}


def freeze(model: nnx.Module, calls: Calls, weight_only: bool) -> Any:
    """Returns a frozen copy of an NNX model; see ``fp8flax.freeze``."""
    if nodes_of(model, FrozenOp):
        raise ValueError(IS_FROZEN)
    copy: Any = nnx.clone(model)
    layers, present = _layers_of(copy), nodes_of(copy, Fp8Op)
    seen, read = _traced(model, calls)
    kernels = {_kernel_of(path): layer.module.kernel.get_value() for path, layer in layers.items()}
    state = {path: state_of(op_of(layer))[OVERWRITE_WITH_GRADIENT] for path, layer in layers.items()}
    unseen = present.keys() - seen
    ops, codes, scales = freeze_ops(seen, read, kernels, unflatten_dict(state), weight_only, unseen)
    for op in present.values():
        op._reason = ""  # report takes only models that quantize_model returned
        # With weight_only an op of a wide kernel multiplies in the inputs' dtype.
        op.recipe = CustomRecipe() if weight_only else op._recipe_in_use()
    for served in ops:
        if served.kernel is not None:
            site = layers[served.path]
            setattr(site.module, site.name, nnx.data(FrozenOp(site.op, served, scales)))
            site.module.kernel = Frozen(codes[served.kernel], **site.module.kernel.get_metadata())
            _let_kernel_pass(site.module, served.dtype)
    return copy


def _layers_of(model: nnx.Module) -> dict[Path, Any]:
    """Returns the layers (``Site``) that have an FP8 op, by the paths of their ops."""
    paths = {id(node): path for path, node in nodes_of(model, nnx.Module).items()}
    return {(*paths[id(site.module)], site.name): site for site in layers_of(model) if op_of(site)}


def _kernel_of(op: Path) -> Path:
    """Returns the path of the kernel of a layer, given that of its op."""
    return *op[:-1], "kernel"


class _PromoteAllButKernel(NamedTuple):
    """Promotes the operands of a layer, except its kernel, which may be FP8 codes."""

    promote: Callable[..., Any]
    kernel_dtype: Any

    def __call__(self, args: Any, /, **kwargs: Any) -> Any:
        inputs, codes, *rest = args
        inputs, _, *rest = self.promote((inputs, jnp.zeros((), self.kernel_dtype), *rest), **kwargs)
        return inputs, codes, *rest


def _let_kernel_pass(module: Any, dtype: Any) -> None:
    """Makes a layer of NNX pass its kernel to its op without a cast."""
    module.promote_dtype = nnx.static(_PromoteAllButKernel(module.promote_dtype, dtype))


def _traced(model: Any, calls: Calls) -> tuple[dict[Path, SeenOp], set[Path]]:
    """Traces a copy of a model.

    Returns the ops of the layers that run, and the kernels that their layers do not multiply by as they
    are, or that anything else reads or changes.
    """
    seen, read, keys = dict[Path, SeenOp](), set[int](), dict[Path, int]()
    got = collections.defaultdict[int, list[Any]](list)
    """The values that the variable of each kernel has returned, by the kernel's place among the inputs."""

    def on_get(key: int, kernel: Any, value: Any) -> Any:
        got[key].append(value)
        return value

    def on_set(key: int, kernel: Any, value: Any) -> Any:
        read.add(key)
        return value

    def on_op(path: Path, site: Site, gemms: Any, lhs: Any, rhs: Any, *rest: Any, **keywords: Any) -> Any:
        if all(value is not rhs for value in got[keys[path]]):
            read.add(keys[path])
        origin = Origin((Source(_kernel_of(path), rhs.shape),), "", steps=())
        found = SeenOp(site.op, gemms, origin, stacked=tuple(range(len(site.stacked))))
        return record(seen, path, found, lhs, rhs.astype(lhs.dtype), *rest, **keywords)

    graphdef, state = nnx.split(model)

    def call(state: Any, name: str, args: Any, kwargs: Any) -> Any:
        copy: Any = nnx.merge(graphdef, state)
        layers, inputs = _layers_of(copy), [id(x) for x in jax.tree.leaves(state)]
        own = {id(site.module.kernel) for site in layers.values()}
        for path, site in layers.items():
            kernel, op = site.module.kernel, getattr(site.module, site.name)
            keys[path] = key = inputs.index(id(kernel.get_value()))  # layers may share a kernel
            kernel.set_metadata(on_get_value=partial(on_get, key), on_set_value=partial(on_set, key))
            if (recipe := op._recipe_in_use()) is not None:  # otherwise FP8 is switched off
                _let_kernel_pass(site.module, kernel.dtype)
                run = calling(site.op, partial(on_op, path, site, recipe.gemms))
                setattr(site.module, site.name, nnx.static(run))
        out = getattr(copy, name)(*args, **kwargs)
        # A kernel may remain in its own variable; it must not be in an output or another variable.
        others = [x.get_value() for x in nodes_of(copy, nnx.Variable).values() if id(x) not in own]
        got.clear()  # no tracer may outlive its trace
        return out, others

    for name, inputs in calls.items():
        needed = needed_inputs(program_of(call, state, (name, *inputs), {}))
        read |= {key for key, is_needed in enumerate(needed) if is_needed}
    return seen, {_kernel_of(path) for path, key in keys.items() if key in read}
