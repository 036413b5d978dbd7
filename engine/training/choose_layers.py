"""`choose-layers`: searches the sub-layers that a target skips when it drafts for itself, for one model and prompts.

The search is that of Draft & Verify (Zhang et al., 2309.08168, section 3.2), with optuna's tree-structured Parzen
estimator in place of a Gaussian process, and the predicted speed-up in place of a measured time. A set is not measured
again, nor if it would be too slow even if all its tokens were accepted. Every trial is written to a file at once, so a
search that was ended goes on from there.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from engine.config import ModelConfig
from engine.drafting.skip_list import SETTING
from engine.execution.eager import EagerBackend
from engine.execution.registry import resolve_device
from engine.models.loader import load_model
from engine.models.tokenizer import load_tokenizer
from engine.sampling.params import SamplingParams
from engine.training.checkpoint import write_whole
from engine.training.errors import TrainingError
from engine.training.self_speculation import Costs, Gain, gain, highest_speedup, measure_acceptance, measure_costs

if TYPE_CHECKING:
    import optuna

PROMPT_TOKENS = 256
_STUDY = "choose-layers"


@dataclass(frozen=True, slots=True)
class SearchOptions:
    """What a search measures, and how long it goes on.

    Attributes:
        num_trials: sets of sub-layers, of earlier runs of the same search included.
        max_draft_tokens: k of the measurement; the best k up to there is part of the result.
        num_tokens: continuation tokens of each prompt.
    """

    num_trials: int = 200
    max_draft_tokens: int = 8
    num_tokens: int = 32
    temperature: float = 0.0
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Choice:
    """The best set so far."""

    skipped: list[str]
    gain: Gain
    num_trials: int


def choose_layers(
    target_folder: Path, prompts: Sequence[str], output: Path, options: SearchOptions, console: Console
) -> Choice:
    """Search, and write the best set to `output`; trials and costs are kept in a file beside it, `output`.trials.

    Raises:
        TrainingError: optuna is missing, or the file's trials are of another search.
    """
    pruned = _optuna().TrialPruned
    target, prompt_ids = _load(target_folder, prompts, options)
    num_layers = target.model.kv_shape.layers
    if num_layers < 2:
        raise TrainingError(f"{target_folder} has {num_layers} layer; there is nothing to choose")
    trials = output.with_name(output.name + ".trials")
    study = _study(trials, _search_key(target_folder, prompt_ids, options), options)
    if "costs" not in study.user_attrs:
        for count in range(1, num_layers):  # the first layers alone, of any number
            study.enqueue_trial({name: index >= count for index in range(num_layers) for name in _names(index)})
        study.set_user_attr("costs", asdict(measure_costs(target, num_layers)))
    costs = Costs(**study.user_attrs["costs"])
    params = SamplingParams(
        temperature=options.temperature, seed=options.seed, max_tokens=options.num_tokens, ignore_eos=True
    )

    def evaluate(trial: "optuna.Trial") -> float:
        skipped = [name for index in range(num_layers) for name in _names(index) if _is_skipped(trial, name)]
        cost_ratio = costs.ratio(skipped)
        if not skipped or all(f"attention.{index}" in skipped for index in range(num_layers)):
            raise pruned
        if highest_speedup(options.max_draft_tokens, cost_ratio) <= _best_value(study) or _is_measured(study, trial):
            raise pruned
        acceptance = measure_acceptance(target, skipped, prompt_ids, params, options.max_draft_tokens)
        trial.set_user_attr("acceptance", acceptance)
        return gain(acceptance, cost_ratio).speedup

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("choosing layers", total=options.num_trials, completed=_num_done(study))
        while _num_done(study) < options.num_trials:
            study.optimize(evaluate, n_trials=1)
            text = f"choosing layers: {_best_value(study):.2f}x"
            progress.update(task, completed=_num_done(study), description=text)
            _write(output, _choice(study, costs), target_folder, options)
    choice = _choice(study, costs)
    _write(output, choice, target_folder, options)
    return choice


def _optuna() -> Any:
    """Return optuna, which only this command needs."""
    try:
        import optuna
    except ImportError as error:
        raise TrainingError("choose-layers needs optuna; `pip install 'paceline[search]'` installs it") from error
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    return optuna


def _load(folder: Path, prompts: Sequence[str], options: SearchOptions) -> tuple[EagerBackend, list[list[int]]]:
    """Return the target, eager because every set would have to be compiled, and the ends of the prompts."""
    config = ModelConfig(str(folder))
    device = resolve_device(config.device)
    dtype = torch.float32 if device.type == "cpu" else torch.bfloat16
    target = EagerBackend(load_model(config, device=device, dtype=dtype))
    tokenizer = load_tokenizer(config)
    room = min(PROMPT_TOKENS, target.info.max_model_len - options.num_tokens - options.max_draft_tokens)
    if room < 1:
        raise TrainingError(f"{folder} has a context of {target.info.max_model_len} tokens, too few for this search")
    return target, [tokenizer.encode(prompt)[-room:] for prompt in prompts]


def _study(path: Path, key: str, options: SearchOptions) -> "optuna.Study":
    """Open the trials of a search, or begin it; a trial in which an earlier run was ended is queued again."""
    optuna = _optuna()
    path.parent.mkdir(parents=True, exist_ok=True)
    storage = optuna.storages.JournalStorage(optuna.storages.journal.JournalFileBackend(str(path)))
    study = optuna.create_study(storage=storage, study_name=_STUDY, direction="maximize", load_if_exists=True)
    if study.user_attrs.setdefault("search", key) != key:
        raise TrainingError(f"{path} holds the trials of another search, of other files or options; remove it first")
    study.set_user_attr("search", key)
    _queue_ended(study)
    # A run that goes on would draw the sets of the first run again with the same seed.
    study.sampler = optuna.samplers.TPESampler(seed=options.seed + len(study.trials))
    return study  # type: ignore[no-any-return]


def _queue_ended(study: "optuna.Study") -> None:
    """Queue the sets again whose measurement has ended without a result: one killed run leaves one."""
    ended = [trial for trial in study.trials if trial.state.name in ("RUNNING", "FAIL")]
    settled = [_params(trial) for trial in study.trials if trial not in ended]
    for trial in ended:
        if trial.state.name == "RUNNING":
            study.tell(trial.number, state=type(trial.state).FAIL)
        if _params(trial) not in settled:
            study.enqueue_trial(_params(trial))
            settled.append(_params(trial))


def _params(trial: "optuna.trial.FrozenTrial") -> dict[str, Any]:
    """Return which sub-layers a trial skips, or is going to skip."""
    params: dict[str, Any] = trial.system_attrs.get("fixed_params", trial.params)
    return params


def _search_key(folder: Path, prompt_ids: Sequence[list[int]], options: SearchOptions) -> str:
    """Return a digest of what trials must have in common; how many there are to be does not matter."""
    parts = {**asdict(options), "num_trials": None, "target": str(folder.resolve()), "prompts": prompt_ids}
    return hashlib.sha256(json.dumps(parts, sort_keys=True).encode()).hexdigest()


def _names(index: int) -> tuple[str, str]:
    return f"attention.{index}", f"mlp.{index}"


def _is_skipped(trial: "optuna.Trial", name: str) -> bool:
    return bool(trial.suggest_categorical(name, [False, True]))


def _num_done(study: "optuna.Study") -> int:
    return sum(trial.state.name in ("COMPLETE", "PRUNED") for trial in study.trials)


def _is_measured(study: "optuna.Study", trial: "optuna.Trial") -> bool:
    return any(other.state.name == "COMPLETE" and other.params == trial.params for other in study.trials)


def _best_value(study: "optuna.Study") -> float:
    """Return the highest speed-up so far, 0 before the first."""
    return max((trial.value for trial in study.trials if trial.value is not None), default=0.0)


def _choice(study: "optuna.Study", costs: Costs) -> Choice:
    """Return the best trial."""
    best = study.best_trial
    skipped = [name for name, is_skipped in best.params.items() if is_skipped]
    return Choice(skipped, gain(best.user_attrs["acceptance"], costs.ratio(skipped)), _num_done(study))


def _write(output: Path, choice: Choice, folder: Path, options: SearchOptions) -> None:
    figures = {
        SETTING: choice.skipped,
        "num_speculative_tokens": choice.gain.num_speculative_tokens,
        "expected_speedup": round(choice.gain.speedup, 4),
        "acceptance_per_position": [round(rate, 4) for rate in choice.gain.acceptance],
        "cost_ratio": round(choice.gain.cost_ratio, 4),
        "target": str(folder),
        "temperature": options.temperature,
        "num_trials": choice.num_trials,
    }
    write_whole(output, (json.dumps(figures, indent=2) + "\n").encode())
