"""Whether target and draft are there, go together and fit into memory, and which draft to pull for a target."""

import re
from collections.abc import Iterator, Mapping

from cluster.config import GroupConfig
from cluster.placement import PlacementError, placement_bundles, shares_gpu
from cluster.ray_core import this_machine
from deployments.config import AppConfig, group_config
from deployments.diagnosis.finding import Finding
from deployments.diagnosis.machine import gib
from engine.config import ModelConfig
from engine.errors import ModelError
from engine.models.registry import open_model
from engine.models.source import ModelSource, check_same_vocabulary

DRAFTS: Mapping[str, str] = {
    r"(?:Meta-)?Llama-3\.[123]-(?:3|8|70|405)B(-Instruct)?": "meta-llama/Llama-3.2-1B",
    r"Qwen3-(?:4|8|14|32|30B-A3|235B-A22)B(-Base)?": "Qwen/Qwen3-0.6B",
    r"Qwen2\.5-(?:3|7|14|32|72)B(-Instruct)?": "Qwen/Qwen2.5-0.5B",
    r"Qwen2\.5-Coder-(?:3|7|14|32)B(-Instruct)?": "Qwen/Qwen2.5-Coder-0.5B",
    r"gemma-3-(?:4|12|27)b(-it|-pt)": "google/gemma-3-1b",
    r"SmolLM2-1\.7B(-Instruct)?": "HuggingFaceTB/SmolLM2-135M",
    r"flan-t5-(?:large|xl|xxl)()": "google/flan-t5-small",
}
"""Drafts by a pattern of their targets' names; what the group matches ends the draft's name, too."""
_LARGE = 0.5
"""A draft with more of the target's weights takes so long that few rounds gain."""


def known_draft(target: str) -> str | None:
    """Return the hub name of a draft with the tokenizer of a target, by the target's name; None if none is known."""
    name = target.rstrip("/").rpartition("/")[2].rpartition("--")[2]
    matches = ((re.match(pattern, name), draft) for pattern, draft in DRAFTS.items())
    return next((draft + (match[1] or "") for match, draft in matches if match), None)


def path_findings(config: AppConfig) -> Iterator[Finding]:
    """Check without torch that the models' files are there, and that a draft is used where one is known."""
    pair = config.pair
    draft, pull = known_draft(pair.target_model), _pull(config)
    for role, model in _models(group_config(config)).items():
        try:
            directory = open_model(model).directory
        except ModelError as error:
            yield Finding("error", role, str(error), f"`{pull}` downloads it" if "/" in model.path else "name another")
        else:
            yield Finding("ok", role, str(directory))
    if draft is not None and pair.draft is None and pair.drafting == "auto":
        yield Finding(
            "warning", "draft", "the target has none, so only copies of earlier text are drafted", f"`{pull}`"
        )


def pair_findings(config: AppConfig) -> Iterator[Finding]:
    """Check tokenizers, formats and memory of models that are there; this imports torch."""
    from engine.drafting.registry import check_kinds
    from engine.execution.memory import plan_kv_blocks
    from engine.execution.registry import survey

    group = group_config(config)
    sources = [open_model(model) for model in _models(group).values()]
    try:
        check_kinds(sources[0], sources[1] if len(sources) > 1 else None, group.method)
        yield _tokenizers(sources)
        number, size = this_machine()[0]["GPU"], group.tensor_parallel_size
        shared = shares_gpu(group, placement_bundles(group, num_gpus=number))
        surveys = [survey(source, group.engine, world_size=size) for source in sources[:1]]
        surveys += [survey(source, group.engine) for source in sources[1:]]
        device = surveys[0].device
        footprints = [one.footprint for one in surveys if shared or one is surveys[0] or one.device == "cpu"]
        footprints += footprints[:1] * (size - 1) * (device == "cpu")
        num_blocks = plan_kv_blocks(surveys[0].free_bytes, footprints, group.engine, device=device)
    except (ModelError, PlacementError) as error:
        yield Finding("error", "pair", str(error), "see Limits in deployments/README.md, or choose other models")
        return
    weights = [one.footprint.weight_bytes for one in surveys]
    room = num_blocks * group.engine.block_size
    found = f"weights take {' and '.join(map(gib, weights))} of {gib(surveys[0].free_bytes)}, and {room:,} tokens fit"
    if len(weights) > 1 and weights[1] > _LARGE * weights[0]:
        yield Finding("warning", "memory plan", found, "choose a draft of a tenth of the target's size")
    else:
        yield Finding("ok", "memory plan", found)


def weight_file_bytes(config: AppConfig) -> int:
    """Return the size of all weight files of the pair."""
    models = _models(group_config(config)).values()
    return sum(file.stat().st_size for model in models for file in open_model(model).weight_files)


def _tokenizers(sources: list[ModelSource]) -> Finding:
    try:
        for draft in sources[1:]:
            check_same_vocabulary(sources[0], draft)
    except ModelError as error:
        other = known_draft(sources[0].path)
        advice = f"pull {other}, or" if other else "choose a draft of the target's family, or"
        return Finding("error", "tokenizers", str(error), f"{advice} draft without a model: drafting=suffix")
    return Finding("ok", "tokenizers", f"{len(sources[0].tokenizer)} tokens" + ", equal" * (len(sources) > 1))


def _models(group: GroupConfig) -> dict[str, ModelConfig]:
    return {"target": group.target} | ({"draft": group.draft} if group.draft else {})


def _pull(config: AppConfig) -> str:
    target, named = config.pair.target_model, config.pair.draft_model
    draft = known_draft(target) if named in ("auto", "none") else named
    return f"paceline pull {target}" + (f" --draft {draft}" if draft else "")
