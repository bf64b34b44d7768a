"""The actor role: the policy that is trained."""

import math
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from rlpack.algorithms.aggregation import row_sums
from rlpack.algorithms.correction import correction_sums, importance_weights, kept_tokens, lag_masks
from rlpack.algorithms.gae import compute_gae, token_rewards
from rlpack.algorithms.kl import KLEstimator, at_bound, kl_estimate
from rlpack.algorithms.metric_reduction import merge_steps
from rlpack.batch.batch import BatchedDataDict, MicrobatchView
from rlpack.batch.bucket import Bucket, pack_bucket
from rlpack.batch.weight_layout import WeightForm, WeightLayout
from rlpack.checkpoint.rank_hashes import record_hashes
from rlpack.config.schema import Actor, Algorithm, Config
from rlpack.config.sections.correction_settings import Correction
from rlpack.models.adapters import dropout_seed
from rlpack.models.errors import ModelError
from rlpack.models.inputs import to_model_inputs
from rlpack.models.model_export import export_model
from rlpack.models.parallel import reshard
from rlpack.models.policy import TokenScores
from rlpack.models.routing import RoutingPass, in_pass
from rlpack.models.weight_stream import WeightStream
from rlpack.worker import RankContext, broadcast, sharded
from rlpack.workers.build import build_policy
from rlpack.workers.inference import Scorer, score_microbatches
from rlpack.workers.loss import LogprobLoss, MicrobatchLoss, Moments, columns_of, needs_whole_groups, trained_tokens
from rlpack.workers.optimizer_step import OptimizerStepper
from rlpack.workers.step_routing import RecordedRouting, StepRouting, routing_of
from rlpack.workers.stepped_role import SteppedRole


class ActorWorker(SteppedRole):
    """One data-parallel rank of the trained policy (FSDP2) with its optimizer."""

    def __init__(self, context: RankContext, scorer: Scorer, settings: Actor, *, seed: int = 0) -> None:
        super().__init__(context)
        self._seed = seed
        self._scorer = scorer
        self._settings = settings
        self._streams: dict[WeightForm, WeightStream] = {}
        self._stepper = OptimizerStepper("actor", scorer.policy, settings.optimizer, context)
        self._routing = routing_of(scorer.policy)

    @classmethod
    def from_settings(cls, context: RankContext, config: Config, tokenizer: PreTrainedTokenizerBase) -> Self:
        """Build and shard the policy, check that packing isolates sequences, and build the optimizer."""
        policy = build_policy(config, "actor", tokenizer, context)
        scorer = Scorer.from_policy(policy, context, config.rollout.temperature, tokenizer)
        return cls(context, scorer, config.actor, seed=config.seed)

    @sharded(
        reads=("input_ids", "response_mask"),
        optional=("rollout_logprobs",),
        returns=("logprobs", "response_tokens", "logprob_sum", "logprob_gap"),
        mini_batches=True,
    )
    def logprobs(self, shard: BatchedDataDict, *, temperature: float | None = None) -> BatchedDataDict:
        """Return the column `logprobs`, and sums of it over each row's response tokens.

        Only tokens that the plan keeps enter the sums: `response_tokens` is their number, `logprob_sum` the sum of
        their log-probs, and `logprob_gap` the sum of the absolute differences from `rollout_logprobs` (0 without that
        column). At the sampling temperature, `entropy_sum` is the sum of their entropies, and with
        `actor.moe.replay_routing` the column `routed_experts`, integers [T, L, k], has each token's experts. With the
        plan of `train_step`, the first ratio is exactly 1; with another one, it is 1 up to rounding.

        Args:
            shard: `input_ids`, `response_mask`, and `rollout_logprobs` if known.
            temperature: temperature of the distribution; None takes the sampling temperature.
        """
        if temperature is None:
            scored = self._scorer.logprobs_and_entropies(shard, self._recorder())
            sums = {"entropy_sum": row_sums(scored["entropies"].values, shard["response_mask"])}
            scored = scored.drop(["entropies"]).union(sums)
        else:
            scored = self._scorer.logprobs(shard, "logprobs", temperature=temperature)
        mask, logprobs = shard["response_mask"], scored["logprobs"].values
        sampled = shard["rollout_logprobs"].values if "rollout_logprobs" in shard else logprobs
        return scored.union(
            {
                "response_tokens": mask.count_nonzero(),
                "logprob_sum": row_sums(logprobs, mask),
                "logprob_gap": row_sums((logprobs - sampled).abs(), mask),
            }
        )

    @sharded(reads=("response_mask", "logprobs", "reference_logprobs"), returns=("kl_sum",), mini_batches=True)
    def kl_sums(self, shard: BatchedDataDict, estimator: KLEstimator, bound: float | None = None) -> BatchedDataDict:
        """Return `kl_sum` f64 [B], each response's divergence from the reference.

        If the estimator is bounded, `kl_bounded` f64 [B] counts the response's tokens at the bound.

        Args:
            shard: `response_mask`, `logprobs`, `reference_logprobs`.
            estimator: estimates the divergence at each token.
            bound: largest value of k3 at a token, nats; None for none.
        """
        mask, own, reference = (shard[name] for name in ("response_mask", "logprobs", "reference_logprobs"))
        kl = kl_estimate(own.values, reference.values, estimator, bound=bound, mask=mask.values)
        bounded = at_bound(kl, estimator, bound)
        counted = {} if bounded is None else {"kl_bounded": row_sums(bounded, mask)}
        return shard.keep([]).union({"kl_sum": row_sums(kl, mask), **counted})

    @sharded(
        reads=("response_mask", "logprobs", "reference_logprobs", "rewards", "valid"),
        returns=("advantages",),
        mini_batches=True,
    )
    def token_returns(
        self, shard: BatchedDataDict, settings: Algorithm, kl_coef: float, pivot: float
    ) -> BatchedDataDict:
        """Return `advantages` f32 [T]: the sum of the rewards from each token on, 0 outside valid responses.

        The reward of a token is -kl_coef times its KL estimate; the last token also gets the response's reward
        (REINFORCE++, Hu et al. 2025, arXiv:2501.03262). This is generalized advantage estimation without values, with
        γ = λ = 1. `return_sum` and `return_squares`, f64 [B], are sums over each row's tokens of the returns minus
        `pivot`, and of their squares.

        Args:
            shard: `response_mask`, `logprobs`, `reference_logprobs`, `rewards`, `valid`.
            settings: the estimator of the KL divergence.
            kl_coef: weight of the KL term in this step.
            pivot: a number near the mean return, so that no digits are lost.
        """
        mask = shard["response_mask"]
        valid_mask = mask.with_values(mask.values & shard["valid"][mask.segment_ids])
        own, reference = shard["logprobs"].values, shard["reference_logprobs"].values
        kl = kl_estimate(own, reference, settings.kl_estimator, bound=settings.k3_bound, mask=valid_mask.values)
        rewards = token_rewards(shard["rewards"], valid_mask, kl_coef * kl)
        returns = compute_gae(torch.zeros_like(rewards), rewards, valid_mask, gamma=1.0, gae_lambda=1.0).returns
        distances = returns.double() - pivot
        sums = {
            "return_sum": row_sums(distances, valid_mask),
            "return_squares": row_sums(distances.square(), valid_mask),
        }
        return shard.keep([]).union({"advantages": mask.with_values(returns), **sums})

    @sharded(reads=("response_mask", "advantages", "valid"), returns=("advantages",), mini_batches=True)
    def normalize_advantages(self, shard: BatchedDataDict, moments: Moments, epsilon: float) -> BatchedDataDict:
        """Return `advantages` f32 [T] minus their mean, divided by their standard deviation plus `epsilon`."""
        mask, advantages = shard["response_mask"], shard["advantages"]
        inside = mask.values & shard["valid"][mask.segment_ids]
        normalized = moments.normalize(advantages.values.double(), epsilon)
        return shard.keep([]).union({"advantages": mask.with_values(torch.where(inside, normalized, 0.0).float())})

    @sharded(reads=("response_mask", "logprobs", "rollout_logprobs"), optional=("policy_version",), mini_batches=True)
    def correct(
        self, shard: BatchedDataDict, settings: Correction, *, newest: int = 0, lead: int | None = None
    ) -> BatchedDataDict:
        """Compare `logprobs` with `rollout_logprobs`; return mismatch sums, importance weights and rejections.

        Args:
            shard: the two columns, `response_mask`, and, with `lead`, `policy_version`.
            settings: weights and rejection.
            newest: the newest policy version.
            lead: the largest lag; None to combine all lags.

        Returns:
            The sums of `rlpack.algorithms.correction.correction_sums`; with `lead`, the same for the tokens of each lag
            k, with the prefix `lag<k>_`; with weights, `importance_weights` f32 [T]; with rejection criteria,
            `kept_mask` bool [T] and `kept_tokens` int64 [B]; with either, `weighted_tokens` int64 [B], the tokens that
            are kept and have a weight above 0.
        """
        mask, own, sampled = (shard[name] for name in ("response_mask", "logprobs", "rollout_logprobs"))
        columns: dict[str, Any] = {}
        weights = free = kept = None
        if settings.weights != "none":
            bounds = {"level": settings.weights, "upper": settings.upper, "lower": settings.lower}
            weights = importance_weights(own.values, sampled.values, mask, **bounds)
            free = importance_weights(own.values, sampled.values, mask, level=settings.weights, upper=math.inf)
            columns["importance_weights"] = mask.with_values(weights)
        if settings.reject:
            kept = kept_tokens(own.values, sampled.values, mask, settings.bounds)
            columns["kept_mask"] = mask.with_values(kept)
            columns["kept_tokens"] = columns["kept_mask"].count_nonzero()
        if weights is not None or kept is not None:
            counts = torch.ones_like(mask.values) if kept is None else kept
            counts = counts if weights is None else counts & (weights > 0)
            columns["weighted_tokens"] = mask.with_values(mask.values & counts).count_nonzero()
        parts = {} if lead is None else lag_masks(mask, shard["policy_version"].values, newest, range(lead + 1))
        for prefix, part in {"": mask, **{f"lag{lag}_": part for lag, part in parts.items()}}.items():
            sums = correction_sums(own.values, sampled.values, part, weights, free, kept)
            columns |= {f"{prefix}{name}": column for name, column in sums.items()}
        return shard.keep([]).union(columns)

    @sharded(reads=columns_of, mini_batches=True, merge=merge_steps, needs_whole_groups=needs_whole_groups)
    def train_step(
        self, shard: BatchedDataDict, loss: LogprobLoss, learning_rate: float | None = None
    ) -> list[dict[str, float]]:
        """Take the optimizer steps of the shard's plan; return the metrics of each.

        Args:
            shard: the columns that `loss` reads; a row's weights are relative to the row's optimizer step.
            loss: the loss to minimize.
            learning_rate: learning rate of these steps; None takes `actor.optimizer.learning_rate`.
        """
        rate = self._settings.optimizer.learning_rate if learning_rate is None else learning_rate
        return [self._step(shard, step, loss, rate) for step in range(shard.num_steps)]

    @broadcast
    def reset_optimizer(self) -> None:
        """Start with a new optimizer, as a recipe does after its supervised warm-up."""
        self._stepper.reset_optimizer()

    @broadcast
    def open_weights(self, form: WeightForm) -> WeightLayout:
        """Plan the buckets of all weights, by their Hugging Face names, or of the adapters.

        Raises:
            ModelError: only adapters are to be sent, and the policy has none.
        """
        stream = WeightStream(self._scorer.policy, form.dtype, adapters_only=form.adapters_only)
        self._streams[form] = stream
        return stream.layout

    @broadcast
    def export_bucket(self, index: int, form: WeightForm, version: int) -> Bucket | None:
        """Gather a bucket, a collective; only rank `index` modulo the number of ranks returns it.

        Args:
            index: index of the bucket.
            form: form of a layout that was opened.
            version: number of the update, which is the policy version it produces.
        """
        is_owner = index % self.context.num_ranks == self.context.rank
        stream = self._streams[form]
        weights = stream.gather(index, keep=is_owner, copy=False)  # the object store copies them
        return pack_bucket(weights, index=index, count=len(stream.layout), version=version) if is_owner else None

    @broadcast
    def canary_logprobs(self, token_ids: Tensor) -> np.ndarray:
        """Return log p(token | tokens before it) at temperature 1, f32 [R, L]; a collective."""
        return self._scorer.score_rows(token_ids).numpy()

    @broadcast
    def export_model(self, folder: str) -> None:
        """Write a Hugging Face model folder (config, safetensors), each rank its files; a collective."""
        self._export(folder, published_names=True)

    @broadcast
    def export_reference(self, folder: str) -> None:
        """Write the same folder with the names of the model's own modules.

        transformers gives the weights of some architectures, such as mixtures of experts, other names in folders.
        """
        self._export(folder, published_names=False)

    def _export(self, folder: str, *, published_names: bool) -> None:
        rank, num_ranks = self.context.rank, self.context.num_ranks
        policy = self._scorer.policy
        files = export_model(policy, Path(folder), rank=rank, num_ranks=num_ranks, published_names=published_names)
        record_hashes(Path(folder), rank, files)

    def _step(self, shard: BatchedDataDict, step: int, loss: LogprobLoss, learning_rate: float) -> dict[str, float]:
        """Take one optimizer step over the step's microbatches."""
        views = list(shard.microbatches(step))
        statistics = self._statistics(views, loss) if loss.needs_statistics else None
        seed = (self._seed, self._stepper.steps_taken, self.context.rank)
        routing = None if self._routing is None else StepRouting(self._routing, self._settings.moe)

        def forward(view: MicrobatchView, number: int) -> TokenScores:
            with nullcontext() if routing is None else routing.microbatch(view.rows, replay=loss.replays_routing):
                return self._scores(view, loss, (*seed, number))

        def microbatch_loss(scores: TokenScores, view: MicrobatchView) -> MicrobatchLoss:
            return loss(scores, view.rows, statistics)

        metrics = self._stepper.step(views, forward, microbatch_loss, learning_rate)
        return metrics if routing is None else self._with_routing(metrics, routing)

    def _recorder(self) -> RecordedRouting | None:
        """Return a recorder for the routing of a pass; None if it won't be replayed."""
        if not self._settings.moe.replay_routing:
            return None
        if self._routing is None:  # refused before the start, unless the checks were left out
            raise ModelError("actor.moe.replay_routing is set, but the model has no routers that could be replayed")
        return RecordedRouting(self._routing, self._scorer.policy)

    def _with_routing(self, metrics: dict[str, float], routing: StepRouting) -> dict[str, float]:
        """Add the metrics of routing, and the balance loss to the loss; a collective."""
        measured = routing.metrics()
        if not self.context.is_reporting_rank:
            return metrics
        loss = metrics.get("actor/loss", 0.0) + routing.weighted_loss(measured)
        return metrics | {"actor/loss": loss} | {f"actor/{name}": value for name, value in measured.items()}

    def _scores(self, view: MicrobatchView, loss: LogprobLoss, seed: tuple[int, ...]) -> TokenScores:
        """Return scores of the trained tokens, with gradient; `seed` seeds the adapters' dropout."""
        device, virtual = self._scorer.device, self._scorer.policy.active_virtual_stage
        inputs = to_model_inputs(view, device=device, pad_token_id=self._scorer.pad_token_id)
        with dropout_seed(self._settings.lora, device, *seed, *[virtual] * (virtual > 0)):
            return self._scorer.policy(
                inputs,
                select=trained_tokens(view.rows).to(device, non_blocking=True),
                temperature=loss.temperature,
                entropy=loss.needs_entropy,
            )

    def _replay(self, view: MicrobatchView) -> RoutingPass:
        """Return a routing pass that only replays a microbatch's recorded routing."""
        assert self._routing is not None
        return RoutingPass(self._routing, replay=view.rows["routed_experts"].values)

    @torch.no_grad()
    def _statistics(self, views: Sequence[MicrobatchView], loss: LogprobLoss) -> dict[str, float]:
        """Return the statistics of the whole optimizer step that the loss needs; a collective."""

        def score(view: MicrobatchView) -> Tensor:
            with in_pass(self._replay(view) if loss.replays_routing else None):
                return self._scorer.score(view, temperature=loss.temperature)

        scores = [scores for _, scores in score_microbatches(self._scorer.policy, views, score)]
        reshard(self._scorer.policy)
        inputs = [loss.statistics_inputs(logprobs, view.rows) for logprobs, view in zip(scores, views, strict=True)]
        gathered: list[list[Any] | None] = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, inputs)
        of_data_ranks = [gathered[rank] for rank in self.context.layout.output_ranks]  # replicas hold the same rows
        return loss.statistics([part for parts in of_data_ranks if parts is not None for part in parts])
