"""Score responses with a language model behind an OpenAI-compatible URL.

The judge's answers are untrusted, like a policy's: an answer without a score in range is a counted failure.
"""

import asyncio
import json
import re
import string
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlpack.data.examples import conversation
from rlpack.rewards.errors import RewardError
from rlpack.rewards.reward_result import RewardResult
from rlpack.rewards.score_requests import AttemptFailedError, RequestSettings, ScoreRequests, excerpt

# With quotes, brackets and Markdown around either side. A score with one of the first words is a limit, not the score.
_SCORE = re.compile(
    r"""(?:\b((?i:max|min|highest|lowest|best|top|full|possible|passing)(?:imum)?)[\W_]*|(?<![A-Za-z])|(?<=[a-z])(?=S))"""
    r"""(?i:score)["'*_`]*\s*[:=：][\s"'*_`<\[($]*(-?\d++(?:[.,]\d++)*+(?:[eE][-+]?\d++)?)""",
)
# Only plain decimals count, not 1,000 or 1e3.
_NUMBER = re.compile(r"-?\d+(?:\.\d+)?")

# The placeholder that stands for a setting, not for a column.
_MAX_SCORE = "max_score"


@dataclass(frozen=True)
class JudgeSettings(RequestSettings):
    """How the judge is called, at `url` without `/chat/completions`.

    Attributes:
        prompt_template: the user message, with `{prompt}`, `{completion}`, `{column}` and `{max_score}` placeholders.
        max_score: scores range from 0 to this.
        max_tokens: length limit of an answer.
    """

    prompt_template: str = "{prompt}{completion}"
    max_score: float = 10.0
    max_tokens: int = 512


# Status codes by which servers refuse a single request: too many tokens, or a content filter.
_REFUSALS = frozenset({400, 413, 422})


class JudgeClient:
    """Client that scores one batch."""

    def __init__(
        self,
        settings: JudgeSettings,
        max_failed_rows: float = float("inf"),
        *,
        slots: asyncio.Semaphore | None = None,
    ) -> None:
        """Allow `max_failed_rows` failed rows and use shared `slots`, as `ScoreRequests` does."""
        self._settings = settings
        self._url = f"{settings.url.rstrip('/')}/chat/completions"
        self._requests = ScoreRequests(settings, self._url, self._read_score, max_failed_rows, _REFUSALS, slots)

    @property
    def num_retries(self) -> int:
        """Number of requests so far, not counting the first of each row."""
        return self._requests.num_retries

    async def score(self, columns: Mapping[str, Sequence[Any]], num_rows: int) -> list[RewardResult]:
        """Return the result of every row, rewards from 0 to 1.

        Raises:
            RewardError: the server rejects the request permanently, for a wrong key, model or address.
        """
        names = placeholders(self._settings.prompt_template)
        rows = [{name: _as_text(name, columns[name][row]) for name in names} for row in range(num_rows)]
        return await self._requests.score([self._body(texts) for texts in rows])

    def _body(self, texts: Mapping[str, str]) -> dict[str, Any]:
        settings = self._settings
        prompt = settings.prompt_template.format_map({**texts, _MAX_SCORE: _as_number(settings.max_score)})
        return {
            "model": settings.model,
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": settings.max_tokens,
            "temperature": 0.0,
        }

    def _read_score(self, body: str) -> RewardResult:
        """Return the score in an answer; an answer without a score is not retried."""
        answer, is_cut = _message_content(body, self._url)
        max_tokens, max_score = self._settings.max_tokens, self._settings.max_score
        if is_cut:  # its last score may be an intermediate one, or lack digits
            detail = f"its answer was cut off at judge.max_tokens ({max_tokens}); raise it: {excerpt(answer)!r}"
            return RewardResult(problem="invalid", detail=detail)
        score = parse_score(answer, max_score)
        if score is None:
            return RewardResult(problem="invalid", detail=f"no score from 0 to {max_score:g} in {excerpt(answer)!r}")
        return RewardResult(score / max_score)


def _as_text(name: str, value: Any) -> str:
    """Return a column's value as the judge reads it: the messages of a chat prompt, one line each."""
    return conversation(value) if name == "prompt" and isinstance(value, list) else str(value)


def _as_number(value: float) -> str:
    """Return a number as a judge would write it: 10, not 10.0."""
    return str(int(value)) if value.is_integer() else str(value)


def placeholders(prompt_template: str) -> list[str]:
    """Return the column names in a prompt template; `{max_score}` is the setting.

    >>> placeholders("Rate {completion} against {answer}.")
    ['completion', 'answer']

    Raises:
        RewardError: a brace is not closed, or encloses something other than a name.
    """
    hint = "write {completion}, {prompt} or {column}, and {{ for a literal brace"
    try:
        fields = [entry for entry in string.Formatter().parse(prompt_template) if entry[1] is not None]
    except ValueError as error:
        raise RewardError(f"judge.prompt_template can't be parsed: {error}; {hint}") from error
    names = [str(name) for _, name, _, _ in fields]
    invalid = [name for name in names if not name.isidentifier()]
    invalid += [str(name) for _, name, spec, conversion in fields if spec or conversion]
    if invalid:
        raise RewardError(f"judge.prompt_template contains {{{invalid[0]}}}, which is not a column name; {hint}")
    return [name for name in dict.fromkeys(names) if name != _MAX_SCORE]


def check_prompt_template(prompt_template: str, columns: Iterable[str]) -> None:
    """Check that a prompt template names existing columns, and the response.

    Raises:
        RewardError: a named column doesn't exist, `{completion}` isn't named, or `{max_score}` is a column, too.
    """
    names, known = placeholders(prompt_template), {"prompt", "completion", *columns}
    if _MAX_SCORE in known and any(name == _MAX_SCORE for _, name, _, _ in string.Formatter().parse(prompt_template)):
        raise RewardError(
            f"judge.prompt_template names {{{_MAX_SCORE}}}, which is judge.max_score, but the dataset has a column "
            f"{_MAX_SCORE}; rename the column, or write the number into the template"
        )
    missing = [name for name in names if name not in known]
    if missing:
        raise RewardError(f"judge.prompt_template names {{{missing[0]}}}; the dataset has the columns {sorted(known)}")
    if "completion" not in names:
        raise RewardError("judge.prompt_template doesn't name {completion}, so the judge would not see the response")


def parse_score(answer: str, max_score: float) -> float | None:
    """Return the last score in an answer, None if it is out of range or not a plain number.

    >>> parse_score("It could be a Score: 3. No: **Score: 7.5**", 10.0), parse_score("Score: 11", 10.0)
    (7.5, None)
    """
    scores = [number for limit, number in _SCORE.findall(answer) if not limit]
    if not scores or not _NUMBER.fullmatch(scores[-1]):
        return None
    score = float(scores[-1])
    return score if 0.0 <= score <= max_score else None


def _message_content(body: str, url: str) -> tuple[str, bool]:
    """Return the text of an answer, and whether it was cut off at the limit of tokens."""
    try:
        match json.loads(body):
            # Servers that separate a model's reasoning return null if it was cut off before the answer.
            case {"choices": [{"message": {"content": str() | None as content}} as choice, *_]}:
                return content or "", choice.get("finish_reason") == "length"
    except (ValueError, RecursionError):
        pass
    raise AttemptFailedError("error", f"{url} answered with no chat completion: {excerpt(body)!r}")
