"""Whether a draft and a target mean the same by a token id.

Compared are the tokenizers, not `vocab_size`: families pad their embeddings differently (Qwen2.5 does), and a
model pair with equal sizes can still disagree, which would corrupt nothing but the acceptance rate, silently.
"""

from typing import TYPE_CHECKING

from engine.config import ModelConfig
from engine.errors import ModelError, ModelMismatchError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


def load_tokenizer(config: ModelConfig) -> "PreTrainedTokenizerFast":
    """Load a model's tokenizer as its tokenizer.json has it.

    Not by `AutoTokenizer`, which imports torch, and builds some families' anew from that file's vocabulary.

    Raises:
        ModelError: there is none, or only a slow one.
    """
    # Imported here: `serve run` and a worker that only starts come by this file too, and would wait a second for it.
    from transformers import PreTrainedTokenizerFast

    try:
        tokenizer = PreTrainedTokenizerFast.from_pretrained(config.path, revision=config.revision or "main")
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(f"cannot load a tokenizer from {config.path}: {error}") from error
    assert isinstance(tokenizer, PreTrainedTokenizerFast)
    return tokenizer


def check_same_vocabulary(target: ModelConfig, draft: ModelConfig) -> None:
    """Compare the two tokenizers id by id.

    Raises:
        ModelMismatchError: naming the first token that differs.
    """
    ours, theirs = load_tokenizer(target).get_vocab(), load_tokenizer(draft).get_vocab()
    if ours == theirs:
        return
    token, token_id = min(ours.items() ^ theirs.items(), key=lambda item: item[1])
    raise ModelMismatchError(
        f"the draft {draft.path} and the target {target.path} do not share their token ids: "
        f"id {token_id} ({token!r}) is not the same token in both ({len(theirs)} and {len(ours)} tokens)"
    )
