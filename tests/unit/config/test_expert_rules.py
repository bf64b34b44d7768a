"""What replayed routing can't be combined with."""

from rlpack.config.expert_rules import expert_problems
from rlpack.config.schema import Actor, Algorithm
from rlpack.config.sections.correction_settings import Correction
from rlpack.config.sections.optimization import Experts
from rlpack.packing import Batching
from tests.builders import tiny_config

REPLAY = Actor(moe=Experts(replay_routing=True))
BYPASS = Algorithm(correction=Correction(bypass=True))


def test_replay_needs_old_log_probs():
    assert list(expert_problems(tiny_config(actor=REPLAY))) == []
    assert list(expert_problems(tiny_config(algorithm=BYPASS))) == []
    (problem,) = expert_problems(tiny_config(actor=REPLAY, algorithm=BYPASS))
    assert "algorithm.correction.bypass doesn't compute; set actor.moe.replay_routing=false, " in problem
    (problem,) = expert_problems(tiny_config("sft", actor=REPLAY))
    assert problem.endswith("recipe=sft has no old log-probs; set actor.moe.replay_routing=false")


def test_replay_needs_a_slot_for_each_token_and_balancing_does_not():
    shared = Batching(max_tokens=64, share_prompts=True)
    balanced = Actor(moe=Experts(balance_coefficient=0.1))
    assert list(expert_problems(tiny_config(actor=balanced, batching=shared))) == []
    (problem,) = expert_problems(tiny_config(actor=REPLAY, batching=shared))
    assert problem.endswith("set batching.share_prompts=false or actor.moe.replay_routing=false")
