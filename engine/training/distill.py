"""`distill`: trains a draft to be accepted by a target.

The draft learns the target's next-token distribution (forward KL divergence) on the corpus and on text that the target
generated, which is the text that it will draft.
"""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import torch.nn.functional as F
from rich.console import Console
from rich.progress import track
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from engine.training.checkpoint import Checkpointer, save_model, write_whole
from engine.training.corpus import Batches, Corpus, read_corpus, render, tokenize
from engine.training.loop import Options, Plan, Task, autocast, make_optimizers, train
from engine.training.measured_acceptance import (
    CONTINUATION_TOKENS,
    TEMPERATURES,
    Continuations,
    acceptance_table,
    check_same_vocabulary,
    continue_prompts,
)
from engine.training.small_model import Size, build_model, load_model

PROMPT_TOKENS = 64
HELD_OUT_PROMPTS = 32
CONTINUED = "continued.safetensors"
REPORT_K = 4
LONG_EVERY = 16
"""Period of batches whose rows have full context length, so that the draft stays useful in long chats."""
_GENERATION_BATCH = 64


@dataclass(frozen=True, kw_only=True)
class DistillOptions(Options):
    """The options of `distill`."""

    batch_tokens: int = 4096
    continuations: int = 2048
    lr_scale: float = 1.0


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
) -> None:
    """Distil the target into a loaded or new draft, and write it to `output`."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    target, tokenizer = load_model(target_folder, device)
    if isinstance(draft, Size):
        model: PreTrainedModel = build_model(draft, tokenizer, options.seed)
        torch.nn.Module.to(model, device)
    else:
        model, _ = load_model(draft, device)
        check_same_vocabulary(target_folder, draft)
    corpus = read_corpus(paths)
    tokens = tokenize(render(corpus.training, tokenizer), tokenizer)
    console.log(
        f"{len(tokens):,} training tokens, target {target.num_parameters() / 1e6:.2f} M parameters, "
        f"draft {model.num_parameters() / 1e6:.2f} M, {device.type}"
    )
    held_out = continue_held_out(target, tokenizer, corpus)
    continued = continue_training_text(target, tokens, output, options, console) if options.continuations else None
    checkpointer = Checkpointer(output, asdict(options), model, make_optimizers(model, options.lr_scale))

    def report(when: str) -> None:
        measured = {continuations.temperature: continuations.acceptance(model) for continuations in held_out}
        console.print(acceptance_table(measured, REPORT_K, f"acceptance on held-out prompts, {when}, k = {REPORT_K}"))

    if not checkpointer.path.exists():
        report("after 0 steps")
    task = _task(target, model, tokens, continued, options)
    train(task, plan, checkpointer, console, lambda step: report(f"after {step:,} steps"))
    save_model(output, model, tokenizer)
    console.log(f"wrote {output}")
    model, _ = load_model(output, device)
    report("as written, in bfloat16 weights")


def continue_held_out(
    target: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, corpus: Corpus
) -> list[Continuations]:
    """Continue the beginnings of held-out pieces with the target, once per temperature."""
    context = target.config.max_position_embeddings
    length, num_new = min(PROMPT_TOKENS, context // 2), min(CONTINUATION_TOKENS, context // 2)
    encoded = [tokenizer(piece.text, verbose=False)["input_ids"][:length] for piece in corpus.held_out]
    prompts = [row for row in encoded if row][:HELD_OUT_PROMPTS]
    return [continue_prompts(target, prompts, num_new, temperature) for temperature in TEMPERATURES]


def _task(
    target: PreTrainedModel, draft: PreTrainedModel, tokens: Tensor, continued: Tensor | None, options: DistillOptions
) -> Task:
    context = min(target.config.max_position_embeddings, draft.config.max_position_embeddings, len(tokens) - 1)
    # The models themselves stay eager for measuring, where lengths vary.
    functions: list[Any] = [target, draft, divergence]
    if options.compile:
        functions = [torch.compile(function, dynamic=False) for function in functions]
    target_forward, draft_forward, loss_of = functions
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

    return Task(mixed_batches(tokens, continued, options, context), loss)


def mixed_batches(
    tokens: Tensor, continued: Tensor | None, options: DistillOptions, context: int
) -> Callable[[int], Tensor]:
    """Return a function that maps a step to its batch: half corpus text, half the target's text, or long rows."""
    length = min(options.length, context)
    num_rows = max(1, options.batch_tokens // length // (1 if continued is None else 2))
    corpus = Batches(tokens, length, num_rows, options.seed)
    long = Batches(tokens, context, max(1, options.batch_tokens // context), options.seed + 2)

    def batch(step: int) -> Tensor:
        if step % LONG_EVERY == LONG_EVERY - 1:
            return long[step]
        if continued is None:
            return corpus[step]
        generator = torch.Generator().manual_seed((options.seed + 1) * 1_000_003 + step)
        return torch.cat([corpus[step], continued[torch.randint(len(continued), (num_rows,), generator=generator)]])

    return batch


def continue_training_text(
    target: PreTrainedModel, tokens: Tensor, output: Path, options: DistillOptions, console: Console
) -> Tensor:
    """Return the target's continuations of training text, [continuations, length + 1]; a resumed run reads them."""
    path = output / CONTINUED
    if path.exists():
        return safetensors.torch.load_file(path)["tensor"]
    context = min(options.length, target.config.max_position_embeddings, len(tokens) - 1)
    prompt_length = min(PROMPT_TOKENS, context // 4)
    windows = Batches(tokens, prompt_length, min(_GENERATION_BATCH, options.continuations), options.seed + 3)
    temperatures = (1.0, 0.7, 1.0, 0.0)
    rows = []
    batches = range(-(-options.continuations // windows.rows))
    for i in track(batches, "generating", console=console, disable=not console.is_terminal):
        prompts = windows[i][:, :prompt_length].tolist()
        temperature = temperatures[i % len(temperatures)]
        written = continue_prompts(target, prompts, context + 1 - prompt_length, temperature, i * windows.rows)
        rows.append(written.token_ids.cpu())
    continued = torch.cat(rows)
    write_whole(path, safetensors.torch.save({"tensor": continued}))
    return continued
