"""shared_tokens: which tokens a target and its draft have in common."""

import filecmp

from engine.errors import ModelMismatchError
from engine.models.source import ModelSource

_MARKS = str.maketrans("Ġ▁Ċ", "  \n")
"""How byte-level and SentencePiece tokenizers write a space, and byte-level tokenizers a new line."""


def shared_tokens(target: ModelSource, draft: ModelSource) -> dict[int, int] | None:
    """Map the target's token ids to the draft's, or return None if all are the same.

    Raises ModelMismatchError if less than half of the draft's tokens are shared.
    """
    first, second = (source.directory / "tokenizer.json" for source in (target, draft))
    if first.exists() and second.exists() and filecmp.cmp(first, second, shallow=False):
        return None
    target_ids, draft_ids = target.tokenizer.get_vocab(), draft.tokenizer.get_vocab()
    if target_ids == draft_ids:
        return None
    target.refuse("tokenizers")
    texts = {token.translate(_MARKS): token_id for token, token_id in draft_ids.items() if token_id < draft.vocab_size}
    shared = {
        token_id: texts[text]
        for token, token_id in target_ids.items()
        if (text := token.translate(_MARKS)) in texts and token_id < target.vocab_size
    }
    if 2 * len(shared) < len(draft_ids):
        raise ModelMismatchError(
            f"the draft {draft.path} and the target {target.path} have {len(shared):,} tokens in common, "
            f"{len(shared) / len(draft_ids):.0%} of the draft's {len(draft_ids):,}; at least half is needed"
        )
    ends = dict.fromkeys(target.eos_token_ids, draft.eos_token_ids[0]) if draft.eos_token_ids else {}
    return ends | shared  # ends end a text, whatever they are called
