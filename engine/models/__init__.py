"""Which model is this, and where are its weights?

In reading order: `source` (a model's files, each read once), `files` (how JSON and headers are read), `families` (which
architectures are served, and why others are not), `registry` (the kinds by their configuration),
`loader` (from safetensors to a device), `weights` (reads the files), `packed_weights` (reads quantised layers),
`shards` (the slices of one tensor-parallel rank), `layers/` (what its layers are replaced by), `causal_lm` (the loaded
module) and `first_layers` (the model that a target self-drafts with).
"""
