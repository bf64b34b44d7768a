"""The part of a response that holds its final answer."""

import re

# What ends and starts a model's thinking: of Qwen3, DeepSeek-R1 and others.
_END_OF_THINKING, _START_OF_THINKING = re.compile(r"</think>(?=\s*\S)"), "<think>"
# gpt-oss writes a channel for its thinking and one for the answer; without special tokens, their names are left.
_ANALYSIS = re.compile(r"analysis(?=[A-Za-z\d])")
_FINAL = re.compile(r".*assistantfinal|final(?=[\dA-Z\\$(])", re.DOTALL)
_OPENED_ANSWER, _CLOSED_ANSWER = "<answer>", "</answer>"
# A line `#### 80`, as in GSM8K. Markdown has headings with as many hashes, such as `#### 2. Add the numbers`.
_AFTER_HASHES = re.compile(r"^[ \t]*+####(?!#)[ \t]*+(?P<answer>[^\n]*+)", re.MULTILINE)
_NUMBER = re.compile(r"[-+]?[$€£¥₹\\]*[-+]?(?:\d[\d,]*+(?:\.\d+|/\d+)?|\.\d+)\s*\\?%?")
_FORMULA = re.compile(r"(?!\d+[.)]\s)(?:[-+$€£¥₹\\(\[{.\d]|[A-Za-z](?![A-Za-z]))")
_BRACE = re.compile(r"(?P<box>\\f?box(?:ed)?\s*\{)|(?<!\\)(?:\{|(?P<end>\}))")
# What may stand between two boxes of one answer: a comma or a conjunction, a variable that equals the second, and
# LaTeX's delimiters and spaces.
_BETWEEN = re.compile(
    r"(?:[\s$,;{}~&]|\\[()\[\],;:!>\\ ]|\\(?:text|mbox|mathrm|textbf|quad|qquad)(?![A-Za-z])|\b(?:and|or)\b"
    r"|\b[A-Za-z](?:_\{?\w+\}?)?\s*=)*+"
)
_JOINS = re.compile(r"[,;]|\b(?:and|or)\b")
_DELIMITERS = re.compile(r"\s*(?:\$\$?|\\\)|\\\])")
# Words of a sentence, whose answer is a number in it.
_SENTENCE = re.compile(
    r"\b(?:is|are|was|equals?|the|so|thus|hence|answers?|we|it|there|has|have|therefore)\b", re.IGNORECASE
)


def after_thinking(completion: str) -> str:
    """Return a response without its thinking: what follows the last `</think>`.

    If it begins with `<think>` and doesn't end it, nothing is left. The channels of gpt-oss are known, too, by their
    names alone, since responses are decoded without special tokens.

    >>> after_thinking("<think>Is it 7?</think>It is 8."), after_thinking("<think>Is it 7?"), after_thinking("It is 8.")
    ('It is 8.', '', 'It is 8.')
    >>> after_thinking("analysisIs it 7?assistantfinalIt is 8."), after_thinking("analysisIs it 7?")
    ('It is 8.', '')
    """
    if final := _FINAL.match(completion):
        return completion[final.end() :]
    if _ANALYSIS.match(completion):
        return ""
    end = max((mark.end() for mark in _END_OF_THINKING.finditer(completion)), default=0)
    rest = completion[end:]
    return "" if rest.lstrip().startswith(_START_OF_THINKING) else rest


def answer_part(text: str) -> str:
    r"""Return the part of a response, or of a dataset's answer, that holds the final answer.

    That is what follows the thinking, and there:

    - the last `<answer>…</answer>`, which may lack its end, where generation stops;
    - or what follows `####` in the last line that starts with it, if it is a number and no box comes after it, or a
      formula at the end of a text without boxes;
    - or what begins with the last box. Boxes with only commas, "and" or "or" between them belong together.

    The first two are in a box then, unless they are sentences or have LaTeX delimiters.

    >>> answer_part("<think>3 + 4</think> <answer>7</answer>"), answer_part("He answered 20.\n#### 80")
    ('\\boxed{7}', '\\boxed{80}')
    >>> answer_part(r"First \boxed{3}. Wait, \boxed{5}"), answer_part(r"$\boxed{3}$ and $\boxed{5}$")
    ('. Wait, \\boxed{5}', '$\\boxed{3}$ and $\\boxed{5}$')
    """
    text = after_thinking(text)
    if (start := text.rfind(_OPENED_ANSWER)) >= 0:
        return _in_box(text[start + len(_OPENED_ANSWER) :].partition(_CLOSED_ANSWER)[0])
    if (answer := _after_hashes(text)) is not None:
        return _in_box(answer)
    return _from_last_boxes(text)


def _after_hashes(text: str) -> str | None:
    """Return what follows the last `####`, if it is an answer rather than a heading."""
    lines = list(_AFTER_HASHES.finditer(text))
    if not lines:
        return None
    answers = [line["answer"].strip() for line in lines]
    answer, rest = answers[-1], text[lines[-1].end() :]
    if not rest.strip():
        is_number = _NUMBER.fullmatch(answer.removesuffix(".")) is not None
        return answer if is_number or (_FORMULA.match(answer) and not boxes(text)) else None
    are_headings = len(answers) > 1 and answers == [str(number) for number in range(1, len(answers) + 1)]
    return answer if _NUMBER.fullmatch(answer) and not are_headings and not boxes(rest) else None


def _in_box(answer: str) -> str:
    """Return an answer in a box, so that it is read as a whole."""
    answer = answer.strip()
    content = answer.strip("*_`\"' ").removesuffix(".")
    is_open = content.count("{") != content.count("}") or "\n" in content or not content
    is_sentence = _SENTENCE.search(content) and re.search(r"\d", content)
    if is_open or is_sentence or any(mark in content for mark in ("$", "\\(", "\\[")) or boxes(content):
        return _from_last_boxes(answer)
    return rf"\boxed{{{content}}}"


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
