"""Every node test of ONNX is right or refused by name on the ONNX Runtime executor too."""

from __future__ import annotations

from collections import Counter

import stitch
from tests.support.onnx import node_tests as suite
from tests.support.onnx.node_tests import CRASH, REFERENCE, REFUSED, RIGHT, WRONG


def test_at_least_1390_cases_are_right_none_is_wrong_and_refusals_say_why() -> None:
    with stitch.open_device("host", executor="onnxruntime") as device:
        verdicts = [suite.run(case, device) for case in suite.cases()]
    assert [v for v in verdicts if v.outcome in (WRONG, CRASH)] == []
    assert [v.case for v in verdicts if v.outcome == REFUSED and len(v.detail) < 12] == []
    counts = Counter(v.outcome for v in verdicts)
    assert counts[RIGHT] + counts[REFERENCE] >= 1390
