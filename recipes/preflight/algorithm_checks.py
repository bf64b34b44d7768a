"""Call the loss and the advantage function on example rows, as a step would: either may be a user's function."""

import logging
import traceback

import torch
from torch import Tensor

from rlpack.algorithms.errors import AlgorithmError
from rlpack.algorithms.policy_loss import PolicyTokens
from rlpack.algorithms.registry import advantage_parameters, call_advantage, find_advantage
from rlpack.config.schema import Config
from rlpack.distributed.failures import place_in_user_code
from rlpack.startup.function_sources import advantage_columns, uses_advantage
from rlpack.user_code import describe_exception
from rlpack.workers.loss import PolicyGradientLoss

logger = logging.getLogger(__name__)

# What functions raise because of values, not of types or shapes.
_DEPENDS_ON_VALUES = (
    ArithmeticError,
    AssertionError,
    ValueError,
    torch.linalg.LinAlgError,  # pyright: ignore[reportPrivateImportUsage]
)


def check_algorithm(config: Config) -> None:
    """Find the loss and the advantage function, and check what they return.

    Raises:
        AlgorithmError: a function doesn't exist, can't be called as configured, fails, or returns something other than
            a loss per token or an advantage per row.
    """
    _check_loss(config)
    if uses_advantage(config):
        _check_advantage(config)


def _check_loss(config: Config) -> None:
    """Call the loss on two rows to check its bounds, its result, its gradient, and that it doesn't mix rows."""
    settings = config.algorithm
    # The numbers of rows, of response tokens and of tokens differ, so no result of another shape passes for [T].
    column, mask = torch.zeros(5), torch.tensor([False, True, True, False, True])
    tokens = PolicyTokens(column, column, column, mask, torch.tensor([3, 2]))
    loss = PolicyGradientLoss(settings, temperature=config.rollout.temperature)
    try:
        loss.evaluate(tokens)
    except AlgorithmError:
        raise
    except Exception as error:  # the function may be a user's
        reason = f"whose call with five tokens failed: {describe_exception(error)}"
        raise AlgorithmError(f"algorithm.loss is {settings.loss!r}, {reason}") from error
    try:
        together, again, alone = _example_losses(loss)
    except Exception as error:  # noqa: BLE001 - the example values may not suit the function
        logger.debug("algorithm.loss %s isn't checked further: %s", settings.loss, describe_exception(error))
        return
    if not together.requires_grad:  # next to a KL term, the run would train on that term alone
        raise AlgorithmError(
            f"algorithm.loss is {settings.loss!r}, whose token_losses have no gradient; compute them from "
            "tokens.logprobs or tokens.ratio without detach() and torch.no_grad()"
        )
    is_repeatable = torch.allclose(together, again, equal_nan=True)  # a random loss isn't
    if is_repeatable and not torch.allclose(together, alone, rtol=1e-4, atol=1e-6, equal_nan=True):
        logger.warning(
            "algorithm.loss %s: the loss of a row changes with the other rows in its microbatch, so training depends "
            "on batching; compute it from the tokens of its row alone, or decorate the function with "
            "rlpack.algorithms.statistics.needs_statistics", settings.loss,
        )  # fmt: skip


def _example_losses(loss: PolicyGradientLoss) -> tuple[Tensor, Tensor, Tensor]:
    """Return the losses of two rows together, again, and each alone, with the same statistics of the step; [T] each."""
    old = torch.tensor([-1.0, -1.5, -0.5, -2.0, -0.7])
    new = (old + torch.tensor([0.0, 0.1, -0.05, 0.02, -0.1])).requires_grad_()
    advantages, mask = torch.tensor([1.0, 1.0, 1.0, -0.5, -0.5]), torch.tensor([False, True, True, False, True])

    def tokens(start: int, *lengths: int) -> PolicyTokens:
        part = slice(start, start + sum(lengths))
        return PolicyTokens(new[part], old[part], advantages[part], mask[part], torch.tensor(lengths))

    both = tokens(0, 3, 2)
    statistics = loss.statistics([both]) if loss.needs_statistics else None
    parts = (both, both, tokens(0, 3), tokens(3, 2))
    together, again, first, second = (loss.evaluate(part, statistics).token_losses for part in parts)
    return together, again, torch.cat([first, second])


def _check_advantage(config: Config) -> None:
    """Call the advantage function on the rows of one step, unless it may read columns whose types aren't known.

    Its numbers aren't checked, and an error that values may cause is only a warning: the example rows aren't those of
    the run.
    """
    settings, offered = config.algorithm, advantage_columns(config)
    find_advantage(settings.advantage, settings.advantage_arguments, offered, dict(settings))
    columns = _example_columns(config, offered)
    parameters = advantage_parameters(settings.advantage)
    may_be_passed = parameters if offered is None else parameters & offered
    if not may_be_passed <= {*columns, *dict(settings), *settings.advantage_arguments}:
        return
    try:
        call_advantage(settings.advantage, settings.advantage_arguments, dict(settings), columns)
    except AlgorithmError:
        raise
    except Exception as error:  # the function may be a user's
        rows = f"{columns['rewards'].numel()} example rows, with rewards of 0 and 1,"
        problem = f"algorithm.advantage is {settings.advantage!r}, whose call with {rows} failed: "
        problem += f"{describe_exception(error)}{place_in_user_code(''.join(traceback.format_exception(error)))}"
        if not isinstance(error, _DEPENDS_ON_VALUES):
            raise AlgorithmError(problem) from error
        logger.warning("%s. If the rows of a step can't cause it, ignore this warning", problem)


def _example_columns(config: Config, offered: set[str] | None) -> dict[str, Tensor]:
    """Return those columns of a step whose types are known, [B]; values vary, and rewards alternate between 0 and 1.

    Args:
        config: the configuration.
        offered: names of the columns that the advantage function may get; None if that isn't known.
    """
    size = config.trainer.group_size
    rows = torch.arange(config.trainer.prompts_per_step * size)
    lengths, rewards = 1 + rows % config.rollout.max_new_tokens, ((rows % size + rows // size) % 2).float()
    of_functions = [f"reward_{name}" for name in config.reward.functions]
    columns = {
        "rewards": rewards,
        "valid": torch.ones_like(rows, dtype=torch.bool),
        "group_ids": rows // size,
        "response_tokens": lengths,
        "response_lengths": lengths,
        "prompt_lengths": 1 + rows // size,
        "greedy_rewards": (rows // size % 2).float(),
        "kl_sum": 0.01 * rows.double(),
        **dict.fromkeys([*of_functions, "rewards_of_reward", "rewards_of_reward_model"], rewards),
    }
    return {name: column for name, column in columns.items() if offered is None or name in offered}
