import json
import subprocess
import sys
from contextlib import nullcontext
from datetime import date
from decimal import Decimal

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rlpack.batch.errors import DataError
from rlpack.config.errors import ConfigError
from rlpack.config.schema import Actor, Config, Data, Model, Placement, Reward, SFTWarmup, Trainer
from rlpack.config.sections.parallelism import Parallel
from rlpack.config.sections.pools import Pool
from rlpack.packing.batching import Batching
from rlpack.rewards.errors import RewardError
from rlpack.startup.dataset_checks import check_datasets

ROWS = '{"prompt": "1+1=", "answer": "2"}\n{"prompt": "1+2=", "answer": "3"}\n'


@pytest.fixture
def data(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text(ROWS)
    return Data(source=str(path), validation_source=str(path))


def test_a_step_takes_no_prompt_twice(data):
    check_datasets(Config(data=data, trainer=Trainer(prompts_per_step=2)))
    with pytest.raises(ConfigError, match=r"trainer.prompts_per_step is 3, but .*rows.jsonl has 2 rows to train on"):
        check_datasets(Config(data=data, trainer=Trainer(prompts_per_step=3)))
    with pytest.raises(ConfigError, match=r"has 1 row to train on at data.fraction=0.5; .* or raise data.fraction"):
        check_datasets(Config(data=data.model_copy(update={"fraction": 0.5}), trainer=Trainer(prompts_per_step=2)))
    with pytest.raises(ConfigError, match=r"has 1 row to train on at data.fraction=0.1; .* or add prompts"):
        check_datasets(Config(data=data.model_copy(update={"fraction": 0.1}), trainer=Trainer(prompts_per_step=8)))
    generated = Data(generator={"train_size": 16})
    check_datasets(Config(data=generated, trainer=Trainer(prompts_per_step=16)))
    with pytest.raises(ConfigError, match="but arithmetic has 16 rows"):
        check_datasets(Config(data=generated, trainer=Trainer(prompts_per_step=17)))


def test_a_prompt_of_megabytes_is_refused_without_a_tokenizer(data, tmp_path):
    (tmp_path / "rows.jsonl").write_text(ROWS + '{"prompt": "' + "a " * 5_000_000 + '", "answer": ""}\n')
    with pytest.raises(DataError, match=r"prompt 'train-2' has 10000000 tokens, which exceeds 512"):
        check_datasets(Config(data=data, trainer=Trainer(prompts_per_step=2)))
    check_datasets(
        Config(data=data.model_copy(update={"overlong_prompt": "drop"}), trainer=Trainer(prompts_per_step=2))
    )


@pytest.mark.parametrize(
    ("name", "column", "reward", "is_taken"),
    [
        ("answer", "answer", Reward(), True),
        ("target", "target", Reward(), True),
        ("answer", None, Reward(), True),
        ("target", None, Reward(), False),
        ("target", None, Reward(function="rlpack.rewards.math:equivalent"), False),
        ("target", None, Reward(arguments={"answer": "2"}), True),
        ("target", None, Reward(function="rlpack.rewards.functions:has_format"), True),
        ("tests", None, Reward(function="rlpack.rewards.code_execution:unit_tests"), True),
        ("target", None, Reward(function="optional_answer:f"), True),
    ],
)
def test_a_function_that_needs_answers_needs_a_column_of_them(
    data, tmp_path, monkeypatch, name, column, reward, is_taken
):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "optional_answer.py").write_text("def f(completion, answer=None): return 1.0")
    (tmp_path / "rows.jsonl").write_text(ROWS.replace("answer", name))
    config = Config(
        data=data.model_copy(update={"answer_column": column}), trainer=Trainer(prompts_per_step=2), reward=reward
    )
    with nullcontext() if is_taken else pytest.raises(RewardError, match=r"needs 'answer'; .*; set data.answer_column"):
        check_datasets(config)


@pytest.mark.parametrize(
    ("parameter", "text"),
    [
        ("question", "data.prompt_column; call the parameter 'prompt'$"),
        ("label", "data.answer_column; call the parameter 'answer'$"),
        ("worked", "data.completion_column and isn't passed"),
    ],
)
def test_a_function_that_names_a_column_of_a_key_is_told_how_to_read_it(data, tmp_path, monkeypatch, parameter, text):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / f"names_{parameter}.py").write_text(f"def f(completion, {parameter}): return 1.0")
    (tmp_path / "rows.jsonl").write_text('{"question": "1+1=", "label": "2", "worked": "2"}')
    columns = {"prompt_column": "question", "answer_column": "label", "completion_column": "worked"}
    config = Config(data=data.model_copy(update=columns), reward=Reward(function=f"names_{parameter}:f"))
    with pytest.raises(RewardError, match=f"needs '{parameter}', which is {text}"):
        check_datasets(config)


@pytest.mark.parametrize(
    ("column", "value", "text"),
    [
        (
            "label",
            b"2",
            r"column 'label' of prompt 'train-1' is b'2' \(bytes\), .*; .* set data.answer_column to another",
        ),
        ("label", {"value": Decimal(2)}, r"column 'label' of prompt 'train-1' is .* \(dict\), .* type Decimal"),
        (
            "made",
            date(2026, 1, 2),
            r"column 'made' of prompt 'train-1' is .* \(date\), .* or leave the column out",
        ),
    ],
)
def test_a_value_that_reward_functions_can_not_be_sent_is_named(data, tmp_path, monkeypatch, column, value, text):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "takes_all.py").write_text("def f(completion, **kwargs): return 1.0")
    (tmp_path / "takes_none.py").write_text("def f(completion): return 1.0")
    path = tmp_path / "rows.parquet"
    rows = [{"prompt": "1+1=", "label": None, "made": None}, {"prompt": "1+2=", "label": "3", "made": None}]
    rows[1] |= {column: value}
    pq.write_table(pa.Table.from_pylist(rows), path)
    data = Data(source=str(path), validation_source=str(path), answer_column="label")
    config = Config(data=data, trainer=Trainer(prompts_per_step=2), reward=Reward(function="takes_none:f"))
    check_datasets(config)
    with pytest.raises(DataError, match=f"rows.parquet: {text}") as caught:
        check_datasets(config.model_copy(update={"reward": Reward(function="takes_all:f")}))
    assert "reward.function=takes_all:f" in str(caught.value)


@pytest.mark.parametrize("chat_template", [False, True])
def test_chat_messages_need_a_tokenizer_with_a_template(data, tmp_path, chat_template):
    row = {"prompt": [{"role": "user", "content": "1+1="}], "answer": "2"}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    config = Config(data=data.model_copy(update={"chat_template": chat_template}), trainer=Trainer(prompts_per_step=1))
    with pytest.raises(DataError, match=r"prompt 'train-0' is .* need a tokenizer with a chat template") as caught:
        check_datasets(config)
    assert "model=pretrained model.path=… or model.tokenizer=…" in str(caught.value)
    assert "data.chat_template=false" not in str(caught.value)
    (tmp_path / "rows.jsonl").write_text(ROWS)
    with pytest.raises(DataError, match=r"set data.chat_template=false") if chat_template else nullcontext():
        check_datasets(config)


def test_no_first_check_imports_pytorch_or_ray():
    code = (
        "import sys; from rlpack.config.compose import compose; from rlpack.startup.first_checks import check_first; "
        "import rlpack.cli.train; check_first(compose([])); print({'torch', 'ray', 'transformers'} & set(sys.modules))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert out.stdout == "set()\n"


def demonstrations(path, *lengths):
    rows = [{"prompt": "a" * 10, "answer": "", "demonstration": "a" * length} for length in lengths]
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))


@pytest.mark.parametrize(
    ("ranks", "cp", "advice"), [(4, 1, "cp=2, "), (4, 2, "cp=4, "), (1, 1, "cp=2 placement.pools.main.ranks=2, ")]
)
def test_a_demonstration_over_the_budget_names_the_cp_that_fits_it(data, tmp_path, ranks: int, cp: int, advice: str):
    config = Config(
        data=data.model_copy(update={"completion_column": "demonstration"}),
        trainer=Trainer(prompts_per_step=1),
        batching=Batching(max_tokens=100),
        sft_warmup=SFTWarmup(steps=1),
        actor=Actor(parallel=Parallel(cp=cp)),
        placement=Placement(pools={"main": Pool(ranks=ranks)}),
    )
    demonstrations(tmp_path / "rows.jsonl", 100 * cp)
    with pytest.raises(DataError) as caught:
        check_datasets(config)
    shared = f"share it among ranks by actor.parallel.{advice}" if advice else ""
    assert f"raise batching.max_tokens, {shared}remove the row" in str(caught.value)


def test_a_demonstration_over_the_budget_is_refused_without_a_tokenizer(data, tmp_path):
    data = data.model_copy(update={"completion_column": "demonstration"})
    config = Config(
        data=data, trainer=Trainer(prompts_per_step=2), batching=Batching(max_tokens=192, pad_to_multiple=8)
    )
    config = config.model_copy(update={"sft_warmup": SFTWarmup(steps=1)})
    demonstrations(tmp_path / "rows.jsonl", 10, 181)  # with the prompt and the end of the sequence, 192
    check_datasets(config)
    demonstrations(tmp_path / "rows.jsonl", 10, 182)
    with pytest.raises(DataError, match=r"prompt 'train-1' and its demonstration have 193 tokens, over the 192 of"):
        check_datasets(config)
    demonstrations(tmp_path / "rows.jsonl", 10, 1_000_000)
    with pytest.raises(DataError, match=r"the demonstration of 'train-1' has at least 1,000,000 tokens"):
        check_datasets(config)
    with_tokenizer = config.model_copy(update={"model": Model(tokenizer="other", config={"model_type": "qwen2"})})
    with pytest.raises(DataError, match=r"the demonstration of 'train-1' has at least 244 tokens"):
        check_datasets(with_tokenizer)
    for overlong in ("truncate", "drop"):
        check_datasets(config.model_copy(update={"batching": Batching(max_tokens=192, overlong=overlong)}))
    check_datasets(config.model_copy(update={"sft_warmup": SFTWarmup(steps=0)}))
    dropping = config.data.model_copy(update={"overlong_prompt": "drop", "max_prompt_tokens": 9})
    (tmp_path / "rows.jsonl").open("a").write('{"prompt": "1+1=", "answer": "2", "demonstration": "2"}\n')
    check_datasets(config.model_copy(update={"data": dropping, "trainer": Trainer(prompts_per_step=1)}))
