"""A checkpoint of Orbax has the layout of Flax's ops. test_recipe_change resumes a run from one."""

import numpy as np
import orbax.checkpoint as ocp

from tests.cases import OWG, flat
from tests.train.net import X, op_of, trained


def test_a_checkpoint_has_the_names_of_flax(tmp_path):
    """The layout is version 1 of the format; a change would break all checkpoints of users."""
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "checkpoint", trained(3))
        checkpointer.wait_until_finished()
        variables = checkpointer.restore(tmp_path / "checkpoint")
    found = {name: (str(leaf.dtype), leaf.shape) for name, leaf in flat(variables[OWG]).items()}
    assert found == {
        f"{layer}/Fp8DotGeneralOp_0/{role}_{leaf}": ("float32", shape)
        for layer in ("first", "second")
        for role in ("input", "kernel", "output_grad")
        for leaf, shape in (("scale", (1,)), ("amax_history", (4,)))
    }
    # Inputs grew from step to step: the newest amax comes first, then the oldest to the second newest.
    newest, _, oldest, second = np.asarray(op_of(variables)["input_amax_history"])
    expected = np.max(np.abs(X)) * np.float32([2, 3, 4])
    np.testing.assert_allclose([oldest, second, newest], expected, rtol=1e-6)
