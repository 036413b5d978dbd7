"""What is refused before anything is deployed."""

import pytest

from deployments import builder
from deployments.config import AppConfig, ArgumentError


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tensor_parallel_size": 4}, "the target needs 4 GPUs, but the cluster has 2"),
        ({"device": "cpu", "target_accelerator_type": "H100"}, "target_accelerator_type is H100"),
        ({"device": "cpu", "draft_accelerator_type": "L4"}, "draft_accelerator_type is L4"),
    ],
)
def test_a_cluster_that_cannot_hold_the_workers_is_an_argument_error(
    arguments: dict[str, object], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(builder, "_count_gpus", lambda: 2.0)
    with pytest.raises(ArgumentError, match=message):
        builder.app(AppConfig.model_validate(arguments))
