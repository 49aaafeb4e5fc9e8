"""Whole Linen models: ``quantize`` and ``report``.

A converted model has a subclass of its class. Its methods begin a ``Call``, in which all methods below run.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeAlias, cast

import flax.linen as nn
import jax

from fp8flax._compat.flax_internals import is_method
from fp8flax._compat.jaxprs import Program
from fp8flax._core.names import OVERWRITE_WITH_GRADIENT, PARAMS
from fp8flax._core.options import wrong_model
from fp8flax._core.types import PyTree
from fp8flax._linen.op import Fp8Op
from fp8flax._model.converted_call import Call, within_call
from fp8flax._model.param_origin import Origin
from fp8flax._model.report import ModelReport, add_site, given_site, in_module, report_of
from fp8flax._model.rules import Rules, Site
from fp8flax._model.subclasses import subclass_of
from fp8flax._model.tracing import eval_init, program_of

Method: TypeAlias = Callable[..., PyTree] | str | None


def quantize(model: object, rules: Rules) -> nn.Module:
    """Returns a Linen model that computes in FP8; see ``fp8flax.quantize_model``."""
    if not isinstance(model, nn.Module):
        more = " Pass its .module." if isinstance(getattr(model, "module", None), nn.Module) else ""
        raise wrong_model(model, "be a flax.linen.Module or a flax.nnx.Module", more)
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
    return convert(model, rules, Call)


class CountingCall(Call):
    """A call whose contractions ``report`` counts: each is in the scope of ``add_site``, none in FP8."""

    has_ops = True  # a model that converts nothing can be reported

    def __init__(self, model: Any, *, counted: dict[Hashable, Site]) -> None:
        super().__init__(model)
        self.decided = counted

    @contextmanager
    def in_frame(self, module: nn.Module, method: str | None) -> Iterator[None]:
        """A context in which a method of a module runs, in a scope of the module."""
        with super().in_frame(module, method), in_module(module.path):
            yield

    def choose(self, site: Site) -> str:
        """Returns the scope by which ``report`` finds a contraction."""
        return add_site(self.decided, self.decide(site))

    def on_op(self, op: Fp8Op, recipe: object, compute: object, *operands: Any, **kwargs: Any) -> jax.Array:
        """Counts an op that the user gave to a layer, and computes it without FP8."""
        kernel = self.origins.of(operands[1]) or Origin()
        site = given_site(op, op.path, kernel.sources, *operands)
        with jax.named_scope(add_site(self.decided, site)):
            return op.op_type.plain(*operands, **kwargs)


def report(model: Any, args: tuple[PyTree, ...], kwargs: dict[str, PyTree]) -> ModelReport:
    """Returns the report of a converted Linen model; see ``fp8flax.report``."""
    if getattr(model, "_fp8_make_call", None) is not Call:
        raise wrong_model(model, "come from fp8flax.quantize_model, not from freeze")
    for name in kwargs.keys() & {"rngs", "mutable"}:
        raise TypeError(
            f"report passes {name} to Linen's init or apply itself; got {name}=. Leave it out. If it "
            "is an input of the model, pass it by position."
        )
    decided: dict[Hashable, Site] = {}
    counted = convert(model, model._fp8_rules, partial(CountingCall, counted=decided))
    shapes = eval_init(counted, args, kwargs)
    return report_of(trace_apply(counted, shapes, args, kwargs), decided)


def convert(model: nn.Module, rules: Rules, make_call: Callable[[nn.Module], Call]) -> nn.Module:
    """Returns a model that computes in the calls that ``make_call(model)`` returns.

    It has the attributes of an unbound model, also those that its ``__init__`` has set.
    """
    cls = getattr(model, "_fp8_base", type(model))
    new = object.__new__(subclass_of(cls, _converted_class, rules, make_call))
    fresh = model.clone(parent=None)  # has an identity of its own
    vars(new).update({**vars(model), **vars(fresh)})
    return cast(nn.Module, new)


def _converted_class(cls: type[nn.Module], rules: Rules, make_call: Callable[[nn.Module], Call]) -> type:
    """Returns the subclass whose methods compute in FP8. Linen names modules by its name, which stays."""
    methods = {name: inspect.getattr_static(cls, name) for name in dir(cls)}
    body = {
        # A dataclass would make new ones, but a decorator may have wrapped those of the model.
        "__init__": cls.__init__,
        "__hash__": cls.__hash__,
        "__eq__": lambda self, other: type(other) is type(self) and cls.__eq__(self, other),
        "_fp8_rules": rules,
        "_fp8_make_call": staticmethod(make_call),
        **{
            name: within_call(method)
            for name, method in methods.items()
            if name != "setup" and is_method(method)
        },
    }
    return type(cls.__name__, (_Converted, cls), body)


class _Converted:
    """The methods of converted models in addition to those of their class."""

    def apply(self: Any, *args: PyTree, method: Method = None, **kwargs: PyTree) -> PyTree:
        return super().apply(*args, method=_as_method(self, method), **kwargs)  # type: ignore[misc]

    def init_with_output(self: Any, *args: PyTree, method: Method = None, **kwargs: PyTree) -> PyTree:
        method = _as_method(self, method)
        return super().init_with_output(*args, method=method, **kwargs)  # type: ignore[misc]


def _as_method(model: nn.Module, method: Method) -> Callable[..., PyTree]:
    """Returns the method for Linen's ``apply`` or ``init``, so that what it computes is converted."""
    name = method or "__call__"
    if not isinstance(name, str):
        return within_call(getattr(name, "__func__", name))
    methods = vars(type(model))
    if name in methods and "_fp8_rules" in methods:  # not a class that Qwix has made of it
        return cast(Callable[..., PyTree], methods[name])

    def call(bound: nn.Module, *args: PyTree, **kwargs: PyTree) -> PyTree:
        return getattr(bound, name)(*args, **kwargs)  # perhaps a submodule, or not a method of Linen

    call.__name__ = name
    return within_call(call)


def trace_apply(
    model: nn.Module, shapes: PyTree, args: tuple[PyTree, ...], kwargs: Mapping[str, PyTree]
) -> Program:
    """Returns the jaxpr of ``model.apply`` for variables and inputs of these shapes."""
    mutable = sorted({*shapes} - {PARAMS, OVERWRITE_WITH_GRADIENT})

    def apply(*args: PyTree, **kwargs: PyTree) -> PyTree:
        return model.apply(*args, rngs=jax.random.key(0), mutable=mutable, **kwargs)

    return program_of(apply, shapes, args, kwargs)
