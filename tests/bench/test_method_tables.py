"""What the tables say of cells that are made up."""

from tests.bench import method_tables
from tests.bench.method_cells import MethodCell


def cell(method, speedup, *, num_tokens=4, verification="coupled", domain="code", heat=0.0, exact=True):
    return MethodCell(method, verification, num_tokens, heat, 1, domain, 2.0, 10 * speedup, speedup, exact, False)


CELLS = [
    cell("none", 1.0, num_tokens=0),
    cell("model", 1.5, num_tokens=2),
    cell("model", 2.0),
    cell("model adaptive", 1.9),
    cell("model+suffix", 2.4),
    cell("transformers", 0.5, verification="", num_tokens=0),
    cell("transformers-lookup", 0.8, verification="", num_tokens=0),
]


def cells_of(table):
    """The texts of a table's rows."""
    return [[list(column.cells)[row] for column in table.columns] for row in range(table.row_count)]


def test_the_fastest_method_is_compared_with_the_fastest_peer():
    assert cells_of(method_tables.best(CELLS)) == [["1", "0", "2.40; 3.00 model+suffix coupled 4"]]


def test_chosen_lengths_are_compared_with_the_best_fixed_one():
    assert cells_of(method_tables.adaptive(CELLS)) == [["1", "0", "model", "coupled", "0.95 (k=4)"]]
    slow = [cell("none", 1.0, num_tokens=0), cell("model", 0.5), cell("model adaptive", 0.9)]
    assert cells_of(method_tables.adaptive(slow)) == [["1", "0", "model", "coupled", "0.90 (k=0)"]]


def test_copies_are_compared_with_the_model_at_the_same_length():
    assert cells_of(method_tables.with_copies(CELLS)) == [["1", "0", "coupled", "4", "1.20; 2.40"]]


def test_a_domain_that_a_method_was_not_measured_in_is_left_empty():
    table = method_tables.every_row([*CELLS, cell("none", 1.0, num_tokens=0, domain="chat")])
    rows = {(row[2], row[4]): row[5:] for row in cells_of(table)}
    assert rows["none", "0"] == ["1.00; 2.00;   10", "1.00; 2.00;   10", "yes"]
    assert rows["model", "2"] == ["1.50; 2.00;   15", "", "yes"]


def test_only_where_the_rule_promises_no_more_another_text_is_no_fault():
    texts = [
        cell("model", 1.0, verification="rejection", heat=0.7, exact=False),
        cell("model", 1.0, verification="rejection", exact=False),
        cell("model", 1.0, heat=0.7, exact=False),
        cell("transformers", 1.0, verification="", heat=0.7, exact=False),
    ]
    assert [cells_of(method_tables.every_row([one]))[0][-1] for one in texts] == ["law", "no", "no", "law"]


def test_a_first_token_is_shown_by_method_and_domain():
    first = [
        method_tables.FirstToken(name, 1, 0.0, domain, seconds)
        for name, domain, seconds in (("none", "code", 0.1), ("model", "code", 0.12), ("none", "chat", 0.2))
    ]
    table = method_tables.costs(first, 800_000_000, 2_400_000)
    assert cells_of(table) == [["1", "0", "none", "100", "200"], ["1", "0", "model", "120", ""]]
    assert "target 800 MB, draft model 2.4 MB" in table.caption
