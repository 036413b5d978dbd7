"""A pair of models so light that many rows fit into the time of a GPU's pass, even on one core.

Weights are random. The draft is the target with a little noise in its weights, so that it agrees with it about as often
as the bundled draft does with its target: the mean acceptance length at k = 4 is 3.2 to 3.5. With 64 rows and k = 4 the
bundled target takes twice the pass of a 70B target on four H100.
"""

from pathlib import Path

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from tests.bench.workload import OWN_PROMPTS

_VOCAB_SIZE = 512
_END = "<|endoftext|>"
_DRAFT_NOISE = 0.02
"""Standard deviation of the draft's noise, relative to that of each weight matrix."""


def make_light_pair(folder: Path) -> tuple[Path, Path]:
    """Write both models and their tokenizer into a folder; return the directories of target and draft."""
    tokenizer = _tokenizer()
    config = transformers.LlamaConfig(
        vocab_size=_VOCAB_SIZE,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=4096,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
        initializer_range=0.3,
    )
    torch.manual_seed(0)
    model = transformers.LlamaForCausalLM(config)
    paths = folder / "target", folder / "draft"
    for path, noise in zip(paths, (0.0, _DRAFT_NOISE), strict=True):
        with torch.no_grad():
            for weights in model.parameters():
                if weights.dim() > 1:
                    weights += noise * weights.std() * torch.randn_like(weights)
        model.save_pretrained(path)
        tokenizer.save_pretrained(path)
    return paths


def _tokenizer() -> transformers.PreTrainedTokenizerFast:
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=_VOCAB_SIZE, special_tokens=[_END], initial_alphabet=alphabet, show_progress=False
    )
    # Every prompt many times over, since the trainer merges pairs only while they are frequent.
    backend.train_from_iterator(OWN_PROMPTS * 50, trainer)
    return transformers.PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=_END)
