"""Whether target and draft are there, go together and fit into memory, and which draft to pull for a target."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import replace

from cluster.config import GroupConfig
from cluster.placement import PlacementError, placement_bundles, shares_gpu
from cluster.ray_core import this_machine
from deployments.config import AppConfig
from deployments.diagnosis.finding import Finding
from deployments.diagnosis.machine import size_text
from deployments.sections import group_config
from engine.config import ModelConfig, split_revision
from engine.drafting.settle import check_kinds
from engine.errors import ConfigError, ModelError
from engine.execution.memory import plan_cache
from engine.models.registry import open_model
from engine.models.shared_tokens import shared_tokens

DRAFTS: Mapping[str, str] = {
    r"(?:Meta-)?Llama-3\.[123]-(?:3|8|70|405)B(-Instruct)?": "meta-llama/Llama-3.2-1B",
    r"Qwen3-(?:4|8|14|32|30B-A3|235B-A22)B(-Base)?": "Qwen/Qwen3-0.6B",
    r"Qwen2\.5-(?:3|7|14|32|72)B(-Instruct)?": "Qwen/Qwen2.5-0.5B",
    r"Qwen2\.5-Coder-(?:3|7|14|32)B(-Instruct)?": "Qwen/Qwen2.5-Coder-0.5B",
    r"gemma-3-(?:4|12|27)b(-it|-pt)": "google/gemma-3-1b",
    r"SmolLM2-1\.7B(-Instruct)?": "HuggingFaceTB/SmolLM2-135M",
    r"flan-t5-(?:large|xl|xxl)()": "google/flan-t5-small",
}
"""Drafts by a pattern of their targets' names; the text of the group is also the end of the draft's name."""


def known_draft(target: str) -> str | None:
    """Return the hub name of a draft that has the target's tokenizer; None if no draft is known."""
    name = target.rstrip("/").rpartition("/")[2]
    matches = ((re.match(pattern, name), draft) for pattern, draft in DRAFTS.items())
    return next((draft + (match[1] or "") for match, draft in matches if match), None)


def path_findings(config: AppConfig) -> Iterator[Finding]:
    """Check without torch that the models' files are there, and that a known draft is used."""
    pair, group = config.pair, group_config(config)
    target_model = group.target.path if pair.target_model == "auto" else pair.target_model
    known = known_draft(target_model)
    draft = known if pair.draft_model in ("auto", "none") else pair.draft_model
    # Else draft_model may be a head that names its target.
    is_named = pair.target_model != "auto" or pair.draft_model in ("auto", "none")
    names = target_model + f" --draft {draft}" * bool(draft) if is_named else pair.draft_model
    pull = f"`paceline pull {names}` downloads what is missing"
    for role, model in _models(group).items():
        try:
            for source in open_model(model).drafts:
                yield Finding("ok", role, f"{source.directory}, {len(source.weight_files)} files of weights")
        except ModelError as error:
            yield Finding("error", role, str(error), pull)
    if known and group.draft is None and group.method.proposes and pair.draft_model == "auto":
        yield Finding("warning", "draft", "without one, only earlier text is copied", f"{pull}; draft_model={known}")


def pair_findings(config: AppConfig) -> Iterator[Finding]:
    """Check kinds, tokenizers and memory of models that are there; this imports torch."""
    from engine.execution.registry import survey

    group = group_config(config)
    engine, size = group.engine, group.tensor_parallel_size
    target, *drafts = map(open_model, _models(group).values())
    if group.target.head is not None:  # a head is surveyed with its target, and has its tokens
        drafts = []
    try:
        check_kinds(target, drafts[0] if drafts else None, group.method)
        target.check_length(engine.max_model_len)
        shared_ids = [shared_tokens(target, each) for draft in drafts for each in draft.drafts]
        has_one_gpu = shares_gpu(group, placement_bundles(group, num_gpus=this_machine()[0]["GPU"]))
        target_survey, *draft_surveys = [
            survey(target, engine, world_size=size),
            *(survey(draft, engine) for draft in drafts),
        ]
        on_cpu = target_survey.device == "cpu"
        workers = [target_survey.footprint] * (size if on_cpu else 1)
        workers += [draft.footprint for draft in draft_surveys if on_cpu or has_one_gpu]
        engine = replace(engine, max_model_len=target_survey.footprint.max_model_len)
        cache = plan_cache(target_survey.free_bytes, workers, engine, device=target_survey.device)
    except (ConfigError, ModelError, PlacementError) as error:
        advice = (
            f"pull {known_draft(target.path) or 'a draft of its family'}, or draft without a model: drafting=suffix"
        )
        yield Finding("error", "pair", str(error), advice if drafts else "choose another target, or other settings")
        return
    weights = " and ".join(size_text(model.footprint.weight_bytes) for model in (target_survey, *draft_surveys))
    room = f"{cache.num_blocks * engine.block_size:,} tokens fit into the cache"
    tokens = f"{len(target.tokenizer)} tokens{' in each' * (bool(shared_ids) and not any(shared_ids))}"
    for shared in filter(None, shared_ids):
        tokens += f", of which the draft has {len(shared)}, by other ids"
    yield Finding("ok", "pair", f"{tokens}, weights of {weights}, {room}")


def weight_file_bytes(config: AppConfig) -> int:
    """Return the size of all weight files of the pair."""
    models = [each for model in _models(group_config(config)).values() for each in open_model(model).drafts]
    return sum(file.stat().st_size for model in models for file in model.weight_files)


def _models(group: GroupConfig) -> dict[str, ModelConfig]:
    head = group.target.head
    draft = group.draft if head is None else ModelConfig(*split_revision(head))
    return {"target": group.target} | ({"draft" if head is None else "head": draft} if draft else {})
