import json
from dataclasses import replace

import pytest

from rlpack.observe.errors import EvaluationError
from rlpack.observe.evaluation.sample_rows import RowLayout, SampleFile
from tests.unit.observe.evaluation.evaluation_rows import all_rows, sample_row

LAYOUT = RowLayout(num_prompts=5, samples=2, greedy=True, prompts_per_part=2)


def written(path, rows):
    file = SampleFile(path, LAYOUT)
    file.append(rows)
    return file


def test_the_rows_that_are_read_are_those_that_were_written(tmp_path):
    rows = [replace(row, response="a\n\u2028\ud800é", reward=None) for row in all_rows(LAYOUT)]
    file = written(tmp_path / "samples.jsonl", rows[:6])
    file.append(rows[6:])
    assert list(file.rows()) == rows
    assert len((tmp_path / "samples.jsonl").read_bytes().splitlines()) == LAYOUT.num_rows == 15


def test_a_file_cut_at_any_byte_goes_on_after_its_last_whole_part(tmp_path):
    path = tmp_path / "samples.jsonl"
    written(path, all_rows(LAYOUT))
    whole = path.read_bytes()
    ends = [0]
    for line in whole.splitlines(keepends=True):
        ends.append(ends[-1] + len(line))
    cuts = {*range(0, len(whole), 61), *(end + shift for end in ends for shift in (-1, 0, 1)), len(whole)}
    for cut in sorted(cuts & {*range(len(whole) + 1)}):
        path.write_bytes(whole[:cut])
        lines = sum(end <= cut for end in ends[1:])
        done = 5 if lines == 15 else lines // 6 * 2
        file = SampleFile(path, LAYOUT)
        assert file.recover() == done
        assert path.read_bytes() == whole[: ends[3 * done]]
        if cut % 4 == 0:
            file.append(all_rows(LAYOUT)[3 * done :])
            assert path.read_bytes() == whole


def test_parts_are_those_that_an_uninterrupted_evaluation_has():
    parts = [part.tolist() for part in LAYOUT.parts(0)]
    assert parts == [[0, 1], [2, 3], [4]]
    for done in (2, 4):
        assert [part.tolist() for part in LAYOUT.parts(done)] == parts[done // 2 :]
    assert list(LAYOUT.parts(5)) == []


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("nonsense", "line 2 of .* is not a row"),
        ('{"prompt_index": 0}', "line 2 of .* is not a row"),
        (json.dumps(vars(sample_row(3, 1))), "sample 1 of prompt 3, which is not the row"),
        (json.dumps(vars(sample_row(0, None))), "sample None of prompt 0, which is not the row"),
    ],
)
def test_rows_of_another_evaluation_are_refused_and_kept(tmp_path, line, words):
    path = tmp_path / "samples.jsonl"
    text = json.dumps(vars(sample_row(0, 0))) + "\n" + line + "\n"
    path.write_text(text)
    with pytest.raises(EvaluationError, match=words):
        SampleFile(path, LAYOUT).recover()
    assert path.read_text() == text


def test_more_rows_than_there_are_prompts_are_refused(tmp_path):
    written(tmp_path / "samples.jsonl", [*all_rows(LAYOUT), sample_row(5, 0)])
    with pytest.raises(EvaluationError, match="line 16 of"):
        SampleFile(tmp_path / "samples.jsonl", LAYOUT).recover()
