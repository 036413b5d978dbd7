"""Who proposes: chain (draft tokens as they are drawn), model (a draft model), run_ahead/ (ahead of the verdict)."""
