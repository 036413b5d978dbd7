"""Loads tokenizers, and checks that draft and target share their token ids.

The check compares tokenizers and not `vocab_size`, because families pad their embeddings differently (Qwen2.5 does),
and because a pair with equal sizes but different ids would silently lose its acceptance rate.
"""

from typing import TYPE_CHECKING

from engine.config import ModelConfig
from engine.errors import ModelError, ModelMismatchError
from engine.models.files import model_directory

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast


def load_tokenizer(config: ModelConfig) -> "PreTrainedTokenizerFast":
    """Load a model's tokenizer from its tokenizer.json.

    `AutoTokenizer` is not used: it imports torch, and rebuilds the tokenizers of some families from the vocabulary.

    Raises:
        ModelError: there is no such model, or it has no tokenizer.json.
    """
    # Imported here, because it takes a second, and `serve run` and starting workers import this file as well.
    from transformers import PreTrainedTokenizerFast

    try:
        tokenizer = PreTrainedTokenizerFast.from_pretrained(model_directory(config))
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(f"cannot load a tokenizer from {config.path}: {error}") from error
    assert isinstance(tokenizer, PreTrainedTokenizerFast)
    return tokenizer


def check_same_vocabulary(target: ModelConfig, draft: ModelConfig) -> None:
    """Check that two tokenizers give every token the same id.

    Raises:
        ModelMismatchError: they do not; the message names the first differing token.
    """
    target_ids, draft_ids = load_tokenizer(target).get_vocab(), load_tokenizer(draft).get_vocab()
    if target_ids == draft_ids:
        return
    token, token_id = min(target_ids.items() ^ draft_ids.items(), key=lambda item: item[1])
    raise ModelMismatchError(
        f"the draft {draft.path} and the target {target.path} do not share their token ids: "
        f"id {token_id} ({token!r}) is not the same token in both ({len(draft_ids)} and {len(target_ids)} tokens)"
    )
