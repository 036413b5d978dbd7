"""Plan: which requests there are, and when the ones of a trace come."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .arms import Arm
from .client import Client
from .options import Options
from .prompts import Prompt, SizedText, read_prompts
from .server import Server, count_prompt_tokens, extension_fields, prompt_fields
from .traces import excerpt, fit, read

_RESERVE = 0.1
"""Share of a model's length that prompts from a trace leave free, because their tokens are only estimated."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The requests of a run, by number. There is no last one: prompts are taken again, with other seeds.

    Attributes:
        times: when the requests of a trace are due, in seconds since its start; None without a trace.
        notes: what a reader of the results must know about the requests.
    """

    prompts: Sequence[Prompt]
    options: Options
    server: Server
    times: Sequence[float] | None = None
    notes: Sequence[str] = ()

    def domain(self, index: int) -> str:
        return self._prompt(index).domain

    def body(self, index: int, arm: Arm, *, cache_salt: str) -> dict[str, Any]:
        """Return a request's body for an arm; only `speculative` and the salt differ between arms."""
        body = self._common(index)
        if self.server.has_extensions:
            body |= extension_fields(cache_salt)
            body["speculative"] |= arm.fields()
        return body

    def reference_body(self, index: int, *, has_extensions: bool) -> dict[str, Any]:
        """Return the body that asks a reference for the same text, without drafts."""
        return self._common(index) | ({"speculative": {"enabled": False}} if has_extensions else {})

    def _common(self, index: int) -> dict[str, Any]:
        prompt = self._prompt(index)
        body = {
            "model": self.server.model,
            **prompt_fields(self.options.endpoint, prompt.content),
            "max_tokens": prompt.num_tokens or self.options.max_tokens,
            "temperature": self.options.temperature,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if self.options.temperature:
            body["seed"] = self.options.seed + index
        if self.server.has_extensions and (self.options.ignore_eos or prompt.num_tokens):
            body["ignore_eos"] = True
        return body

    def _prompt(self, index: int) -> Prompt:
        return self.prompts[index % len(self.prompts)]


async def make_plan(options: Options, client: Client, server: Server) -> Plan:
    """Read the prompts, and make text of the lengths that a trace asks for.

    Raises LoadError if a file cannot be read, or the server refuses a prompt.
    """
    prompts = read_prompts(options.prompts.split(","), seed=options.seed)
    if options.trace is None:
        return Plan(prompts, options, server)

    async def count_tokens(text: str) -> int:
        return await count_prompt_tokens(client, server, options.endpoint, text)

    text = SizedText(prompts, count_tokens)
    await text.calibrate()
    arrivals = excerpt(read(options.trace), duration_s=options.duration_s, requests_per_s=options.rate)
    notes: list[str] = []
    if server.max_model_len is not None:
        room = int(server.max_model_len * (1 - _RESERVE))
        max_tokens = min(options.max_tokens, room // 2)
        arrivals, num_cut = fit(arrivals, max_prompt_tokens=room - max_tokens, max_tokens=max_tokens)
        if num_cut:
            notes.append(
                f"{num_cut} of the trace's {len(arrivals)} requests were cut to {room - max_tokens} prompt tokens and "
                f"{max_tokens} new ones (--max-tokens; the model takes {server.max_model_len})"
            )
    replayed = [
        Prompt(
            text.about(arrival.num_prompt_tokens, seed, arrival.block_ids)
            if arrival.prompt is None
            else arrival.prompt,
            domain=options.trace.stem,
            num_tokens=arrival.num_tokens,
        )
        for seed, arrival in enumerate(arrivals)
    ]
    return Plan(replayed, options, server, [arrival.time_s for arrival in arrivals], notes)
