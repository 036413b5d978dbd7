"""A Ray cluster for the groups of this folder: a node for drafts and one for targets, both on this machine."""

from collections.abc import Iterator
from dataclasses import replace

import pytest
import ray
from ray.cluster_utils import Cluster

from cluster.config import GroupConfig
from engine.config import Execution
from tests.e2e.groups.generation import ENGINE, Text, model_config, text_of_one_process
from tests.models import save_llama

STORE_BYTES = 80 * 2**20


@pytest.fixture(scope="package", autouse=True)
def cluster() -> Iterator[None]:
    cluster = Cluster()
    for pool in ("draft", "target"):  # with room for two groups, because tests share one
        cluster.add_node(num_cpus=2, labels={"pool": pool}, object_store_memory=STORE_BYTES, include_dashboard=False)
    cluster.wait_for_nodes()
    ray.init(address=cluster.address, logging_level="WARNING")
    yield
    ray.shutdown()
    cluster.shutdown()


@pytest.fixture(scope="package")
def config(tmp_path_factory: pytest.TempPathFactory, execution: Execution) -> GroupConfig:
    folder = tmp_path_factory.mktemp("models")
    # vLLM's kernels for CPUs take no smaller heads and blocks.
    heads, blocks = ({"head_dim": 32}, {"block_size": 32}) if execution == "vllm" else ({}, {})
    return GroupConfig(
        target=replace(model_config(save_llama(folder / "target", seed=1, **heads)), execution=execution),
        draft=model_config(save_llama(folder / "draft", seed=1, noise=0.02, **heads)),
        engine=replace(ENGINE, **blocks),
        target_label_selector={"pool": "target"},
        draft_label_selector={"pool": "draft"},
        round_timeout_s=30,
        start_timeout_s=120,
    )


@pytest.fixture(scope="package")
async def expected(config: GroupConfig) -> Text:
    """The target's own text, in one process and without drafts."""
    return await text_of_one_process(config)
