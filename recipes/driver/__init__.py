"""What the recipes' loops are made of; it runs on the driver.

- `session`, `step_context`, `progress`: the run, one step of it, and what is completed.
- `rollout_stages`, `reward_stages`, `policy_stages`, `critic_stages`, `sft_stages`: the lines of a loop.
- `dynamic_sampling`, `evaluation`: stages made of stages.
- `loss_weights`, `learning_rate`: pure functions of plan and step.
- `splits`, `resume`: the prompts of a run, and the checkpoint that it continues from.
"""
