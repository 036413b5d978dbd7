"""How many draft tokens, for whom, and what does the drafter do meanwhile?

In reading order: `plan` (the lengths of a round), `planner` (its choice), `budget` (the tokens that are worth it),
`survival` (how likely each is accepted), `round_cost` and `pass_cost` (how long rounds and passes take), `trials`
(lengths that are tried), `overlap` (the choice between run-ahead, alternation and neither), `acceptance` (how often the
places of a chain are accepted) and `stats` (counters of drafts and requests).
"""
