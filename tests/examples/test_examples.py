"""The examples run, and do what their README says; the OpenAI client's is in `tests/e2e/served`."""

import json
import re
import shlex
import subprocess
from functools import partial
from pathlib import Path

import pytest

from deployments.config import AppConfig
from engine import LLM, SamplingParams, check_drafter, check_rule
from engine.laws import LawError
from engine.verification.draft_rows import decide_by
from engine.verification.rule import Rule
from tests.examples import rule
from tests.examples.drafter import BigramDrafter

HERE = Path(__file__).parent
PARAMS = SamplingParams(temperature=0.7, max_tokens=24, seed=1)


@pytest.fixture(scope="module")
def plain():
    return LLM(drafting="none", compile="off").generate(["Up betimes"], PARAMS)[0].outputs[0].text


def test_the_drafter_holds_the_law_and_the_engine_takes_it(plain):
    check_drafter(BigramDrafter, rules=["coupled"])
    llm = LLM(drafting="tests.examples.drafter:BigramDrafter", compile="off")
    assert llm.generate(["Up betimes"], PARAMS)[0].outputs[0].text == plain
    assert llm.stats.num_accepted_tokens > 0


def test_the_rule_holds_the_law_and_the_engine_takes_it():
    check_rule(rule.RULE)
    # Texts of these rules depend on the lengths of the drafts, which adaptive ones measure.
    llm = LLM(verification="tests.examples.rule:RULE", speculation="fixed", compile="off")
    builtin = LLM(verification="rejection", speculation="fixed", compile="off")
    assert llm.generate(["Up betimes"], PARAMS)[0].outputs[0].text == (
        builtin.generate(["Up betimes"], PARAMS)[0].outputs[0].text
    )
    assert llm.stats.num_accepted_tokens > 0


def test_without_the_subtraction_the_rule_fails():
    def accept(target_probs, coins, drafts):
        paths, _ = rule.accept(target_probs, coins, drafts)
        starts = [sum(1 + len(draft.token_ids) for draft in drafts[:i]) for i in range(len(drafts))]
        return paths, target_probs[[start + len(path) for start, path in zip(starts, paths, strict=True)]]

    with pytest.raises(LawError, match=r"do not have the target's law with drafts from another law: .* begin with"):
        check_rule(Rule(partial(decide_by, accept), needs_draft_rows=True))


def test_the_notebooks_cells_run_in_order():
    cells = json.loads((HERE / "notebook.ipynb").read_text())["cells"]
    names = {}
    for cell in cells:
        if cell["cell_type"] == "code":
            exec("".join(cell["source"]), names)
    assert names["plain"].text


def test_the_script_for_two_machines_is_a_script_with_settings_that_exist():
    path = HERE / "two_machines.sh"
    subprocess.run(["sh", "-n", str(path)], check=True)
    command = re.search(r"deployments:app (.*?)\n    ;;", path.read_text(), re.DOTALL)[1].replace("\\\n", "")
    settings = dict(argument.split("=", 1) for argument in shlex.split(command))
    config = AppConfig.model_validate({**settings, "target_model": "big", "draft_model": "small"})
    assert config.label_selector.draft == {"role": "draft"}
