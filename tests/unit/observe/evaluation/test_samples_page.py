import re
from html.parser import HTMLParser

import pytest

from rlpack.observe.evaluation import samples_page
from rlpack.observe.evaluation.samples_page import reward_filters, write_samples_page
from tests.unit.observe.evaluation.evaluation_rows import sample_row

EVIL = "<script>alert(1)</script>\n</pre><img src=http://x/y onerror=alert(1)> \x1b[2J\u202e &amp;"


class Page(HTMLParser):
    """Collects tags with their attributes, and text."""

    def __init__(self, text):
        super().__init__()
        self.tags, self.texts = [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data):
        self.texts.append(data)


def page_of(tmp_path, *prompts, title="a model"):
    path = tmp_path / "samples.html"
    rewards = [row.reward for rows in prompts for row in rows]
    write_samples_page(path, title, [("mean reward", "0.5", "[0, 1]")], ["by exact text"], prompts, rewards)
    return path.read_text()


def test_all_text_is_escaped_and_nothing_is_loaded(tmp_path):
    values = dict.fromkeys(("uid", "prompt", "response", "answer", "extracted_answer", "finish_reason"), EVIL)
    text = page_of(tmp_path, [sample_row(**values)], title=EVIL)
    page = Page(text)
    assert not {tag for tag, _ in page.tags} & {"script", "img", "link", "iframe", "object", "a", "form"}
    assert not [
        name for _, attributes in page.tags for name in attributes if name in {"src", "href"} or name[:2] == "on"
    ]
    policy = next(attributes["content"] for tag, attributes in page.tags if "http-equiv" in attributes)
    assert policy == "default-src 'none'; style-src 'unsafe-inline'"
    assert "url(" not in text
    assert "@import" not in text
    shown = "".join(page.texts)
    assert shown.count("<script>alert(1)</script>") >= len(values)
    assert "\x1b" not in text
    assert "\u202e" not in text
    assert "\\x1b[2J\\u202e &amp;" in shown


def test_responses_keep_their_line_breaks(tmp_path):
    assert "first\n  second" in page_of(tmp_path, [sample_row(response="first\n  second")])


@pytest.mark.parametrize(
    "rewards",
    [
        [1.0, 0.0, 1.0, None],
        [None, None],
        [0.25],
        [number / 7 for number in range(40)],
        [0.0] * 50 + [0.1, 0.2, 0.3, 1, 2, 3, 4],
    ],
)
def test_each_reward_belongs_to_exactly_one_choice(rewards):
    choices = reward_filters(rewards)
    assert [sum(choice.holds(reward) for choice in choices) for reward in rewards] == [1] * len(rewards)
    assert all(any(choice.holds(reward) for reward in rewards) for choice in choices)
    lows = [choice.low for choice in choices if choice.low is not None]
    assert lows == sorted(lows, reverse=True)


def test_the_filter_hides_what_a_choice_does_not_hold_and_prompts_without_any(tmp_path):
    prompts = [[sample_row(0, 0, reward=1.0), sample_row(0, 1, reward=0.0)], [sample_row(1, 0, reward=0.0)]]
    text = page_of(tmp_path, *prompts)
    assert re.findall(r"main:has\(#(f\d):checked\) \.x:not\(\.(c\d)\) { display: none; }", text) == [
        ("f0", "c0"),
        ("f1", "c1"),
    ]
    labels = re.findall(r'<input type="radio" name="reward" id="(\w+)"( checked)?> ([^<]*)</label>', text)
    assert labels == [("all", " checked", "all (3)"), ("f0", "", "1 (1)"), ("f1", "", "0 (2)")]
    classes = [
        attributes["class"].split() for tag, attributes in Page(text).tags if "x" in attributes.get("class", "").split()
    ]
    assert classes == [["x", "c0", "c1"], ["r", "x", "c0"], ["r", "x", "c1"], ["x", "c1"], ["r", "x", "c1"]]


def test_a_prompt_is_named_by_its_number_once(tmp_path):
    text = page_of(tmp_path, [sample_row(0, 0, uid="validation-0")], [sample_row(1, 0, uid="algebra/17")])
    assert re.findall(r"<h2>(.*?)</h2>", text) == ["prompt validation-0 · answer 2", "prompt 1 · algebra/17 · answer 2"]


def test_a_page_of_many_prompts_ends_with_the_number_that_it_leaves_out(tmp_path, monkeypatch):
    monkeypatch.setattr(samples_page, "MOST_CHARACTERS", 1000)
    text = page_of(tmp_path, *([sample_row(number, 0, response="x" * 300)] for number in range(9)))
    shown = text.count("<h2>")
    assert 0 < shown < 9
    assert f"{9 - shown} more prompts are in samples.jsonl" in text
