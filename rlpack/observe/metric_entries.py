"""The metrics that a run may log, with their units and meanings."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Metric:
    """The description of one metric.

    Attributes:
        unit: unit of its values; `1` for plain numbers, `fraction` for numbers from 0 to 1.
        description: one sentence.
    """

    unit: str
    description: str


METRICS: dict[str, Metric] = {
    "reward/mean": Metric("1", "Mean reward of the step's rollouts, without quarantined rows."),
    "reward/std": Metric("1", "Standard deviation of the step's rewards."),
    "reward/min": Metric("1", "Lowest reward of the step."),
    "reward/max": Metric("1", "Highest reward of the step."),
    "reward/greedy_mean": Metric("1", "Mean reward of the greedy responses (recipe=remax)."),
    "reward/quarantined": Metric("rows", "Rollouts without a finite reward; they are not trained on."),
    "reward/timeouts": Metric("rows", "Rows on which a reward function exceeded its time limit; quarantined."),
    "reward/errors": Metric("rows", "Rows on which a reward function raised; quarantined."),
    "reward/killed": Metric("rows", "Rows whose reward process died; quarantined."),
    "reward/invalid": Metric(
        "rows", "Rows for which a reward function returned something other than a number; quarantined."
    ),
    "reward/output_bytes": Metric("bytes", "Output of reward functions to standard output and error."),
    "reward/retries": Metric("1", "Requests to a judge or a served reward model beyond the first of each row."),
    "reward/functions/<name>": Metric(
        "1", "Mean unweighted reward of one of reward.functions, or of a role's column reward_<name>, where it has one."
    ),
    "reward/roles/<name>": Metric("1", "Mean contribution of one of several scoring roles to the reward."),
    "rollout/response_tokens_mean": Metric("tokens", "Mean length of the responses."),
    "rollout/response_tokens_max": Metric("tokens", "Length of the longest response."),
    "rollout/truncated_fraction": Metric("fraction", "Responses cut off at rollout.max_new_tokens."),
    "rollout/lag": Metric(
        "versions",
        "How many policy versions the oldest token of the batch is behind the newest (trainer.lead). Above 0, the "
        "limit of rollout/logprob_gap applies to mismatch/lag_0/gap instead.",
    ),
    "rollout/lag_mean": Metric("versions", "Mean lag of the sampled tokens, in policy versions."),
    "rollout/lag_share/<name>": Metric("fraction", "Sampled tokens that are this many policy versions old."),
    "rollout/batches_waiting": Metric(
        "1", "Batches that were drawn and not trained on as the step began, its own included (trainer.lead)."
    ),
    "rollout/late_groups": Metric(
        "1", "Groups of earlier batches that the step trained on, because they ended late (trainer.late_groups.window)."
    ),
    "rollout/groups_left": Metric("1", "Groups of this batch and earlier ones that the step left to later ones."),
    "mismatch/kl": Metric(
        "nats",
        "KL(μ ‖ π) per token: mean of log μ - log π. In all mismatch/* (with algorithm.correction or trainer.lead), μ "
        "is the policy that sampled the token, and π the trainer's policy before the update.",
    ),
    "mismatch/k3": Metric("nats", "As mismatch/kl, with the k3 estimator, which is never negative."),
    "mismatch/chi2": Metric(
        "1", "χ² divergence per token: the mean of (π / μ)², minus 1; log (π / μ) is clamped to [-20, 20]."
    ),
    "mismatch/gap": Metric("nats", "Mean absolute difference of log π and log μ over tokens."),
    "mismatch/largest_gap": Metric("nats", "Largest absolute difference of log π and log μ of a token."),
    "mismatch/perplexity_ratio": Metric("1", "Perplexity of a response under π over that under μ; mean over rows."),
    "mismatch/lag_<name>": Metric(
        "1",
        "A metric mismatch/* over the tokens of one lag, such as mismatch/lag_1/k3: lag 0 shows the rounding of the "
        "engine, higher ones what updates have changed (trainer.lead).",
    ),
    "mismatch/weight_mean": Metric("1", "Mean importance weight of the response tokens, before it is normalized."),
    "mismatch/effective_share": Metric(
        "fraction",
        "Effective sample size of the importance weights as a share of the tokens; without weights, that of the ratios "
        "π / μ.",
    ),
    "mismatch/weights_bounded": Metric("fraction", "Tokens whose importance weight was truncated, or set to 0."),
    "mismatch/rejected_tokens": Metric("tokens", "Response tokens that algorithm.correction.reject left out."),
    "mismatch/rejected_rows": Metric("rows", "Responses of which algorithm.correction.reject left out every token."),
    "rollout/repeated_rows": Metric(
        "rows",
        "Responses that were generated again from the same seeds, because an engine failed, was replaced or returned "
        "an unusable response (vllm).",
    ),
    "rollout/engines_replaced": Metric(
        "1",
        "Engines that were replaced because they died, hung or failed the canary (vllm), since the previous record; "
        "logged only if above 0.",
    ),
    "rollout/gpu_bytes_awake": Metric(
        "bytes",
        "Memory in use on the GPUs of the first rank of the rollout, by all processes, before its engine sleeps "
        "(rollout.sleep_level).",
    ),
    "rollout/gpu_bytes_asleep": Metric("bytes", "As rollout/gpu_bytes_awake, after the engine fell asleep."),
    "rollout/canary_gap": Metric(
        "nats",
        "Largest difference between the engine's and the trainer's log-probs of a fixed prompt (the canary) after "
        "loading weights; the run ends if it or the mean over tokens exceeds its tolerance.",
    ),
    "rollout/logprob_gap": Metric(
        "nats",
        "Mean absolute difference between the trainer's and the sampler's log-probs, over all response tokens. Above "
        "rollout.max_logprob_gap the run warns; above ten times that it ends. Without an old-log-prob pass (a single "
        "optimizer step per batch, or algorithm.correction.bypass without rejection and limits), the first optimizer "
        "step of the update measures it, over the tokens that it trains on. Then it is missing in steps of recipe=ppo "
        "that train only the critic, and has no limit with actor.lora.dropout, which changes log-probs.",
    ),
    "actor/loss": Metric(
        "1", "Minimized loss: policy loss, weighted KL term and load-balancing loss, minus the weighted entropy bonus."
    ),
    "actor/policy_loss": Metric("1", "Policy-gradient loss without the KL term."),
    "actor/kl": Metric("nats", "Mean KL divergence from the reference, estimated by algorithm.kl_estimator."),
    "actor/kl_bounded_fraction": Metric("fraction", "Tokens whose KL estimate in actor/kl is at algorithm.k3_bound."),
    "actor/entropy": Metric("nats", "Mean entropy of the policy at the sampled tokens."),
    "actor/old_entropy": Metric(
        "nats",
        "Mean entropy of the policy before its update, at the sampled tokens; only in steps that compute the "
        "log-probs of the old policy, with rollout.temperature.",
    ),
    "actor/ratio_mean": Metric("1", "Mean ratio of new to old probability of the sampled tokens."),
    "actor/ratio_max": Metric("1", "Largest ratio of new to old probability of a sampled token."),
    "actor/clip_low_fraction": Metric(
        "fraction", "Tokens without gradient because the ratio is below its lower bound."
    ),
    "actor/clip_high_fraction": Metric(
        "fraction",
        "Tokens without gradient because the ratio is above its upper bound; with kl_cov, the tokens with a penalty.",
    ),
    "actor/moe_balance_loss": Metric(
        "1",
        "Load-balancing loss of a layer with experts, the mean over layers; 1 if the load of each row is even. "
        "Measured also if actor.moe.balance_coefficient is 0.",
    ),
    "actor/moe_load_imbalance": Metric(
        "1",
        "Tokens of a layer's busiest expert over the mean of its experts, in an optimizer step; the mean over layers.",
    ),
    "actor/moe_load_imbalance_max": Metric("1", "As actor/moe_load_imbalance, for the layer where it is largest."),
    "actor/moe_replay_changed": Metric(
        "fraction",
        "Tokens that would have got another set of experts without actor.moe.replay_routing; the mean over layers.",
    ),
    "actor/grad_norm": Metric("1", "Global gradient norm before clipping."),
    "actor/learning_rate": Metric("1", "Learning rate of the optimizer step."),
    "actor/skipped_steps": Metric("steps", "Optimizer steps skipped because the gradient was zero or not finite."),
    "critic/loss": Metric("1", "Half the squared error of the values, clipped by critic.value_clip; mean over tokens."),
    "critic/value_mean": Metric("1", "Mean value of the response tokens during the critic's update."),
    "critic/return_mean": Metric("1", "Mean return of the response tokens."),
    "critic/explained_variance": Metric("1", "1 - variance of (returns - values) / variance of returns."),
    "critic/clip_fraction": Metric("fraction", "Tokens whose value is clipped by critic.value_clip."),
    "critic/grad_norm": Metric("1", "Global norm of the critic's gradient before clipping."),
    "critic/learning_rate": Metric("1", "Learning rate of the critic's optimizer step."),
    "critic/skipped_steps": Metric("steps", "Skipped optimizer steps of the critic, as in actor/skipped_steps."),
    "reference/kl": Metric(
        "nats",
        "KL divergence from the reference, summed over a response's tokens; mean over responses. Where a batch gets a "
        "single optimizer step and the KL term is in the loss, the update measures it; the steps of recipe=ppo that "
        "train only the critic then lack it.",
    ),
    "reference/kl_bounded_fraction": Metric(
        "fraction",
        "Tokens whose KL estimate in reference/kl is at algorithm.k3_bound; only in steps that compute old log-probs.",
    ),
    "reference/kl_coef": Metric("1", "Weight of the KL term in this step."),
    "sampling/rounds": Metric("1", "Rounds of drawing prompts for the step (recipe=dapo)."),
    "sampling/informative_fraction": Metric("fraction", "Groups drawn for the step whose unpenalized rewards differ."),
    "sampling/discarded_groups": Metric("groups", "Groups drawn for the step that are not trained on."),
    "sampling/filled_groups": Metric("groups", "Groups with equal rewards that fill the batch after dapo.max_rounds."),
    "sampling/overlong_filtered": Metric("rows", "Responses excluded from the loss by dapo.overlong_filter."),
    "advantage/mean": Metric(
        "1",
        "Mean advantage of the rollouts that are trained on. If advantages differ within a response, it is the mean "
        "over tokens, before normalization.",
    ),
    "advantage/std": Metric("1", "Standard deviation of the advantages in advantage/mean."),
    "advantage/zero_group_fraction": Metric(
        "fraction",
        "Groups without policy gradient: all advantages are 0. With group_relative, the rewards are equal (with "
        "algorithm.kl_placement=reward, after the KL terms are subtracted).",
    ),
    "evaluation/reward_sampled": Metric(
        "1", "Held-out mean reward over evaluation.samples samples per prompt; the accuracy if rewards are 0 or 1."
    ),
    "evaluation/reward_best_of_n": Metric(
        "1", "Held-out mean of each prompt's best reward; the fraction of solved prompts if rewards are 0 or 1."
    ),
    "evaluation/reward_greedy": Metric(
        "1", "Held-out mean reward of greedy responses; the accuracy if rewards are 0 or 1."
    ),
    "evaluation/graded_rewards": Metric(
        "rows", "Held-out rewards that are neither 0 nor 1; without any, evaluation/reward_* are accuracies."
    ),
    "evaluation/quarantined": Metric(
        "rows", "Held-out responses without a finite reward; they count as 0 in evaluation/reward_*."
    ),
    "evaluation/loss": Metric(
        "nats", "Mean negative log-prob of all tokens of held-out demonstrations, at temperature 1 (recipe=sft)."
    ),
    "evaluation/perplexity": Metric("1", "Exponential of evaluation/loss."),
    "evaluation/overlong": Metric(
        "rows", "Held-out demonstrations over the token budget, which evaluation/loss leaves out or cuts (recipe=sft)."
    ),
    "evaluation/<name>": Metric(
        "1", "A set of evaluation.sets: <name>/reward_sampled and all other metrics above, on its prompts."
    ),
    "sft_warmup/loss": Metric("nats", "Mean negative log-prob of the tokens of demonstrations."),
    "sft_warmup/moe_balance_loss": Metric("1", "As actor/moe_balance_loss, in a supervised step."),
    "sft_warmup/moe_load_imbalance": Metric("1", "As actor/moe_load_imbalance, in a supervised step."),
    "sft_warmup/moe_load_imbalance_max": Metric("1", "As actor/moe_load_imbalance_max, in a supervised step."),
    "sft_warmup/grad_norm": Metric("1", "Global gradient norm of the supervised step before clipping."),
    "sft_warmup/learning_rate": Metric("1", "Learning rate of the supervised step."),
    "sft_warmup/skipped_steps": Metric("steps", "Skipped supervised steps, as in actor/skipped_steps."),
    "time/step_s": Metric("s", "Wall-clock time of the whole step."),
    "time/generate_s": Metric(
        "s",
        "Generation, including any scoring that roles in the same pool do in between. With trainer.lead above 0, the "
        "batch was generated while earlier steps trained.",
    ),
    "time/wake_s": Metric("s", "Waking the engines before generation (rollout.sleep_level)."),
    "time/sleep_s": Metric("s", "Letting the engines sleep after generation."),
    "time/reward_s": Metric("s", "Waiting for rewards, without the scoring that overlaps generation and log-probs."),
    "time/logprobs_s": Metric("s", "Log-probs of the policy before its update; this, too, may include scoring."),
    "time/reference_s": Metric("s", "Waiting for the reference's log-probs, excluding time that overlaps other work."),
    "time/values_s": Metric("s", "Values of the critic before its update."),
    "time/update_critic_s": Metric("s", "Forward, backward and optimizer step of the critic."),
    "time/greedy_s": Metric("s", "Generation of the greedy responses."),
    "time/advantages_s": Metric("s", "Computation of advantages."),
    "time/update_s": Metric("s", "Forward, backward and optimizer step."),
    "time/wait_s": Metric("s", "Waiting for the step's own batch (trainer.lead): idle time within time/step_s."),
    "time/drain_s": Metric(
        "s",
        "Waiting for the next batch, or the last evaluation, before weights are published (trainer.lead): idle time "
        "within time/step_s.",
    ),
    "time/correction_s": Metric("s", "Importance weights and rejection (algorithm.correction)."),
    "time/recipe/<name>": Metric("s", 'Time that a custom recipe measures with `step.timer("recipe/<name>")`.'),
    "time/draw/<name>": Metric(
        "s", "As time/recipe/<name>, in the draw of a batch that was drawn ahead (trainer.lead)."
    ),
    "time/sync_s": Metric("s", "Weight transfer to the rollout role."),
    "time/restart_s": Metric("s", "Starting ranks again after a fault; the calls that needed them include it."),
    "time/evaluate_s": Metric("s", "Evaluation on the held-out split; with trainer.lead, while the next step trains."),
    "time/checkpoint_s": Metric(
        "s", "Time that training waits for checkpoints; with checkpoint.asynchronous, mostly to copy the state."
    ),
    "throughput/tokens_per_s": Metric(
        "tokens/s", "Real tokens, prompt and response, trained on per second of the step."
    ),
    "faults/restarts/<name>": Metric(
        "1", "Number of restarts of the ranks of an untrained role; logged only in steps with a restart."
    ),
    "perf/tflops/<name>": Metric(
        "TFLOP/s",
        "FLOPs that a role's model needs for the real tokens of a phase, over the time of its slowest rank, per rank. "
        "Padding and recomputed activations don't count. Phases are actor_logprobs, actor_update, reference_logprobs, "
        "critic_values, critic_update and reward_model_scores.",
    ),
    "perf/mfu/<name>": Metric(
        "fraction",
        "perf/tflops over the peak of the ranks' devices: the data sheet's dense rate of a known GPU, else the "
        "matrix products that all ranks of the pool reach at the same time, measured as the run starts.",
    ),
    "perf/trainer_idle_share": Metric(
        "fraction", "Share of the step in which the trainer waited for batches that are being drawn (trainer.lead)."
    ),
    "perf/engine_idle_share": Metric(
        "fraction",
        "Share of the step in which an engine had no response to generate, the mean over engines. With hf, all engines "
        "are busy until the last response of a call ends.",
    ),
    "perf/group_wait_s": Metric(
        "s",
        "Mean time between the end of a response's group and the end of the last group of the batch (vllm). It is long "
        "if a few responses are much longer than the others. Summed over rounds with recipe=dapo, and with "
        "trainer.late_groups over the batches whose last groups the step takes.",
    ),
    "perf/memory_resident": Metric(
        "bytes", "Peak resident memory of a rank's process since its start, of the rank with most."
    ),
    "perf/memory_allocated": Metric(
        "bytes", "Peak GPU memory of PyTorch's tensors in a rank's process since its start, of the rank with most."
    ),
    "perf/memory_reserved": Metric(
        "bytes", "As perf/memory_allocated, with the memory that PyTorch's allocator keeps for later tensors."
    ),
    "seqlen/min": Metric(
        "tokens", "Fewest tokens of a data rank if rows were split over ranks in arrival order, without balancing."
    ),
    "seqlen/max": Metric("tokens", "As seqlen/min, for the data rank with most tokens."),
    "seqlen/mean": Metric("tokens", "Mean tokens of a data rank."),
    "seqlen/minmax_diff": Metric("tokens", "seqlen/max minus seqlen/min."),
    "seqlen/balanced_min": Metric("tokens", "Fewest tokens of a data rank in the actor's plan."),
    "seqlen/balanced_max": Metric("tokens", "Maximum number of tokens of a data rank in the actor's plan."),
    "packing/microbatches_per_rank": Metric("1", "Microbatches per rank, dummy ones included."),
    "packing/num_microbatches": Metric("microbatches", "Microbatches that hold rows, over ranks and optimizer steps."),
    "packing/bin_utilization": Metric("fraction", "Real tokens over microbatches × token budget."),
    "packing/waste_ratio": Metric("fraction", "Token slots that hold no real token."),
    "packing/bin_balance": Metric("fraction", "Mean slots over the most slots of a microbatch."),
    "packing/packing_efficiency": Metric("fraction", "Lower bound on the number of microbatches, over their number."),
    "packing/rank_imbalance": Metric(
        "1", "Maximum number of slots of a rank, divided by the mean over the ranks, minus 1."
    ),
    "packing/lockstep_overhead": Metric(
        "1", "Time lost because ranks wait for each other at every microbatch, over the ideal time."
    ),
    "packing/dummy_microbatches": Metric("microbatches", "Empty microbatches that equalize the counts of all ranks."),
    "packing/overlong": Metric("rows", "Sequences over the token budget."),
    "packing/critical_slots": Metric(
        "tokens", "Slots of the costliest rank's microbatch, which all ranks wait for, summed over microbatch indices."
    ),
    "packing/critical_squares": Metric(
        "tokens²", "Sum of squared sequence lengths (slots) in the microbatches of packing/critical_slots."
    ),
    "packing/dropped": Metric("rows", "Overlong sequences that were left out."),
    "packing/truncated_tokens": Metric("tokens", "Tokens cut from overlong sequences."),
    "packing/real_tokens": Metric("tokens", "Tokens that are not padding."),
    "packing/shared_tokens": Metric(
        "tokens",
        "Prompt tokens among packing/real_tokens that another row of the microbatch computes (batching.share_prompts).",
    ),
    "packing/search_limit_hits": Metric("steps", "Optimizer steps in which algorithm=optimal hit its search limit."),
    "packing/groups_split": Metric("groups", "Groups over the token budget that were split."),
    "packing/slots": Metric("tokens", "Token slots, padding and dummy microbatches included."),
    "store/peak_bytes": Metric(
        "bytes", "Peak size of a step's tokens and texts in the object store, without the dataset cache."
    ),
    "recipe/<name>": Metric("1", "A metric that a custom recipe logs."),
    "optimizer_steps": Metric(
        "steps", "Optimizer steps of the actor so far, including those of the warm-up, without skipped ones."
    ),
    "epoch": Metric("1", "Dataset epoch of the step's last prompt, starting at 0."),
    "prompts_consumed": Metric(
        "prompts", "Prompts drawn since the start of the run, including those that recipe=dapo discarded."
    ),
    "prompts_trained": Metric(
        "prompts", "Prompts trained on since the start of the run: those with a response that counts in a loss."
    ),
}
