import pytest
import torch

from rlpack.batch.batch import BatchedDataDict
from rlpack.distributed.context import RankContext
from rlpack.rollout.types import SamplingParams
from rlpack.workers.build import build_model
from rlpack.workers.rollout import RolloutWorker
from tests.builders import tiny_config, tiny_rollouts, tiny_tokenizer

PARAMS = SamplingParams(max_new_tokens=6, stop_token_ids=(1,))


@pytest.fixture(scope="module")
def worker() -> RolloutWorker:
    return RolloutWorker.from_settings(RankContext(), tiny_config(), tiny_tokenizer())


def prompts() -> BatchedDataDict:
    batch = tiny_rollouts([(3, 0), (5, 0), (1, 0), (5, 0)]).keep(["input_ids", "group_ids", "uid"])
    return batch.union({"seeds": torch.tensor([5, 6, 7, 6])})


def test_responses_follow_their_prompts_and_are_written_out(worker: RolloutWorker):
    given = prompts()
    made = worker.generate(given, PARAMS)
    tokenizer = tiny_tokenizer()
    assert made["uid"] == given["uid"]
    for row in range(made.num_rows):
        tokens, mask, prompt = made["input_ids"][row], made["response_mask"][row], given["input_ids"][row]
        assert torch.equal(tokens[~mask], prompt)
        assert 1 <= mask.sum() <= 6
        assert (made["finish_reason"][row] == "stop") == (tokens[-1].item() == tokenizer.eos_token_id)
        assert made["completion"][row] == tokenizer.decode(tokens[mask], skip_special_tokens=True)
        assert (made["rollout_logprobs"][row][mask] < 0).all()


def test_a_row_is_sampled_alike_in_any_company_and_keeps_its_id(worker: RolloutWorker):
    whole, part = worker.generate(prompts(), PARAMS), worker.generate(prompts().select([3, 1]), PARAMS)
    assert part.row_ids.tolist() == [3, 1]
    for place, row in enumerate((3, 1)):
        assert torch.equal(part["input_ids"][place], whole["input_ids"][row])


def test_no_prompts_give_no_rollouts(worker: RolloutWorker):
    assert worker.generate(prompts().select([]), PARAMS).num_rows == 0


def test_new_weights_are_used_and_their_version_is_on_every_row():
    worker = RolloutWorker.from_settings(RankContext(), tiny_config(), tiny_tokenizer())
    greedy = SamplingParams(temperature=0.0, max_new_tokens=4)
    before = worker.generate(prompts(), greedy)
    other = RolloutWorker.from_settings(RankContext(), tiny_config(seed=4), tiny_tokenizer())
    expected = other.generate(prompts(), greedy)
    model = build_model(tiny_config().model, tiny_tokenizer(), RankContext(), seed=4)
    weights = {name: parameter.detach().numpy() for name, parameter in model.named_parameters()}
    for array in weights.values():
        array.flags.writeable = False
    worker.load_weights(weights, 9)
    after = worker.generate(prompts(), greedy)
    assert not torch.equal(before["input_ids"].values, after["input_ids"].values)
    assert torch.equal(after["input_ids"].values, expected["input_ids"].values)
    mask = after["response_mask"].values
    assert after["policy_version"].values[mask].unique().tolist() == [9]
    assert after["policy_version"].values[~mask].unique().tolist() == [-1]
