"""Heads that are wider than a block: which numbers share a scale, and which are rotated first."""

import numpy as np
import pytest
import torch

from headcount.workers.interventions.stored_caches import FormatName, store_keys, store_values
from tests.reference.reference_changes import STORED


def rotation(size: int) -> np.ndarray:
    """±1/√size, negative where row and column have an odd number of bits in common."""
    in_common = [[(row & column).bit_count() for column in range(size)] for row in range(size)]
    return (-1.0) ** np.array(in_common) / np.sqrt(size)


@pytest.mark.parametrize(
    ("name", "d_head", "of_keys", "of_values"),
    [
        ("q4_0", 64, 64, 64),
        ("q8_0", 256, 256, 64),
        ("q4_0", 192, 64, 64),
        ("q8_0", 96, None, None),
        ("mlx4", 128, None, None),
        ("affine2", 128, None, None),
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
        options = {"number_format": name, "whole": 0, "groups": 1, "chosen": "x1"}
        found = store(torch.from_numpy(heads), 0, **options)
        np.testing.assert_allclose(found.reshape(3, d_head), expected, atol=1e-12)
