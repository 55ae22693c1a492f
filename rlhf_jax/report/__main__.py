"""The command: python -m rlhf_jax.report RUN_DIR [RUN_DIR ...]."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from rlhf_jax import report
from rlhf_jax.errors import UserError
from rlhf_jax.report import pictures
from rlhf_jax.utils import text


def main(argv: Sequence[str] | None = None) -> int:
    """0 when written; 2 with a line of explanation when something the user gave is wrong."""
    text.escape_unencodable_output()
    parser = argparse.ArgumentParser(
        prog="python -m rlhf_jax.report",
        description="One HTML page of a run, or of several compared; runs that differ in their seed only are one curve "
        "with a band. A run may still go on.",
    )
    parser.add_argument("run_dirs", nargs="+", metavar="RUN_DIR", help="a run's --run_dir: of one stage, or of several")
    parser.add_argument(
        "--out", help="the page's file; default: report.html in the folder of one run, else in this one"
    )
    parser.add_argument("--no_png", action="store_true", help="no pictures beside the page")
    options = parser.parse_args(argv)
    try:
        png = not options.no_png and pictures.available()
        if not (png or options.no_png):
            print(f"note: no pictures beside the page: {pictures.NEEDED}", file=sys.stderr)
        for path in report.write(options.run_dirs, options.out, png):
            print(f"written: {text.printable(path)}")
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.status
    return 0


if __name__ == "__main__":
    sys.exit(main())
