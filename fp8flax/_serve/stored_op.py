"""Describes an op of a frozen model, and computes it from the codes of its kernel and its fixed scales."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, cast

import jax
import numpy as np

from fp8flax._compat.stand_in import StandIn
from fp8flax._core.autocast import recipe_in_use
from fp8flax._core.names import KERNEL_TENSOR_SCALE, state_leaf_names
from fp8flax._core.ops.canonical import Shape
from fp8flax._core.ops.op import Op
from fp8flax._core.ops.stored import frozen
from fp8flax._core.qtensor import QTensor, Quantizer
from fp8flax._core.recipes import CustomRecipe
from fp8flax._core.state.tree import path_names
from fp8flax._core.types import Path, PyTree

Arrays = dict[Path, jax.Array]
Groups = tuple[tuple[int, ...], ...]
"""Which dimensions of a variable are one dimension of its tensor in a file.

For a kernel (16, 4, 8) of ``nn.DenseGeneral((4, 8))`` they are ``((1, 2), (0,))``: its weight is (32, 16),
``(out, in)``. They are counted without the dimensions that stack layers. ``freeze`` knows them from the op
(``ServedOp.groups``), and ``export.merged`` writes files by them. ``load_into`` has no op, so it finds them
by the two shapes, and ``export.unmerged`` reads by them."""

INPUT_SCALE, KERNEL_SCALE = (state_leaf_names(role)[0] for role in ("input", "kernel"))


def groups_in_weight(weight: Sequence[int], kernel: Sequence[int]) -> list[Groups]:
    """Returns the dimensions of a kernel that are one in a weight ``(..., out, in)``, if there are any.

    The kernel has the dimensions of the stack first. Of the others, a matmul sums over some that are next
    to each other, and not over the last of several: a kernel ``(out, in)`` has no groups. If several
    choices fit, they are the first, as in the layers of Flax: a kernel (8, 8, 8) and a weight (64, 8) give
    ``((1, 2), (0,))``. For ``td,edf->tef`` they are in the middle. A kernel (8,) and a weight (1, 8) give
    ``((), (0,))``. The dimensions of a stack are in no group: a kernel (3, 16, 4, 8) and a weight
    (3, 32, 16) give ``((1, 2), (0,))``.
    """
    num_stacked, found = len(weight) - 2, list[Groups]()
    dims = kernel[num_stacked:]
    for start, end in itertools.combinations(range(max(2, len(dims))), 2):
        out = (*range(start), *range(end, len(dims)))
        sizes = math.prod(dims[i] for i in out), math.prod(dims[start:end])
        if (*kernel[:num_stacked], *sizes) == tuple(weight):
            found.append((out, tuple(range(start, end))))
    is_clear = len(found) == 1 or (found and 0 in found[0][1])
    return found[:1] if is_clear else []


class ServedOp(NamedTuple):
    """Description of an op in a frozen model (hashable).

    An op whose kernel stays wide has only a path and a recipe. It computes as in training.
    """

    path: Path
    gemms: CustomRecipe
    scales: tuple[tuple[str, Shape], ...] = ()
    """The names of its scales in the variables, and the shapes of the scales of one layer."""
    kernel: Path = ()
    """The path of the parameter in FP8 that is the kernel, or that the kernel is a slice of."""
    groups: Groups = ()
    """The output dimensions and the summed dimensions of the kernel.

    They are counted without the dimensions that stack layers, and without those that stack kernels, such as
    the experts. There are none if the op does not read the kernel as it is stored, or if ``load_into``
    would find others."""
    dtype: np.dtype | None = None
    """The dtype of the kernel before it was stored."""
    stack: tuple[int, ...] = ()
    """The axes along which layers are stacked in the kernel. In the scales they are always the first."""
    cut: tuple[int, int, int] | None = None
    """The axis, the start and the end, if the kernel is a slice of the parameter."""

    @property
    def quantizer(self) -> Quantizer:
        """The quantizer of the stored kernel."""
        return cast(Quantizer, self.gemms.forward.rhs).stored


def leaves_of(tree: PyTree) -> dict[Path, Any]:
    """Returns the leaves of a tree without boxes by their paths."""
    return {path_names(keys): leaf for keys, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]}


@jax.custom_jvp
def constant(x: PyTree) -> PyTree:
    """Returns codes and scales unchanged; differentiating them raises ``TypeError``."""
    return x


@constant.defjvp
def _constant_jvp(primals: PyTree, tangents: PyTree) -> PyTree:
    raise TypeError(
        "The FP8 kernels and the scales of a frozen model have no gradient. Differentiate with respect to "
        "the inputs, or to wide parameters only, with the other variables closed over. To train the "
        "kernels, train the model that was frozen."
    )


def not_seen(path: Path) -> ValueError:
    """Returns the error for an op that gets another kernel than in the calls that ``freeze`` traced."""
    return ValueError(
        f"The FP8 op at {'/'.join(path)} did not run with this kernel when the model was frozen. Freeze "
        "the model with inputs that reach the op as it is called here."
    )


def computed(
    op_type: type[Op],
    served: ServedOp,
    scales: Mapping[str, Any],
    lhs: jax.Array,
    kernel: StandIn,
    *arguments: Any,
    **keywords: Any,
) -> jax.Array:
    """Returns the result of an op with a plan for its stored kernel and its scales."""
    if recipe_in_use(served.gemms, served.gemms) is None:
        raise ValueError(
            "fp8flax.autocast(enabled=False) cannot turn FP8 off in a frozen model, whose kernels are "
            "stored in FP8. Call it outside of that context, or call the original model."
        )
    if kernel.codes.dtype.itemsize != 1:
        raise TypeError(
            f"The kernel of a frozen model must stay in FP8; got {kernel.codes.dtype}. Cast wide variables "
            "alone."
        )
    lhs = lhs.astype(np.promote_types(lhs.dtype, kernel.dtype))
    codes, scales = constant((kernel.codes, dict(scales)))
    # ``freeze_ops`` gives a scalar scale the shape (1,).
    of = {name: scales[name].reshape(shape if shape != (1,) else ()) for name, shape in served.scales}
    rhs = QTensor(codes, of[KERNEL_SCALE], served.quantizer, tensor_scale=of.get(KERNEL_TENSOR_SCALE))
    keywords |= {"recipe": served.gemms, "input_scale": of.get(INPUT_SCALE)}
    return frozen(op_type, lhs, rhs, *arguments, **keywords)
