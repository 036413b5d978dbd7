"""How many draft tokens, for whom, and do they pay?

In reading order: `plan` (the draft lengths of a round), `planner` (chooses them), `budget` (which draft tokens pay),
`survival` (how likely draft tokens are accepted), `acceptance` (learns acceptance rates), `costs` (how long passes and
rounds take), `trials` (tries other lengths), `overlap` (run-ahead, alternation or neither) and `judge` (whether the
draft pays).
"""
