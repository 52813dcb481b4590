from __future__ import annotations

from isotype.rules.ist402_state_missing import find
from tests.rules.samples import packed, trace, weight


def test_a_lost_state() -> None:
    (finding,) = find(trace([packed(state=None)]))
    assert finding.severity == "error"
    assert finding.message == "1 quantized weight has lost the quantization state"
    assert finding.fixes[0].actions[0].kind == "advice"


def test_states_at_hand_are_silent() -> None:
    assert not list(find(trace([packed(), weight()])))
