"""Docstrings under the fields of a dataclass, which Python itself does not keep."""

import ast
import inspect
from dataclasses import fields
from itertools import pairwise


def field_docstrings(cls: type) -> dict[str, str]:
    """Return the docstring of each field, on one line; a class's own fields come before those it inherits."""
    texts: dict[str, str] = {}
    for ancestor in cls.__mro__[:-1]:
        (definition,) = ast.parse(inspect.getsource(ancestor)).body
        assert isinstance(definition, ast.ClassDef)
        for statement, following in pairwise(definition.body):
            match statement, following:
                case ast.AnnAssign(target=ast.Name(name)), ast.Expr(ast.Constant(str(text))):
                    texts.setdefault(name, " ".join(text.split()))
    return {name: text for name, text in texts.items() if name in {setting.name for setting in fields(cls)}}
