"""Every drafting method with every verification rule, by domain of text.

In reading order: `domains` (prompts), `pairs` (one loaded pair under many methods, and transformers' own ways),
`large_target` (a slow model with the same texts) and `comparison`.
"""
