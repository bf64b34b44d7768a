import itertools
import json
import re
import socket
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from rlpack.batch.errors import DataError
from rlpack.batch.ragged import Ragged
from rlpack.data.datasets import Example, SplitUse, load_prompts
from rlpack.data.prompts import Prompts

GOOD = {"prompt": "1+1=", "answer": "2"}


def jsonl(tmp_path, *rows, text=None):
    path = tmp_path / "rows.jsonl"
    content = "\n".join(json.dumps(row) for row in rows) if text is None else text
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return str(path)


def load(source, **arguments):
    return load_prompts(source, **{"split": "train", "seed": 1, **arguments})


def test_rows_of_a_jsonl_file_become_examples(tmp_path):
    source = jsonl(tmp_path, {**GOOD, "level": 3}, {**GOOD, "uid": "second"})
    dataset = load(source)
    assert dataset[0] == Example("train-0", "1+1=", "2", None, {"level": 3})
    assert (len(dataset), dataset[1].uid) == (2, "second")


def test_columns_are_read_by_name(tmp_path):
    messages = [{"role": "user", "content": "hi"}]
    source = jsonl(tmp_path, {"messages": messages, "target": [1, 2], "worked": "text", "prompt": 7})
    example = load(source, prompt_column="messages", answer_column="target", completion_column="worked")[0]
    assert (example.prompt, example.answer, example.demonstration) == (messages, [1, 2], "text")
    assert example.columns == {"prompt": 7}
    assert load(source, prompt_column="messages", answer_column=None)[0].answer is None


def test_parquet_and_jsonl_give_the_same_examples(tmp_path):
    rows = [{**GOOD, "extra": {"nested": [1, 2]}}, {**GOOD, "prompt": "אב 😀", "extra": {"nested": []}}]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    assert list(load(str(tmp_path / "rows.parquet"))) == list(load(jsonl(tmp_path, *rows)))


def tool_call(name, **arguments):
    return {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": name, "arguments": arguments}}]}


@pytest.mark.parametrize("form", ["file", "folder"])
def test_every_tool_call_of_a_parquet_file_has_only_its_own_arguments(tmp_path, monkeypatch, form):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    question, reply = {"role": "user", "content": "?"}, {"role": "tool", "content": "!", "name": "adder"}
    prompts = [[question, tool_call("add", a=2, b=[1]), reply], [question, tool_call("find", where={"city": "Rome"})]]
    rows = [
        {"prompt": [*prompt, question], "answer": {"x": 1} if row else {"y": 2}} for row, prompt in enumerate(prompts)
    ]
    (tmp_path / "data").mkdir()
    file = tmp_path / "data" / "train.parquet"
    pq.write_table(pa.Table.from_pylist(rows), file)
    loaded = load(str(file if form == "file" else file.parent))
    assert [example.prompt for example in loaded] == [row["prompt"] for row in rows]
    assert [example.answer for example in loaded] == [{"x": None, "y": 2}, {"x": 1, "y": None}]


def test_the_byte_order_mark_carriage_returns_and_blank_lines_are_fine(tmp_path):
    line = json.dumps(GOOD)
    plain, odd = jsonl(tmp_path, GOOD, GOOD), tmp_path / "odd.jsonl"
    odd.write_bytes(b"\xef\xbb\xbf" + f"{line}\r\n\r\n{line}\r\n".encode())
    assert list(load(str(odd))) == list(load(plain))


def test_a_text_may_have_any_character(tmp_path):
    prompts = ["nul \0 in", "עברית", "👩‍👩‍👧", "<eos> <|im_end|>", "line\nbreak\u2028", "x" * 10_000_000]
    dataset = load(jsonl(tmp_path, *[{"prompt": prompt, "answer": ""} for prompt in prompts]))
    assert [example.prompt for example in dataset] == prompts


def test_equal_rows_are_different_prompts(tmp_path):
    assert len({example.uid for example in load(jsonl(tmp_path, GOOD, GOOD))}) == 2


def test_the_generator_has_two_splits_that_share_no_prompt():
    arguments = {"generator": {"train_size": 300, "validation_size": 30}, "completion_column": "demonstration"}
    train, held_out = load("arithmetic", **arguments), load("arithmetic", split="validation", **arguments)
    assert (len(train), len(held_out)) == (300, 30)
    assert not {example.prompt for example in train} & {example.prompt for example in held_out}
    assert list(load("arithmetic", **arguments)) == list(train)
    assert list(load("arithmetic", **{**arguments, "seed": 2})) != list(train)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_most_of_the_few_short_prompts_are_in_the_training_split(seed):
    train = load("arithmetic", seed=seed, generator={"train_size": 4096, "validation_size": 256})
    short = {example.prompt for example in train if len(example.prompt) == len("a0b0=")}
    assert 16 / 2 < len(short) < 16


def test_generator_errors_name_the_key():
    with pytest.raises(DataError, match=r"data.generator: .*'operands'.*; the keys are train_size, "):
        load("arithmetic", generator={"operands": 3})
    with pytest.raises(DataError, match="no split 'test'"):
        load("arithmetic", split="test")


BAD_ROWS = {
    "prompt missing": ({"answer": "2"}, "has no column 'prompt'; it has answer; set data.prompt_column"),
    "answer missing": ({"prompt": "a"}, "has no column 'answer'; it has prompt; set data.answer_column"),
    "prompt null": ({**GOOD, "prompt": None}, r"prompt is None \(NoneType\); it must be text"),
    "prompt empty": ({**GOOD, "prompt": ""}, "prompt is blank"),
    "prompt blank": ({**GOOD, "prompt": " \n"}, "prompt is blank"),
    "prompt a number": ({**GOOD, "prompt": 7}, r"prompt is 7 \(int\)"),
    "prompt an object": ({**GOOD, "prompt": {"a": 1}}, r"\(dict\); it must be text or a list"),
    "surrogate": ({**GOOD, "prompt": "a\ud800"}, "prompt has an unpaired surrogate"),
    "surrogate in the answer": ({**GOOD, "answer": "\udfff"}, "answer has an unpaired surrogate"),
    "surrogate in a message": (
        {**GOOD, "prompt": [{"role": "user", "content": "a", "name": "\ud800"}]},
        "message 0: name has an unpaired surrogate",
    ),
    "no message": ({**GOOD, "prompt": []}, "empty list"),
    "message a text": ({**GOOD, "prompt": ["hi"]}, "message 0 is 'hi'"),
    "unknown role": ({**GOOD, "prompt": [{"role": "human", "content": "a"}]}, "role 'human'; choose one of system"),
    "no role": ({**GOOD, "prompt": [{"content": "a"}]}, "role None"),
    "null content": ({**GOOD, "prompt": [{"role": "user", "content": None}]}, "message 0: content is None"),
    "assistant last": ({**GOOD, "prompt": [{"role": "assistant", "content": "a"}]}, "ends with the assistant"),
    "uid null": ({**GOOD, "uid": None}, "uid is None"),
    "uid a number": ({**GOOD, "uid": 3}, "uid is 3"),
    "an array": ([1, 2], "is a list; every line must be one JSON object"),
}


@pytest.mark.parametrize("case", BAD_ROWS)
def test_a_bad_row_is_one_error_with_file_and_line(tmp_path, case):
    row, text = BAD_ROWS[case]
    source = jsonl(tmp_path, GOOD, row)
    with pytest.raises(DataError, match=f"^{re.escape(source)}:2.*{text}"):
        load(source)


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("", "has no rows"),
        ("\n\n", "has no rows"),
        ('{"prompt": "a", "answer": "b"}\n{"prompt": "a",', r":2 is not JSON: [^:]* at column \d+; it begins"),
        (b'{"prompt": "\xff"}', ":1 is not UTF-8"),
        ("[" * 100_000, ":1 is not JSON"),
        (
            '{"prompt": "a", "answer": "1", "answer": "2"}',
            r"rows\.jsonl:1 has the key 'answer' twice; rename or remove",
        ),
        ('{"prompt": "a", "answer": "1", "x": [{"k": 1, "k": 1}]}', r"rows\.jsonl:1 has the key 'k' twice"),
        ('{"prompt": "a", "answer": "b"}\n{"prompt": ' + "1" * 5000 + "}", r"rows\.jsonl:2 is not JSON: .*digits"),
    ],
)
def test_broken_files_are_errors_with_their_line(tmp_path, content, text):
    with pytest.raises(DataError, match=text):
        load(jsonl(tmp_path, text=content))


def test_uids_are_distinct(tmp_path):
    with pytest.raises(DataError, match="rows 0 and 2 both have uid 'a'"):
        load(jsonl(tmp_path, {**GOOD, "uid": "a"}, {**GOOD, "uid": "b"}, {**GOOD, "uid": "a"}))


def test_a_demonstration_must_be_text(tmp_path):
    with pytest.raises(DataError, match=r":1: worked is blank \(' '\); remove the row"):
        load(jsonl(tmp_path, {**GOOD, "worked": " "}), completion_column="worked")
    with pytest.raises(DataError, match=r":1: worked is None"):
        load(jsonl(tmp_path, {**GOOD, "worked": None}), completion_column="worked")
    with pytest.raises(DataError, match=r"no column 'worked'; it has .*; set data.completion_column"):
        load(jsonl(tmp_path, GOOD), completion_column="worked")


def test_demonstrations_that_a_split_does_not_need_may_be_missing(tmp_path):
    use = SplitUse("data.validation_source", "data.validation_split", needs_demonstrations=False)
    texts = [None, "", " \n", "1+1=2", " 1+1=2\n"]
    source = jsonl(tmp_path, GOOD, *({**GOOD, "worked": text} for text in texts))
    loaded = load(source, completion_column="worked", use=use)
    assert [example.demonstration for example in loaded] == [None, None, None, None, "1+1=2", " 1+1=2\n"]
    assert [example.columns for example in loaded] == [{}] * 6
    answers = load(jsonl(tmp_path, GOOD, {**GOOD, "answer": None}), completion_column="answer", use=use)
    assert [(example.answer, example.demonstration) for example in answers] == [("2", "2"), (None, None)]
    with pytest.raises(DataError, match=r":1: worked is 7 \(int\); it must be text"):
        load(jsonl(tmp_path, {**GOOD, "worked": 7}), completion_column="worked", use=use)


def test_a_missing_file_is_named():
    with pytest.raises(DataError, match=r"no file nothing.jsonl; set data.source"):
        load("nothing.jsonl")


@pytest.mark.parametrize(
    "source", ["./nothing", "../nothing", "~/nothing", "/no/such/folder", "a.json", "a.csv", "a.jsonl.gz", "b/a.TXT"]
)
def test_paths_are_never_looked_up_on_the_hub(source, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("rlpack.data.datasets._hub", lambda *_: pytest.fail("went to the hub"))
    with pytest.raises(DataError, match=f"there is no file {re.escape(source)}; set data.source"):
        load(source)


def test_a_user_without_a_home_is_named():
    with pytest.raises(DataError, match=r"there is no file ~no-such-user/rows\.jsonl"):
        load("~no-such-user/rows.jsonl")


def test_the_closest_name_in_the_folder_is_suggested(tmp_path):
    jsonl(tmp_path, GOOD)
    (tmp_path / "row.txt").write_text("")
    for wrong in ("row.jsonl", "rows.json", "rows.jsonl.gz"):
        with pytest.raises(DataError, match=rf"no file .*; did you mean {re.escape(str(tmp_path))}/rows\.jsonl\?$"):
            load(str(tmp_path / wrong))
    with pytest.raises(DataError) as raised:
        load(str(tmp_path / "quite_another.parquet"))
    assert "did you mean" not in str(raised.value)


@pytest.mark.parametrize("name", ["rows.jsonl.gz", "rows.json", "rows.csv", "rows", "rows.v1"])
def test_a_file_of_another_kind_is_refused_at_once(tmp_path, monkeypatch, name):
    monkeypatch.setattr("rlpack.data.datasets._hub", lambda *_: pytest.fail("went to the hub"))
    (tmp_path / name).write_text(json.dumps(GOOD))
    with pytest.raises(DataError, match=r"set data.source to a \.jsonl or \.parquet file, a folder"):
        load(str(tmp_path / name))


@pytest.mark.parametrize("nested", [False, True])
def test_text_of_a_parquet_file_must_be_utf_8(tmp_path, nested):
    offsets = pa.py_buffer(np.array([0, 1, 2], dtype=np.int32).tobytes())
    text = pa.Array.from_buffers(pa.string(), 2, [None, offsets, pa.py_buffer(b"a\xff")])
    column = pa.StructArray.from_arrays([text], ["inner"]) if nested else text
    table = pa.table({"prompt": pa.array(["a", "b"]), "answer": column})
    pq.write_table(table, tmp_path / "rows.parquet")
    with pytest.raises(DataError, match=r"rows\.parquet can't be read as Parquet: .*column 1: .*UTF8"):
        load(str(tmp_path / "rows.parquet"))


@pytest.mark.parametrize(
    ("value", "kind"), [(2**60, pa.timestamp("us")), (2**30, pa.date32()), (2**62, pa.duration("s"))]
)
def test_a_date_of_a_parquet_file_that_python_does_not_have_is_named(tmp_path, value, kind):
    table = pa.table({**{name: [text] for name, text in GOOD.items()}, "made": pa.array([value], kind)})
    pq.write_table(table, tmp_path / "rows.parquet")
    with pytest.raises(DataError, match=r"rows\.parquet: column 'made' has a value that Python can't hold"):
        load(str(tmp_path / "rows.parquet"))


def test_a_column_that_a_parquet_file_has_twice_is_named(tmp_path):
    table = pa.Table.from_arrays([pa.array([text]) for text in "a12"], names=["prompt", "answer", "answer"])
    pq.write_table(table, tmp_path / "rows.parquet")
    with pytest.raises(DataError, match=r"rows\.parquet has 2 columns 'answer'; rename one"):
        load(str(tmp_path / "rows.parquet"))


@pytest.mark.parametrize("content", [b"", b"PAR1", b"not parquet at all", None])
def test_a_broken_parquet_file_is_named(tmp_path, content):
    path = tmp_path / "rows.parquet"
    pq.write_table(pa.Table.from_pylist([GOOD] * 100), path)
    path.write_bytes(path.read_bytes()[:-20] if content is None else content)
    with pytest.raises(DataError, match=r"rows\.parquet can't be read as Parquet"):
        load(str(path))


def test_a_folder_of_files_is_a_dataset_with_splits(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "train.jsonl").write_text(json.dumps(GOOD))
    (folder / "validation.jsonl").write_text(json.dumps({**GOOD, "prompt": "2+2="}))
    assert load(str(folder))[0].prompt == "1+1="
    assert load(str(folder), split="validation")[0].prompt == "2+2="
    with pytest.raises(DataError, match=r"split 'test', can't be loaded: .*; set data.source .* and data.split to its"):
        load(str(folder), split="test")
    use = SplitUse("data.validation_source", "data.validation_split")
    with pytest.raises(DataError, match=r"; set data.validation_source to .* and data.validation_split to its split"):
        load(str(folder), split="test", use=use)


@pytest.fixture
def gsm8k(tmp_path, monkeypatch):
    """Return a folder with two configurations, as GSM8K has on the Hub."""
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "gsm8k"
    lines = ["---", "configs:"]
    for name in ("main", "socratic"):
        (folder / name).mkdir(parents=True)
        lines += [f"- config_name: {name}", "  data_files:"]
        for split in ("train", "test"):
            row = {"prompt": f"{name} {split}", "answer": "2"}
            (folder / name / f"{split}-00000.jsonl").write_text(json.dumps(row))
            lines += [f"  - split: {split}", f"    path: {name}/{split}-*"]
    (folder / "README.md").write_text("\n".join([*lines, "---", ""]))
    return str(folder)


def test_a_subset_of_a_dataset_is_read_by_its_name(gsm8k):
    for name, split in itertools.product(("main", "socratic"), ("train", "test")):
        assert load(gsm8k, split=split, use=SplitUse(subset=name))[0].prompt == f"{name} {split}"


def test_the_subsets_of_a_dataset_are_named_where_none_of_them_is_chosen(gsm8k):
    with pytest.raises(DataError, match=r"gsm8k' has several subsets; set data.subset to one of main, socratic$"):
        load(gsm8k)
    use = SplitUse(subset_key="data.validation_subset", subset="easy")
    with pytest.raises(DataError, match=r"has no subset 'easy'; set data.validation_subset to one of main, socratic$"):
        load(gsm8k, use=use)


def test_images_and_sounds_of_a_dataset_stay_bytes(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    image, sound = datasets.Image(), datasets.Audio()
    kinds = {"image": image, "sound": sound, "pages": datasets.List(image), "parts": {"left": image}}
    file = {"bytes": b"GIF89a", "path": None}
    files = {"image": file, "sound": file, "pages": [file, file], "parts": {"left": file}}
    features = datasets.Features({**dict.fromkeys(GOOD, datasets.Value("string")), **kinds})
    (tmp_path / "data").mkdir()
    table = pa.Table.from_pylist([GOOD | files, GOOD | dict.fromkeys(files)], schema=features.arrow_schema)
    pq.write_table(table, tmp_path / "data" / "train.parquet")
    first, second = load(str(tmp_path / "data"))
    assert first.columns == files
    assert second.columns["image"] is None


def test_files_of_a_folder_are_bytes_wherever_the_folder_is(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    rows = [{"file_name": f"{number}.gif", **GOOD} for number in range(2)]
    for name in ("a", "b"):
        folder = tmp_path / name / "train"
        folder.mkdir(parents=True)
        (folder / "0.gif").write_bytes(b"GIF89a zero")
        (folder / "1.gif").write_bytes(b"GIF89a one")
        (folder / "metadata.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    monkeypatch.chdir(tmp_path)
    first, second = load("a"), load(str(tmp_path / "b"))
    assert [example.columns["image"] for example in first] == [
        {"bytes": b"GIF89a zero", "path": "0.gif"},
        {"bytes": b"GIF89a one", "path": "1.gif"},
    ]
    fingerprints = [
        Prompts(data.examples, Ragged.from_rows([[1], [2]], torch.int64)).fingerprint for data in (first, second)
    ]
    assert fingerprints[0] == fingerprints[1]


def test_local_files_in_lists_and_objects_become_bytes(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    (tmp_path / "page.gif").write_bytes(b"GIF89a")
    image = datasets.Image()
    kinds = {"pages": datasets.List(image), "parts": {"left": image, "note": datasets.Value("string")}}
    local, url = (
        {"bytes": None, "path": path} for path in (str(tmp_path / "page.gif"), "https://example.org/page.gif")
    )
    files = {"pages": [local, url, None], "parts": {"left": local, "note": "n"}}
    features = datasets.Features({**dict.fromkeys(GOOD, datasets.Value("string")), **kinds})
    (tmp_path / "data").mkdir()
    table = pa.Table.from_pylist([GOOD | files, GOOD | {"pages": None, "parts": None}], schema=features.arrow_schema)
    pq.write_table(table, tmp_path / "data" / "train.parquet")
    first, second = load(str(tmp_path / "data"))
    read = {"bytes": b"GIF89a", "path": "page.gif"}
    assert first.columns == {"pages": [read, url, None], "parts": {"left": read, "note": "n"}}
    assert second.columns["pages"] is None


def test_objects_of_several_shapes_in_a_folder_stay_objects(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    (tmp_path / "data").mkdir()
    rows = [{**GOOD, "extra": {"a": value}} for value in (1, "x")]
    (tmp_path / "data" / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert [example.columns["extra"] for example in load(str(tmp_path / "data"))] == [{"a": 1}, {"a": "x"}]


def test_shards_whose_columns_differ_are_a_data_error(tmp_path):
    (tmp_path / "train-0.jsonl").write_text(json.dumps({"prompt": "1+1=", "answer": "2"}) + "\n")
    (tmp_path / "train-1.jsonl").write_text(json.dumps({"prompt": {"deep": 1}, "solution": 2}) + "\n")
    reason = r"split 'train', can't be loaded: .* because column names don't match"
    with pytest.raises(DataError, match=reason + r".*; set data\.source to .* a folder with files of the dataset only"):
        load(str(tmp_path))


@pytest.mark.parametrize(
    ("answers", "message"),
    [
        (["2", ["2"]], r"rows.jsonl:2: answer is \['2'\] \(list\), but .*rows.jsonl:1: answer is '2' \(str\)"),
        ([None, ["2"], {"a": 1}], r"rows.jsonl:3: answer is .* \(dict\), but .*:2: answer is .* \(list\)"),
    ],
)
def test_answers_are_all_of_one_type(tmp_path, answers, message):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(json.dumps({"prompt": "1+1=", "answer": answer}) + "\n" for answer in answers))
    with pytest.raises(DataError, match=message):
        load(str(path))


def test_a_hub_that_has_nothing_is_reported_at_once(monkeypatch):
    class Nothing(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_error(404)

        def log_message(self, format, *args):
            """Keep the console clean."""

    with HTTPServer(("127.0.0.1", 0), Nothing) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        with pytest.raises(DataError, match=r"dataset 'nobody/nothing' .* can't be asked for it \(it answered 404\)"):
            load("nobody/nothing")
        server.shutdown()


def test_a_hub_that_does_not_answer_is_given_up(monkeypatch):
    monkeypatch.setattr("rlpack.data.hub.DEADLINE_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as server:
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", f"http://127.0.0.1:{server.getsockname()[1]}")
        with pytest.raises(
            DataError, match=r"dataset 'nobody/nothing' .* \((no answer in 0.2 s|it can't be reached: .*)\)"
        ):
            load("nobody/nothing")


def test_an_unreachable_hub_is_reported_in_time(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:9")
    began = time.monotonic()
    with pytest.raises(DataError, match=r"dataset 'nobody/nothing' .*:9 can't be asked for it .it can't be reached"):
        load("nobody/nothing")
    assert time.monotonic() - began < 5
