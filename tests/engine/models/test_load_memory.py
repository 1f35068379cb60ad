"""The peak memory of loading: little more than the weights in their final form."""

from __future__ import annotations

import sys

import pytest

from tools.bench.loading import peak_of_load, write_checkpoint

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the kernel tells the peak")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """300 MiB in three shards."""
    return write_checkpoint(tmp_path_factory.mktemp("large"), 300 * 2**20)


@pytest.mark.parametrize("quantization", ["int8", pytest.param(None, marks=pytest.mark.slow)])
def test_the_peak_is_that_of_the_weights(checkpoint, quantization):
    """A second copy, or dense weights beside the rounded ones, would take twice as much."""
    measured = peak_of_load(checkpoint, "bfloat16", quantization)
    assert measured["weights_bytes"] > (120 if quantization else 250) * 2**20
    assert measured["peak_bytes"] < 1.1 * measured["weights_bytes"]
