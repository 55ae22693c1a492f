"""The command `rlhf-jax report RUN_DIR [RUN_DIR ...] [--serve]`, or `python -m rlhf_jax.report`."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Sequence

from rlhf_jax import report
from rlhf_jax.config import command_line
from rlhf_jax.errors import UserError
from rlhf_jax.report import pictures, serve
from rlhf_jax.utils import text
from rlhf_jax.utils.output import guarded_output

PROG = "rlhf-jax report"


@dataclasses.dataclass(frozen=True)
class ReportOptions:
    """One HTML page about a run, or comparing several. Runs that differ only in their seed are one curve with a band.
    Works during a run too."""

    run_dirs: tuple[str, ...] = ()
    """Folders of runs, of one or several stages; may be given without the flag."""
    out: str | None = None
    """File of the page; default: report.html in the folder of a single run, otherwise in the working directory."""
    no_png: bool = False
    """Write no PNG pictures (they need the extra report)."""
    serve: bool = False
    """Write nothing, and serve the page to browsers of this machine; it follows the runs until Ctrl-C."""
    port: int | None = None
    """Port of --serve; default: a free one, as 0."""


@guarded_output()
def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command. Returns its exit status: 0, or 2 after a user error (one line on stderr)."""
    argv = sys.argv[1:] if argv is None else argv
    try:
        options = command_line.parse_options(argv, ReportOptions, PROG, positional="run_dirs")
        if not options.run_dirs:
            raise UserError(f"{PROG} needs the folder of a run: {PROG} runs/quickstart")
        if options.serve:
            if options.out is not None:
                raise UserError("--serve writes no file: leave out --out or --serve")
            serve.serve(options.run_dirs, options.port or 0)
            return 0
        if options.port is not None:
            raise UserError("--port is the port of --serve: add --serve")
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
