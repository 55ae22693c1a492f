"""Memory of long responses: the page shows the rows, and every piece is a config of its own that is accepted."""

import sys

import pytest

from tests.helpers.paths import SCRIPTS

sys.path.insert(0, str(SCRIPTS / "scaling"))
import long_responses  # noqa: E402
import slices  # noqa: E402

from rlhf_jax.config.check import check


@pytest.mark.parametrize("table", long_responses.TABLES)
def test_the_page_shows_the_rows(table):
    lines = "\n".join(long_responses.TABLES[table][1](slices.read(long_responses.PATH)))
    assert slices.shown(long_responses.PAGE.read_text(), f"long {table}")[1] == lines + "\n"


@pytest.mark.parametrize("name", long_responses.PIECES)
def test_a_piece_changes_the_run_and_is_accepted(name):
    piece = long_responses.PIECES[name]
    config = long_responses.config_of(piece, "path", 8, (1, 8, 1), long_responses.RESPONSE)
    check(config)
    for option, value in piece.options.items():
        assert getattr(config, option) == value
    for option, value in piece.rows.items():
        assert getattr(config, option) == 8 * value
    if piece.patch is not None:
        module, attribute, value = piece.patch
        assert getattr(module, attribute) != value
