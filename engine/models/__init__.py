"""Transformers models: registry (which can be served), tokenizer, shards, fusion, causal_lm."""
