"""Rules across the keys of `data`."""

import os
from collections.abc import Iterator
from pathlib import Path

from rlpack.config.evaluation_sets import key_of, set_configs
from rlpack.config.schema import Config, Data
from rlpack.path_suggestions import DATA_FILES, suggest_path


def data_problems(config: Config) -> Iterator[str]:
    """Yield problems across the keys of `data` and the datasets of evaluation sets."""
    data = config.data
    for name in ("source", "split", "validation_split", "prompt_column"):
        if not getattr(data, name).strip():
            yield f"data.{name} is blank; set it"
    if data.validation_source is not None and not data.validation_source.strip():
        yield f"data.validation_source is {data.validation_source!r}, which is blank; set it, or null for data.source"
    if data.generator and data.source != "arithmetic":
        yield (
            f"data.generator is set, but data.source is {data.source!r}; the generator is for data.source=arithmetic: "
            "for other prompts, choose data=jsonl, data=parquet or data=hub, and leave out data.generator and "
            "experiment=smoke, which sets it (trainer.steps=2 is a short run, too)"
        )
    if data.validation_source is None and (same := _why_nothing_is_held_out(data)):
        if data.source.endswith(DATA_FILES) and not os.path.isfile(os.path.expanduser(data.source)):
            hint = suggest_path(Path(os.path.expanduser(data.source)))
            yield f"data.source is {data.source!r}, but there is no such file in {Path.cwd()}{hint}"
        yield (
            f"{same}, so no prompts would be held out; set data.validation_source to other prompts, "
            f"or to {data.source} itself to evaluate on the training prompts"
        )
    yield from _subset_problems(config)


def _subset_problems(config: Config) -> Iterator[str]:
    """Yield a problem for each subset of a source that has none: a file, or the generator."""
    data = config.data
    subsets = {"data.subset": (data.source, data.subset), "data.validation_subset": data.held_out}
    if data.validation_subset is None:
        del subsets["data.validation_subset"]
    for name, of_set in set_configs(config).items():
        if config.evaluation.sets[name].subset is not None:
            subsets[f"{key_of(name)}.subset"] = of_set.data.held_out
    for key, (source, subset) in subsets.items():
        if subset is None:
            continue
        if not subset.strip():
            yield f"{key} is {subset!r}, which is blank; set it, or null for none"
        elif source == "arithmetic" or source.endswith(DATA_FILES):
            kind = "the built-in generator" if source == "arithmetic" else "a file"
            yield (
                f"{key} is {subset!r}, but the source is {source!r}, {kind}: only a dataset on the Hub, or a folder "
                f"with a README.md that lists them, has subsets; set {key}=null"
            )


def _why_nothing_is_held_out(data: Data) -> str | None:
    """Return why training and held-out prompts are the same rows, None if they are not."""
    if data.source.endswith(DATA_FILES):
        return f"data.validation_source is null, but {data.source} is one file without splits"
    if data.split == data.validation_split:
        return f"data.validation_source is null, and data.split and data.validation_split are both {data.split!r}"
    return None
