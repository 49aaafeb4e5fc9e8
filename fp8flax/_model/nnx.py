"""Whole NNX models: ``quantize``, which gives ops to their modules, and ``report``.

A contraction has a module and the name of an attribute: the field of a layer, such as ``dot_general``, or
an attribute of ours, such as ``fp8_w``. ``quantize`` puts an op there, or a ``LeftWide`` with the reason
why not. ``report`` reads these attributes. A module that writes a product out is watched by a
``ModuleCall``, which computes the product by the attribute.
"""

from __future__ import annotations

import contextlib
import functools
import math
import re
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias, cast

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from fp8flax._compat.jaxprs import needed_inputs
from fp8flax._compat.traces import FrontTrace
from fp8flax._core.autocast import autocast
from fp8flax._core.gemm.gemm import GemmSizes
from fp8flax._core.ops.conv import Conv
from fp8flax._core.ops.dot_general import DotGeneral
from fp8flax._core.ops.einsum import Einsum
from fp8flax._core.ops.op import Op
from fp8flax._core.options import wrong_model
from fp8flax._core.types import Path, PyTree
from fp8flax._model.module_call import LeftWide, ModuleCall, attribute_of, has_methods, nodes_of, watch
from fp8flax._model.param_origin import Source
from fp8flax._model.report import GIVEN, ModelReport, add_site, given_site, in_module, report_of
from fp8flax._model.rules import DEFAULT, Rules, Site
from fp8flax._model.tracing import program_of
from fp8flax._nnx import ops, qwix
from fp8flax._nnx.ops import Fp8Op

Inputs: TypeAlias = Sequence[PyTree]
KeywordInputs: TypeAlias = Mapping[str, PyTree]

ONLY_WITH_INPUTS = "only a call shows what it computes: give quantize_model inputs that reach it"
"""The reason for contractions that ``quantize_model`` has not seen in a call."""


def op_of(site: Site) -> Fp8Op | None:
    """Returns the op of a contraction, which is an attribute of the module; None if there is none.

    The contraction of an op that a module of the user calls has this op as its module.
    """
    op = getattr(site.module, site.name, site.module)
    return op if isinstance(op, Fp8Op) else None


def _layer_of(module: Any) -> tuple[type[Op], tuple[int, ...], Sequence[int], Sequence[int]]:
    """Returns what a layer with a field for an op computes, as its attributes say.

    This is the op, the shape of the kernel without the axes by which ``nnx.vmap`` stacked it, the axes of
    the kernel that the layer sums over, and those that only the kernel and the result have.
    """
    if isinstance(module, nnx.Linear):
        return DotGeneral, (module.in_features, module.out_features), [0], [1]
    if isinstance(module, nnx.LinearGeneral):
        shape = *module.batch_axis.values(), *module.in_features, *module.out_features
        start, end = len(module.batch_axis), len(shape) - len(module.out_features)
        return DotGeneral, shape, range(start, end), range(end, len(shape))
    shape = tuple(module.kernel_shape)
    if isinstance(module, nnx.Einsum):
        # The names of the axes of the input, the kernel and the result.
        lhs, rhs, result = re.split(",|->", module.einsum_str.replace("...", ""))
        summed = [i for i, name in enumerate(rhs) if name in lhs and name not in result]
        return Einsum, shape, summed, [i for i, name in enumerate(rhs) if name not in lhs]
    return Conv, shape, range(len(shape) - 1), [len(shape) - 1]


def _is_matmul(layer: nnx.Conv) -> bool:
    """Returns whether a convolution is a matmul for inputs of any size, because no windows overlap."""
    options = layer.strides, layer.kernel_dilation, layer.input_dilation
    strides, dilation, input_dilation = (np.array(1 if x is None else x) for x in options)
    are_apart = np.all((np.array(layer.kernel_size) - 1) * dilation < strides)
    return bool(are_apart and np.all(input_dilation == 1) and layer.feature_group_count == 1)


def layers_of(model: nnx.Module) -> Iterator[Site]:
    """Yields the contractions of layers that have a field for an op; kernels give the sizes."""
    for path, module in nodes_of(model, nnx.Linear, nnx.LinearGeneral, nnx.Einsum, nnx.Conv).items():
        op_type, shape, summed, free = _layer_of(module)
        kernel, function = module.kernel.get_value(), getattr(module, op_type.nnx_field)
        stacked, impossible = _stack_of(kernel.shape, shape)
        is_free = function in (None, jnp.einsum, op_type.plain) or isinstance(function, Fp8Op | LeftWide)
        if not is_free or getattr(module, "dot_general_cls", None) is not None:
            impossible = impossible or "it has an op of its own"
        k, n = (math.prod(shape[i] for i in axes) for axes in (summed, free))
        yield Site(
            path=path,
            module=module,
            sources=(Source((*path, "kernel"), shape),),
            op=op_type,
            shapes=(tuple(shape[i] for i in summed), shape),
            dtypes=(jnp.dtype(getattr(module, "dtype", None) or kernel.dtype),) * 2,
            sizes=GemmSizes(1, 1, k, n),
            is_matmul=not isinstance(module, nnx.Conv) or _is_matmul(module),
            impossible=impossible,
            name=op_type.nnx_field,
            stacked=stacked,
        )


def _stack_of(whole: tuple[int, ...], part: tuple[int, ...]) -> tuple[tuple[int, ...], str | None]:
    """Returns the leading sizes of a kernel that ``part`` lacks.

    If it lacks others, state could not be stacked as the kernel is. The reason is returned, too.
    """
    stack = whole[: len(whole) - len(part)]
    is_leading = (*stack, *part) == whole
    return stack, None if is_leading else "its kernel is stacked along another axis than the first"


class DryRun:
    """One abstract call of a model, which finds the contractions and converts none.

    A copy of the model is called. Each contraction in it is recorded when the call computes it, and is
    computed in a scope of its own; see ``add_site``::

        in the model                              in the copy
        ----------------------------------------  ------------------------------------------------------
        a layer, such as nnx.Linear               has ``_run_layer`` in its field, such as dot_general
        an op that a module of the user calls     computes by ``_run_given``
        a module that writes out x @ w            is watched by a ``DryRunCall``; ``choose`` records x @ w
    """

    def __init__(self, model: nnx.Module, args: Inputs, kwargs: KeywordInputs) -> None:
        self.sites: dict[Hashable, Site] = {}
        """The contractions by their keys. Their modules are those of the model."""
        self.custom_vjps: list[bool] = []
        """That of the calls of all modules; see ``Interception``."""
        self.modules = nodes_of(model, nnx.Module)
        graphdef, state = nnx.split(self._recording_copy(model))
        call = lambda state, *args, **kwargs: nnx.merge(graphdef, state)(*args, **kwargs)  # noqa: E731
        with autocast():  # finds the same contractions while FP8 is switched off
            self.program = program_of(call, state, args, kwargs)
            """The jaxpr of the call."""
        inputs = zip(jax.tree.leaves(state), needed_inputs(self.program))
        self.needed = {id(x) for x, is_needed in inputs if is_needed}
        """The identities of the arrays of the model that the call needs."""

    def _recording_copy(self, model: nnx.Module) -> nnx.Module:
        """Returns a copy of the model that records its contractions."""
        copy: Any = nnx.clone(model)
        modules = nodes_of(copy, nnx.Module)
        for path, op in nodes_of(copy, Fp8Op).items():
            op._compute = nnx.static(functools.partial(self._run_given, path))
        for site in layers_of(model):
            layer = modules[site.path]
            setattr(layer, site.name, nnx.static(functools.partial(self._run_layer, site)))
            if hasattr(layer, "dot_general_cls"):
                layer.dot_general_cls = None
        for path, module in modules.items():
            if has_methods(module):
                module._fp8_path, module._fp8_dry_run = path, self
                watch(module, DryRunCall)
        return copy

    def _run_layer(self, site: Site, *args: PyTree, **kwargs: PyTree) -> jax.Array:
        """Records that a layer calls its field, and computes its contraction."""
        scope = add_site(self.sites, site._replace(in_custom_vjp=any(self.custom_vjps)))
        if qwix.is_running():
            compute = jax.named_scope(scope)(FrontTrace.compute)
            return qwix.call_replaced(site.op, compute, *args, **kwargs)
        with jax.named_scope(scope):
            return qwix.function_of(site.op)(*args, **kwargs)

    def _run_given(self, path: Path, recipe: object, *args: PyTree, **kwargs: PyTree) -> jax.Array:
        """Records that a module calls an op that the user gave to it, and computes its contraction."""
        op: Fp8Op = self.modules[path]
        site = given_site(op, path, (), *args)._replace(module=op)
        with jax.named_scope(add_site(self.sites, site)):
            return op.op_type.plain(*args, **kwargs)


class DryRunCall(ModuleCall):
    """A call of a module in a ``DryRun``, to which it reports the contractions; none is computed in FP8."""

    def __init__(self, module: Any) -> None:
        super().__init__(module)
        self._dry_run: DryRun = module._fp8_dry_run
        self.custom_vjps = self._dry_run.custom_vjps

    @contextlib.contextmanager
    def in_frame(self, module: Any, method: str) -> Iterator[None]:
        """A context in which a method of a module runs, in a scope of the module."""
        with super().in_frame(module, method), in_module(module._fp8_path):
            yield

    def choose(self, site: Site) -> str:
        """Records a contraction that a module writes out, and returns the scope to compute it in."""
        path = site.module._fp8_path
        site = site._replace(path=path, module=self._dry_run.modules[path], name=attribute_of(site))
        if site.sources:
            whole = nodes_of(site.module, nnx.Param)[site.sources[0].path].get_value().shape
            stacked, impossible = _stack_of(whole, site.sources[0].shape)
            sources = tuple(x._replace(path=(*path, *x.path)) for x in site.sources)
            impossible = site.impossible or impossible
            site = site._replace(sources=sources, stacked=stacked, impossible=impossible)
        return add_site(self._dry_run.sites, site)


def quantize(
    model: nnx.Module, inputs: Inputs, keyword_inputs: KeywordInputs, rules: Rules, rngs: nnx.Rngs | None
) -> nnx.Module:
    """Returns a copy of an NNX model that computes in FP8; see ``fp8flax.quantize_model``."""
    if isinstance(model, nnx.bridge.ToNNX):
        raise wrong_model(model, "be converted before the bridge: ToNNX(quantize_model(linen_module, …))")
    given = nodes_of(model, Fp8Op)
    for path, node in nodes_of(model, nnx.Module).items():
        if getattr(type(node), "_fp8_make_call", None) or (path in given and given[path]._reason):
            raise ValueError(
                f"{type(model).__name__}, or a part of it, is converted already: {'/'.join(path)!r} comes "
                "from quantize_model or freeze. Call quantize_model once, on the whole original model, "
                "with all rules at once."
            )
    copy: Any = nnx.clone(model)
    decided = [rules.decide(site) for site in _contractions(copy, inputs, keyword_inputs)]
    rules.check(decided, has_ops=bool(given))
    written_out = [site for site in decided if site.name != site.op.nnx_field]
    for site in written_out if any(site.converts for site in written_out) else ():
        watch(site.module)
    # Several contractions may have one place. One that is converted comes last, and decides.
    places = {(id(x.module), x.name): x for x in sorted(decided, key=lambda x: x.converts)}
    for site in places.values():
        there = getattr(site.module, site.name, None)
        if site.name != site.op.nnx_field and there is not None and not isinstance(there, Fp8Op):
            raise ValueError(
                f"{site.place or 'The model'!r} has an attribute {site.name!r}, where the FP8 op of "
                f"{site.kernel!r} would be. Give the attribute another name."
            )
        if op_of(site) is not None and (not site.converts or site.pattern == DEFAULT):
            continue  # the op that the user gave
        if site.converts:
            setattr(site.module, site.name, nnx.data(_new_op(site, rngs)))
        elif site.impossible is None:
            wide = LeftWide(site.place, qwix.function_of(site.op), site.reason)
            setattr(site.module, site.name, nnx.static(wide))
    for path, op in nodes_of(copy, Fp8Op).items():
        op._scope = "/".join(path[:-1] if path[-1] == op.op_type.nnx_field else path)
        op._reason = op._reason or GIVEN
    return copy


def _contractions(model: nnx.Module, inputs: Inputs, keyword_inputs: KeywordInputs) -> Iterator[Site]:
    """Yields the contractions of a model: those of a call with these inputs, if there are inputs.

    A layer of Flax that the call does not reach is also there, because another method may call it.
    """
    run = DryRun(model, inputs, keyword_inputs) if inputs or keyword_inputs else None
    for layer in layers_of(model):
        is_flax_own = type(layer.module).__call__.__module__.startswith("flax.")
        if run is None:
            yield layer if is_flax_own else layer._replace(impossible=ONLY_WITH_INPUTS)
        elif layer.key in run.sites:
            yield run.sites[layer.key]
        elif is_flax_own and id(layer.module.kernel.get_value()) not in run.needed:
            yield layer
    if run is not None:
        yield from (x for x in run.sites.values() if x.name.startswith("fp8"))


def _new_op(site: Site, rngs: nnx.Rngs | None) -> Fp8Op:
    """Returns the op of a contraction, with state that is stacked as its kernel is."""
    op_type = site.op
    num_kernels = site.shapes[1][:1] if op_type.is_stack else ()
    op: Any = getattr(ops, op_type.name)(*num_kernels, recipe=site.recipe, **dict(site.options))
    op._make_state(site.stacked, rngs)
    op._reason, op.has_kernel = site.reason, site.kernel is not None
    return cast(Fp8Op, op)


def report(model: nnx.Module, args: Inputs, kwargs: KeywordInputs) -> ModelReport:
    """Returns the report of a converted NNX model; see ``fp8flax.report``."""
    given = nodes_of(model, Fp8Op).values()
    if not any(op._reason for op in given):
        raise wrong_model(model, "come from fp8flax.quantize_model, not from freeze")
    run = DryRun(model, args, kwargs)
    ran = {id(op_of(site)) for site in run.sites.values()}
    not_run = [op._scope for op in given if id(op) not in ran]
    return report_of(run.program, {key: _decided(site) for key, site in run.sites.items()}, not_run)


def _decided(site: Site) -> Site:
    """Returns a contraction of a converted model with the decision of ``quantize_model``."""
    op, there = op_of(site), getattr(site.module, site.name, None)
    if op is not None and site.impossible is None:
        return site._replace(converts=True, recipe=op.recipe, reason=op._reason)
    if isinstance(there, LeftWide):
        return site._replace(reason=there.reason)
    if site.kernel is None or site.impossible is not None:
        return Rules().decide(site)
    return site._replace(reason=ONLY_WITH_INPUTS)
