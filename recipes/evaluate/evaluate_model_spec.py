"""The spec of `rlpack evaluate`: it generates and scores, and trains nothing."""

from collections.abc import Iterator

from rlpack.config.recipes import RecipeSpec, recipe_section
from rlpack.config.schema import Config
from rlpack.config.sections.evaluation_settings import Evaluate


def k_fits(config: Config) -> Iterator[str]:
    """Refuse pass@k of more responses than there are."""
    settings = recipe_section(config, Evaluate)
    largest = max(settings.pass_at, default=0)
    if largest > settings.samples:
        yield (
            f"evaluate.pass_at holds {largest}, over evaluate.samples={settings.samples}; pass@k needs at least k "
            "samples: lower k, or raise evaluate.samples"
        )


def directory_is_named(config: Config) -> Iterator[str]:
    """Refuse a directory without a name."""
    output = recipe_section(config, Evaluate).output_dir
    if output is not None and not output.strip():
        yield "evaluate.output_dir is blank; set a directory, or null for one in evaluations/"


SPEC = RecipeSpec(
    roles=("rollout", "reward"),
    trains=(),
    sections={"evaluate": Evaluate},
    rules=(k_fits, directory_is_named),
    ignores=dict.fromkeys(
        ("algorithm.advantage", "algorithm.baseline", "algorithm.scale", "algorithm.loss"), "nothing is trained"
    ),
)
