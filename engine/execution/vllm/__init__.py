"""How does vLLM compute the target's passes?

In reading order: `arguments` (our settings in vLLM's words, and what is refused), `vllm_verifier` (a round's rows to
verdicts), `schedule` (rows to vLLM's `SchedulerOutput`), `rank` (starts vLLM's worker of one rank in this process),
`runner` (what knows vLLM's model runner), `tapped_features` (what a head on the draft worker reads). Nothing outside
this folder imports vllm.
"""
