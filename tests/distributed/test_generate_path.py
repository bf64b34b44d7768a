"""A generate call passes few functions between the recipe and the engine."""

from benchmarks.generate_path import traced_path
from benchmarks.structure import generate_measure


def test_a_generate_call_passes_at_most_twelve_functions_from_the_recipe_to_the_engine():
    path = traced_path()
    measure = generate_measure(path)
    assert measure.is_kept, path
    assert measure.limit == 12
    # Driver and rank are on the path, each from its first function to its last.
    assert path[0] == "recipes/driver/rollout_stages.py:generate"
    assert path[-1] == "workers/rollout.py:RolloutWorker.generate"
    received = next(i for i, function in enumerate(path) if function.startswith("rlpack/distributed/rank_actor.py:"))
    assert path[received - 1].startswith("rlpack/distributed/ranks.py:RayRanks.")
    assert "rlpack/distributed/rank_actor.py:RankActor.call_rows" in path[received:]
