"""How does a draft model draft?

In reading order: `draft_model` (what drafters take), `translated` (a draft with another tokenizer), `draft_cache` (its
keys and values), `feature_store` and `feature_cache` (the target's features), `next_tokens` (how likely each token is),
`token_drawer` (draws tokens pass by pass), `chain_drafter`, `block_drawer` (draws several tokens from a pass),
`block_model_drafter` and `several` (drafts by several models).
"""
