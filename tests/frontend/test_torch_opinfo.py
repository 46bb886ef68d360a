"""Operators of torch's own database, through the backend: right, or refused by one clear error."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.support.grids import CAMPAIGN, every, in_turn
from tests.support.torch import agreement
from tests.support.torch.operator_samples import (
    BREAKS,
    COMPILED,
    REFUSED,
    RIGHT,
    Outcome,
    cases_of,
    core_share,
    operators,
    outcome_in_one_graph,
    outcomes_of,
)

SAMPLES = 2
#: What Stitch cannot compile is refused, and not given to torch.
OWN = {"fallback": "error"}
EXECUTORS = ("numpy", "onnxruntime", "torch", "auto")
#: The slice that runs always: every so many-th operator by name.
EVERY = 80
#: So many graphs have all compiled operators, about twelve each.
PARTS = 20


def names() -> list[str]:
    """Of all operators. The database is read when it is asked for: to collect tests needs none."""
    return sorted(operators())


def assert_right_or_refused(chosen: list[str]) -> list[Outcome]:
    outcomes = [o for name in chosen for o in outcomes_of(operators()[name], SAMPLES, OWN)]
    wrong = [o for o in outcomes if o.state not in (RIGHT, REFUSED, BREAKS)]
    assert not wrong, "\n".join(f"{o.operator} {o.sample}: {o.state}, {o.text}" for o in wrong)
    assert all(o.text for o in outcomes if o.state == REFUSED)
    print(f"\n{dict(Counter(o.state for o in outcomes))} of {len(outcomes)} samples")
    return outcomes


@pytest.mark.parametrize(("part", "executor"), in_turn(range(PARTS), EXECUTORS))
def test_operators_in_one_graph_have_results_and_gradients_of_eager_torch(
    part: int, executor: str
) -> None:
    names, options = COMPILED[part::PARTS], {**OWN, "executor": executor}
    together = outcome_in_one_graph(names, options)
    assert together is not None
    assert together.state == RIGHT, [
        together,
        *(o for n in names for o in outcomes_of(operators()[n], 1, options) if o.state != RIGHT),
    ]


@CAMPAIGN
@pytest.mark.parametrize("sample", range(SAMPLES))
@pytest.mark.parametrize("executor", EXECUTORS)
@pytest.mark.parametrize("name", COMPILED)
def test_results_and_gradients_of_an_operator_are_those_of_eager_torch(
    name: str, executor: str, sample: int
) -> None:
    options = {**OWN, "executor": executor}
    outcomes = outcomes_of(operators()[name], sample + 1, options, first=sample)
    assert [(o.state, o.text) for o in outcomes if o.state not in (RIGHT, BREAKS)] == []
    assert sample or outcomes[0].state == RIGHT


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("part", every(16, range(16)))
def test_exported_operators_agree_with_eager_torch(part: int) -> None:
    """As one module: torch exports it once. A module may not write to its inputs."""
    names = [name for name in COMPILED[part::16] if name != "nn.functional.batch_norm"]
    found = agreement.outcomes_of(cases_of(names), traced=False)
    for name, (got, want) in found.items():
        assert got, name
        agreement.assert_close(got, want)


def test_a_slice_of_the_database_is_right_or_refused() -> None:
    assert_right_or_refused(names()[::EVERY])


@pytest.mark.campaign("torch_operators")
def test_the_whole_database_is_right_or_refused_and_most_of_core_is_run_by_own_programs() -> None:
    right, seen = core_share(assert_right_or_refused(names()))
    print(f"core overloads in samples: {seen}, run by own programs: {right} ({right / seen:.1%})")
    assert right >= 0.85 * seen
