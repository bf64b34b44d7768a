import re
from typing import Any

from rlpack.config.compose import compose
from rlpack.config.keys import walk
from rlpack.config.reference_page import PAGE, preset_values, render
from rlpack.config.schema import Config


def test_the_reference_page_is_what_the_schema_says():
    assert PAGE.read_text(encoding="utf-8") == render(), "run python -m rlpack.config.reference_page"


def test_the_reference_page_names_every_key():
    page = render()
    assert [key.path for key in walk() if key.is_leaf and f"| `{key.name}` |" not in page] == []


def test_presets_set_what_a_run_without_overrides_uses():
    config = compose([]).model_dump(mode="json")
    for path, (value, preset) in preset_values().items():
        assert of(config, path) == value, preset


def test_defaults_of_a_run_that_differ_from_the_schemas_are_on_the_page():
    used, schema, page = compose([]).model_dump(mode="json"), Config().model_dump(mode="json"), render()
    leaves = [key.path for key in walk() if key.is_leaf and "<" not in key.path]
    differing = {path for path in leaves if of(used, path) != of(schema, path)}
    assert {"algorithm.kl_coef", "trainer.mini_batch_size", "rollout.max_new_tokens"} <= differing
    assert differing <= preset_values().keys()
    assert "| `kl_coef` | number, >= 0, &lt;= 1e+18 | `0.03` by recipe=grpo, else `0.0` |" in page
    assert "| `mini_batch_size` | whole number, null, >= 1 | `64` by recipe=grpo, else `null` |" in page
    assert "| `max_new_tokens` | whole number, >= 1 | `128` by every preset of rollout |" in page
    critic = page.partition("## `critic.optimizer`")[2]
    rate = Config().critic.optimizer.learning_rate
    assert critic.index(f"| `learning_rate` | number, > 0, &lt;= 100 | `{rate}` |") < critic.index("##")


def test_every_row_of_the_page_has_its_four_cells():
    rows = [line for line in render().splitlines() if line.startswith("|")]
    assert [row for row in rows if len(re.findall(r"(?<!\\)\|", row)) != 5] == []
    assert [line for line in render().split("\n\n") if "|---|" in line and not line.strip().endswith("|")] == []


def of(values: dict[str, Any], path: str) -> Any:
    for part in path.split("."):
        values = values[part]
    return values
