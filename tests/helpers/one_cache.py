"""The command, as it starts fastest: python -m tests.helpers.one_cache ARGUMENTS.

JAX's name of a program on disk holds which process of a run on CPUs asks for it, and only the first one writes: without
this the others would compile everything again at each start.
"""

import gc
import sys

from jax._src import cache_key

from rlhf_jax import train

if __name__ == "__main__":
    cache_key._hash_accelerator_config = cache_key._hash_devices
    gc.freeze()  # what was imported stays: looking through it takes a fifth of a start
    gc.set_threshold(50_000, 10, 10)
    sys.exit(train.main())
