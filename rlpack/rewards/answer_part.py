"""The part of a response that holds its final answer."""

import re

# What ends and starts a model's thinking: of Qwen3, DeepSeek-R1 and others.
_END_OF_THINKING, _START_OF_THINKING = "</think>", "<think>"
# gpt-oss writes a channel for its thinking and one for the answer; without special tokens, their names are left.
_ANALYSIS, _FINAL = "analysis", "assistantfinal"
_OPENED_ANSWER, _CLOSED_ANSWER = "<answer>", "</answer>"
# A line `#### 80`, as in GSM8K. Markdown has headings with as many hashes, such as `#### 2. Add the numbers`.
_AFTER_HASHES = re.compile(r"^[ \t]*+####(?!#)[ \t]*+(?P<answer>[^\n]*+)", re.MULTILINE)
_NUMBER = re.compile(r"[-+]?[$€£¥₹\\]*[-+]?(?:\d[\d,]*+(?:\.\d+|/\d+)?|\.\d+)\s*\\?%?\.?")
_BRACE = re.compile(r"(?P<box>\\f?box(?:ed)?\s*\{)|(?<!\\)(?:\{|(?P<end>\}))")
# What may stand between two boxes of one answer: a comma or a conjunction, and LaTeX delimiters.
_BETWEEN = re.compile(r"(?:[\s$,;{}]|\\[()\[\]]|\\(?:text|quad|qquad)|\b(?:and|or)\b)*+")
_JOINS = re.compile(r"[,;]|\b(?:and|or)\b")
_DELIMITERS = re.compile(r"\s*(?:\$\$?|\\\)|\\\])")


def after_thinking(completion: str) -> str:
    """Return a response without its thinking: what follows the last `</think>`, or nothing if thinking doesn't end.

    The channels of gpt-oss are known, too, by their names alone, since responses are decoded without special tokens.

    >>> after_thinking("<think>Is it 7?</think>It is 8."), after_thinking("<think>Is it 7?"), after_thinking("It is 8.")
    ('It is 8.', '', 'It is 8.')
    >>> after_thinking("analysisIs it 7?assistantfinalIt is 8.")
    'It is 8.'
    """
    if completion.startswith(_ANALYSIS) and _FINAL in completion:
        return completion.rpartition(_FINAL)[2]
    return completion.rpartition(_END_OF_THINKING)[2].partition(_START_OF_THINKING)[0]


def answer_part(text: str) -> str:
    r"""Return the part of a response, or of a dataset's answer, that holds the final answer.

    That is what follows the thinking, and there:

    - the last `<answer>…</answer>`, which may lack its end, where generation stops;
    - or what follows `####` in the last line that starts with it, if it is a number or the last line of text, and no
      box comes after it;
    - or what begins with the last box. Boxes with only commas, "and" or "or" between them belong together.

    >>> answer_part("<think>3 + 4</think> <answer>7</answer>"), answer_part("He answered 20.\n#### 80")
    ('7', '80')
    >>> answer_part(r"First \boxed{3}. Wait, \boxed{5}"), answer_part(r"$\boxed{3}$ and $\boxed{5}$")
    ('. Wait, \\boxed{5}', '$\\boxed{3}$ and $\\boxed{5}$')
    """
    text = after_thinking(text)
    if (start := text.rfind(_OPENED_ANSWER)) >= 0:
        return _from_last_boxes(text[start + len(_OPENED_ANSWER) :].partition(_CLOSED_ANSWER)[0])
    lines = list(_AFTER_HASHES.finditer(text))
    if lines:
        answer, rest = lines[-1]["answer"].strip(), text[lines[-1].end() :]
        is_last = bool(answer) and not rest.strip()
        if (is_last or _NUMBER.fullmatch(answer)) and not boxes(rest):
            return _from_last_boxes(answer)
    return _from_last_boxes(text)


def boxes(text: str) -> list[tuple[int, int, int]]:
    r"""Return where each box starts, where its content does, and where that ends; boxes in others are left out.

    A box without a closing brace has all text after it.

    >>> boxes(r"\boxed{1}, \fbox{{2}}")
    [(0, 7, 8), (11, 17, 20)]
    """
    found: list[tuple[int, int, int]] = []
    opened: list[re.Match[str]] = []
    for brace in _BRACE.finditer(text):
        if not brace["end"]:
            opened.append(brace)
        elif opened and (opening := opened.pop())["box"]:
            _add(found, (opening.start(), opening.end(), brace.start()))
    unclosed = next((opening for opening in opened if opening["box"]), None)
    if unclosed is not None:
        _add(found, (unclosed.start(), unclosed.end(), len(text)))
    return found


def _add(found: list[tuple[int, int, int]], box: tuple[int, int, int]) -> None:
    """Add a box in place of those that are in it."""
    while found and found[-1][0] > box[0]:
        found.pop()
    found.append(box)


def _from_last_boxes(text: str) -> str:
    """Return the text after the last box that doesn't belong to the final answer."""
    found = boxes(text)
    for (_, _, end), (start, _, _) in zip(found[-2::-1], found[:0:-1], strict=True):
        between = text[end + 1 : start]
        if not (_BETWEEN.fullmatch(between) and _JOINS.search(between)):
            delimiters = _DELIMITERS.match(text, end + 1)
            return text[delimiters.end() if delimiters else end + 1 :]
    return text
