"""Loading transformers models.

In reading order: `files` (where they are), `registry` (whether an architecture can be served), `family` (which
models are encoder-decoders), `footprint` (the memory of a model), `loader` (from safetensors to a device),
`shards` (the slices of one tensor-parallel rank), `quantization` (int8 and int4, at load or as saved),
`quantized_linear` (the layer for them), `fusion` (q/k/v and gate/up as one product), `causal_lm` (the loaded
module), `sub_layers` (the same without some of its sub-layers), `encoder_decoder` (T5 in a paged cache) and `tokenizer`
(whether draft and target share their token ids).
"""
