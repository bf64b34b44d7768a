"""The critic role: the value of the context before each token, and advantages computed from it (PPO)."""

from collections.abc import Mapping
from pathlib import Path
from typing import Self, TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from rlpack.algorithms.aggregation import row_sums
from rlpack.algorithms.gae import compute_gae, token_rewards
from rlpack.algorithms.kl import kl_estimate
from rlpack.algorithms.metric_reduction import merge_steps
from rlpack.batch.batch import BatchedDataDict, MicrobatchView
from rlpack.batch.bucket import Bucket
from rlpack.batch.ragged import Ragged
from rlpack.batch.weight_layout import WeightForm, WeightLayout
from rlpack.checkpoint.rank_hashes import record_hashes
from rlpack.config.schema import Algorithm, Config, Critic
from rlpack.data.tokenization import pad_id
from rlpack.models.heads import ScalarHeadModel
from rlpack.models.inputs import to_model_inputs
from rlpack.models.model_export import export_model
from rlpack.models.value_head import save_value_head
from rlpack.models.weight_stream import base_name, check_weights, copy_weights, head_state_dict
from rlpack.rollout.bucket_receiver import BucketReceiver
from rlpack.worker import RankContext, broadcast, rank_zero, sharded
from rlpack.workers.build import build_critic
from rlpack.workers.inference import compute_per_token
from rlpack.workers.loss import MicrobatchLoss, ValueLoss, columns_of, needs_whole_groups
from rlpack.workers.optimizer_step import OptimizerStepper
from rlpack.workers.stepped_role import SteppedRole

V = TypeVar("V")


def _columns_of_advantages(kl_coef: float = 0.0) -> tuple[str, ...]:
    """Return the columns that `CriticWorker.advantages` reads: with a KL term also both roles' log-probs."""
    columns = ("response_mask", "values", "rewards", "valid")
    return (*columns, "logprobs", "reference_logprobs") if kl_coef > 0 else columns


class CriticWorker(SteppedRole):
    """One data-parallel rank of the critic (FSDP2) with its optimizer."""

    def __init__(
        self,
        context: RankContext,
        critic: ScalarHeadModel,
        settings: Critic,
        algorithm: Algorithm,
        *,
        pad_token_id: int,
    ) -> None:
        super().__init__(context)
        self._critic = critic
        self._settings = settings
        self._algorithm = algorithm
        self._pad_token_id = pad_token_id
        self._received = BucketReceiver("critic")
        self._stepper = OptimizerStepper("critic", critic, settings.optimizer, context)

    @classmethod
    def from_settings(cls, context: RankContext, config: Config, tokenizer: PreTrainedTokenizerBase) -> Self:
        """Build and shard the critic, check that packing isolates sequences, and build the optimizer."""
        critic = build_critic(config, tokenizer, context)
        return cls(context, critic, config.critic, config.algorithm, pad_token_id=pad_id(tokenizer))

    @sharded(reads=("input_ids", "response_mask"), returns=("values", "value_tokens"), mini_batches=True)
    def values(self, shard: BatchedDataDict) -> BatchedDataDict:
        """Return `values` f32 [T], 0 outside responses, and `value_tokens` int64 [B].

        Entry t of `values` is the value of the tokens before t; `value_tokens` counts each row's response tokens that
        the plan keeps. With the plan of `train_step`, a step starts from exactly the values that advantages were
        computed with; with another one, from equal values up to rounding.

        Args:
            shard: `input_ids`, `response_mask`.
        """
        self._critic.eval()

        def score(view: MicrobatchView) -> Tensor:
            return self._values(view).where(view.rows["response_mask"].values, 0.0)

        mask = shard["response_mask"]
        counts = mask.count_nonzero()
        return compute_per_token(shard, "values", self._critic, score).union({"value_tokens": counts})

    @sharded(reads=_columns_of_advantages, returns=("advantages", "returns"), mini_batches=True)
    def advantages(self, shard: BatchedDataDict, kl_coef: float = 0.0) -> BatchedDataDict:
        """Return `advantages` and `returns` f32 [T], 0 outside responses, by generalized advantage estimation.

        For statistics of the whole batch, sums over each row's tokens are returned too, f64 [B]: `advantage_sum`,
        `advantage_squares`, and likewise `return_…` and `error_…` (returns minus values).

        Args:
            shard: `response_mask`, `values`, `rewards`, `valid`; with `kl_coef` above 0 also `logprobs` and
                `reference_logprobs`.
            kl_coef: weight of the KL penalty that is subtracted from each token's reward.
        """
        mask, values = shard["response_mask"], shard["values"].values
        valid_mask = mask.with_values(mask.values & shard["valid"][mask.segment_ids])
        penalties = None
        if kl_coef > 0:
            logprobs, reference = shard["logprobs"].values, shard["reference_logprobs"].values
            estimator, bound = self._algorithm.kl_estimator, self._algorithm.k3_bound
            penalties = kl_coef * kl_estimate(logprobs, reference, estimator, bound=bound, mask=valid_mask.values)
        rewards = token_rewards(shard["rewards"], valid_mask, penalties)
        gamma, gae_lambda = self._settings.gamma, self._settings.gae_lambda
        estimates = compute_gae(values, rewards, valid_mask, gamma=gamma, gae_lambda=gae_lambda)
        advantages, returns = estimates.advantages, estimates.returns
        columns: dict[str, Ragged | Tensor] = {
            "advantages": mask.with_values(advantages),
            "returns": mask.with_values(returns),
        }
        for name, column in (("advantage", advantages), ("return", returns), ("error", returns - values)):
            columns |= _row_moments(name, column, valid_mask)
        return shard.keep([]).union(columns)

    @sharded(reads=columns_of, mini_batches=True, merge=merge_steps, needs_whole_groups=needs_whole_groups)
    def train_step(
        self, shard: BatchedDataDict, loss: ValueLoss, learning_rate: float | None = None
    ) -> list[dict[str, float]]:
        """Take the optimizer steps of the shard's plan; return the metrics of each.

        Args:
            shard: the columns that `loss` reads; a row's weights are relative to the row's optimizer step.
            loss: the loss to minimize.
            learning_rate: learning rate of these steps; None takes `critic.optimizer.learning_rate`.
        """
        rate = self._settings.optimizer.learning_rate if learning_rate is None else learning_rate

        def forward(view: MicrobatchView, number: int) -> Tensor:
            return self._values(view)

        def microbatch_loss(values: Tensor, view: MicrobatchView) -> MicrobatchLoss:
            return loss(values, view.rows)

        steps = range(shard.num_steps)
        return [self._stepper.step(list(shard.microbatches(step)), forward, microbatch_loss, rate) for step in steps]

    @rank_zero
    def weights_form(self) -> WeightForm:
        """Return the form in which the critic receives a policy's weights: in fp32, like its own weights."""
        return WeightForm(torch.float32)

    @broadcast
    def check_weights(self, layout: WeightLayout) -> None:
        """Check that a policy's weights, without its head, fit the critic's model.

        Raises:
            ModelError: a weight is missing or has another shape.
        """
        check_weights(self._critic, self._by_base_name(layout.shapes))
        self._received.open(len(layout))

    @broadcast
    def load_bucket(self, bucket: Bucket, version: int) -> None:
        """Check a bucket of a policy's weights and copy it, without the policy's head.

        Raises:
            EngineError: it is not the bucket that is due, or was damaged; nothing is copied.
        """
        with self._received.receive(bucket, version) as weights:
            copy_weights(self._critic, self._by_base_name(weights))

    @broadcast
    def finish_transfer(self, version: int) -> None:
        """Check that all buckets of an update have arrived.

        Raises:
            EngineError: a bucket is missing; names the first one.
        """
        self._received.check_complete(version)
        self._received.close()

    @broadcast
    def export_model(self, folder: str) -> None:
        """Write a headless Hugging Face model folder and `value_head.safetensors`, for `critic.path`; a collective."""
        head = head_state_dict(self._critic)  # first: after a failed write, a rank would miss this collective
        files = export_model(self._critic, Path(folder), rank=self.context.rank, num_ranks=self.context.num_ranks)
        record_hashes(Path(folder), self.context.rank, files)
        if self.context.rank == 0:
            save_value_head(head, Path(folder))

    def _by_base_name(self, weights: Mapping[str, V]) -> dict[str, V]:
        """Return a policy's weights under their names in the critic's model, without the policy's head."""
        named = ((base_name(self._critic, name), value) for name, value in weights.items())
        return {name: value for name, value in named if name is not None}

    def _values(self, view: MicrobatchView) -> Tensor:
        """Return the values of a microbatch's tokens, f32 [T], on the CPU."""
        inputs = to_model_inputs(view, device=self.context.torch_device, pad_token_id=self._pad_token_id)
        return self._critic(inputs, before_token=True).cpu()


def _row_moments(name: str, values: Tensor, mask: Ragged) -> dict[str, Ragged | Tensor]:
    """Return each row's sums of masked values and of their squares, f64 [B]."""
    squares = row_sums(values.double().square(), mask)
    return {f"{name}_sum": row_sums(values, mask), f"{name}_squares": squares}
