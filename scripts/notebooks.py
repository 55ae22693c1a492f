"""Runs the notebooks and stores their outputs; puts in the repository's address where mkdocs.yml has one.

    python scripts/notebooks.py                      # all; needs '.[test]', or '.[report]' with nbclient and ipykernel
    python scripts/notebooks.py --only 03            # those whose names start with this
    python scripts/notebooks.py --only 05 --work DIR # in a folder that has runs/quickstart, whose files 05 reads
    python scripts/notebooks.py --no_run             # only the address

The one setting is `repo_url` in mkdocs.yml. While it is empty, the notebooks have no badge, and 06 installs from a
wheel that the reader uploads.
"""

from __future__ import annotations

import argparse
import os
import pathlib
import re
import tempfile

import nbformat

ROOT = pathlib.Path(__file__).resolve().parent.parent
BADGE = "[![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)]"


def repo_url() -> str:
    """The setting in mkdocs.yml."""
    text = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    return re.search(r'^repo_url: *"?([^"\n]*)"?$', text, re.M).group(1).strip()


def badge(name: str, url: str) -> str:
    """A line that opens a notebook in Colab; empty without an address on GitHub."""
    path = url.removeprefix("https://github.com/").strip("/")
    if not url.startswith("https://github.com/"):
        return ""
    return f"{BADGE}(https://colab.research.google.com/github/{path}/blob/main/notebooks/{name})"


def with_address(notebook, name: str, url: str) -> None:
    """Sets the badge at the top and REPO_URL in the code."""
    title, _, rest = notebook.cells[0].source.partition("\n")
    rest = "\n".join(line for line in rest.splitlines() if not line.startswith(BADGE)).strip("\n")
    notebook.cells[0].source = "\n\n".join(filter(None, [title, badge(name, url), rest]))
    for cell in notebook.cells:
        cell.source = re.sub(r'^REPO_URL = ".*"', f'REPO_URL = "{url}"', cell.source, flags=re.M)


def merged(outputs: list) -> list:
    """Outputs with the texts of one stream that follow each other as one."""
    result: list = []
    for output in outputs:
        if result and output.output_type == result[-1].output_type == "stream":
            result[-1].text += output.text
        else:
            result.append(output)
    return result


def run(notebook, folder: str) -> None:
    """Executes it there, on CPU, and keeps outputs without times."""
    from nbclient import NotebookClient

    os.environ |= {"JAX_PLATFORMS": "cpu", "PYTHONPATH": str(ROOT), "COLUMNS": "100"}
    NotebookClient(notebook, timeout=900, kernel_name="python3", resources={"metadata": {"path": folder}}).execute()
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)
        if cell.cell_type == "code":
            cell.outputs = merged([output for output in cell.outputs if output.get("name") != "stderr"])
    notebook.metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }


def main(argv: list[str] | None = None) -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="notebooks whose names start with this")
    parser.add_argument("--work", help="folder to run in; default: an empty one")
    parser.add_argument("--no_run", action="store_true", help="do not execute them")
    options = parser.parse_args(argv)
    for path in sorted((ROOT / "notebooks").glob(f"{options.only}*.ipynb")):
        notebook = nbformat.read(path, as_version=4)
        with_address(notebook, path.name, repo_url())
        with tempfile.TemporaryDirectory() as empty:
            if not options.no_run:
                run(notebook, options.work or empty)
        nbformat.write(notebook, path)
        print(f"written: {path.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
