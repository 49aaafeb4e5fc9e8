"""The variables of an NNX model in the layout of a Linen model whose modules have the same names."""

import flax.linen as nn
from flax import nnx

from fp8flax._nnx.ops import Fp8Op


def ops_of(model):
    """Returns the FP8 ops of a model by their paths."""
    return {"/".join(map(str, path)): op for path, op in nnx.iter_graph(model) if isinstance(op, Fp8Op)}


def places(model):
    """Returns the path and the variable of each place in Linen's layout, which begins with a collection.

    Entry 0 of a list ``layers`` is called ``layers_0`` there. The op of a layer has the name of its class,
    but ``Fp8DotGeneralOp`` if it is an einsum, as in models that are converted.
    """
    ops, found = ops_of(model), {}
    for path, variable in nnx.to_flat_state(nnx.state(model, nnx.Not(nnx.RngState))):
        collection = nnx.variable_name_from_type(type(variable), allow_register=True)
        names = []
        for i, key in enumerate(path):
            op = ops.get("/".join(map(str, path[: i + 1])))
            if op is not None and key == op.op_type.nnx_field:
                name = type(op).__name__
                names.append("Fp8DotGeneralOp_0" if name == "Fp8Einsum" else f"{name}_0")
            elif isinstance(key, int) and names:
                names[-1] += f"_{key}"
            else:
                names.append(str(key))
        found[collection, *names] = path, variable
    return found


def to_linen(model):
    """Returns the variables of a model as collections of Linen."""
    values = {place: variable.get_value() for place, (_, variable) in places(model).items()}
    return nnx.traversals.unflatten_mapping(values)


def update_from_linen(model, variables):
    """Writes collections of Linen into a model; the names and shapes must be those of the model."""
    given = nnx.traversals.flatten_mapping(nn.meta.unbox(variables))
    mine = {place: entry for place, entry in places(model).items() if place[0] in variables}
    assert {k: v.shape for k, v in given.items()} == {k: v.get_value().shape for k, (_, v) in mine.items()}
    nnx.update(model, nnx.from_flat_state([(path, v.replace(given[p])) for p, (path, v) in mine.items()]))
