"""Which numbers share a scale, in heads wider than a block and in many positions; and which are
rotated first.
"""

import numpy as np
import pytest
import torch

from headcount.workers.interventions.stored_caches import FormatName, store_keys, store_values
from tests.reference.reference_changes import STORED, quantised, rotation


@pytest.mark.parametrize(
    ("name", "d_head", "of_keys", "of_values"),
    [
        ("q4_0", 64, 64, 64),
        ("q8_0", 256, 256, 64),
        ("q4_0", 192, 64, 64),
        ("q8_0", 96, None, None),
        ("mlx4", 128, None, None),
        ("affine8", 128, None, None),
    ],
)
def test_llama_cpp_rotates_the_numbers_of_heads_before_it_rounds_them(
    name: FormatName, d_head: int, of_keys: int | None, of_values: int | None
):
    heads = np.random.default_rng(0).normal(size=(1, 3, 1, d_head))
    block = 32 if name.startswith("q") else 64
    for store, size in ((store_keys, of_keys), (store_values, of_values)):
        turn = np.eye(d_head) if size is None else np.kron(np.eye(d_head // size), rotation(size))
        expected = np.array(
            [
                np.concatenate([STORED[name](part) for part in row.reshape(-1, block)]) @ turn.T
                for row in heads.reshape(3, d_head) @ turn
            ]
        )
        options = {"number_format": name, "whole": 0, "end": 3, "groups": 1, "chosen": "x1"}
        found = store(torch.from_numpy(heads), 0, **options)
        np.testing.assert_allclose(found.reshape(3, d_head), expected, atol=1e-12)


@pytest.mark.parametrize(("name", "bits"), [("channel4", 4), ("channel3", 3)])
def test_each_number_of_a_head_has_a_scale_of_its_own_for_each_32_positions(
    name: FormatName, bits: int
):
    keys = np.random.default_rng(0).normal(size=(2, 75, 3, 8))
    expected = keys.copy()
    # Four positions stay as they are, and a block of seven is not complete.
    for start in (4, 36):
        for sequence, head, channel in np.ndindex(2, 2, 8):
            block = expected[sequence, start : start + 32, head, channel]
            block[:] = quantised(block, bits)
    options = {"number_format": name, "whole": 4, "end": 75, "groups": 3, "chosen": "x3"}
    found = store_keys(torch.from_numpy(keys), 0, **options)
    np.testing.assert_allclose(found, expected, atol=1e-12)
    assert not np.allclose(found, keys)


@pytest.mark.parametrize("name", ["rotated4", "rotated3", "rotated2"])
@pytest.mark.parametrize("d_head", [64, 96])
def test_heads_of_any_width_are_rotated_before_their_numbers_share_a_scale(
    name: FormatName, d_head: int
):
    heads = np.random.default_rng(0).normal(size=(1, 3, 1, d_head))
    options = {"number_format": name, "whole": 0, "end": 3, "groups": 1, "chosen": "x1"}
    for store in (store_keys, store_values):
        found = store(torch.from_numpy(heads), 0, **options)
        expected = [STORED[name](row) for row in heads.reshape(3, d_head)]
        np.testing.assert_allclose(found.reshape(3, d_head), expected, atol=1e-12)
