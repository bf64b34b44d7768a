"""Rules across the keys of reward functions and judges."""

import re
from collections.abc import Iterator

from rlpack.config.evaluation_sets import reward_functions
from rlpack.config.redaction import looks_secret
from rlpack.config.roles import started_roles
from rlpack.config.schema import Config, Judge, Reward, builtin_roles

JUDGE = "rlpack.workers.judge:JudgeWorker"
SERVED_REWARD_MODEL = "rlpack.workers.served_reward_model:ServedRewardModelWorker"
# Roles that call the server of the section `judge`.
CALLS_SERVER = (JUDGE, SERVED_REWARD_MODEL)
_COLUMN = re.compile(r"[A-Za-z][A-Za-z0-9_]*")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_UNIT_TESTS = "rlpack.rewards.code_execution:unit_tests"
# Columns reward_<name> that scoring roles use for counters.
_COUNTERS = ("failure", "output_bytes", "retries")


def reward_problems(config: Config) -> Iterator[str]:
    """Yield problems across the keys of `reward`."""
    reward = config.reward
    if reward.functions and (reward.arguments or reward.function != Reward().function):
        yield (
            f"reward.functions has {', '.join(reward.functions)}, but reward.function or reward.arguments is set too; "
            "set either reward.functions or reward.function"
        )
    for name in reward.functions:
        if not _COLUMN.fullmatch(name):
            yield f"reward.functions holds the name {name!r}; use letters, digits and _, starting with a letter"
        if name in _COUNTERS:
            yield f"reward.functions holds the name {name!r}, which is reserved for a counter; choose another"
    named = {f"reward.functions.{name}.function": function.function for name, function in reward.functions.items()}
    targets = {"reward.function": reward.function} | named | reward_functions(config)
    running = [key for key, target in targets.items() if target == _UNIT_TESTS]
    if reward.subprocesses == 0 and running:
        yield (
            f"{running[0]} is {_UNIT_TESTS}, which runs programs, but reward.subprocesses is 0; set "
            "reward.subprocesses=1"
        )
    for number, variable in enumerate(reward.env_vars):
        yield from _variable_problems(f"reward.env_vars.{number}", variable)


def _variable_problems(key: str, variable: str) -> Iterator[str]:
    """Yield a problem unless a value is a variable's name. It may be a secret, so it is not shown."""
    if not _VARIABLE.fullmatch(variable) or looks_secret("", variable):
        yield (
            f"{key} is not the name of an environment variable (letters, digits and _); configs are stored and shown, "
            "so set the name here, such as OPENAI_API_KEY, and the value in the environment of the ranks"
        )


def deadline_problems(config: Config) -> Iterator[str]:
    """Yield deadlines of rewards that the deadline of a role's call would cut short, as if the rank hung."""
    limit, roles = config.placement.call_timeout_s, started_roles(config)
    deadlines: dict[str, float] = {}
    if "reward" in roles:
        named = {f"reward.functions.{name}.timeout_s": one.timeout_s for name, one in config.reward.functions.items()}
        deadlines = {key: value for key, value in named.items() if value is not None}
        deadlines["reward.timeout_s"] = config.reward.timeout_s
        deadlines["reward.batch_timeout_s"] = config.reward.batch_timeout_s
    if any(config.roles[name].target in CALLS_SERVER for name in roles):
        yield from _request_problems(config.judge, limit)
    for key, value in deadlines.items():
        if value >= limit:
            yield (
                f"{key} ({value:g}) is not below placement.call_timeout_s ({limit:g}), so slow rewards would end the "
                f"run as a rank that hangs; lower {key} or raise placement.call_timeout_s"
            )


def _request_problems(judge: Judge, limit: float) -> Iterator[str]:
    """Yield a problem if all attempts of a row's request may take as long as a role's call, with the pauses between."""
    longest = (1 + judge.retries) * judge.timeout_s + judge.backoff_s * (2**judge.retries - 1)
    if longest >= limit:
        further = f", judge.retries={judge.retries} and judge.backoff_s={judge.backoff_s:g}" if judge.retries else ""
        yield (
            f"a row may take {longest:g} s with judge.timeout_s={judge.timeout_s:g}{further}, which is not below "
            f"placement.call_timeout_s ({limit:g}), so a slow server would end the run as a rank that hangs; lower "
            "one of them, or raise placement.call_timeout_s"
        )


def judge_problems(config: Config) -> Iterator[str]:
    """Yield problems across `judge` and the roles that call its server."""
    judge = config.judge
    callers = [name for name, role in config.roles.items() if role.target in CALLS_SERVER]
    if len(callers) > 1:
        yield f"the roles {', '.join(callers)} would all call the server of judge.url; keep one of them"
    for name in callers:
        column = "judge" if config.roles[name].target == JUDGE else "served_model"
        if column in config.reward.functions:
            other = f"reward.functions.{column}"
            yield f"the role {name} and {other} would both add the column reward_{column}; remove one of them"
    if callers and (judge.url is None or judge.model is None):
        missing = "judge.url" if judge.url is None else "judge.model"
        yield f"{missing} is null, but the role {callers[0]} needs it; set judge.url and judge.model"
    if judge.api_key_env is not None:
        yield from _variable_problems("judge.api_key_env", judge.api_key_env)
    if judge.url is not None:
        yield from _url_problems(config, judge.url)


def _url_problems(config: Config, url: str) -> Iterator[str]:
    """Yield problems of `judge.url`; one with a secret is not shown."""
    if "@" in url.partition("://")[2].partition("/")[0]:
        yield "judge.url contains a user or a password, and configs are stored and shown; use judge.api_key_env"
        return
    if looks_secret("url", url):
        yield "judge.url contains a key or a token, and configs are stored and shown; use judge.api_key_env"
        return
    unchanged = {role.target for role in builtin_roles().values()}
    if all(role.target in unchanged for role in config.roles.values()):
        yield (
            f"judge.url is {url!r}, but no role uses it; add roles.judge.target={JUDGE}, or, for a reward model, "
            f"roles.judge.target={SERVED_REWARD_MODEL}"
        )
    if not url.startswith(("http://", "https://")):
        yield f"judge.url is {url!r}; it has to start with http:// or https://"
