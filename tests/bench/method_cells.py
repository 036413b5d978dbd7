"""MethodCell: one method in one cell of the comparison of methods, and the files that hold them."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

ADAPTIVE = " adaptive"
"""Behind a method's name: `speculation=adaptive` chooses its draft lengths; else they are fixed."""
PLAIN = "none"


@dataclass(frozen=True, slots=True)
class MethodCell:
    """One method in one cell.

    Attributes:
        verification: empty for a peer, which has rules of its own.
        num_tokens: draft tokens, or nodes, of a round at most.
        mean_acceptance_length: tokens of a request per pass, passes without a draft included; 0 where nobody says.
        speedup: tokens/s over those of plain decoding in the same turn, the median of the turns.
        exact: whether every text was plain decoding's.
        large: whether the target is the large one.
    """

    method: str
    verification: str
    num_tokens: int
    temperature: float
    batch_size: int
    domain: str
    mean_acceptance_length: float
    tokens_per_s: float
    speedup: float
    exact: bool
    large: bool

    @property
    def setting(self) -> tuple[int, float]:
        """Batch size and temperature."""
        return self.batch_size, self.temperature

    @property
    def is_peer(self) -> bool:
        """Whether another library computed it."""
        return not self.verification

    @property
    def is_fixed(self) -> bool:
        """Whether it is a method of ours with drafts of a fixed length."""
        return not (self.is_peer or self.method == PLAIN or self.method.endswith(ADAPTIVE))


def write(cells: Iterable[MethodCell], path: Path) -> None:
    """Write cells as a JSON list."""
    path.write_text(json.dumps([asdict(cell) for cell in cells], indent=2) + "\n")


def read(paths: Sequence[Path]) -> list[MethodCell]:
    """Return the cells of several files, in their order."""
    return [MethodCell(**fields) for path in paths for fields in json.loads(path.read_text())]
