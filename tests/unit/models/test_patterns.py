import pytest

from rlpack.models.errors import ModelError
from rlpack.models.patterns import match_patterns

NAMES = [
    "model.embed_tokens.weight",
    *(f"model.layers.{layer}.self_attn.{part}_proj.weight" for layer in range(12) for part in "qkv"),
    "lm_head.weight",
]


def test_a_pattern_matches_whole_names_and_a_star_matches_dots():
    assert match_patterns(["lm_head.weight", "model.layers.1.*"], NAMES, "k") == {
        "lm_head.weight",
        *(f"model.layers.1.self_attn.{part}_proj.weight" for part in "qkv"),
    }
    assert len(match_patterns(["model.layers.[0-3].*"], NAMES, "k")) == 12
    assert len(match_patterns(["*.q_proj.*", "*_proj.weight"], NAMES, "k")) == 36
    assert match_patterns([], NAMES, "k") == set()


@pytest.mark.parametrize(
    ("pattern", "near"),
    [
        ("*embed_token.*", r"model\.embed_tokens\.weight"),
        ("q_porj", r"model\.layers\.0\.self_attn\.q_proj\.weight"),
        ("model.layer.3.*", r"model\.layers\.0\.self_attn"),
        ("LM_HEAD.weight", r"lm_head\.weight"),
        ("zzz", r"model\.embed_tokens\.weight"),
    ],
)
def test_a_pattern_without_a_match_is_named_with_the_nearest_names(pattern: str, near: str):
    message = rf"actor\.x contains '{pattern.replace('*', '.')}', .* matches no name; .*{near}"
    with pytest.raises(ModelError, match=message):
        match_patterns(["*", pattern], NAMES, "actor.x")
