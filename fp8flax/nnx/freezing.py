"""``freeze``: turns an NNX model into one for serving, with FP8 kernels and fixed scales.

A kernel can be stored as codes only if nothing but the op of its layer reads it, because only the op knows
the scale. To check this, ``freeze`` traces the model with the kernels as inputs. Each kernel passes through
a mark when it enters the op of its layer. If anything else reads the kernel, it stays wide.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from fp8flax._compat.interpreter import Set, interpret
from fp8flax._core.autocast import recipe_in_use
from fp8flax._core.names import OVERWRITE_WITH_GRADIENT
from fp8flax._core.ops.calls import calling
from fp8flax._core.ops.row import OpRow
from fp8flax._core.options import check_bool, wrong_model
from fp8flax._core.recipes import CustomRecipe
from fp8flax._model.program_reads import ELSE, SAME, Reads
from fp8flax._serve.stored_op import (
    FROZEN,
    WEIGHT_ONLY,
    check_can_freeze,
    check_is_on,
    computed,
    fixed_scales,
    stored_kernel,
    warn_of,
)
from fp8flax._train.bridge import needing_inputs, split_arrays
from fp8flax.nnx.models import Layer, layers_of
from fp8flax.nnx.ops import Fp8Op
from fp8flax.nnx.variables import state_of


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

    kernel_scale: Frozen
    input_scale: Frozen

    def __init__(self, row: OpRow, recipe: CustomRecipe, scope: str, scales: dict[str, jax.Array]):
        self.row, self.recipe, self.scope = row, recipe, scope
        for role, scale in scales.items():
            setattr(self, f"{role}_scale", Frozen(scale))

    def _multiply(self, lhs: jax.Array, codes: jax.Array, *arguments: Any, **keywords: Any) -> jax.Array:
        """Returns the result of the op for the codes of a kernel."""
        check_is_on(recipe_in_use(self.recipe, self.recipe))
        if codes.dtype.itemsize != 1:
            raise TypeError(
                f"The kernel of a frozen model must stay in FP8; got {codes.dtype}. Cast the variables of "
                "nnx.Param alone, not those of fp8flax.nnx.Frozen."
            )
        fixed = getattr(self, "input_scale", None)
        scales = self.kernel_scale.get_value(), None if fixed is None else fixed.get_value()
        like = jnp.zeros(codes.shape, lhs.dtype)
        with jax.named_scope(self.scope) if self.scope else contextlib.nullcontext():
            return computed(self.row, self.recipe, codes, *scales, lhs, like, *arguments, **keywords)

    def __call__(self, *args: Any, **kwargs: Any) -> jax.Array:
        """Returns the result, called as the op that it replaces."""
        return calling(self.row.call, self._multiply)(*args, **kwargs)


@dataclasses.dataclass(frozen=True)
class _PromoteAllButKernel:
    """Promotes the operands of a layer, except its kernel, which may be FP8 codes."""

    promote: Callable[..., Any]
    kernel_dtype: Any

    def __call__(self, args: Any, /, **kwargs: Any) -> Any:
        inputs, codes, *rest = args
        inputs, _, *rest = self.promote((inputs, jnp.zeros((), self.kernel_dtype), *rest), **kwargs)
        return inputs, codes, *rest


def freeze(model: nnx.Module, *args: Any, weight_only: bool = False, **kwargs: Any) -> Any:
    """Returns a copy of a model for serving: kernels in FP8, scales that no longer change.

    What the copy computes is described in ``fp8flax.freeze``.

    Kernels are stored at their old place, as codes in variables of the type ``Frozen``, with their scales
    in the op of the layer. Wide parameters stay ``nnx.Param``. ``nnx.jit``, ``nnx.split`` and checkpoints
    take the copy like any model. It can be differentiated with respect to inputs and wide parameters; with
    respect to codes and scales it raises ``TypeError``.

    Args:
        model: a model with FP8 ops, given to its layers or set by ``quantize_model``; trained or
            calibrated.
        *args: inputs to trace the model with; ``jax.ShapeDtypeStruct`` may take the place of arrays.
        weight_only: whether to store kernels in FP8 with a scale for each output feature, and to multiply
            in the inputs' dtype.
        **kwargs: keyword inputs of the model.

    Returns:
        A model of the same type; ``model`` stays unchanged.

    Raises:
        TypeError: ``model`` is not an NNX module, or ``weight_only`` is not a bool.
        ValueError: ``model`` is frozen; no layer with an op of a matmul runs with these inputs, or all
            their kernels are read elsewhere; or FP8 is switched off here.

    Warns:
        UserWarning: kernels of FP8 ops stay wide, or delayed scales have seen no data. Reasons for a wide
            kernel are a convolution, an op outside of NNX's layers, a layer that did not run, a recipe that
            keeps kernels wide, and a kernel that is read elsewhere.

    Example:
        >>> from flax import nnx
        >>> import jax.numpy as jnp
        >>> import fp8flax.nnx as fp8nnx
        >>> layer = nnx.Linear(4, 8, dot_general=fp8nnx.Fp8DotGeneralOp(), rngs=nnx.Rngs(0))
        >>> x = jnp.ones((2, 4))
        >>> fp8nnx.calibrate(lambda layer, x: layer(x), layer, [x])
        >>> frozen = fp8nnx.freeze(layer, x)
        >>> frozen.kernel.get_value().dtype.name, bool((frozen(x) == layer(x)).all())
        ('float8_e4m3fn', True)

    Source: as for ``fp8flax.freeze``.
    """
    if not isinstance(model, nnx.Module):
        raise wrong_model(model, "be a flax.nnx.Module", "flax.nnx", "freeze")
    check_bool("weight_only", weight_only)
    if any(isinstance(node, FrozenOp) for _, node in nnx.iter_graph(model)):
        raise ValueError(FROZEN)
    check_can_freeze()
    copy: Any = nnx.clone(model)
    layers = {
        layer.site.path: layer for layer in layers_of(copy) if layer.op is not None and layer.takes_codes
    }
    seen, shared = _operands(model, set(layers), args, kwargs)
    fresh: list[str] = []
    frozen = 0
    for path, (lhs, arguments) in seen.items():
        if path not in shared:
            frozen += _freeze(layers[path], path, lhs, arguments, weight_only, fresh)
    if not frozen:
        names = ", ".join(f"{path}/kernel".lstrip("/") for path in sorted(shared))
        raise ValueError(
            f"There is nothing to freeze: something else than its layer's op reads or changes {names}. "
            "Give tied layers a copy of the kernel."
            if shared
            else "There is nothing to freeze: no layer with an FP8 matmul ran with these inputs. Convert "
            "the model by fp8flax.nnx.quantize_model(model, include=…), or give its layers ops."
        )
    wide: dict[str, str] = {}
    owners = {id(layer.op): layer for layer in layers_of(copy) if layer.op is not None}
    for keys, op in nnx.iter_graph(copy):
        if isinstance(op, Fp8Op):
            op._reason = ""  # report takes only models that quantize_model returned
            if weight_only:
                op.recipe = CustomRecipe()  # multiplies in the inputs' dtype, also by a wide kernel
            wide["/".join(map(str, keys))] = _why_wide(owners.get(id(op)), set(seen), shared)
    warn_of(wide, fresh, "fp8flax.nnx.calibrate")
    return copy


def _why_wide(layer: Any, seen: set[str], shared: set[str]) -> str:
    """Returns the reason why the kernel of an op stays wide; ``layer`` is None if no layer has the op."""
    if layer is None:
        return "it is not the op of a layer of NNX"
    if layer.site.path in shared:
        return "something else than this op reads or changes the kernel"
    if layer.kind.row.plan is None:
        return "it is a convolution"
    if not layer.takes_codes:
        return "its einsum does not multiply by the kernel as it is stored"
    if layer.site.path not in seen:
        return "it did not run with these inputs"
    return "its recipe keeps the kernel wide"


def _operands(
    model: nnx.Module, paths: set[str], args: Any, kwargs: Any
) -> tuple[dict[str, tuple[Any, tuple[Any, ...]]], set[str]]:
    """Traces the model, and records the operands of the layers at these paths.

    Returns:
        Two results. The first has, for the path of each layer that runs, the shape of its input and the
        arguments of its op. The second is the set of the layers that multiply by anything but their own
        kernel, or whose kernel anything else reads.
    """
    copy = nnx.clone(model)
    seen: dict[str, tuple[Any, tuple[Any, ...]]] = {}

    def recorder(path: str, row: OpRow) -> Any:
        def record(lhs: jax.Array, rhs: jax.Array, *arguments: Any, **keywords: Any) -> jax.Array:
            seen[path] = jax.ShapeDtypeStruct(lhs.shape, lhs.dtype), arguments
            rhs = checkpoint_name(rhs, f"{_MARK}{path}").astype(lhs.dtype)
            return row.plain(lhs, rhs, *arguments, **keywords)

        return calling(row.call, record)

    for layer in layers_of(copy):
        if layer.site.path in paths:
            function = recorder(layer.site.path, layer.kind.row)
            setattr(layer.module, layer.kind.field, nnx.static(function))
            _let_kernel_pass(layer, layer.module.kernel.get_value().dtype)
    graphdef, state = nnx.split(copy)
    arrays, fill = split_arrays(args, kwargs)
    # By the path of a layer: the number of its kernel among the inputs of the program.
    inputs: dict[str, int] = {}

    def call(state: Any, arrays: Any) -> Any:
        args, kwargs = fill(arrays)
        merged = nnx.merge(graphdef, state)
        numbers = {id(leaf): i for i, leaf in enumerate(jax.tree.leaves(state))}
        kernels = {layer.site.path: layer.module.kernel for layer in layers_of(merged)}
        kernels = {path: kernel for path, kernel in kernels.items() if path in paths}
        inputs.update((path, numbers[id(kernel.get_value())]) for path, kernel in kernels.items())
        out = merged(*args, **kwargs)
        # A kernel may remain in its own variable; it must not be in an output or another variable.
        own = {id(kernel) for kernel in kernels.values()}
        nodes = [node for _, node in nnx.iter_graph(merged) if isinstance(node, nnx.Variable)]
        held = [node.get_value() for node in nodes if id(node) not in own]
        return [x for x in jax.tree.leaves((out, held)) if isinstance(x, jax.Array)]

    with needing_inputs(args, kwargs):
        program = jax.make_jaxpr(call)(state, arrays)
    of_kernels = set(inputs.values())
    reads = _KernelReads()
    given = [i if i in of_kernels else ELSE for i, _ in enumerate(jax.tree.leaves((state, arrays)))]
    for result in interpret(program, [frozenset([one]) for one in given], reads):
        reads.use(result)
    return seen, {
        path for path in seen if inputs[path] in reads.read or reads.by_op[path] != {inputs[path]}
    }


_MARK = "fp8flax_kernel:"


class _KernelReads(Reads):
    """Finds which kernels a program reads, and which kernels reach the op of each layer by its mark."""

    # Other movements, and casts, count as reading: only the op knows what the stored codes mean.
    movements = SAME

    def __init__(self) -> None:
        super().__init__()
        self.by_op: defaultdict[str, Set] = defaultdict(frozenset)
        """For the path of each layer, the values that its op multiplies by."""

    def is_op(self, eqn: Any) -> bool:
        return eqn.primitive.name == "name" and eqn.params["name"].startswith(_MARK)

    def equation(self, eqn: Any, operands: list[Set]) -> list[Set]:
        if self.is_op(eqn):
            self.by_op[eqn.params["name"].removeprefix(_MARK)] |= operands[0]
        return super().equation(eqn, operands)

    def part_of(self, whole: Set) -> Set:
        return whole  # a part of stacked kernels is the kernel of one layer


def _let_kernel_pass(layer: Layer, dtype: Any) -> None:
    """Makes a layer of NNX pass its kernel to its op without a cast. Other modules pass what they hold."""
    promote = getattr(layer.module, "promote_dtype", None)
    if promote is not None:
        layer.module.promote_dtype = nnx.static(_PromoteAllButKernel(promote, dtype))


def _freeze(
    layer: Layer, path: str, lhs: Any, arguments: tuple[Any, ...], weight_only: bool, fresh: list[str]
) -> bool:
    """Freezes a layer, and returns whether this was possible."""
    op = layer.op
    assert op is not None
    recipe = op._recipe_in_use()
    if recipe is None or recipe.gemms.forward.rhs is None:
        return False
    row, gemms = layer.kind.row, WEIGHT_ONLY if weight_only else recipe.gemms
    wide = layer.module.kernel.get_value()

    def of_one(wide: jax.Array, scales: dict[str, jax.Array]) -> Any:
        wide = wide.astype(lhs.dtype)
        codes, scale = stored_kernel(row, gemms, lhs, arguments, wide, scales.get("kernel"))
        return codes, {**scales, "kernel": scale}

    for _ in layer.stacked:
        of_one = jax.vmap(of_one)
    delayed = fixed_scales((path,), gemms, {path: state_of(op)[OVERWRITE_WITH_GRADIENT]}, fresh)
    codes, scales = jax.jit(of_one)(wide, delayed)
    setattr(layer.module, layer.kind.field, nnx.data(FrozenOp(row, gemms, path, scales)))
    layer.module.kernel = Frozen(codes)
    _let_kernel_pass(layer, wide.dtype)
    return True
