"""What replayed routing can't be combined with."""

from rlpack.config.expert_rules import expert_problems
from rlpack.config.schema import Actor, Algorithm
from rlpack.config.sections.correction_settings import Correction
from rlpack.config.sections.optimization import Experts
from tests.builders import tiny_config

REPLAY = Actor(moe=Experts(replay_routing=True))
BYPASS = Algorithm(correction=Correction(bypass=True))


def test_replay_needs_old_log_probs():
    assert list(expert_problems(tiny_config(actor=REPLAY))) == []
    assert list(expert_problems(tiny_config(algorithm=BYPASS))) == []
    (problem,) = expert_problems(tiny_config(actor=REPLAY, algorithm=BYPASS))
    assert "algorithm.correction.bypass doesn't compute; set actor.moe.replay_routing=false or" in problem
    (problem,) = expert_problems(tiny_config("sft", actor=REPLAY))
    assert problem.endswith("recipe=sft has no old log-probs; set actor.moe.replay_routing=false")
