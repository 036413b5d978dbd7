"""`distill`: trains a draft to be accepted by a target.

The draft learns the target's next-token distribution (forward KL divergence) on the corpus and on text that the target
generated, because that is the text it will draft.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import track
from rich.table import Table
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from engine.config import ModelConfig
from engine.models.tokenizer import check_same_vocabulary
from engine.training.acceptance import CONTINUATION_TOKENS, TEMPERATURES, Continuations, continue_prompts
from engine.training.checkpoint import Checkpointer, load_tensor, save_model, save_tensor
from engine.training.corpus import Batches, Corpus, Rows, read_corpus, render, tokenize
from engine.training.loop import Plan, autocast, train
from engine.training.models import Size, build_model, count_parameters, load_model
from engine.training.optimizer import make_optimizers

PROMPT_TOKENS = 64
HELD_OUT_PROMPTS = 32
CONTINUED = "continued.safetensors"
REPORT_K = 4
_GENERATION_BATCH = 64


@dataclass(frozen=True)
class DistillOptions:
    """The options that determine the result of `distill`, besides models and corpus."""

    batch_tokens: int = 4096
    length: int = 256
    long_every: int = 16
    continuations: int = 2048
    seed: int = 0
    lr_scale: float = 1.0
    compile: bool = False


@dataclass(frozen=True)
class Distillation:
    """The loss and the batches of `distill`: half of each batch is corpus text, half is text that the target generated.

    Every `long_every`th batch has rows of full context length, so that the draft stays useful in long chats.
    """

    corpus: Batches
    continued: Rows | None
    long: Batches
    long_every: int
    loss: Callable[[Tensor], Tensor]

    def batch(self, step: int) -> Tensor:
        """Return the rows of a step: [rows, length + 1]."""
        if step % self.long_every == self.long_every - 1:
            return self.long[step]
        if self.continued is None:
            return self.corpus[step]
        return torch.cat([self.corpus[step], self.continued[step]])


def divergence(logits: Tensor, target_logits: Tensor) -> Tensor:
    """Return the mean KL(target || draft) in nats per token, a scalar. Both logits: [tokens, vocab]."""
    log_probs = logits.float().log_softmax(-1)
    target_log_probs = target_logits.float().log_softmax(-1)
    return F.kl_div(log_probs, target_log_probs, reduction="batchmean", log_target=True)


def distill(
    paths: list[Path],
    target_folder: Path,
    draft: Path | Size,
    output: Path,
    options: DistillOptions,
    plan: Plan,
    console: Console,
) -> bool:
    """Distil the target into a draft and write it to `output`; return False if interrupted."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    target, tokenizer = load_model(target_folder, device)
    model = load_draft(draft, target_folder, tokenizer, options.seed).to(device)  # type: ignore[arg-type]
    corpus = read_corpus(paths)
    tokens = tokenize(render(corpus.training, tokenizer), tokenizer)
    console.log(
        f"{len(tokens):,} training tokens, target {count_parameters(target) / 1e6:.2f} M parameters, "
        f"draft {count_parameters(model) / 1e6:.2f} M, {device.type}"
    )
    held_out = continue_held_out(target, tokenizer, corpus)
    task = _task(target, model, tokens, options)
    if options.continuations:
        rows = _continued(target, tokens, output, options, console)
        task = replace(task, continued=Rows(rows, task.corpus.rows, options.seed + 1))
    optimizers = make_optimizers(model, options.lr_scale)
    checkpointer = Checkpointer(output, asdict(options), model, optimizers)

    def report(step: int) -> None:
        show_acceptance(held_out, model, f"after {step:,} steps", console)

    if not checkpointer.path.exists():
        report(0)
    if not train(task, plan, checkpointer, console, report):
        return False
    save_model(output, model, tokenizer)
    console.log(f"wrote {output}")
    show_acceptance(held_out, load_model(output, device)[0], "as written, in bfloat16 weights", console)
    return True


def load_draft(
    draft: Path | Size, target_folder: Path, tokenizer: PreTrainedTokenizerBase, seed: int
) -> PreTrainedModel:
    """Load a draft that shares the target's token ids, or initialise one of a size."""
    if isinstance(draft, Size):
        return build_model(draft, tokenizer, seed)
    model, _ = load_model(draft)
    check_same_vocabulary(ModelConfig(str(target_folder)), ModelConfig(str(draft)))
    return model


def continue_held_out(
    target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, corpus: Corpus
) -> list[Continuations]:
    """Continue the beginnings of held-out pieces with the target, once per temperature."""
    context = target.config.max_position_embeddings
    length, num_new = min(PROMPT_TOKENS, context // 2), min(CONTINUATION_TOKENS, context // 2)
    encoded = [tokenizer(piece.text, verbose=False)["input_ids"][:length] for piece in corpus.held_out]
    prompts = [row for row in encoded if row][:HELD_OUT_PROMPTS]
    return [continue_prompts(target, prompts, num_new, t) for t in TEMPERATURES]


def show_acceptance(held_out: list[Continuations], draft: PreTrainedModel, when: str, console: Console) -> None:
    """Print acceptance by position and mean acceptance length for each temperature."""
    table = Table(title=f"acceptance on held-out prompts, {when}, k = {REPORT_K}")
    for heading in ("temperature", *map(str, range(1, REPORT_K + 1)), "mean acceptance length"):
        table.add_column(heading, justify="right")
    for continuations in held_out:
        acceptance = continuations.acceptance(draft)
        rates = [f"{rate:.3f}" for rate in acceptance.per_position(REPORT_K)]
        mean = f"{acceptance.mean_acceptance_length(REPORT_K):.2f}"
        table.add_row(f"{continuations.temperature:g}", *rates, mean)
    console.print(table)


def _task(target: PreTrainedModel, draft: PreTrainedModel, tokens: Tensor, options: DistillOptions) -> Distillation:
    context = min(target.config.max_position_embeddings, draft.config.max_position_embeddings)
    context = min(context, len(tokens) - 1)
    length = min(options.length, context)
    # With continuations, they fill half of each batch.
    rows = options.batch_tokens // length // (2 if options.continuations else 1)
    # The models themselves stay eager for measuring, where lengths vary.
    target_forward, draft_forward, loss_of = map(_compiler(options.compile), (target, draft, divergence))
    # Families pad their vocabularies differently; padding ids never occur in text.
    vocab = min(target.config.vocab_size, draft.config.vocab_size)

    def loss(rows: Tensor) -> Tensor:
        token_ids = rows[:, :-1].contiguous().to(draft.device)
        with autocast(draft.device):
            with torch.no_grad():
                target_logits = target_forward(input_ids=token_ids, use_cache=False).logits
            logits = draft_forward(input_ids=token_ids, use_cache=False).logits
        flat = (rows_logits[..., :vocab].flatten(0, 1) for rows_logits in (logits, target_logits))
        value: Tensor = loss_of(*flat)
        return value

    return Distillation(
        corpus=Batches(tokens, length, max(1, rows), options.seed),
        continued=None,
        long=Batches(tokens, context, max(1, options.batch_tokens // context), options.seed + 2),
        long_every=options.long_every,
        loss=loss,
    )


def _compiler(enabled: bool) -> Callable[[Any], Any]:
    return partial(torch.compile, dynamic=False) if enabled else lambda module: module


def _continued(
    target: PreTrainedModel, tokens: Tensor, output: Path, options: DistillOptions, console: Console
) -> Tensor:
    """Continue windows of the training text with the target; saved in `output` for a resumed run.

    Returns:
        [continuations, length + 1].
    """
    path = output / CONTINUED
    if path.exists():
        return load_tensor(path)
    context = min(options.length, target.config.max_position_embeddings, len(tokens) - 1)
    prompt_length = min(PROMPT_TOKENS, context // 4)
    windows = Batches(tokens, prompt_length, min(_GENERATION_BATCH, options.continuations), options.seed + 3)
    temperatures = (1.0, 0.7, 1.0, 0.0)
    rows = []
    batches = range(-(-options.continuations // windows.rows))
    for i in track(batches, "generating", console=console, disable=not console.is_terminal):
        prompts = windows[i][:, :prompt_length].tolist()
        num_new = context + 1 - prompt_length
        temperature = temperatures[i % len(temperatures)]
        written = continue_prompts(target, prompts, num_new, temperature, first_seed=i * windows.rows)
        rows.append(written.token_ids.cpu())
    continued = torch.cat(rows)
    save_tensor(path, continued)
    return continued
