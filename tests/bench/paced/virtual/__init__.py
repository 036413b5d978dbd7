"""The twin: speculation groups in virtual time, so that more rows can be timed than a CPU computes in real time.

In reading order: `clock` (an event loop whose time jumps, and processes with clocks of their own), `wire` (links and
workers), `twin` (groups: what is between engine and models is the product's own), `measures`, `learning`, `report` and
`commands`.
"""
