import pytest

from deployments.config import Limits
from deployments.grammar_check.compiler import GrammarCompiler
from deployments.openai.structured_output import GrammarSource, StructuredOutputs, structured_source
from engine.errors import RequestError
from engine.sampling.grammar import MAX_GBNF_RULES, Grammars


@pytest.fixture
def compiler(grammars: Grammars) -> GrammarCompiler:
    return GrammarCompiler(grammars, Limits(max_grammar_chars=20))


async def test_a_source_that_compiles_becomes_its_grammar(compiler: GrammarCompiler) -> None:
    source = structured_source(StructuredOutputs(regex="a|b"))
    assert await compiler.compile(source) == source.to_grammar()


async def test_a_source_that_is_too_long_is_not_even_converted(compiler: GrammarCompiler) -> None:
    def convert() -> str:
        raise AssertionError

    with pytest.raises(RequestError, match="has 21 characters, at most 20 are allowed") as error:
        await compiler.compile(GrammarSource("the.field", "x" * 21, convert))
    assert error.value.param == "the.field"


@pytest.mark.parametrize("regex", ["(a", "[b-a]"])
async def test_an_error_names_the_field(compiler: GrammarCompiler, regex: str) -> None:
    with pytest.raises(RequestError, match=r"structured_outputs\.regex") as error:
        await compiler.compile(structured_source(StructuredOutputs(regex=regex)))
    assert error.value.param == "structured_outputs.regex"


async def test_a_grammar_of_very_many_rules_is_not_even_converted(grammars: Grammars) -> None:
    rules = "".join(f"r{i} ::= r{i + 1} r{i + 1}\n" for i in range(MAX_GBNF_RULES))
    source = structured_source(StructuredOutputs(grammar=f"root ::= r0\n{rules}"))
    with pytest.raises(RequestError, match="has 1,001 rules in GBNF, at most 1,000 are allowed") as error:
        await GrammarCompiler(grammars, Limits()).compile(source)
    assert error.value.param == "structured_outputs.grammar"
