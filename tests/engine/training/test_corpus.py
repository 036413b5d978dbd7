import gzip
from pathlib import Path

import pytest
import torch

from engine.training.checkpoint import TrainingError
from engine.training.corpus import Batches, as_dialogue, read_corpus


def test_every_fiftieth_piece_is_held_out_and_none_is_lost(tmp_path: Path) -> None:
    path = tmp_path / "book.txt"
    paragraphs = [f"{i} " + "x" * 9000 for i in range(100)]
    path.write_text("\n\n".join(paragraphs))
    corpus = read_corpus([path])
    assert [piece.text.split()[0] for piece in corpus.held_out] == ["49", "99"]
    assert len(corpus.training) == 98
    assert read_corpus([tmp_path]) == corpus


def test_three_blank_lines_end_a_document(tmp_path: Path) -> None:
    path = tmp_path / "two.txt.gz"
    path.write_bytes(gzip.compress(b"one\n\nstill one\n\n\n\ntwo"))
    assert [(p.text, p.is_last) for p in read_corpus([path]).training] == [("one\n\nstill one", True), ("two", True)]


def test_dialogue_alternates_and_keeps_every_paragraph() -> None:
    exchanges = as_dialogue("\n\n".join(f"{i} " + "x" * 300 for i in range(10)))
    assert all([message["role"] for message in exchange] == ["user", "assistant"] for exchange in exchanges)
    text = "\n\n".join(message["content"] for exchange in exchanges for message in exchange)
    assert [part.split()[0] for part in text.split("\n\n")] == [str(i) for i in range(10)]


def test_an_epoch_visits_every_window_once_and_a_batch_depends_on_its_index_alone() -> None:
    batches = Batches(torch.arange(1001), length=10, rows=9, seed=3)
    epoch = torch.cat([batches[i] for i in range(11)])
    assert batches.rows_per_epoch == 99
    assert len({int(row[0]) for row in epoch}) == 99
    assert torch.equal(batches[7], batches[7])
    assert torch.equal(epoch.diff(dim=1), torch.ones(99, 10, dtype=torch.int64))
    with pytest.raises(TrainingError, match="corpus has 5 tokens, one row takes 11"):
        Batches(torch.arange(5), length=10, rows=1)
