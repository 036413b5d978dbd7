"""Which model is this, and where are its weights?

In reading order: `source` (a model's files, each read once), `files` (reads JSON and headers), `families` (which
architectures are served, and why others are not), `registry` (the kinds of models by their configuration), `loader`
(from safetensors to a device), `weights` (reads the files), `packed_weights` (reads quantised layers), `shards` (one
tensor-parallel rank's slices), `layers/` (replacements of a model's layers), `causal_lm` (the loaded module),
`first_layers` (the model that a target self-drafts with) and `shared_tokens` (a target's and its draft's).
"""
