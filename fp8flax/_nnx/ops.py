"""The NNX ops: modules that layers take in the place of ``lax.dot_general``, and the state of models."""

from __future__ import annotations

import contextlib
import contextvars
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax import lax

from fp8flax._compat.jaxprs import Compute, Operands, Params, Primitive, Results
from fp8flax._compat.traces import FrontTrace, Trace, running_in, trace_behind, unwatched
from fp8flax._core.names import BY_OP, OVERWRITE_WITH_GRADIENT, RNG
from fp8flax._core.ops.conv import Conv
from fp8flax._core.ops.dot_general import DotGeneral
from fp8flax._core.ops.einsum import Einsum
from fp8flax._core.ops.op import Form, MissingStateError, Op, OpBase, StateLeaf
from fp8flax._core.ops.ragged_dot import RaggedDot
from fp8flax._core.options import check_int, wrong_model
from fp8flax._core.recipes import Recipe


class OverwriteWithGradient(nnx.Variable[Any]):
    """Variable whose "gradient" is its next value: the scaling state of FP8 ops.

    Its arrays are float32: the scale of a tensor, and its amax history. It is not an ``nnx.Param``, so an
    optimizer of parameters does not see it. In ``flax.nnx.bridge`` it is the collection
    ``_overwrite_with_gradient``.

    Example:
        >>> from flax import nnx
        >>> import fp8flax.nnx as fp8nnx
        >>> op = fp8nnx.Fp8DotGeneralOp()
        >>> op.input_scale.get_value()
        Array([1.], dtype=float32)
        >>> len(nnx.state(op, fp8nnx.OverwriteWithGradient).flat_state())
        6

    Source: the collection of ``flax.linen.fp8_ops``.
    """


# The name that Flax's bridge would give the type. MaxText looks for it.
OverwriteWithGradient.__name__ = OVERWRITE_WITH_GRADIENT
# Flax's bridge has one type for each collection. If there is one for this collection, it is taken.
try:
    OverwriteWithGradient = nnx.variable_type_from_name(OVERWRITE_WITH_GRADIENT)  # type: ignore[assignment, misc]
except ValueError:
    nnx.register_variable_name(OVERWRITE_WITH_GRADIENT, OverwriteWithGradient)


_searched: contextvars.ContextVar[Any] = contextvars.ContextVar("fp8flax_nnx_searched", default=())
"""The models in which errors look for the path of an op that does not know its path."""


@contextlib.contextmanager
def errors_search(nodes: Any) -> Iterator[None]:
    """A context in which errors about the state of an op name its path in ``nodes``, models by position."""
    token = _searched.set(nodes)
    try:
        yield
    finally:
        _searched.reset(token)


class _StateName(NamedTuple):
    """The name of an array of an op's state, which is made when an error shows it."""

    op: Fp8Op
    leaf: str

    def __str__(self) -> str:
        paths = (path[1:] for path, x in nnx.iter_graph(_searched.get()) if x is self.op)
        path = self.op._scope or "/".join(map(str, next(paths, ())))
        return f"{path}/{self.leaf}" if path else f"{type(self.op).__name__}.{self.leaf}"


class Fp8Op(OpBase, nnx.Module):
    """Base class of the NNX ops: holds the scaling state of one contraction, and computes it."""

    _on_op: Callable[..., jax.Array] | None = None
    """A function that computes the op in a dry run, ``_on_op(op, lhs, rhs, *arguments)``."""
    _trace: Trace | None = None
    """The trace in which a ``ModuleCall`` draws random keys: NNX refuses to do so in ``jax.checkpoint``."""
    _experts: tuple[int, ...] = ()
    """The number of experts of a ragged op, whose kernels have a state each."""
    qwix_path: tuple[str, ...] = ()
    """A path for Qwix, which takes the innermost module whose method runs for a layer."""

    def __init__(
        self, *, recipe: Recipe | None = None, form: Form = "direct", rngs: nnx.Rngs | None = None
    ):
        self.recipe, self.form = recipe, form
        self._check_options()
        self._scope = ""
        """The path of the op in a model, for audits. NNX itself puts no names into programs."""
        self._reason = ""
        """The reason why ``quantize_model`` gave the op to its layer, or left it there, for ``report``."""
        self._make_state((), rngs)

    def _make_state(self, stack: tuple[int, ...], rngs: nnx.Rngs | None) -> None:
        """Makes the state, stacked as ``nnx.vmap`` stacked the kernel, for the recipe that is in use now.

        If the recipe rounds stochastically, the op gets a stream of random keys from ``rngs``.
        """
        in_use = self._recipe_in_use()
        if in_use is None:  # FP8 is switched off
            return
        if in_use.gemms.is_random and rngs is not None:
            self.rngs = rngs[RNG].split(stack) if stack else rngs[RNG].fork()
        for leaf in self._state_leaves(in_use, self._experts):
            array = jnp.full((*stack, *leaf.shape), leaf.fill, jnp.float32)
            setattr(self, leaf.name, OverwriteWithGradient(array))

    def _compute(
        self, recipe: Recipe | None, lhs: Any, rhs: Any, *arguments: Any, **keywords: Any
    ) -> jax.Array:
        if self._on_op is not None:
            return self._on_op(self, lhs, rhs, *arguments, **keywords)
        scope = jax.named_scope(self._scope) if self._scope else contextlib.nullcontext()
        with unwatched(), jax.named_scope(BY_OP), scope:
            return super()._compute(recipe, lhs, rhs, *arguments, **keywords)

    def _place(self) -> tuple[str, ...]:
        if not (self._scope or self._reason):
            raise ValueError(
                f"fp8flax.statistics needs the path of each op, and this {type(self).__name__} does not "
                "know its path. Convert the model by fp8flax.quantize_model: ops that are there keep their "
                "state and get their paths."
            )
        return tuple(self._scope.split("/")) if self._scope else (type(self).__name__,)

    def _key(self) -> jax.Array | None:
        stream = getattr(self, "rngs", None)
        with running_in(self._trace or trace_behind()):
            return None if stream is None else stream()

    def _value(self, leaf: StateLeaf) -> tuple[jax.Array, Any]:
        variable, where = getattr(self, leaf.name, None), _StateName(self, leaf.name)
        if not isinstance(variable, nnx.Variable):
            raise MissingStateError(
                f"The FP8 op has no scaling state {where}, which its recipe needs: it was made under a "
                "recipe without delayed scaling, or with FP8 switched off. Make the op, or the model, "
                "under the recipe of its calls (fp8flax.autocast), or give the op its own recipe: "
                f"{type(self).__name__}(recipe=…)."
            )
        return variable.get_value(), where


_CODE = lax.dot_general.__code__
"""JAX's own code. Qwix replaces it while a model runs, to add LoRA to what layers multiply."""


def plain_of(op_type: type[Op]) -> Callable[..., jax.Array]:
    """Returns the function of JAX that an op stands for, for the field of a layer."""
    return jnp.einsum if op_type is Einsum else op_type.plain


class _InPlace:
    """The handler of a ``FrontTrace`` in which the primitive of some operands is computed in another way.

    ``jnp.einsum`` is a jitted function, whose primitive has several results.
    """

    def __init__(self, op_type: type[Op], operands: Sequence[Any], compute: Callable[..., Results]) -> None:
        self.primitive = "jit" if op_type is Einsum else op_type.primitive
        self.operands, self.compute = {id(x) for x in operands}, compute

    def on_primitive(
        self, front: FrontTrace, primitive: Primitive, operands: Operands, params: Params
    ) -> Results:
        is_ours = primitive.name == self.primitive and self.operands <= {id(x) for x in operands}
        return (self.compute if is_ours else FrontTrace.compute)(front, primitive, operands, params)

    def on_function(self, is_custom_vjp: bool, operands: Operands, compute: Compute) -> Operands:
        return compute()


def has_others() -> bool:
    """Returns whether code has replaced a function of JAX, to add products to those of layers."""
    return lax.dot_general.__code__ is not _CODE


def beside_others(
    op_type: type[Op], compute: Callable[..., Results], *args: Any, **kwargs: Any
) -> jax.Array:
    """Computes the primitive of a contraction by ``compute``, and adds what other code adds."""
    first = int(op_type is Einsum)  # an equation comes before the operands
    args = *args[:first], *map(jnp.asarray, args[first : first + 2]), *args[first + 2 :]
    with running_in(FrontTrace(_InPlace(op_type, args[first : first + 2], compute))):
        return plain_of(op_type)(*args, **kwargs)


def _beside_others(call: Any) -> Any:
    """Returns the ``__call__`` of an op, which lets code that has replaced a function of JAX take part.

    Qwix takes the innermost ``self`` that is a module for the layer, so the op has another name here.
    """

    @functools.wraps(call)
    def run(op: Fp8Op, *args: Any, **kwargs: Any) -> jax.Array:
        def compute(front: FrontTrace, primitive: Primitive, *_: Any) -> Results:
            with running_in(front.behind):
                out = call(op, *args, **kwargs)
            return [out] if primitive.multiple_results else out

        if has_others():
            return beside_others(op.op_type, compute, *args, **kwargs)
        return call(op, *args, **kwargs)

    return run


class Fp8DotGeneralOp(Fp8Op):
    """FP8 matmul for NNX layers, called like ``lax.dot_general``; see ``fp8flax.Fp8DotGeneralOp``.

    Give each layer an instance of its own, as ``dot_general=``; ``nnx.Linear`` and ``nnx.LinearGeneral``
    take it. For ``nnx.MultiHeadAttention`` use ``quantize_model``: one instance would be shared, with its
    scales, by query, key and value. A class as ``dot_general_cls=`` makes a new op at each call, so its
    state is lost.

    The scaling state is in variables of the type ``OverwriteWithGradient``. The op has the variables of the
    recipe under which it was made.

    Args:
        recipe: how tensors are scaled, as in ``fp8flax.Fp8DotGeneralOp``.
        form: ``"direct"`` or ``"qdq"``, as in ``fp8flax.Fp8DotGeneralOp``.
        rngs: random numbers for a recipe with stochastic rounding: the op takes a stream of its own from
            the stream ``fp8``, or ``default``.

    Example:
        >>> from flax import nnx
        >>> import fp8flax.nnx as fp8nnx
        >>> layer = nnx.Linear(4, 8, dot_general=fp8nnx.Fp8DotGeneralOp(), rngs=nnx.Rngs(0))
        >>> layer.dot_general.kernel_amax_history.shape
        (1024,)
    """

    op_type = DotGeneral
    __call__ = _beside_others(DotGeneral.__call__)


class Fp8Einsum(Fp8Op):
    """FP8 einsum of two operands for NNX layers; see ``fp8flax.Fp8Einsum`` and ``Fp8DotGeneralOp``.

    Example:
        >>> from flax import nnx
        >>> import fp8flax.nnx as fp8nnx
        >>> op = fp8nnx.Fp8Einsum()
        >>> layer = nnx.Einsum("nta,hab->nthb", (8, 2, 4), einsum_op=op, rngs=nnx.Rngs(0))
    """

    op_type = Einsum
    __call__ = _beside_others(Einsum.__call__)


class Fp8ConvGeneralDilatedOp(Fp8Op):
    """FP8 convolution for NNX layers; see ``fp8flax.Fp8ConvGeneralDilatedOp`` and ``Fp8DotGeneralOp``.

    It has one form, ``"direct"``.

    Example:
        >>> from flax import nnx
        >>> import fp8flax.nnx as fp8nnx
        >>> op = fp8nnx.Fp8ConvGeneralDilatedOp()
        >>> layer = nnx.Conv(3, 8, (4, 4), (4, 4), conv_general_dilated=op, rngs=nnx.Rngs(0))
    """

    op_type = Conv
    __call__ = _beside_others(Conv.__call__)


class Fp8RaggedDotOp(Fp8Op):
    """FP8 matmul of a mixture of ``num_experts`` experts in NNX; see ``fp8flax.Fp8RaggedDotOp``.

    Example:
        >>> import jax.numpy as jnp
        >>> import fp8flax.nnx as fp8nnx
        >>> op, x, kernels = fp8nnx.Fp8RaggedDotOp(2), jnp.ones((6, 4)), jnp.ones((2, 4, 8))
        >>> op(x, kernels, jnp.array([4, 2])).shape
        (6, 8)
        >>> op.kernel_scale.shape
        (2, 1)
    """

    op_type = RaggedDot
    __call__ = RaggedDot.__call__

    def __init__(self, num_experts: int, *, recipe: Recipe | None = None):
        check_int("num_experts", num_experts, 1)
        self._experts = (num_experts,)
        super().__init__(recipe=recipe)


# The state of a whole model.


def is_node(x: Any) -> bool:
    """Returns whether a value is a module or a variable of NNX."""
    return isinstance(x, nnx.Pytree | nnx.Variable)


def check_model(model: Any) -> None:
    """Raises ``TypeError`` if a value is not a model, an ``nnx.State`` or a tree that has one in it."""
    nodes = jax.tree.leaves(model, is_leaf=is_node)
    if not (isinstance(model, nnx.State) or any(map(is_node, nodes))):
        raise wrong_model(model, "be a flax.nnx.Module")


def state_of(node: Any) -> dict[str, Any]:
    """Returns the scaling state of a model, or of a tree with models, as a collection, by NNX's paths."""
    if not is_node(node) and jax.tree_util.all_leaves([node]):  # such as an array, which NNX cannot search
        return {OVERWRITE_WITH_GRADIENT: {}}
    return {OVERWRITE_WITH_GRADIENT: nnx.to_pure_dict(nnx.state(node, OverwriteWithGradient))}


def set_state(node: Any, state: Mapping[str, Any]) -> None:
    """Writes a state with the structure of ``state_of`` into a model, or into a tree with models."""
    if state[OVERWRITE_WITH_GRADIENT]:
        nnx.update(node, state[OVERWRITE_WITH_GRADIENT])
