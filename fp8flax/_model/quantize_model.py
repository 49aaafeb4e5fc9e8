"""``quantize_model``: a Linen model whose contractions run in FP8, its source untouched.

Internals: ``_call_wrapped_method`` of Linen modules, around which a converted model counts its calls.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
import weakref
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial, wraps
from typing import Any, NamedTuple

import flax.core
import flax.errors
import flax.linen as nn
import jax
import numpy as np

from fp8flax._conv import is_matmul
from fp8flax._convert import split_arrays
from fp8flax._core.names import BY_OP
from fp8flax._model.interception import (
    CONV,
    DOT,
    RAGGED_DOT,
    SITE,
    Contraction,
    Derived,
    Interception,
    Left,
)
from fp8flax._model.lifting import beside_params, in_custom_vjp
from fp8flax._model.rules import Decision, Rules, Site, Sizes
from fp8flax._modules import (
    Fp8ConvGeneralDilatedOp,
    Fp8DotGeneralOp,
    Fp8Op,
    Fp8RaggedDotOp,
    op_handler,
)
from fp8flax._recipes import CustomRecipe, Recipe
from fp8flax._state import OVERWRITE_WITH_GRADIENT, PARAMS


class FoundOp(NamedTuple):
    """An FP8 op that a model computes."""

    op: type[Fp8Op]
    gemms: CustomRecipe
    kernel: Derived | None
    """What its kernel owes to parameters."""
    args: tuple[Any, ...]
    """Shapes and dtypes of the input and the kernel; dimension numbers, precision, dtype of the result."""
    others: frozenset[tuple[str, ...]] = frozenset()
    """Where it multiplies by several kernels, the parameters of all of them."""


class FoundSite(NamedTuple):
    """A contraction that a model computes, and what became of it."""

    site: Site
    decision: Decision
    name: str
    """Of the contraction in its module, and of the op if it was converted."""
    is_swapped: bool
    """Whether the kernel is its left operand."""

    @property
    def scope(self) -> str:
        """A name by which ``report`` finds it in a jaxpr: the same whenever it is traced."""
        text = f"{self.site.path}/{self.name}/{self.site.shapes}/{self.site.impossible}"
        return f"{SITE}{zlib.crc32(text.encode()):08x}"


class Seen:
    """What a model was last seen to compute, shared by its clones."""

    def __init__(self) -> None:
        self.sites: list[FoundSite] = []
        self.ops: dict[tuple[str, ...], FoundOp] = {}
        self.used_otherwise: set[tuple[str, ...]] = set()

    def __deepcopy__(self, memo: Any) -> Seen:
        return self  # by a copy of the model

    def __reduce__(self) -> Any:
        return Seen, ()  # nothing of it outlives the process


class Call:
    """One call of a converted model from outside."""

    def __init__(self, cls: type, rules: Rules) -> None:
        self.cls = cls
        self.rules = self._rules_here = rules
        self.sites: list[FoundSite] = []
        self.ops: dict[tuple[str, ...], FoundOp] = {}
        self.interception = Interception(
            self.convert, lambda module: isinstance(module, Fp8Op), cls, self.beside_params
        )

    def convert(self, contraction: Contraction) -> Any:
        """Computes a contraction as the rules say."""
        op, arguments, restore = _as_op(contraction)
        site = _site(contraction, arguments)
        decision = self._rules_here.decide(site)
        if self._rules_here is not self.rules:
            decision = decision._replace(rule=None)  # none of the model's own
        name = f"{op.__name__}_{_name(site, contraction, arguments)}"
        scope: Any = contraction.frame.module.scope
        bare = site._replace(module=type(site.module))  # of whose scope nothing may outlive its trace
        found = FoundSite(bare, decision, name, arguments[0] is not contraction.operands[0])
        self.sites.append(found)
        if self.is_counting:
            return Left(found.scope)
        if not decision.converts:
            return Left()
        with jax.named_scope(BY_OP):
            out = op(recipe=decision.recipe, parent=scope.push(name, reuse=True))(*arguments)
        return restore(out)

    def on_op(
        self, op: Fp8Op, recipe: Recipe | None, compute: Any, lhs: Any, rhs: Any, *rest: Any
    ) -> jax.Array:
        """Remembers what an op computes, and computes it."""
        if recipe is not None and not self.interception.is_apart:
            kernel = self.interception.derived(rhs, op.scope)
            args = jax.tree.map(_as_struct, (lhs, rhs, *rest))  # no arrays: it outlives the call
            self._remember(op.path, FoundOp(type(op), recipe.gemms, kernel, args))
        return compute(lhs, rhs, *rest)

    def _remember(self, path: tuple[str, ...], found: FoundOp) -> None:
        before = self.ops.get(path)
        if before is not None and not _is_same_kernel(before, found):
            # One op, and one state, of several kernels: none of them is the op's own.
            kernels = [kernel for kernel in (before.kernel, found.kernel) if kernel is not None]
            others = before.others.union(source.path for kernel in kernels for source in kernel.sources)
            self.interception.used_otherwise |= others
            found = found._replace(kernel=None, others=others)
        self.ops[path] = found

    @contextmanager
    def running(self, model: nn.Module) -> Iterator[None]:
        """A context for the model's method, whose loops take what ops have along with the parameters."""
        token = op_handler.set(self.on_op)
        self.interception.mark(model.scope)
        try:
            with (
                beside_params(self.beside_params, self.interception.on_map),
                self.interception.active(),
            ):
                yield
        finally:
            op_handler.reset(token)

    @contextmanager
    def ruled_by(self, rules: Rules) -> Iterator[None]:
        """A context for a method of a converted model inside of the model."""
        before, self._rules_here = self._rules_here, rules
        try:
            yield
        finally:
            self._rules_here = before

    beside_params = OVERWRITE_WITH_GRADIENT
    """The collection of what the ops have."""
    collections: tuple[str, ...] = (PARAMS,)
    """The collections that the method sees otherwise than the caller."""
    is_init = False
    """Whether it is one of ``init``, which makes the variables."""
    is_counting = False
    """Whether nothing is converted, and each contraction stands in its ``FoundSite.scope``."""

    def put_in(self, variables: Mapping[str, Any]) -> Mapping[str, Any]:
        """Returns these collections as the method sees them, NumPy's arrays as JAX's."""
        return jax.tree.map(as_jax, variables)

    def take_out(self, variables: Mapping[str, Any]) -> Mapping[str, Any]:
        """Returns these collections as the caller sees them."""
        return variables

    def finish(self, model: Any, method: str) -> None:
        """Looks at what the method has computed."""
        seen = seen_of(model)
        seen.sites = self.sites
        if not self.is_counting:
            before, self.ops = self.ops, dict(seen.ops)
            for path, found in before.items():
                self._remember(path, found)
            seen.ops = self.ops
            seen.used_otherwise |= self.interception.used_otherwise
        if method == "__call__" and model.is_initializing():
            check_matched(self.rules, self.sites)
            if not _reporting.get():
                _check_converted(self.rules, self.sites, self.ops)


def _as_struct(x: Any) -> Any:
    return jax.ShapeDtypeStruct(x.shape, x.dtype) if isinstance(x, jax.Array | np.ndarray) else x


def as_jax(x: Any) -> Any:
    """Returns NumPy's arrays as JAX's, which keep their identity in a computation."""
    return jax.numpy.asarray(x) if isinstance(x, np.ndarray) else x


def _is_same_kernel(a: FoundOp, b: FoundOp) -> bool:
    """Tells whether an op multiplied with the same kernel twice."""
    if a.kernel is None or b.kernel is None:
        return a.kernel is b.kernel
    return a.kernel.sources == b.kernel.sources and a.kernel.moves == b.kernel.moves


_reporting: ContextVar[bool] = ContextVar("reporting", default=False)
_counting: ContextVar[int | None] = ContextVar("counting", default=None)
_calls: ContextVar[tuple[Call, ...]] = ContextVar("calls", default=())


def _as_op(contraction: Contraction) -> tuple[type[Fp8Op], tuple[Any, ...], Callable[[Any], Any]]:
    """Returns the op that computes a contraction, its arguments, and what to do with its result.

    Of the arguments of a matmul the second is the kernel, if one of them is.
    """
    operands, params = contraction.operands, contraction.params
    rest = params["precision"], params["preferred_element_type"]
    if contraction.primitive == CONV:
        names = (
            *("window_strides", "padding", "lhs_dilation", "rhs_dilation", "dimension_numbers"),
            *("feature_group_count", "batch_group_count"),
        )
        return Fp8ConvGeneralDilatedOp, (*operands, *(params[name] for name in names), *rest), _as_it_is
    if contraction.primitive == RAGGED_DOT:
        return Fp8RaggedDotOp, (*operands, *rest), _as_it_is
    lhs, rhs = operands
    dims = params["dimension_numbers"]
    left, right = contraction.derived
    if left is None or right is not None:
        return Fp8DotGeneralOp, (lhs, rhs, dims, *rest), _as_it_is
    (lhs_contract, rhs_contract), (lhs_batch, rhs_batch) = dims
    num_batch, num_left = len(lhs_batch), lhs.ndim - len(lhs_batch) - len(lhs_contract)

    def restore(out: jax.Array) -> jax.Array:
        axes, split = list(range(out.ndim)), out.ndim - num_left
        return jax.lax.transpose(out, (*axes[:num_batch], *axes[split:], *axes[num_batch:split]))

    swapped = ((rhs_contract, lhs_contract), (rhs_batch, lhs_batch))
    return Fp8DotGeneralOp, (rhs, lhs, swapped, *rest), restore


def _as_it_is(out: jax.Array) -> jax.Array:
    return out


def _name(site: Site, contraction: Contraction, arguments: tuple[Any, ...]) -> str:
    """Returns what tells a contraction from the others of its module, whatever else a method computes.

    For a Linen layer that takes ops, what the op would be called that is given to it by hand. Else by its
    kernel: one that is used twice alike has one state, as a layer that is called twice has. Products of
    activations have nothing to be called by, and are counted.
    """
    frame = contraction.frame
    left, right = contraction.derived
    kernel = left if right is None else right
    if site.kind != "kernel" or kernel is None:
        kind = f"{frame.method}_{site.kind}".lstrip("_")
        return f"{kind}_{frame.count(kind)}"
    paths = dict.fromkeys(
        path[len(frame.path) :] if path[: len(frame.path)] == frame.path else path
        for path in (source.path for source in kernel.sources)
    )
    is_linens = type(frame.module).__module__.startswith("flax.")  # and has no other contraction
    if _takes_ops(frame.module) and (("kernel",) in paths or is_linens):
        return "0"
    summed: tuple[int, ...] = ()
    if contraction.primitive == DOT:
        summed = arguments[2][0][1]
    return "-".join(name.replace("/", "-") for path in paths for name in path) + kernel.part(summed)


def _takes_ops(module: nn.Module) -> bool:
    """Tells whether a layer has a field for an FP8 op; ``fp8flax.Einsum`` is ``nn.Einsum`` with one."""
    fields = ("dot_general_cls", "conv_general_dilated_cls")
    return isinstance(module, nn.Einsum) or any(hasattr(module, field) for field in fields)


def _site(contraction: Contraction, arguments: tuple[Any, ...]) -> Site:
    """Returns a contraction as the rules see it, given the arguments of its op."""
    left, right = contraction.derived
    kernel = left if right is None else right
    kind = "product" if kernel is None else "kernel" if None in (left, right) else "parameters"
    if contraction.primitive != DOT and right is None:  # the first operand of these is never the kernel
        kind = "product"
    lhs, rhs = arguments[:2]
    reason = None
    if contraction.params.get("out_sharding") is not None:
        reason = "it is told the sharding of its result"
    elif isinstance(contraction.frame.module, nn.WeightNorm | nn.SpectralNorm):
        reason = "part of a normalization of weights"
    elif in_custom_vjp():
        reason = "in nn.custom_vjp, whose derivative is the model's own"
    elif contraction.frame.is_apart:
        reason = "in a module that is applied to variables of its own, where there is no place for state"
    elif contraction.primitive == RAGGED_DOT and not _is_plain_ragged(contraction.params):
        reason = "a ragged dot of other dimensions than lax.ragged_dot"
    return Site(
        path="/".join(contraction.frame.path),
        module=contraction.frame.module,
        kernel="/".join(kernel.sources[0].path) if kind == "kernel" and kernel is not None else None,
        kind=kind,
        primitive=contraction.primitive,
        shapes=(lhs.shape, rhs.shape),
        dtypes=(lhs.dtype, rhs.dtype),
        sizes=_sizes(contraction, arguments),
        is_matmul=contraction.primitive != CONV or is_matmul(*arguments[:-1]),
        impossible=reason,
    )


def _is_plain_ragged(params: dict[str, Any]) -> bool:
    numbers = params["ragged_dot_dimension_numbers"]
    dims = jax.tree.map(int, numbers.dot_dimension_numbers)
    places = (*numbers.lhs_ragged_dimensions, *numbers.rhs_group_dimensions)
    return jax.tree.leaves(dims) == [1, 1] and places == (0, 0) and params.get("group_offset") is None


def _sizes(contraction: Contraction, arguments: tuple[Any, ...]) -> Sizes:
    lhs, rhs = contraction.operands[:2]
    out = ()
    if contraction.primitive == CONV:
        _, _, *rest = arguments
        convolve = jax.lax.conv_general_dilated
        out = jax.eval_shape(lambda a, b: convolve(a, b, *rest[:-1]), lhs, rhs).shape
    shapes = lhs.shape, rhs.shape, out
    return sizes_of(contraction.primitive, contraction.params, shapes, arguments[0] is not lhs)


def sizes_of(
    primitive: str, params: dict[str, Any], shapes: tuple[tuple[int, ...], ...], is_swapped: bool = False
) -> Sizes:
    """Returns the sizes of a contraction.

    Args:
        primitive: its name.
        params: those of the primitive.
        shapes: of its operands and of its result.
        is_swapped: whether the kernel is its left operand.
    """
    lhs, rhs, out = shapes
    if primitive == RAGGED_DOT:
        return Sizes(math.prod(lhs[:-2]), lhs[-2], *rhs[-2:])
    if primitive == CONV:
        _, kernel, result = params["dimension_numbers"]
        k = math.prod(rhs[i] for i in kernel[1:])
        return Sizes(1, math.prod(out[i] for i in (result[0], *result[2:])), k, rhs[kernel[0]])
    (lhs_contract, _), (lhs_batch, _) = params["dimension_numbers"]
    batch, k = (math.prod(lhs[i] for i in dims) for dims in (lhs_batch, lhs_contract))
    m, n = (math.prod(shape) // max(1, batch * k) for shape in (lhs, rhs))
    return Sizes(batch, n, k, m) if is_swapped else Sizes(batch, m, k, n)


# Held by their instances: when these are gone, so are the class and what rules and calls refer to.
_classes: weakref.WeakValueDictionary[Any, type[nn.Module]] = weakref.WeakValueDictionary()


def converted_class(cls: type[nn.Module], rules: Rules, make_call: Callable[..., Any]) -> Any:
    """Returns the subclass whose methods compute in FP8; one class for equal arguments."""
    key = cls, rules, make_call
    found = _classes.get(key)
    if found is None:
        found = _classes.setdefault(key, _make_class(cls, rules, make_call))
    return found


def _make_class(cls: type[nn.Module], rules: Rules, make_call: Callable[..., Any]) -> Any:
    """Makes that class; of its own name, for Linen's automatic names."""
    names = {
        "__module__": cls.__module__,
        "__qualname__": cls.__qualname__,
        "__doc__": cls.__doc__,
        # Not those that a dataclass makes anew: a decorator may have wrapped them.
        "__init__": cls.__init__,
        "__hash__": cls.__hash__,
        "__eq__": _is_equal,
        "_fp8_base": cls,
        "_fp8_rules": rules,
        "_fp8_make_call": staticmethod(make_call),
        "_fp8_serving": getattr(make_call, "serving", None),
        **{name: _with_call(method) for name, method in _transformed_methods(cls)},
    }
    return type(cls.__name__, (_Converted, cls), names)


class _Converted:
    """What the classes of converted models have beside those of the models."""

    _fp8_base: Any
    _fp8_rules: Rules
    _fp8_make_call: Callable[..., Any]
    _fp8_serving: Any

    def _call_wrapped_method(self: Any, fun: Any, args: Any, kwargs: Any) -> Any:
        def compute(module: Any, args: Any, kwargs: Any) -> Any:
            return super()._call_wrapped_method(fun, args, kwargs)  # type: ignore[misc]

        return _in_call(self, getattr(fun, "__name__", type(fun).__name__), compute, args, kwargs)

    def apply(self: Any, *args: Any, method: Any = None, **kwargs: Any) -> Any:
        return super().apply(*args, method=_as_method(self, method), **kwargs)  # type: ignore[misc]

    def init_with_output(self: Any, *args: Any, method: Any = None, **kwargs: Any) -> Any:
        method = _as_method(self, method)
        return super().init_with_output(*args, method=method, **kwargs)  # type: ignore[misc]

    def clone(self: Any, **kwargs: Any) -> Any:
        copy = super().clone(**kwargs)  # type: ignore[misc]
        if set(kwargs) <= {"parent", "name", "_deep_clone", "_reset_names"}:
            object.__setattr__(copy, "_fp8_seen", seen_of(self))
        return copy

    def __reduce_ex__(self: Any, protocol: Any) -> Any:
        if self.scope is not None:
            return super().__reduce_ex__(protocol)
        made_by = self._fp8_base, self._fp8_rules, self._fp8_make_call
        return _assembled, (*made_by, *_parts(self))


def _is_equal(self: Any, other: Any) -> bool:
    return type(other) is type(self) and self._fp8_base.__eq__(self, other)


def _in_call(self: Any, name: str, compute: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Returns ``compute(model, args, kwargs)``, of the model as its method sees it."""
    calls, cls = _calls.get(), type(self)
    if self.scope is None or name == "setup" or any(call.cls is cls for call in calls):
        return compute(self, args, kwargs)
    if calls and self._fp8_serving is None and calls[-1].interception.has_place(self.scope.root):
        with calls[-1].ruled_by(self._fp8_rules):
            return compute(self, args, kwargs)
    call = self._fp8_make_call(cls, self._fp8_rules)
    call.is_counting = _counting.get() == len(calls)
    call.is_init = self.is_initializing()

    def run(module: Any, *args: Any, **kwargs: Any) -> Any:
        with call.running(module):
            return compute(module, args, kwargs)

    run.method_handler_wrapped = True  # type: ignore[attr-defined]  # it is not a method of its own
    token = _calls.set((*calls, call))
    try:
        mapped = nn.map_variables(run, call.collections, call.put_in, call.take_out, mutable=True)
        with call.interception.active_in_setup():  # which Linen runs before the method
            result = mapped(self, *args, **kwargs)
        call.finish(self, name)
    finally:
        _calls.reset(token)
    return result


def _with_call(transformed: Any) -> Any:
    """Returns a method that a transformation has made, such that a call begins outside of it."""

    @wraps(transformed, updated=())
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        def compute(module: Any, args: Any, kwargs: Any) -> Any:
            return transformed(module, *args, **kwargs)

        return _in_call(self, transformed.__name__, compute, args, kwargs)

    return nn.nowrap(method)


def _transformed_methods(cls: type[nn.Module]) -> Iterator[tuple[str, Any]]:
    """Yields the methods that ``nn.scan``, ``nn.jit`` and the like have made of others.

    These reach the module's method inside of the transformation alone, which must know before of what the
    ops have.
    """
    for name in dir(cls):
        method = inspect.getattr_static(cls, name)
        if _is_wrapped(method) and _is_wrapped(getattr(method, "__wrapped__", None)):
            yield name, method


def _is_wrapped(method: Any) -> bool:
    """Tells whether Linen has wrapped a method."""
    return callable(method) and hasattr(method, "method_handler_wrapped")


def _as_method(model: Any, method: Any) -> Any:
    """Returns what is given to ``apply`` or ``init`` as a method: ``lambda m, x: m.encoder(x)`` is none."""
    if isinstance(method, str):
        found = getattr(model, method, None)
        if isinstance(found, nn.Module):
            return _as_method(model, partial(_call_submodule, method))
        method = found if callable(found) else method
    if inspect.ismethod(method) and isinstance(method.__self__, nn.Module):
        method = method.__func__
    if method is None or not callable(method):
        return method  # for Linen to refuse
    own = vars(type(model)).get(getattr(method, "__name__", ""))
    if own is not None and method in (own, getattr(own, "__wrapped__", None)):
        return own
    if _is_wrapped(method):
        return method
    return lambda model, *args, **kwargs: model._call_wrapped_method(method, args, kwargs)


def _call_submodule(name: str, model: Any, *args: Any, **kwargs: Any) -> Any:
    return getattr(model, name)(*args, **kwargs)


def check_matched(rules: Rules, sites: list[FoundSite]) -> None:
    """Raises ``ValueError`` where a rule matched nothing."""
    paths = sorted({found.site.path or "(the model itself)" for found in sites})
    used = {found.decision.rule for found in sites}
    unmatched = [text for i, text in enumerate(rules.patterns) if i not in used]
    if unmatched and not rules.allow_unmatched:
        raise ValueError(
            f"No contraction was the first to match {', '.join(unmatched)}. The modules with contractions "
            f"are: {', '.join(paths)}. Correct the pattern, or say allow_unmatched=True."
        )


def _check_converted(rules: Rules, sites: list[FoundSite], ops: Mapping[Any, FoundOp]) -> None:
    """Raises ``ValueError`` where nothing at all runs in FP8."""
    if ops or any(found.decision.converts for found in sites):
        return
    if not sites:
        raise ValueError(
            "The model's methods compute no contraction that quantize_model looks into. It does not look "
            "into JAX's own lax.scan, jax.checkpoint and custom derivatives; Linen's nn.scan and nn.remat "
            "it does."
        )
    reasons = sorted({f"{f.site.path or 'the model'}: {f.decision.reason}" for f in sites})
    patterns = tuple(rule for rule in rules.rules if not callable(rule))
    everything = dataclasses.replace(rules, rules=patterns, include=(".*",))
    advice = ""
    if rules.include is None and any(everything.decide(found.site).converts for found in sites):
        advice = " include=r'.*' converts all layers, small ones too."
    raise ValueError(
        f"None of the model's {len(sites)} contractions would run in FP8. {'; '.join(reasons[:8])}"
        f"{'; …' if len(reasons) > 8 else ''}.{advice}"
    )


def quantize_model(
    model: Any,
    recipe: Recipe | None = None,
    *,
    include: Any = None,
    exclude: Any = (),
    rules: Any = (),
    products: bool = False,
    allow_unmatched: bool = False,
) -> nn.Module:
    """Returns the model with its contractions in FP8; its source and its fields stay as they are.

    Every matmul that a module's method computes between something and a parameter becomes an FP8 op,
    whatever it is written with: ``nn.Dense`` and Linen's other layers, recurrent cells, ``x @ w``,
    ``jnp.einsum``, ``lax.dot_general``. The result is used like ``model``: ``init`` gives the same
    parameters, and with delayed scaling also the state that the layers would have had with
    ``dot_general_cls=Fp8DotGeneralOp``. Inside ``nn.scan``, ``nn.vmap`` and ``nn.remat`` the state is
    stacked and shared as the parameters are, though the model does not name our collection there.

    A contraction with a parameter ``w`` that is written out has the state ``Fp8DotGeneralOp_w``, whatever
    else the method computes: ``…_qkv-0-64`` is that of a part of it, ``…_w-T`` that of its transpose. A
    kernel that is used twice alike has one state, as a layer that is called twice has. Products of
    activations have nothing to be named by; they are counted.

    Rules are tried in this order; the first that speaks decides: ``exclude``, ``rules``, ``include``, and
    then the defaults, which leave out: embeddings; layers named like the last one (``lm_head``, ``logits``,
    ``classifier``, …); convolutions that are not matmuls, for which XLA has no FP8 with gradients; kernels
    with K or N below 16, or too small for FP8 to gain on an H200 with any batch (``1/(1/K + 1/N) < 281``).
    The batch has no say, so that ``init``, training and decoding agree. A pattern is searched
    (``re.search``) in a module's path, ``encoder/layer_0/Dense_0``, and in that path with the parameter's
    name.

    Args:
        model: an unbound module.
        recipe: how to scale, where a rule does not say; None for that of ``fp8flax.autocast``, or
            ``DelayedScaling()`` outside of it.
        include: a regular expression or several; what matches is converted, also against the defaults, and
            nothing else is.
        exclude: a regular expression or several; what matches is left as it is.
        rules: pairs of a regular expression and a recipe or ``"leave"``, and callables ``(path, module,
            shapes)`` of the module's path, the module, and the shapes of input and kernel, which return a
            recipe, ``"leave"``, or None for no opinion.
        products: whether to convert products of two activations too, such as the two of attention, which
            have the state of an op with the second as its kernel.
        allow_unmatched: whether a pattern that is the first to match nothing is no error.

    Returns:
        A module of a subclass of ``type(model)``, equal for equal arguments. ``init`` raises ``ValueError``
        where a pattern matched nothing or nothing is converted; ``report`` says what is and why. What is
        not looked into: JAX's own ``lax.scan``, ``jax.checkpoint`` and custom derivatives inside a method
        (``report`` lists what they contain), and submodules that are called from outside: on a bound model,
        or by a function that ``nn.apply`` or ``nn.init`` gets. (The model's own ``apply`` and ``init`` do
        look into ``method=lambda m, x: m.encoder(x)``.) It can be copied and pickled, also for another
        process, if what ``rules`` holds can.

    Raises:
        TypeError: ``model`` is not a Linen module, or a recipe is none.
        ValueError: ``model`` is bound, or converted already; or a rule is not valid.

    Example:
        >>> import flax.linen as nn, jax, jax.numpy as jnp, fp8flax as fp8
        >>> model = nn.Sequential([nn.Dense(64), nn.relu, nn.Dense(4)])
        >>> model8 = fp8.quantize_model(model, include="layers_0")
        >>> variables = model8.init(jax.random.key(0), jnp.ones((2, 32)))
        >>> list(variables["_overwrite_with_gradient"])
        ['layers_0']

    Source: none; the size limit is where a roofline of an H200 says that FP8 gains nothing. (torchao's
    filters have other limits, from benchmarks on an H100.)
    """
    if not isinstance(model, nn.Module):
        hint = " Pass an instance, not the class." if isinstance(model, type) else ""
        hint = " Pass its .module." if isinstance(getattr(model, "module", None), nn.Module) else hint
        raise TypeError(f"model must be a flax.linen.Module; got {type(model).__name__}.{hint}")
    if model.scope is not None:
        raise ValueError(
            f"model must not be bound to variables; got a bound {type(model).__name__}. Convert the model "
            "first, then bind the result: quantize_model(model).bind(variables)."
        )
    if hasattr(model, "_fp8_rules"):
        raise ValueError(
            f"{type(model).__name__} is converted already. Call quantize_model on the model that it was "
            "made from, with all rules at once."
        )
    options = Rules(
        recipe=recipe,
        include=include,
        exclude=exclude,
        rules=rules,
        products=products,
        allow_unmatched=allow_unmatched,
    )
    return convert(model, converted_class(type(model), options, Call))


def convert(model: nn.Module, cls: type[nn.Module]) -> nn.Module:
    """Returns a model of this class with the fields of ``model``."""
    fields, others = _parts(model)
    return _with_parts(cls, fields, {name: x for name, x in others.items() if name != "_fp8_seen"})


_LINENS_ATTRIBUTES = ("_id", "_state", "_parent_ref", "scope")


def _parts(model: nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the fields of an unbound model, and what else was set on it, by its ``__init__`` for one."""
    fields = [f.name for f in dataclasses.fields(model) if f.init and f.name != "parent"]
    known = (*fields, *_LINENS_ATTRIBUTES)
    others = {name: value for name, value in vars(model).items() if name not in known}
    return {name: getattr(model, name) for name in fields}, others


def _with_parts(cls: Any, fields: dict[str, Any], others: dict[str, Any]) -> Any:
    model = cls(**fields, parent=None)
    for name, value in others.items():
        object.__setattr__(model, name, value)
    return model


def _assembled(
    cls: type[nn.Module],
    rules: Rules,
    make_call: Callable[..., Any],
    fields: dict[str, Any],
    others: dict[str, Any],
) -> Any:
    """Makes a converted model of what its copies and pickles consist of."""
    return _with_parts(converted_class(cls, rules, make_call), fields, others)


def seen_of(model: Any) -> Seen:
    """Returns what a converted model was last seen to compute."""
    if "_fp8_seen" not in vars(model):
        object.__setattr__(model, "_fp8_seen", Seen())
    seen: Seen = model._fp8_seen
    return seen


@contextmanager
def reporting(*, counting: bool = False) -> Iterator[None]:
    """A context in which a model of which nothing is converted may be traced.

    With ``counting`` nothing at all is converted, and each contraction stands in its ``FoundSite.scope``.
    """
    # What another model computes inside of the one in question is not counted.
    tokens = _reporting.set(True), _counting.set(len(_calls.get()) if counting else None)
    try:
        yield
    finally:
        _reporting.reset(tokens[0])
        _counting.reset(tokens[1])


def trace_apply(model: nn.Module, shapes: Any, args: Any, kwargs: Any) -> Any:
    """Returns the jaxpr of ``model.apply`` for variables and inputs of these shapes."""
    arrays, fill = split_arrays(args, kwargs)

    def apply(mutable: Any, variables: Any, arrays: list[Any]) -> Any:
        args, kwargs = fill(arrays)
        out = model.apply(variables, *args, rngs=jax.random.key(0), mutable=mutable, **kwargs)
        return [leaf for leaf in jax.tree.leaves(out) if isinstance(leaf, jax.Array)]

    all_others = flax.core.DenyList((PARAMS, OVERWRITE_WITH_GRADIENT))
    try:
        return jax.make_jaxpr(partial(apply, all_others))(shapes, arrays)
    except (flax.errors.ScopeCollectionNotFound, flax.errors.ScopeParamNotFoundError):
        # Where anything is mutable, nn.map_variables(init=True) of Linen loses the parameters.
        return jax.make_jaxpr(partial(apply, False))(shapes, arrays)
