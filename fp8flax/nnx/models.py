"""Whole NNX models: ``quantize_model``, which gives ops to their modules, and ``report``."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from fp8flax._compat.traces import current_trace
from fp8flax._core.names import NOT_CONVERTED
from fp8flax._core.ops.row import CONV, DOT_GENERAL, EINSUM, GemmSizes, OpRow
from fp8flax._core.options import wrong_model
from fp8flax._linen.eval_init import needing_inputs, split_arrays
from fp8flax._model.contraction_site import contraction
from fp8flax._model.interception import Front
from fp8flax._model.report import SEE_AUDIT, ModelReport, report_of
from fp8flax._model.rules import Decision, Rules, Site
from fp8flax.nnx.ops import Fp8Op, OverwriteWithGradient
from fp8flax.nnx.products import ModuleCall, base_of, params_of, watch, watched_class


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


class Product(NamedTuple):
    """A contraction that a module writes out, as a dry run finds it."""

    site: Site
    decision: Decision
    stacked: tuple[int, ...]
    """The sizes of the axes that ``nnx.vmap`` or ``nnx.scan`` has put in front of the kernel."""


class DryRun:
    """Finds the contractions of a model in one abstract call.

    Args:
        model: the model; it stays unchanged.
        decide: returns the decision about a contraction of a module of the model: ``decide(site, module)``.
    """

    def __init__(self, model: Any, decide: Callable[[Site, Any], Decision]) -> None:
        self.decide = decide
        self.decided: dict[str, tuple[Site, Decision]] = {}
        """The decisions by ``Site.scope``."""
        self.products: dict[tuple[str, str], Product] = {}
        """The written-out products by the path of their module and the name of their op."""
        self.nodes = {"/".join(map(str, path)): node for path, node in nnx.iter_graph(model)}
        self.layers = {layer.site.path: layer for layer in layers_of(model)}
        self.copy: Any = nnx.clone(model)
        for layer in layers_of(self.copy):
            function = getattr(layer.module, layer.kind.field)
            if function is None or isinstance(function, Fp8Op | LeftWide):
                function = layer.kind.plain or lax.dot_general
            setattr(layer.module, layer.kind.field, nnx.static(_InField(function)))
        classes: dict[type, type] = {}
        for keys, node in list(nnx.iter_graph(self.copy)):
            # An attribute of a dict or a list would be an item.
            if isinstance(node, nnx.Module) and not isinstance(node, nnx.Dict | nnx.List):
                module: Any = node
                module._fp8_path, cls = "/".join(map(str, keys)), base_of(node)
                object.__setattr__(node, "__class__", cls)
                if cls not in classes:
                    classes[cls] = watched_class(node, self._call)
                object.__setattr__(node, "__class__", classes[cls])

    def trace(self, args: Any, kwargs: Any) -> Any:
        """Returns the program of one call of the model."""
        graphdef, state = nnx.split(self.copy)
        arrays, fill = split_arrays(args, kwargs)

        def call(state: Any, arrays: Any) -> Any:
            args, kwargs = fill(arrays)
            out = nnx.merge(graphdef, state)(*args, **kwargs)
            return [x for x in jax.tree.leaves(out) if isinstance(x, jax.Array)]

        with needing_inputs(args, kwargs):
            return jax.make_jaxpr(call)(state, arrays)

    def _call(self, module: Any, method: str) -> Any:
        return None if isinstance(module, Fp8Op) else _DryCall(self, module, method)


@dataclasses.dataclass(frozen=True)
class _InField:
    """The function of a layer in a dry run. A contraction in it is the one that an op can compute."""

    plain: Callable[..., jax.Array]

    def __call__(self, *args: Any, **kwargs: Any) -> jax.Array:
        front = current_trace()
        if not isinstance(front, Front):
            return self.plain(*args, **kwargs)
        with front.interception.having(in_field=True):
            return self.plain(*args, **kwargs)


class _DryCall(ModuleCall):
    """One call of a method of a module in a dry run, which converts nothing."""

    in_field = False

    def __init__(self, run: DryRun, module: Any, method: str) -> None:
        super().__init__(module, method)
        self.run = run

    def contract(self, row: OpRow, operands: Sequence[Any], params: dict[str, Any]) -> tuple[Any, str]:
        path = self.module._fp8_path
        found, node = contraction(row, operands, params, self.origins), self.run.nodes[path]
        if self.in_field:
            site = self.run.layers[path].site
            decision = self.run.decide(site, node)
        else:
            stacked: tuple[int, ...] | None = ()
            if found.kernel is not None:
                source = found.kernel.sources[0]
                whole = {tuple(map(str, keys)): x for keys, x in params_of(node)}[source.path]
                stacked = _stack(whole.get_value().shape, source.shape)
            name = self.name_of(found)
            why = None if stacked is not None else "its kernel is stacked along another axis than the first"
            site = found.site(tuple(path.split("/")) if path else (), node, name, why)
            if found.kernel is not None:
                site = site._replace(kernel="/".join(filter(None, (path, site.kernel))))
            decision = self.run.decide(site, node)
            self.run.products[path, name] = Product(site, decision, stacked or ())
        site = site._replace(module=type(node))
        self.run.decided[site.scope] = site, decision
        return None, site.scope


def _stack(whole: tuple[int, ...], part: tuple[int, ...]) -> tuple[int, ...] | None:
    """Returns the leading sizes of an array that ``part`` lacks; None if it lacks others."""
    stack = whole[: len(whole) - len(part)]
    return stack if (*stack, *part) == whole else None


def quantize(model: Any, inputs: Sequence[Any], options: Rules) -> Any:
    """Returns a copy of an NNX model that computes in FP8; see ``fp8flax.quantize_model``."""
    for path, node in nnx.iter_graph(model):
        if isinstance(node, Fp8Op) and node._reason:
            raise ValueError(
                f"{type(model).__name__} is converted already, or a part of it: the op at "
                f"{'/'.join(map(str, path))!r} comes from quantize_model. Call it once, on the whole model "
                "without conversions, with all rules at once."
            )
    copy: Any = nnx.clone(model)
    layers = list(layers_of(copy))
    products: list[Product] = []
    if inputs:
        run = DryRun(copy, lambda site, node: options.decide(site))
        run.trace(inputs, {})
        products = list(run.products.values())
    if not layers and not products:
        names = ", ".join(f"nnx.{cls.__name__}" for cls in _KINDS)
        raise ValueError(
            f"The model has no layer that takes an op: none of {names}. "
            + (
                "With these inputs its modules compute no other contraction either, outside of JAX's own "
                "lax.scan, jax.checkpoint and custom derivatives."
                if inputs
                else "To convert what its modules write out, pass inputs: fp8flax.quantize_model(model, x)."
            )
        )
    of_layers = [(layer.site, options.decide(layer.site)) for layer in layers]
    decided = [*of_layers, *((product.site, product.decision) for product in products)]
    options.check_matched(decided)
    # A layer keeps the op that it had, gets a new op, or gets a ``LeftWide``. A layer that cannot take an
    # op stays as it is.
    for layer, (site, decision) in zip(layers, of_layers):
        if layer.op is not None and (not decision.converts or decision.reason == BY_DEFAULT):
            continue
        if decision.converts:
            op = _new_op(layer.kind.row, decision, options, layer.stacked)
            setattr(layer.module, layer.kind.field, nnx.data(op))
        elif site.impossible is None:
            left = LeftWide(site.path, layer.kind.plain or lax.dot_general, decision.reason)
            setattr(layer.module, layer.kind.field, nnx.static(left))
    for site, decision, stacked in products:
        node = site.module
        if decision.converts:
            setattr(node, site.name, nnx.data(_new_op(site.op, decision, options, stacked, site.shapes[1])))
            watch(node)
        else:
            node._fp8_left = (*getattr(node, "_fp8_left", ()), (site.name, decision.reason))
    of_layer = {id(layer.op): layer.site.path for layer in reversed(layers)}
    ops = [(path, node) for path, node in nnx.iter_graph(copy) if isinstance(node, Fp8Op)]
    if not ops:
        raise ValueError(options.why_unconverted(decided))
    for path, op in ops:
        op._scope = of_layer.get(id(op), "/".join(map(str, path)))
        op._reason = op._reason or "an op of its own"
    return copy


def _new_op(
    row: OpRow, decision: Decision, options: Rules, stacked: tuple[int, ...], kernel: tuple[int, ...] = ()
) -> Fp8Op:
    """Returns the op of a contraction, with state that is stacked as its kernel is."""
    form = {"form": options.form} if row.has_form else {}
    op: Any = Fp8Op._for_row(row)(*(kernel[:1] if row.stacked else ()), recipe=decision.recipe, **form)
    op._reason = decision.reason
    for value in vars(op).values():
        if isinstance(value, OverwriteWithGradient):
            array = value.get_value()
            value.set_value(jnp.broadcast_to(array, (*stacked, *array.shape)))
    found: Fp8Op = op
    return found


def report(model: Any, *args: Any, **kwargs: Any) -> ModelReport:
    """Returns the report of a converted NNX model; see ``fp8flax.report``."""
    if not any(isinstance(node, Fp8Op) and node._reason for _, node in nnx.iter_graph(model)):
        raise wrong_model(model, "come from fp8flax.quantize_model", SEE_AUDIT)

    def decision_of(site: Site, node: Any) -> Decision:
        op = getattr(node, site.name, None) if site.name else None
        if isinstance(op, Fp8Op):
            return Decision(True, op.recipe, op._reason)
        if not site.name:
            return run.layers[site.path].decision
        by_default = NOT_FOUND if site.kind == "kernel" else Rules().decide(site).reason
        return Decision(False, None, dict(getattr(node, "_fp8_left", ())).get(site.name, by_default))

    run = DryRun(model, decision_of)
    return report_of(run.trace(args, kwargs), run.decided)


NOT_FOUND = "written out by a module: give quantize_model inputs, so that it finds this contraction"
"""The reason of a contraction that ``quantize_model`` did not look for."""
