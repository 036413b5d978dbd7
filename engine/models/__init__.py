"""Which model is this, and where are its weights?

In reading order: `source` (a model's files, each read once), `families` (which architectures are served, and why others
are not), `registry` (the kinds by their configuration), `loader` (from safetensors to a device), `weights` (reads the
files), `packed_weights` (reads quantised layers), `shards` (the slices of one tensor-parallel rank), `layers/` (what
its layers are replaced by), `causal_lm` (the loaded module), `first_layers` (the model that a target self-drafts with),
`kinds` (how decoder-only models are served, and limits of those with linear layers), `encoder_decoder` (the served
ones, their limits and prompts) and `t5` (them in a paged cache).
"""
