"""The resources of this machine, counted as Ray counts them; and how processes write their log."""

import pytest

from cluster import ray_core


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        (None, ({"CPU": 8.0, "GPU": 4.0}, {"ray.io/accelerator-type": "H100"})),
        (["0", "2"], ({"CPU": 8.0, "GPU": 2.0}, {"ray.io/accelerator-type": "H100"})),
        ([], ({"CPU": 8.0, "GPU": 0.0}, {})),
    ],
    ids=["all", "two visible", "none visible"],
)
def test_this_machine_is_counted_as_ray_counts_it(visible, expected, monkeypatch):
    monkeypatch.setattr(ray_core, "get_num_cpus", lambda: 8.0)
    monkeypatch.setattr(ray_core.Nvidia, "get_current_node_num_accelerators", lambda: 4)
    monkeypatch.setattr(ray_core.Nvidia, "get_current_process_visible_accelerator_ids", lambda: visible)
    monkeypatch.setattr(ray_core.Nvidia, "get_current_node_accelerator_type", lambda: "H100")
    assert ray_core.this_machine() == expected
