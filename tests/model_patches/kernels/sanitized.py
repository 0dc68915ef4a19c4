"""What sanitize.sh runs: `build` makes the instrumented library and prints its path, `run LIBRARY` uses it.

Every instruction set, number type and way through the operators is met once; results are compared roughly, for what
matters here is what the sanitizers say.
"""

import itertools
import sys

import torch

from model_patches.kernels import ops
from model_patches.kernels.build import find_or_build
from model_patches.kernels.ops import Level
from model_patches.loading.cache import default_cache_dir
from tests.model_patches.kernels.reference import attention_by_definition
from tests.model_patches.paged import random_batch

FLAGS = ("-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-fno-omit-frame-pointer")
LENGTHS = [(1, 1), (1, 530), (3, 7), (0, 4), (40, 600), (130, 130)]


def run() -> None:
    """All of it."""
    shapes = [(6, 2, 64, 64, 16), (5, 1, 7, 5, 3), (12, 1, 80, 24, 4), (2, 2, 33, 128, 16)]
    kinds = itertools.product(Level, (torch.float32, torch.bfloat16), (False, True), shapes)
    for level, dtype, as_int8, (heads, kv_heads, key_dim, value_dim, page_size) in kinds:
        batch = random_batch(
            LENGTHS,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=key_dim,
            value_dim=value_dim,
            page_size=page_size,
            dtype=dtype,
            kept_as=torch.int8 if as_int8 else None,
        )
        ops.limit_level(level)
        step, pages = batch.batch, batch.batch.layers[0]
        pairs = key_dim // 4
        waves = torch.ones(len(batch.query), pairs), torch.zeros(len(batch.query), pairs)
        for interleaved in (False, True):
            query = ops.rotate_and_write(
                batch.query, batch.key, batch.value, *waves, step.slots, pages, interleaved=interleaved
            )
        for window, deterministic in itertools.product((None, 20), (False, True)):
            sinks, slopes = torch.ones(heads), torch.full((heads,), 0.01)
            output = ops.paged_attention(
                query,
                pages,
                step.cu_seq_q,
                step.seqused_k,
                step.block_table,
                0.1,
                window=window,
                soft_cap=30.0,
                sinks=sinks,
                slopes=slopes,
                deterministic=deterministic,
            )
            expected = attention_by_definition(batch, 0.1, window=window, soft_cap=30.0, sinks=sinks, slopes=slopes)
            torch.testing.assert_close(output.double(), expected, rtol=5e-2, atol=5e-2)
        print(level.name, dtype, "int8" if as_int8 else "", heads, kv_heads, key_dim, value_dim, flush=True)


if __name__ == "__main__":
    if sys.argv[1:] == ["build"]:
        print(find_or_build(default_cache_dir(), FLAGS))
    else:
        torch.ops.load_library(sys.argv[2])
        run()
