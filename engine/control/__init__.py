"""How many draft tokens, for whom, and do they pay?

In reading order: `plan` (the lengths of a round), `planner` (its choice), `budget` (the tokens that are worth it),
`survival` (how likely each is accepted), `acceptance` (what learns that), `costs` (how long passes and rounds take),
`trials` (lengths that are tried), `overlap` (run-ahead, alternation or neither) and `judge` (whether the draft pays).
"""
