"""Ranks that share the tokens, weights or layers of a microbatch, on nodes whose CPUs compute other numbers of rows."""

from pathlib import Path

import numpy as np
import pytest

from rlpack.models import cpu_products
from tests.distributed.definition import plain_model, row_scores, scored
from tests.distributed.layouts.cases import LAYOUTS, TEMPERATURE, config_of
from tests.distributed.layouts.ranks import score_on_unlike_cpus
from tests.distributed.processes import on_ranks

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not cpu_products._can_be_called(), reason="this build of PyTorch lacks the operator"),
]


@pytest.mark.parametrize("layout", ["cp2", "gather2", "tp2sp", "pp2"])
def test_log_probs_are_those_of_the_definition(tmp_path: Path, layout: str):
    config = config_of("llama")
    batch = scored([(5, 40), (6, 47), (4, 60), (7, 30)], None, TEMPERATURE, config)
    model = plain_model(config)
    expected = np.concatenate(
        [row_scores(model, row, TEMPERATURE)[0].detach().numpy() for row in batch["input_ids"].rows()]
    )
    expected *= batch["response_mask"].values.numpy()
    for found in on_ranks(tmp_path, LAYOUTS[layout][0], score_on_unlike_cpus, layout, batch):
        np.testing.assert_allclose(found, expected, atol=1e-5)
