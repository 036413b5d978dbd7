"""Generation: an engine over a group of processes, or over one process, and the text it has committed."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from cluster.config import GroupConfig
from cluster.group import SpeculationGroup
from engine.config import EngineConfig, ModelConfig
from engine.engine import Engine
from engine.execution.registry import make_backend
from engine.models.loader import load_model
from engine.models.registry import open_model
from engine.params import SamplingParams
from engine.protocols import NoDrafter
from engine.verification.verifier import ModelVerifier
from tests.cluster.fakes import process_ids
from tests.waiting import wait_for

ENGINE = EngineConfig(num_speculative_tokens=3, max_num_seqs=4, num_blocks=64)
PROMPTS = [[5, 9, 2], [7] * 20, list(range(2, 40))]
PARAMS = [
    SamplingParams(temperature=0, max_tokens=60, ignore_eos=True),
    SamplingParams(temperature=0.7, seed=11, max_tokens=60, ignore_eos=True, prompt_logprobs=2),
    SamplingParams(temperature=1.0, top_p=0.9, presence_penalty=0.5, seed=3, max_tokens=60, ignore_eos=True),
]

Text = dict[str, list[int]]


@dataclass
class Generation:
    """One engine, its requests, and what it has committed."""

    engine: Engine
    text: Text

    async def step(self) -> None:
        for output in await self.engine.step():
            self.text[output.request_id] += output.token_ids

    async def run(self, until: Callable[[], bool] = lambda: False) -> None:
        while self.engine.has_work and not until():
            await self.step()

    @property
    def num_tokens(self) -> int:
        return sum(map(len, self.text.values()))


def submit(engine: Engine) -> Generation:
    for i, (prompt, params) in enumerate(zip(PROMPTS, PARAMS, strict=True)):
        engine.add(str(i), prompt, params)
    return Generation(engine, {str(i): [] for i in range(len(PROMPTS))})


def model_config(path: Path) -> ModelConfig:
    return ModelConfig(str(path), dtype="float32", device="cpu", num_threads=1)


async def text_of_one_process(config: GroupConfig) -> Text:
    torch.set_num_threads(1)
    source = open_model(replace(config.target, execution="torch"))
    model = make_backend(load_model(source), source)
    verifier = ModelVerifier(model, ENGINE)
    generation = submit(
        Engine(ENGINE, model.info, drafter=NoDrafter(), verifier=verifier, num_blocks=verifier.num_blocks)
    )
    await generation.run()
    return generation.text


@asynccontextmanager
async def running(config: GroupConfig) -> AsyncIterator[SpeculationGroup]:
    group = await SpeculationGroup.start(config)
    try:
        yield group
    finally:
        pids = process_ids(group).values()
        await group.stop()
        await wait_for(lambda: not any(map(is_alive, pids)))


def generate(group: SpeculationGroup, **settings: object) -> Generation:
    return submit(
        Engine(
            replace(group.config.engine, **settings),
            group.target_info,
            drafter=group.drafter,
            verifier=group.remote_verifier,
            num_blocks=group.num_blocks,
            overlaps=("ahead",) if group.config.run_ahead == "on" else (),
        )
    )


def is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rsplit(") ", 1)[1][0]
    except (FileNotFoundError, ProcessLookupError):  # the latter while it ends
        return False
    return state != "Z"
