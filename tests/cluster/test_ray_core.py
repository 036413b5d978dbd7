"""The resources of this machine, counted as Ray counts them; and how processes write their log."""

import json
import logging

import pytest

from cluster import ray_core
from cluster.ray_core import stderr_handler


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        (None, ({"CPU": 8.0, "GPU": 4.0}, {"ray.io/accelerator-type": "H100"})),
        (["0", "2"], ({"CPU": 8.0, "GPU": 2.0}, {"ray.io/accelerator-type": "H100"})),
        ([], ({"CPU": 8.0, "GPU": 0.0}, {})),
    ],
    ids=["all", "two visible", "none visible"],
)
def test_this_machine_is_counted_as_ray_counts_it(
    visible: list[str] | None, expected: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_core, "get_num_cpus", lambda: 8.0)
    monkeypatch.setattr(ray_core.Nvidia, "get_current_node_num_accelerators", lambda: 4)
    monkeypatch.setattr(ray_core.Nvidia, "get_current_process_visible_accelerator_ids", lambda: visible)
    monkeypatch.setattr(ray_core.Nvidia, "get_current_node_accelerator_type", lambda: "H100")
    assert ray_core.this_machine() == expected


def record(**extra: object) -> logging.LogRecord:
    return logging.makeLogRecord(
        {"name": "cluster.group", "levelname": "WARNING", "msg": "lost %d\nranks", "args": (2,), **extra}
    )


def test_text_is_a_level_a_time_and_a_message() -> None:
    line = stderr_handler("text").format(record())
    assert line.startswith("WARNING ")
    assert line.endswith(" -- lost 2\nranks")


def test_json_is_one_line_with_the_fields_of_ray() -> None:
    line = stderr_handler("json").format(record(request_id="mine"))
    assert "\n" not in line
    fields = json.loads(line)
    expected = {"levelname": "WARNING", "message": "lost 2\nranks", "request_id": "mine"}
    assert expected.items() <= fields.items()
