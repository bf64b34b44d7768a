"""Bad results of engines, rewards and plans during a run, and the tests that say what happens then.

No command line gives these: each is a typed failure, a row that is left out and counted, or handled.
"""

ROLLOUT, REWARDS = "tests/unit/rollout/test_", "tests/unit/rewards/test_"
PLAN = "tests/unit/packing/test_make_plan.py"

# By what is wrong: file and test.
TESTS = {
    "an empty response": (
        f"{ROLLOUT}assemble.py",
        "test_rows_are_prompts_followed_by_responses_with_every_column_aligned",
    ),
    "only an end, or none": (f"{ROLLOUT}hf.py", "test_a_response_ends_with_its_first_stop_token_or_at_the_limit"),
    "an end exactly at the limit": (f"{ROLLOUT}hf.py", "test_a_stop_token_exactly_at_the_limit_is_a_stop"),
    "missing or uneven log-probs": (f"{ROLLOUT}assemble.py", "test_tokens_need_a_logprob_and_a_version_each"),
    "log-probs over 0, NaN or infinite": (
        f"{ROLLOUT}assemble.py",
        "test_values_that_no_model_returns_are_refused_by_row",
    ),
    "token ids outside the vocabulary": (
        f"{ROLLOUT}assemble.py",
        "test_values_that_no_model_returns_are_refused_by_row",
    ),
    "fewer or more responses": (f"{ROLLOUT}assemble.py", "test_row_counts_that_differ_are_refused"),
    "a version of the future": (f"{ROLLOUT}assemble.py", "test_a_version_that_was_not_published_yet_is_refused_by_row"),
    "an unknown finish reason": (f"{ROLLOUT}assemble.py", "test_an_unknown_finish_reason_is_refused_by_row"),
    "NaN and infinite rewards": (
        f"{REWARDS}reward_result.py",
        "test_values_that_are_not_finite_have_their_own_problems",
    ),
    "rewards that are no numbers": (f"{REWARDS}reward_result.py", "test_a_value_that_is_not_a_number_is_a_failure"),
    "another number of rewards": (
        f"{REWARDS}scoring.py",
        "test_a_function_that_returns_another_number_of_rewards_ends_the_run",
    ),
    "a whole batch that fails": (f"{REWARDS}scoring.py", "test_no_failure_is_too_many_where_none_may_be"),
    "equal rewards in a group": (
        "tests/unit/algorithms/test_advantages.py",
        "test_a_group_of_one_and_a_group_of_equal_rewards_are_exactly_zero",
    ),
    "no valid row": ("tests/unit/algorithms/test_advantages.py", "test_all_rows_invalid_give_zeros"),
    "an empty mask": (
        "tests/unit/algorithms/test_aggregation.py",
        "test_a_batch_without_any_counted_token_has_weights_of_exactly_zero",
    ),
    "an empty mask in a row": (
        "tests/unit/algorithms/test_aggregation.py",
        "test_a_row_without_a_token_that_counts_weighs_nothing",
    ),
    "a length of 0": (PLAN, "test_rows_without_tokens_get_a_slot_to_run_on"),
    "lengths that are negative, NaN, booleans": (PLAN, "test_invalid_arguments_are_rejected"),
    "fewer rows than ranks": (PLAN, "test_dummy_microbatches_replace_missing_rows_if_there_are_fewer_rows_than_ranks"),
    "uneven rows": (PLAN, "test_every_plan_keeps_all_seven_guarantees"),
    "one token over the budget": (
        PLAN,
        "test_an_overlong_row_is_truncated_dropped_or_gets_its_own_microbatch_and_is_counted",
    ),
}
