"""The Job that fills the volume downloads both models to where the GPU overlays read them."""

import subprocess
from pathlib import Path

import pytest

from tests.k8s.manifests import K8S, build, has_kustomize, of_kind
from tests.k8s.serving_rules import app_config

pytestmark = pytest.mark.skipif(not has_kustomize(), reason="kubectl builds the kustomizations")


def test_the_job_fills_what_the_overlays_read(tmp_path: Path) -> None:
    (job,) = of_kind(build(K8S / "models"), "Job")
    (container,) = job["spec"]["template"]["spec"]["containers"]
    fake = tmp_path / "hf"
    fake.write_text('#!/bin/sh\nshift; echo "$1 $4 $5"\n')
    fake.chmod(0o755)
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    command = [*container["command"], *container["args"]]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    target, draft = container["args"]
    (service,) = of_kind(build(K8S / "overlays" / "gpu"), "RayService")
    pair = app_config(service).pair
    assert ran.stdout.splitlines() == [
        f"{target} --local-dir {pair.target_model}",
        f"{draft} --local-dir {pair.draft_model}",
    ]
