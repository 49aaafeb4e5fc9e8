"""Whole NNX models: ``quantize_model``, which gives ops to their layers, and ``report``."""

from __future__ import annotations

import dataclasses
import math
import re
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from fp8flax._core.names import NOT_CONVERTED
from fp8flax._core.ops.calls import calling
from fp8flax._core.ops.ops import CONV, DOT_GENERAL, EINSUM
from fp8flax._core.ops.row import GemmSizes, OpRow
from fp8flax._core.options import wrong_model
from fp8flax._core.recipes import Recipe
from fp8flax._model.model_report import SEE_AUDIT, ModelReport, table_of
from fp8flax._model.rules import Decision, Rules, Site
from fp8flax._train.bridge import needing_inputs, split_arrays
from fp8flax.nnx.ops import Fp8Op, OverwriteWithGradient


class Kind(NamedTuple):
    """A kind of NNX layer that has a field for an op."""

    row: OpRow
    """The op that the field takes."""
    plain: Any
    """The default value of the field."""
    kernel_shape: Callable[[Any], tuple[int, ...]]
    """Returns the shape of the kernel of a layer, without the axes by which ``nnx.vmap`` stacked it."""
    axes: Callable[[Any], tuple[Sequence[int], Sequence[int]]]
    """Returns the axes of the kernel that the layer contracts, and the batch axes of the kernel."""

    @property
    def field(self) -> str:
        """The name of the field that takes the op."""
        assert self.row.nnx_field is not None
        return self.row.nnx_field


def _einsum_names(layer: nnx.Einsum) -> list[str]:
    """Returns the names of the axes of the input, the kernel and the result, without an ellipsis."""
    return re.split(",|->", layer.einsum_str.replace("...", ""))


def _einsum_axes(layer: nnx.Einsum) -> tuple[list[int], list[int]]:
    lhs, rhs, result = _einsum_names(layer)
    shared = [i for i, name in enumerate(rhs) if name in lhs]
    return [i for i in shared if rhs[i] not in result], [i for i in shared if rhs[i] in result]


def _general_axes(layer: nnx.LinearGeneral) -> tuple[list[int], list[int]]:
    batch = len(layer.batch_axis)
    return list(range(batch, batch + len(layer.in_features))), list(range(batch))


BY_DEFAULT = "by default"
"""The reason of a decision for which no rule matched."""

_KINDS: dict[type[nnx.Module], Kind] = {
    nnx.Linear: Kind(
        DOT_GENERAL,
        lax.dot_general,
        lambda layer: (layer.in_features, layer.out_features),
        lambda layer: ([0], []),
    ),
    nnx.LinearGeneral: Kind(
        DOT_GENERAL,
        None,
        lambda layer: (*layer.batch_axis.values(), *layer.in_features, *layer.out_features),
        _general_axes,
    ),
    nnx.Einsum: Kind(EINSUM, jnp.einsum, lambda layer: tuple(layer.kernel_shape), _einsum_axes),
    nnx.Conv: Kind(
        CONV,
        lax.conv_general_dilated,
        lambda layer: tuple(layer.kernel_shape),
        lambda layer: (list(range(len(layer.kernel_shape) - 1)), []),
    ),
}


def _kind_of(module: Any) -> Kind | None:
    """Returns the kind of a layer that has a field for an op; None for other modules."""
    return next((kind for cls, kind in _KINDS.items() if isinstance(module, cls)), None)


@dataclasses.dataclass(frozen=True)
class LeftWide:
    """The function of a layer that ``quantize_model`` leaves wide, with the layer's name for audits."""

    scope: str
    plain: Callable[..., jax.Array]
    reason: str
    """The reason why the layer is not converted."""

    def __call__(self, *args: Any, **kwargs: Any) -> jax.Array:
        """Computes the layer without FP8."""
        with jax.named_scope(self.scope or "model"), jax.named_scope(NOT_CONVERTED):
            return self.plain(*args, **kwargs)


class Layer(NamedTuple):
    """A layer of a model, with its description for the rules."""

    module: Any
    kind: Kind
    stacked: tuple[int, ...]
    """The sizes of the axes that ``nnx.vmap`` has put in front of the kernel."""
    site: Site

    @property
    def op(self) -> Fp8Op | None:
        """The op of the layer, if it is an ``Fp8Op``; otherwise None."""
        found = getattr(self.module, self.kind.field)
        return found if isinstance(found, Fp8Op) else None

    @property
    def decision(self) -> Decision:
        """The decision of ``quantize_model`` about the layer."""
        found = getattr(self.module, self.kind.field)
        if isinstance(found, Fp8Op):
            return Decision(True, found.recipe, found._reason)
        reason = found.reason if isinstance(found, LeftWide) else self.site.impossible
        return Decision(False, None, reason or "not converted")

    @property
    def takes_codes(self) -> bool:
        """Whether the stored kernel enters one matmul without a change."""
        if self.kind.row is EINSUM:
            lhs, rhs, result = _einsum_names(self.module)
            return all(name in lhs or name in result for name in rhs)
        return self.kind.row.plan is not None


def layers_of(model: nnx.Module) -> Iterator[Layer]:
    """Yields the layers of a model that have a field for an op."""
    for path, module in nnx.iter_graph(model):
        kind = _kind_of(module)
        if kind is None:
            continue
        shape, (contracted, batched) = kind.kernel_shape(module), kind.axes(module)
        kernel = module.kernel.get_value()
        stacked = kernel.shape[: kernel.ndim - len(shape)]
        k = math.prod(shape[i] for i in contracted)
        batch = math.prod(shape[i] for i in batched)
        place = "/".join(map(str, path))
        site = Site(
            path=place,
            module=module,
            kernel=f"{place}/kernel".lstrip("/"),
            kind="kernel",
            op=kind.row,
            shapes=(tuple(shape[i] for i in contracted), shape),
            dtypes=(jnp.dtype(getattr(module, "dtype", None) or kernel.dtype),) * 2,
            sizes=GemmSizes(batch, 1, k, math.prod(shape) // max(1, k * batch)),
            is_matmul=not isinstance(module, nnx.Conv) or _is_matmul(module),
            impossible=_why_impossible(module, kind, is_stacked_first=(*stacked, *shape) == kernel.shape),
        )
        yield Layer(module, kind, stacked, site)


def _why_impossible(module: Any, kind: Kind, is_stacked_first: bool) -> str | None:
    """Returns why a layer cannot take an op; None if it can."""
    op = getattr(module, kind.field)
    if not is_stacked_first:
        return "its kernel is stacked along another axis than the first"
    if getattr(module, "dot_general_cls", None) is not None:
        return "it has a dot_general_cls of its own"
    if not (isinstance(op, Fp8Op | LeftWide) or op is kind.plain):
        return f"it has a {kind.field} of its own"
    return None


def _is_matmul(layer: nnx.Conv) -> bool:
    """Returns whether a convolution is a matmul for inputs of any size, because no windows overlap."""

    def each(value: Any) -> tuple[int, ...]:
        value = 1 if value is None else value
        return (value,) * len(layer.kernel_size) if isinstance(value, int) else tuple(value)

    windows = zip(layer.kernel_size, each(layer.kernel_dilation), each(layer.strides))
    are_apart = all((size - 1) * dilation < stride for size, dilation, stride in windows)
    return are_apart and layer.feature_group_count == 1 and set(each(layer.input_dilation)) == {1}


def quantize_model(
    model: Any,
    recipe: Recipe | None = None,
    *,
    include: Any = None,
    exclude: Any = (),
    rules: Any = (),
    allow_unmatched: bool = False,
    form: str = "direct",
) -> Any:
    """Returns a copy of an NNX model whose layers compute in FP8; ``model`` stays unchanged.

    Layers with a field for an op get one: ``nnx.Linear``, ``nnx.LinearGeneral``, ``nnx.Einsum`` and
    ``nnx.Conv``, anywhere in the model, also inside of ``nnx.MultiHeadAttention`` and recurrent cells. Each
    layer gets its own op, with fresh state; a module that occurs at two places gets one. A layer with an op
    that you gave keeps this op and its state, unless ``rules`` or ``include`` convert the layer. In layers
    that ``nnx.vmap`` stacked along the first axis, for ``nnx.scan``, the state is stacked. Matmuls that a
    module writes out (``x @ w``, ``jnp.einsum``) are not converted: give the module an op.

    The copy shares the arrays of the model, which are not mutable, but none of its variables.

    The rules and their order are those of ``fp8flax.quantize_model``. A pattern is searched
    (``re.search``) in a layer's path, such as ``encoder/layers/0/linear``, and in that path with
    ``/kernel``. (The path of a layer that occurs at two places is the one that comes first in
    ``nnx.iter_graph``.)

    Args:
        model: any NNX module, also an abstract one (``nnx.eval_shape``).
        recipe: how tensors are scaled, unless a rule says otherwise.
        include: a regular expression or several, as in ``fp8flax.quantize_model``.
        exclude: a regular expression or several, as in ``fp8flax.quantize_model``.
        rules: pairs and callables, as in ``fp8flax.quantize_model``. The shape of the input that a callable
            gets has only the dimensions that the kernel contracts.
        allow_unmatched: whether to allow a pattern that decides nothing.
        form: form of the matmuls, ``"direct"`` or ``"qdq"``; see ``fp8flax.Fp8DotGeneralOp``.

    Returns:
        A model of the same type; ``report`` lists what is converted and why.

    Raises:
        TypeError: ``model`` is not an NNX module, a recipe is not a ``Recipe``, or ``allow_unmatched`` is
            not a bool.
        ValueError: the model, or a part of it, is converted already; a rule or ``form`` is not valid; a
            pattern matched nothing; or nothing is converted.

    Example:
        >>> from flax import nnx
        >>> import fp8flax.nnx as fp8nnx
        >>> rngs = nnx.Rngs(0)
        >>> model = nnx.Sequential(nnx.Linear(32, 64, rngs=rngs), nnx.relu, nnx.Linear(64, 4, rngs=rngs))
        >>> model8 = fp8nnx.quantize_model(model, include="layers/0")
        >>> type(model8.layers[0].dot_general).__name__
        'Fp8DotGeneralOp'
        >>> model8.layers[2].dot_general.plain is model.layers[2].dot_general
        True

    Source: as for ``fp8flax.quantize_model``.
    """
    if not isinstance(model, nnx.Module):
        raise wrong_model(model, "be a flax.nnx.Module", "flax.nnx", "quantize_model")
    for path, node in nnx.iter_graph(model):
        if isinstance(node, Fp8Op) and node._reason:
            raise ValueError(
                f"{type(model).__name__} is converted already, or a part of it: the op at "
                f"{'/'.join(map(str, path))!r} comes from quantize_model. Call it once, on the whole model "
                "without conversions, with all rules at once."
            )
    options = Rules(
        recipe=recipe,
        include=include,
        exclude=exclude,
        rules=rules,
        allow_unmatched=allow_unmatched,
        form=form,
    )
    copy: Any = nnx.clone(model)
    layers = list(layers_of(copy))
    if not layers:
        names = ", ".join(f"nnx.{cls.__name__}" for cls in _KINDS)
        raise ValueError(
            f"The model has no layer that takes an op: none of {names}. In a module that writes out its "
            "matmuls, call an op yourself: fp8flax.nnx.Fp8DotGeneralOp()."
        )
    decided = [(layer.site, options.decide(layer.site)) for layer in layers]
    options.check_matched(decided)
    # A layer keeps the op that it had, gets a new op, or gets a ``LeftWide``. A layer that cannot take an
    # op stays as it is.
    for layer, (site, decision) in zip(layers, decided):
        if layer.op is not None and (not decision.converts or decision.reason == BY_DEFAULT):
            continue
        if decision.converts:
            row = layer.kind.row
            op = Fp8Op._for_row(row)(recipe=decision.recipe, **({"form": form} if row.has_form else {}))
            op._reason = decision.reason
            for value in vars(op).values():
                if isinstance(value, OverwriteWithGradient):
                    array = value.get_value()
                    value.set_value(jnp.broadcast_to(array, (*layer.stacked, *array.shape)))
            setattr(layer.module, layer.kind.field, nnx.data(op))
        elif site.impossible is None:
            left = LeftWide(site.path, layer.kind.plain or lax.dot_general, decision.reason)
            setattr(layer.module, layer.kind.field, nnx.static(left))
    of_layers = {id(layer.op): layer.site.path for layer in reversed(layers)}
    ops = [(path, node) for path, node in nnx.iter_graph(copy) if isinstance(node, Fp8Op)]
    if not ops:
        raise ValueError(options.why_unconverted(decided))
    for path, op in ops:
        op._scope = of_layers.get(id(op), "/".join(map(str, path)))
        op._reason = op._reason or "an op of its own"
    return copy


def report(model: nnx.Module, *args: Any, **kwargs: Any) -> ModelReport:
    """Lists the layers of a converted model that run: sizes, whether in FP8, and why or why not.

    Nothing is computed: the shapes come from tracing a call. They are the shapes that the layer sees, under
    ``jax.vmap`` and ``nnx.vmap`` those of one example. A layer counts as often as it is called; in a loop
    it counts once. Matmuls that modules write out are not listed, nor is ``Fp8RaggedDotOp``, which is an
    FP8 op already. What a GPU runs is in the compiled program: see ``fp8flax.audit``.

    Args:
        model: the model that ``quantize_model`` returned, or a part of it.
        *args: inputs of the model; ``jax.ShapeDtypeStruct`` may take the place of arrays.
        **kwargs: keyword inputs of the model.

    Returns:
        A ``ModelReport``; print it, or look at its ``rows``.

    Raises:
        TypeError: ``model`` does not come from ``quantize_model``.

    Example:
        >>> from flax import nnx
        >>> import jax, jax.numpy as jnp
        >>> import fp8flax.nnx as fp8nnx
        >>> make = lambda: nnx.Linear(4096, 1024, rngs=nnx.Rngs(0))
        >>> model8 = nnx.eval_shape(lambda: fp8nnx.quantize_model(make()))
        >>> print(fp8nnx.report(model8, jax.ShapeDtypeStruct((8192, 4096), jnp.float32)))
        contraction  kernel  B×M×K×N         times  % FLOPs  FP8?  why
        ---------------------------------------------------------------------
        (the model)  kernel  8192×4096×1024  1      100.0    FP8   by default
        <BLANKLINE>
        1 of 1 contractions are converted (100.0 % of their FLOPs).
    """
    copy = nnx.clone(model)
    if not any(isinstance(node, Fp8Op) and node._reason for _, node in nnx.iter_graph(copy)):
        raise wrong_model(model, "come from fp8flax.nnx.quantize_model", "flax.nnx", "report", SEE_AUDIT)
    counts: Counter[tuple[str, GemmSizes]] = Counter()
    decided = {}
    for layer in list(layers_of(copy)):
        decided[layer.site.path] = layer.site, layer.decision
        counting = calling(layer.kind.row.call, _counting(counts, layer))
        setattr(layer.module, layer.kind.field, nnx.static(counting))
    graphdef, state = nnx.split(copy)
    arrays, fill = split_arrays(args, kwargs)

    def call(state: Any, arrays: Any) -> None:
        args, kwargs = fill(arrays)
        nnx.merge(graphdef, state)(*args, **kwargs)

    with needing_inputs(args, kwargs):
        jax.eval_shape(call, state, arrays)
    return table_of(counts, decided)


def _counting(counts: Counter[tuple[str, GemmSizes]], layer: Layer) -> Callable[..., jax.Array]:
    """Returns a function that computes a layer's op without FP8, and counts the calls by their sizes."""
    row, path = layer.kind.row, layer.site.path

    def count(lhs: jax.Array, rhs: jax.Array, *arguments: Any, **keywords: Any) -> jax.Array:
        counts[path, row.sizes(lhs.shape, rhs.shape, *arguments)] += 1
        return row.plain(lhs, rhs, *arguments, **keywords)

    return count
