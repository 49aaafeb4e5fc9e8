"""The names in programs and variables."""

from flax.linen import fp8_ops

from fp8flax._core import names
from tests.cases import MATMUL, normal

X = normal(0, 2, 2)


def test_names_of_the_state_are_those_of_flax():
    op = fp8_ops.Fp8DotGeneralOp()
    variables = op.init({}, X, X, MATMUL)
    ours = {name for role in names.ROLES for name in names.state_leaf_names(role)}
    assert set(variables[names.OVERWRITE_WITH_GRADIENT]) == ours


def test_no_scope_contains_another_where_one_is_searched_for():
    """The audit searches op names for these scopes."""
    scopes = [*names.CHOSEN_WIDE, *names.WITHOUT_UNITS, names.QDQ]
    assert len(set(scopes)) == len(scopes)
    assert not [(a, b) for a in scopes for b in scopes if a != b and a in b]
