"""The schema: every key a user can set, its type, its limits and its default, and nothing else.

Hydra's base node is generated from these models, YAML presets only override, and the composed config is
validated back into them (`rlpack.config.validate`). Code takes the section that it needs, not the whole config.
"""

from typing import Any, Literal

from pydantic import Field

from rlpack.config.sections.compute import Compute, RoleCompute
from rlpack.config.sections.correction_settings import Correction
from rlpack.config.sections.held_out import Evaluation
from rlpack.config.sections.held_out import EvaluationSet as EvaluationSet
from rlpack.config.sections.late_group_settings import LateGroupSettings
from rlpack.config.sections.optimization import Experts, Lora, Optimizer
from rlpack.config.sections.parallelism import Parallel, RoleParallel
from rlpack.config.sections.pools import Pool as Pool
from rlpack.config.sections.records import Checkpoint, Logger
from rlpack.config.sections.reward_sources import Judge, Reward
from rlpack.config.sections.reward_sources import RewardFunction as RewardFunction
from rlpack.config.sections.role_batching import ActorBatching, ForwardBatching, RoleBatching
from rlpack.config.sections.section import Count, NonNegative, Positive, Seconds, Section, TokenId, Unit
from rlpack.config.sections.submission import Submission
from rlpack.config.sections.value_models import Critic, RewardModel
from rlpack.packing.batching import Batching

BUILTIN_ROLES = ("actor", "critic", "reference", "rollout", "reward", "reward_model")


class Trainer(Section):
    """Batch sizes and the number of steps."""

    steps: int = Field(default=50, ge=0, description="Number of training steps; each trains on one rollout batch.")
    data_epochs: Positive | None = Field(
        default=None,
        description="Passes over the training prompts, from which the number of steps is then computed; null uses "
        "trainer.steps.",
    )
    prompts_per_step: Count = Field(default=32, description="Prompts of one rollout step.")
    group_size: Count = Field(default=8, description="Samples of each prompt (n).")
    mini_batch_size: Count | None = Field(
        default=None, description="Sequences of one optimizer step, over all ranks; null for the whole rollout batch."
    )
    updates_per_batch: Count = Field(default=1, description="Update passes over each rollout batch (GRPO's μ).")
    shuffle_mini_batches: bool = Field(
        default=False,
        description="Shuffle rows across mini-batches, with the seed, in each pass over a rollout batch after the "
        "first; false keeps arrival order.",
    )
    lead: int = Field(
        default=0,
        ge=0,
        le=64,
        description="How many steps ahead batches are generated: 0 to alternate generation and training; 1 to generate "
        "the next batch while the actor trains on the current one, with weights that are one policy version older; "
        "more only with rollout.publish=in_flight. Above 0, the role rollout needs its own pool.",
    )
    late_groups: LateGroupSettings = LateGroupSettings()

    @property
    def known_steps(self) -> int | None:
        """Rollout steps; None if they follow from data that isn't read yet."""
        return self.steps if self.data_epochs is None else None

    @property
    def max_lag(self) -> int:
        """Policy versions that the oldest token of a batch may be behind the newest."""
        return self.lead + self.late_groups.window - 1

    @property
    def measured_lags(self) -> range:
        """Lags with separate metrics: those up to `max_lag` that occur, since step b is at most b - 1 behind."""
        return range(min(self.max_lag, self.steps - 1) + 1)


class SFTWarmup(Section):
    """Supervised fine-tuning on the dataset's demonstrations before the first rollout step."""

    steps: int = Field(default=0, ge=0, description="Optimizer steps; 0 for none.")
    batch_size: Count = Field(default=64, description="Sequences of one optimizer step, over all ranks.")
    learning_rate: Positive = Field(
        default=1e-5, description="Peak learning rate: linear rise over the first tenth of the steps, then cosine."
    )


class Actor(Compute):
    """The policy that is trained."""

    optimizer: Optimizer = Optimizer()
    lora: Lora = Lora()
    moe: Experts = Experts()
    parallel: Parallel = Parallel()
    forward_batching: ForwardBatching = ForwardBatching()


class Reference(RoleCompute):
    """The frozen policy of the KL term; started only when algorithm.kl_coef > 0."""

    logprob_chunk: Count | None = Field(default=None, description="As actor.logprob_chunk; null inherits it.")
    parallel: RoleParallel = RoleParallel()
    batching: RoleBatching = RoleBatching()


class Algorithm(Section):
    """Advantages, the policy loss, its KL term and its entropy bonus."""

    advantage: str = Field(
        default="group_relative",
        description=("group_relative, opo, reinforce_pp, remax (recipe=remax), or package.module:function."),
    )
    advantage_arguments: dict[str, Any] = Field(
        default_factory=dict, description="Further keyword arguments of the advantage function."
    )
    baseline: Literal["mean", "leave_one_out"] = Field(default="mean", description="Baseline of group_relative.")
    scale: Literal["std", "none"] = Field(
        default="std", description="Whether group_relative divides by the group's standard deviation."
    )
    loss: str = Field(
        default="ppo_clip",
        description="ppo_clip, gspo, gmpo, cispo, sapo, dppo_tv, dppo_kl, reinforce, kl_cov, or "
        "package.module:function.",
    )
    loss_arguments: dict[str, Any] = Field(
        default_factory=dict, description="Further keyword arguments of the loss function."
    )
    clip_low: float = Field(
        default=0.2, ge=0, le=1, description="Clips ratios below 1 - clip_low; gmpo: log-ratios; dppo_*: divergences."
    )
    clip_high: NonNegative = Field(default=0.28, description="Upper counterpart of clip_low: 1 + clip_high.")
    dual_clip: float | None = Field(default=None, gt=1, description="ppo_clip: ratio bound for A < 0; null for none.")
    kl_coef: NonNegative = Field(
        default=0.0, description="Weight of the KL term; the reference is started only above 0."
    )
    kl_estimator: Literal["k1", "k2", "k3", "abs"] = Field(
        default="k3", description="Estimator of the KL divergence at a token."
    )
    k3_bound: Positive | None = Field(
        default=10.0,
        description="Upper bound on k3 at a token, in nats. Clipped tokens have no gradient, unless "
        "kl_straight_through gives them k2's. null bounds only the exponent, to 20.",
    )
    kl_straight_through: bool = Field(
        default=False,
        description="Use the value of kl_estimator, but the gradient of k2, which is unbiased for the KL divergence.",
    )
    kl_placement: Literal["loss", "reward"] = Field(
        default="loss",
        description="Whether the KL term is added to the loss or subtracted from the rewards: of each token under "
        "recipe=ppo or algorithm.advantage=reinforce_pp, else of the response.",
    )
    kl_target: Positive | None = Field(
        default=None, description="Target KL of a response, in nats, for an adaptive kl_coef; null keeps kl_coef fixed."
    )
    kl_horizon: Positive = Field(
        default=10000.0, description="Responses over which kl_coef changes by at most a fifth."
    )
    entropy_coef: NonNegative = Field(default=0.0, description="Weight of the entropy bonus.")
    correction: Correction = Correction()
    aggregation: Literal[
        "token_mean", "seq_mean_token_mean", "seq_mean_token_sum", "seq_mean_token_sum_norm", "token_sum"
    ] = Field(default="token_mean", description="How token losses are aggregated over a mini-batch.")
    aggregation_constant: Positive | None = Field(
        default=None,
        description="Divisor of seq_mean_token_sum_norm (Dr. GRPO: the longest response).",
    )


class Model(Section):
    """The policy's weights and tokenizer."""

    path: str | None = Field(
        default=None, description="Folder or Hub name; null initializes a new model from model.config."
    )
    config: dict[str, Any] = Field(default_factory=dict, description="transformers config of a new model.")
    tokenizer: str | None = Field(
        default=None, description="Folder or Hub name; null for that of model.path, or characters for a new model."
    )
    revision: str | None = Field(default=None, description="Pinned revision of a model on the Hub.")
    tokenizer_revision: str | None = Field(
        default=None,
        description="Pinned revision of model.tokenizer on the Hub, if that isn't model.path; needed to run its code.",
    )
    trust_remote_code: bool = Field(
        default=False, description="Run code from the model's repository; needs model.revision."
    )


class Data(Section):
    """Prompts: a built-in generator, a JSONL or Parquet file, or a dataset on the Hub."""

    source: str = Field(
        default="arithmetic", description="arithmetic, a .jsonl or .parquet file, or the name of a dataset on the Hub."
    )
    subset: str | None = Field(default=None, description="Configuration of a Hub dataset, such as GSM8K's main.")
    split: str = Field(default="train", description="Training split (Hub and generator).")
    fraction: Unit = Field(
        default=1.0, description="Share of the training prompts that is used, drawn with the seed; at least one."
    )
    validation_source: str | None = Field(
        default=None, description="Source of held-out prompts; null for data.source. A file needs its own."
    )
    validation_subset: str | None = Field(
        default=None, description="As data.subset, for data.validation_source; null for that of the same dataset."
    )
    validation_split: str = Field(default="validation", description="Held-out split.")
    prompt_column: str = Field(default="prompt", description="Column of the prompt: text, or a list of chat messages.")
    answer_column: str | None = Field(default="answer", description="Column with the reference answer; null for none.")
    completion_column: str | None = Field(default=None, description="Column of the target text for supervised steps.")
    chat_template: bool = Field(
        default=False,
        description="Render prompts with the tokenizer's chat template: text as one user message, or chat messages.",
    )
    max_prompt_tokens: Count = Field(default=512, description="Maximum number of tokens in a prompt.")
    overlong_prompt: Literal["error", "drop"] = Field(default="error", description="What to do with longer prompts.")
    generator: dict[str, Any] = Field(default_factory=dict, description="Arguments of the built-in generator.")

    @property
    def held_out(self) -> tuple[str, str | None]:
        """Source of the held-out prompts, and its subset; `subset` applies to the training prompts' dataset alone."""
        source = self.source if self.validation_source is None else self.validation_source
        inherited = self.subset if source == self.source else None
        return source, inherited if self.validation_subset is None else self.validation_subset


class Rollout(Section):
    """Generation."""

    engine: Literal["hf", "vllm"] = Field(
        default="hf", description="Generation engine: hf (transformers), or vllm, which is installed separately."
    )
    max_new_tokens: Count = Field(default=256, description="Maximum number of tokens in a response.")
    temperature: float = Field(
        default=1.0, ge=0.01, description="Sampling temperature; log-probs in training use it, too."
    )
    top_p: Unit = Field(default=1.0, description="Nucleus sampling: probability mass of the candidates.")
    top_k: int = Field(default=0, ge=0, description="Sample from the k most likely tokens; 0 for all.")
    stop_token_ids: tuple[TokenId, ...] = Field(
        default=(),
        strict=False,
        description="Token ids that end a response, in addition to the tokenizer's end of sequence, eos_token_id in "
        "the model's generation_config.json and, with data.chat_template, the template's end of a turn.",
    )
    publish: Literal["drain", "in_flight"] = Field(
        default="drain",
        description="When new weights reach the engines with trainer.lead: drain waits until the batch in progress is "
        "generated, so that all of its tokens have one policy version and a resumed run is bit-identical; in_flight "
        "(vllm) sends them at once, and unfinished responses continue with the new weights.",
    )
    kv_cache: Literal["clear", "keep"] = Field(
        default="clear",
        description="What happens to the KV cache of responses that continue with new weights (publish=in_flight): "
        "clear recomputes it, so that the trainer can recompute each token's log-prob from the weights of its version; "
        "keep saves that time.",
    )
    max_logprob_gap: Positive | None = Field(
        default=None,
        description="Limit on the mean absolute difference between the trainer's and the sampler's log-probs, in nats: "
        "above it the run warns once, above ten times it the run ends. null: 0.05 with actor.precision=fp32, 0.3 with "
        "bf16; no limit with top_p below 1 or top_k above 0, which change only the sampler's log-probs.",
    )
    max_num_seqs: Count = Field(
        default=256,
        description="Responses that a rank generates at once, at most; finished ones are scored during generation.",
    )
    dtype: Literal["fp32", "bf16"] | None = Field(
        default=None, description="Type of vLLM's weights; null for actor.precision. hf always generates in fp32."
    )
    compile: bool | None = Field(
        default=None, description="Whether vLLM compiles the model and uses CUDA graphs; null on GPUs only."
    )
    kv_cache_gb: Positive | None = Field(
        default=None,
        description="Size of vLLM's KV cache on each rank, in GB. If null: on CPUs, what max_num_seqs rows need, at "
        "most an eighth of the available memory; on GPUs, as vllm.gpu_memory_utilization sets it (default: 0.5 if "
        "other roles use the GPUs, else vLLM's own).",
    )
    sleep_level: Literal[0, 1, 2] | None = Field(
        default=None,
        description="What vLLM frees between generations if roles that run a model share its GPUs: 0 nothing; 1 its "
        "KV cache, and its weights, which it moves to host memory; 2 both, so that weights have to be sent again "
        "before it generates. null is 1.",
    )
    request_timeout_s: Seconds = Field(
        default=600.0,
        description="Deadline of one response by vLLM, including its time in the engine's queue, and of one call that "
        "loads weights (at most half of placement.call_timeout_s), in seconds.",
    )
    lora: Literal["merged", "adapter"] = Field(
        default="merged",
        description="How actor.lora's adapters reach the engine: merged into the weights, or as adapters that vLLM "
        "applies, so that only their matrices are sent.",
    )
    deterministic: bool = Field(
        default=False,
        description="Require a row's tokens and log-probs to be bit-identical whichever rows vLLM runs with it. A test "
        "at startup fails if they are not. On GPUs this sets VLLM_BATCH_INVARIANT, which costs speed.",
    )
    vllm: dict[str, Any] = Field(
        default_factory=dict, description="Further engine arguments of vLLM, by vLLM's own names."
    )


class Placement(Section):
    """Which role runs where, and deadlines."""

    address: str | None = Field(
        default=None, description="Ray cluster to join (auto, or host:port); null starts a local one."
    )
    pools: dict[str, Pool] = Field(default_factory=lambda: {"main": Pool()}, description="Pools of devices by name.")
    roles: dict[str, str] = Field(
        default_factory=lambda: dict.fromkeys(BUILTIN_ROLES, "main"),
        description="Pool of each role; roles of a pool share its processes. Roles not named run in the first pool.",
    )
    start_timeout_s: Seconds = Field(
        default=300.0, description="Deadline for starting processes and roles, in seconds."
    )
    call_timeout_s: Seconds = Field(default=1800.0, description="Deadline of one call of a role, in seconds.")
    ray_timeout_s: Seconds = Field(
        default=6.0,
        description="Time without an answer from Ray's GCS or this machine's raylet after which the run ends, in "
        "seconds. Raise it on a cluster whose GCS is restarted with its state (GCS fault tolerance).",
    )
    object_store_gb: float | None = Field(
        default=None,
        ge=0.08,
        description="Object store of a cluster that the run starts, in GB; null for Ray's default, 30 % of memory.",
    )
    in_flight_gb: float | None = Field(
        default=None,
        ge=0.001,
        description="Byte budget of batches in the object stores of all nodes together, in GB. A result that would "
        "exceed it waits while another thread may free room; if none can, the call fails before any of its rows are "
        "stored. null for 60 % of the stores.",
    )


class Role(Section):
    """A role's class, its arguments and, for roles that users add, its batching."""

    target: str = Field(description="The role's class as package.module:Class.")
    arguments: dict[str, Any] = Field(default_factory=dict, description="Keyword arguments for the class on each rank.")
    batching: RoleBatching = RoleBatching()


def builtin_roles() -> dict[str, Role]:
    """Return the classes of the built-in roles."""
    return {name: Role(target=f"rlpack.workers.{name}:{name.title().replace('_', '')}Worker") for name in BUILTIN_ROLES}


class Recipe(Section):
    """The algorithm. The group `recipe=…` chooses a built-in one with its presets; a recipe may add its own section."""

    target: str = Field(
        default="rlpack.recipes.grpo", description="Module of the recipe, as package.module; may be your own."
    )

    @property
    def name(self) -> str:
        """The module's last name, which run directories and messages use."""
        return self.target.rpartition(".")[2]


class Config(Section):
    """A whole run; `rlpack.config.recipes.config_class` adds the sections of its recipe."""

    recipe: Recipe = Recipe()
    seed: int = Field(default=1, ge=0, lt=2**63, description="Seed of all random numbers.")
    run_dir: str | None = Field(default=None, description="Directory of the run; null for runs/<date>-<recipe>.")
    resume: Literal["never", "auto"] = Field(
        default="never", description="auto resumes from run_dir's newest checkpoint, or starts if there is none."
    )
    supervise: int = Field(
        default=0,
        ge=0,
        le=1000,
        description="How many times `rlpack train` restarts a failed run from its newest checkpoint.",
    )
    trainer: Trainer = Trainer()
    sft_warmup: SFTWarmup = SFTWarmup()
    evaluation: Evaluation = Evaluation()
    algorithm: Algorithm = Algorithm()
    model: Model = Model()
    data: Data = Data()
    reward: Reward = Reward()
    judge: Judge = Judge()
    rollout: Rollout = Rollout()
    batching: ActorBatching = Field(
        default=Batching(), description="Batching of the actor, and the default of other roles."
    )
    actor: Actor = Actor()
    critic: Critic = Critic()
    reference: Reference = Reference()
    reward_model: RewardModel = RewardModel()
    placement: Placement = Placement()
    roles: dict[str, Role] = Field(default_factory=builtin_roles, description="Role classes by name; add your own.")
    logger: Logger = Logger()
    checkpoint: Checkpoint = Checkpoint()
    job: Submission = Submission()
