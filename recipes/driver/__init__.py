"""The building blocks of the recipes' loops; all of them run on the driver.

- `session`, `step_context`, `progress`: the run, the step in progress, and how far the run has come.
- `rollout_stages`, `reward_stages`, `policy_stages`, `critic_stages`, `sft_stages`: the lines of a loop.
- `ahead`, `evaluations`: batches and evaluations that are drawn while the actor trains.
- `dynamic_sampling`, `evaluation`: stages that combine other stages; `rlpack evaluate` shares the latter.
- `logprob_gap`: the limit on the gap between the trainer's and the sampler's log-probs.
- `loss_weights`, `learning_rate`: pure functions of plan and step.
- `splits`, `resume`: the prompts of a run, and the checkpoint that it continues from.
"""
