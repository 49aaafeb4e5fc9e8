"""What the parser of docstrings is told: headings of ours, links between names, signatures of modules."""

from __future__ import annotations

import re
from typing import Any

import griffe
from api_names import linked  # beside this file; MkDocs finds it for hooks.py


class Docstrings(griffe.Extension):
    """Puts docstrings and signatures into the form that the parser knows."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        """Changes a docstring before it is parsed."""
        if obj.docstring is None:
            return
        text = re.sub(r"^( *)Example:$", r"\1Examples:", obj.docstring.value, flags=re.MULTILINE)
        text = re.sub(r"^ *Source: none\.$", "", text, flags=re.MULTILINE)
        obj.docstring.value = linked(text, obj.path)

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """Gives Linen modules, which are dataclasses, the signature that Flax gives them."""
        modules = [pkg]
        while modules:
            module = modules.pop()
            modules += [m for m in module.modules.values() if not m.is_alias]
            for cls in module.classes.values():
                if not cls.is_alias and "__init__" not in cls.members:
                    add_signature(cls)


def add_signature(cls: griffe.Class) -> None:
    """Adds the ``__init__`` that Flax makes of the fields, if the class is a Linen module."""
    line = [*reversed(cls.mro()), cls]
    if not any(str(base) == "nn.Module" for each in line for base in each.bases):
        return
    fields = {
        name: griffe.Parameter(
            name,
            annotation=attribute.annotation,
            kind=griffe.ParameterKind.positional_or_keyword,
            default=attribute.value,
        )
        for each in line
        for name, attribute in each.attributes.items()
        if attribute.annotation is not None and "instance-attribute" in attribute.labels
    }
    myself = griffe.Parameter("self", kind=griffe.ParameterKind.positional_or_keyword)
    init = griffe.Function("__init__", parameters=griffe.Parameters(myself, *fields.values()))
    cls.set_member("__init__", init)
