"""Annotations of arrays with a kind of dtype and shape names, as in ``Float[jax.Array, "rows columns"]``.

Type checkers and tests read them as the annotations of jaxtyping. The package itself does not need
jaxtyping: at run time such an annotation is the type of the array, annotated by the text.
"""

from typing import TYPE_CHECKING, Annotated, Any

__all__ = ["Bool", "Float", "Float32", "Int32", "Integer", "Shaped", "UInt8"]

if TYPE_CHECKING:
    from jaxtyping import Bool, Float, Float32, Int32, Integer, Shaped, UInt8
else:

    class _Kind:
        def __init__(self, name: str):
            self._name = name

        def __getitem__(self, array_and_shape: tuple[Any, str]) -> Any:
            array, shape = array_and_shape
            return Annotated[array, f"{self._name} {shape}"]

    Bool, Float, Float32, Int32, Integer, Shaped, UInt8 = map(_Kind, __all__)
