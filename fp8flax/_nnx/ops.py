"""The NNX ops, and the scaling state of a whole NNX model.

An op is a module in a field of a layer, and its variables are its scaling state::

    layer = nnx.Linear(4, 8, dot_general=Fp8DotGeneralOp(), rngs=rngs)
    layer.dot_general.kernel_scale    # an OverwriteWithGradient of shape (1,)

``OpBase`` computes the op. ``Fp8Op`` gives it the state, a random key, and a path for errors and audits.
"""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from fp8flax._compat.traces import unwatched
from fp8flax._core.names import BY_OP, OVERWRITE_WITH_GRADIENT, RNG
from fp8flax._core.ops.conv import Conv
from fp8flax._core.ops.dot_general import DotGeneral
from fp8flax._core.ops.einsum import Einsum
from fp8flax._core.ops.op import Form, MissingStateError, OpBase, StateLeaf
from fp8flax._core.ops.ragged_dot import RaggedDot
from fp8flax._core.options import check_int, wrong_model
from fp8flax._core.recipes import Recipe
from fp8flax._nnx.qwix import with_adapters


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


# ``flax.nnx.bridge`` has one type of variable for each collection of Linen, known by the collection's name.
# The bridge makes the type of this collection if it meets the state of a Linen op before this import.
OverwriteWithGradient.__name__ = OVERWRITE_WITH_GRADIENT
try:
    OverwriteWithGradient = nnx.variable_type_from_name(OVERWRITE_WITH_GRADIENT)  # type: ignore[assignment, misc]
except ValueError:
    nnx.register_variable_name(OVERWRITE_WITH_GRADIENT, OverwriteWithGradient)


class Fp8Op(OpBase, nnx.Module):
    """Base class of the NNX ops: holds the scaling state of one contraction, and computes it."""

    _experts: tuple[int, ...] = ()
    """The number of experts of a ragged op, whose kernels have a state each."""
    qwix_path: tuple[str, ...] = ()
    """Qwix reads this attribute of the innermost module that runs, which is the op while it multiplies."""

    def __init__(
        self, *, recipe: Recipe | None = None, form: Form = "direct", rngs: nnx.Rngs | None = None
    ):
        self.recipe, self.form = recipe, form
        self._check_options()
        self._scope = ""
        """The path of the op in the model that ``quantize_model`` returned, for the scope that audits read.

        NNX itself puts no paths into programs. Empty in an op that the user gave to a layer."""
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

    def _compute(self, *arguments: Any, **keywords: Any) -> jax.Array:
        scope = jax.named_scope(self._scope) if self._scope else contextlib.nullcontext()
        with unwatched(), jax.named_scope(BY_OP), scope:
            return super()._compute(*arguments, **keywords)

    def _value(self, leaf: StateLeaf) -> tuple[jax.Array, Any]:
        variable, where = getattr(self, leaf.name, None), _NameInErrors(self, leaf.name)
        if not isinstance(variable, nnx.Variable):
            raise MissingStateError(
                f"The FP8 op has no scaling state {where}, which its recipe needs: it was made under a "
                "recipe without delayed scaling, or with FP8 switched off. Make the op, or the model, "
                "under the recipe of its calls (fp8flax.autocast), or give the op its own recipe: "
                f"{type(self).__name__}(recipe=…)."
            )
        return variable.get_value(), where

    def _key(self) -> jax.Array | None:
        stream = getattr(self, "rngs", None)
        return None if stream is None else stream()

    def _place(self) -> tuple[str, ...]:
        if not (self._scope or self._reason):
            raise ValueError(
                f"fp8flax.statistics needs the path of each op, and this {type(self).__name__} does not "
                "know its path. Convert the model by fp8flax.quantize_model: ops that are there keep their "
                "state and get their paths."
            )
        return tuple(self._scope.split("/")) if self._scope else (type(self).__name__,)


class _NameInErrors(NamedTuple):
    """The name of an array of an op's state, such as ``layers/0/dot_general/kernel_scale``.

    An op that the user made does not know its path. The search for the path goes through a whole model, so
    it runs only if an error prints the name.
    """

    op: Fp8Op
    leaf: str

    def __str__(self) -> str:
        paths = (path[1:] for path, x in nnx.iter_graph(_searched.get()) if x is self.op)
        path = self.op._scope or "/".join(map(str, next(paths, ())))
        return f"{path}/{self.leaf}" if path else f"{type(self.op).__name__}.{self.leaf}"


_searched: contextvars.ContextVar[Any] = contextvars.ContextVar("fp8flax_nnx_searched", default=())
"""The models in which errors look for the path of an op, see ``errors_search``."""


@contextlib.contextmanager
def errors_search(nodes: Any) -> Iterator[None]:
    """A context in which errors about the state of an op name its path in ``nodes``, models by position."""
    token = _searched.set(nodes)
    try:
        yield
    finally:
        _searched.reset(token)


# The ops.


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
    __call__ = with_adapters(DotGeneral.__call__)


class Fp8Einsum(Fp8Op):
    """FP8 einsum of two operands for NNX layers; see ``fp8flax.Fp8Einsum`` and ``Fp8DotGeneralOp``.

    Example:
        >>> from flax import nnx
        >>> import fp8flax.nnx as fp8nnx
        >>> op = fp8nnx.Fp8Einsum()
        >>> layer = nnx.Einsum("nta,hab->nthb", (8, 2, 4), einsum_op=op, rngs=nnx.Rngs(0))
    """

    op_type = Einsum
    __call__ = with_adapters(Einsum.__call__)


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
    __call__ = with_adapters(Conv.__call__)


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
