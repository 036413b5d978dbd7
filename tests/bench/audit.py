"""Audit of our methods: are the texts of their first batches those of the target alone, in this process?"""

from collections import defaultdict
from collections.abc import Sequence

import torch
from rich.console import Console

from engine.audit import Record
from engine.llm import LLM
from engine.models.loader import resolve_device, resolve_dtype
from engine.params import SamplingParams
from tests.bench.figures import Row
from tests.bench.workload import Workload

NEAR, NEAR_16_BITS = 1e-3, 0.5
"""Tokens whose scores are at most so far apart may change places, since rounding depends on batch and kernels."""


def audit(rows: Sequence[Row], workload: Workload, console: Console) -> list[str]:
    """Audit each different text once and print a line; return what is not the target's."""
    owners: dict[tuple[tuple[int, ...], float, int, tuple[int, ...]], set[str]] = defaultdict(set)
    for row in rows:
        for seed, (prompt, ids) in enumerate(zip(workload.batches(row.cell)[0], row.texts, strict=False)):
            owners[tuple(prompt), row.temperature, seed, tuple(ids)].add(row.name)
    if not owners:
        return []
    near = NEAR if resolve_dtype(workload.dtype, resolve_device(workload.device)) == torch.float32 else NEAR_16_BITS
    places = {"dtype": workload.dtype, "device": workload.device, "compile": workload.compile}
    llm = LLM(workload.target, "none", num_speculative_tokens=64, max_num_seqs=8, **places)
    records = [
        Record(prompt, SamplingParams(heat, seed=seed, max_tokens=len(ids), ignore_eos=True), ids, "length")
        for prompt, heat, seed, ids in owners
    ]
    findings = [finding for _, finding in sorted(llm.audit(records), key=lambda pair: pair[0])]
    num_equal, num_near = (sum(finding.is_equal(bound) for finding in findings) for bound in (0.0, near))
    counts = f"{num_equal} are the target's, {num_near - num_equal} but for near ties (up to {near:g})"
    console.print(f"audited: of {len(records)} different texts, {counts}", highlight=False)
    return [
        f"{', '.join(sorted(names))}: a text at T={record.params.temperature:g} is not the target's: "
        f"{finding.differences[:1]} {finding.problems}"
        for record, names, finding in zip(records, owners.values(), findings, strict=True)
        if not finding.is_equal(near)
    ]
