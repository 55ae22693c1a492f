"""The command `rlhf-jax evaluate`, or `python -m rlhf_jax.evaluate`; see docs/evaluation.md."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from rlhf_jax.errors import UserError
from rlhf_jax.evaluate import options
from rlhf_jax.evaluate.run import run
from rlhf_jax.parallel import multihost, platforms, xla_flags
from rlhf_jax.runtime import compile_cache
from rlhf_jax.utils import text
from rlhf_jax.utils.output import guarded_output


@guarded_output()
def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command. Returns its exit status: 0, 2 after a user error (one line on stderr), 1 if other
    processes were not found or died, 130 if interrupted."""
    try:
        config = options.parse(sys.argv[1:] if argv is None else argv)
        xla_flags.add_those_of_run()
        compile_cache.enable()
        multihost.initialize(config.distributed, config.num_processes, config.process_id)
        platforms.check()
        run(config, lambda line: print(text.printable(line), flush=True))
    except UserError as error:
        print(f"error: {error}", file=sys.stderr, flush=True)
        multihost.close(str(error))
        return error.status
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr, flush=True)
        multihost.close("interrupted")
        return 130
    except Exception as error:
        if multihost.peer_died():
            return 1  # parallel.liveness has already reported which process died
        multihost.close(multihost.error_text(error))
        raise
    multihost.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
