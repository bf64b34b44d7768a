"""Reward functions: how they are found, called, isolated and checked.

`functions`, `math` and `code_execution` are the built-in rewards; `signatures` says how a function is called;
`scoring` runs several in the `pool` of killable processes, sums them with weights and quarantines rows without a finite
reward; `judge_client` scores with a language model behind an OpenAI-compatible URL.
"""
