import pytest
import torch
from transformers import AutoConfig, AutoModelForSequenceClassification

from rlpack.batch.batch import BatchedDataDict
from rlpack.batch.ragged import Ragged
from rlpack.models.heads import ScalarHeadModel
from rlpack.models.loading import linear_head
from rlpack.packing import Batching, make_plan
from rlpack.worker import RankContext
from rlpack.workers.reward_model import RewardModelWorker

VOCABULARY, PAD = 53, 2
ROWS = [[5, 6, 7], [5, 6, PAD], [PAD, 8, PAD, PAD], [9], [PAD, PAD], [4, PAD, 7]]


def classifier(pad: int | None):
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = AutoConfig.for_model(
        "llama",
        vocab_size=VOCABULARY,
        intermediate_size=48,
        initializer_range=0.25,
        num_labels=1,
        pad_token_id=pad,
        **sizes,
    )
    torch.manual_seed(4)
    return AutoModelForSequenceClassification.from_config(config, dtype=torch.float32).eval()


@pytest.mark.parametrize("pad", [PAD, None])
def test_scores_are_those_of_transformers_for_each_row_alone_where_rows_end_with_padding(pad: int | None):
    truth = classifier(pad)
    model = ScalarHeadModel(truth.base_model, linear_head(truth))
    worker = RewardModelWorker(RankContext(), model, 2.0, pad_token_id=PAD)
    batch = BatchedDataDict({"input_ids": Ragged.from_rows(ROWS, torch.int64)})
    batch = batch.union(
        {"response_mask": batch["input_ids"].with_values(torch.ones(len(batch["input_ids"].values)).bool())}
    )
    plan = make_plan(batch["input_ids"].lengths.numpy(), Batching(mode="dynamic", max_tokens=64), dp_size=1)
    (shard,) = batch.shard(plan)
    scored = worker.score(shard)
    for row, reward in zip(shard["input_ids"].rows(), scored["rewards"], strict=True):
        with torch.no_grad():
            expected = truth(input_ids=row[None], use_cache=False).logits[0, 0]
        assert reward.item() == pytest.approx(2.0 * expected.item(), abs=1e-5)
