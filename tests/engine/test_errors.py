"""Every exception travels between processes, and the tree in the docstring is the tree of the classes."""

import inspect
import pickle

import pytest

from engine import errors
from engine.errors import PacelineError, RequestError


def error_classes():
    return [cls for _, cls in inspect.getmembers(errors, inspect.isclass) if issubclass(cls, PacelineError)]


@pytest.mark.parametrize("cls", error_classes(), ids=lambda cls: cls.__name__)
def test_an_error_arrives_as_it_was_raised(cls):
    fields = ["prompt"] if issubclass(cls, RequestError) else []
    arrived = pickle.loads(pickle.dumps(cls("5 is too many", *fields)))
    assert (type(arrived), str(arrived)) == (cls, "5 is too many")
    assert not fields or arrived.param == "prompt"


def test_the_docstring_draws_the_tree_of_the_classes():
    drawn = {}
    parents = []
    for line in errors.__doc__.split("```")[1].strip("\n").splitlines():
        name, depth = line.split()[0], (len(line) - len(line.lstrip())) // 2
        parents[depth:] = [name]
        drawn[name] = parents[depth - 1] if depth else "Exception"
    assert drawn == {cls.__name__: cls.__base__.__name__ for cls in error_classes()}
