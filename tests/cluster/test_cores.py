import os

import pytest

from cluster.cores import home_core


@pytest.mark.parametrize(("cores", "expected"), [({0}, None), ({4, 7}, 7), (set(range(64)), 63)])
def test_home_is_one_of_the_cores_that_this_process_has(cores, expected, monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: cores, raising=False)
    assert home_core() == expected


def test_without_such_calls_there_is_none(monkeypatch):
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    assert home_core() is None
