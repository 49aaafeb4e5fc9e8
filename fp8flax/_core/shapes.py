"""Annotations of arrays with a kind of dtype and shape names, as in ``Float[jax.Array, "rows columns"]``.

Type checkers and tests read them as the annotations of jaxtyping. The package itself does not need
jaxtyping: at run time such an annotation is the type of the array, annotated by the text.
"""

from typing import TYPE_CHECKING, Annotated, Any

if TYPE_CHECKING:
    from jaxtyping import (
        Bool as Bool,
    )
    from jaxtyping import (
        Float as Float,
    )
    from jaxtyping import (
        Float32 as Float32,
    )
    from jaxtyping import (
        Int32 as Int32,
    )
    from jaxtyping import (
        Integer as Integer,
    )
    from jaxtyping import (
        Shaped as Shaped,
    )
    from jaxtyping import (
        UInt8 as UInt8,
    )
else:

    class _Kind:
        def __init__(self, name: str):
            self._name = name

        def __getitem__(self, array_and_shape: tuple[Any, str]) -> Any:
            array, shape = array_and_shape
            return Annotated[array, f"{self._name} {shape}"]

    Bool, Float, Float32, Int32, Integer, Shaped, UInt8 = map(
        _Kind, ("Bool", "Float", "Float32", "Int32", "Integer", "Shaped", "UInt8")
    )
