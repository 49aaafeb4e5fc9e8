"""The signatures of the ops: arguments in the order of the JAX function, whatever is called by name."""

import pytest

from fp8flax._core.ops.calls import (
    ConvCall,
    DotGeneralCall,
    EinsumCall,
    RaggedDotCall,
    calling,
)


@pytest.mark.parametrize("cls", [DotGeneralCall, EinsumCall, ConvCall, RaggedDotCall])
def test_an_argument_that_no_function_has_is_refused(cls):
    with pytest.raises(TypeError, match="swallowed"):
        calling(cls, lambda *args: None)(*[None] * 4, swallowed=True)
