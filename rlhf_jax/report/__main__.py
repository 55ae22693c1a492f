"""The command `python -m rlhf_jax.report RUN_DIR [RUN_DIR ...]`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from rlhf_jax import report
from rlhf_jax.errors import UserError
from rlhf_jax.report import pictures
from rlhf_jax.utils import text


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command. Returns its exit status: 0, or 2 after a user error (one line on stderr)."""
    text.escape_unencodable_output()
    parser = argparse.ArgumentParser(
        prog="python -m rlhf_jax.report",
        description="One HTML page about a run, or comparing several. Runs that differ only in their seed are one "
        "curve with a band. Works during a run too.",
    )
    parser.add_argument("run_dirs", nargs="+", metavar="RUN_DIR", help="--run_dir of a run, of one or several stages")
    parser.add_argument(
        "--out",
        help="file of the page; default: report.html in the folder of a single run, otherwise in the working directory",
    )
    parser.add_argument("--no_png", action="store_true", help="write no PNG pictures")
    options = parser.parse_args(argv)
    try:
        png = not options.no_png and pictures.available()
        if not (png or options.no_png):
            print(f"note: no pictures: {pictures.MISSING_MATPLOTLIB}", file=sys.stderr)
        for path in report.write(options.run_dirs, options.out, png):
            print(f"written: {text.printable(path)}")
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.status
    return 0


if __name__ == "__main__":
    sys.exit(main())
