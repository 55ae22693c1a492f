"""Completions as tables: what a model wrote is shown as it wrote it, whatever it wrote."""

import io

import pytest

from rlhf_jax.metrics.logger import MetricLogger
from rlhf_jax.runtime.run_folder import RunFolder
from rlhf_jax.utils import tables
from tests.helpers.tensorboard import events

ROWS = [
    {"prompt": "POST: a", "completion": "[bold]first[/bold] [/nonsense]", "reward": 1.25, "ended": True},
    {"prompt": "POST: b", "completion": "second :smile:", "reward": -0.5, "ended": False},
    {"prompt": "POST: a", "completion": "third", "reward": float("nan"), "ended": True},
]


def shown(*args, **options) -> str:
    stream = io.StringIO()
    tables.show(*args, stream=stream, **options)
    return stream.getvalue()


def test_brackets_and_colons_in_completions_are_text_and_no_markup(monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    text = shown(ROWS, "ppo: samples after update 3")
    assert text.splitlines()[0].strip() == "ppo: samples after update 3"
    assert "[bold]first[/bold] [/nonsense]" in text and "second :smile:" in text
    assert " 1.25 " in text and "-0.50" in text and "nan" in text and "False" in text


def test_a_limit_says_how_many_rows_there_are(monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    text = shown(ROWS, "title", limit=2)
    assert "2 of 3 rows" in text and "second" in text and "third" not in text
    assert "rows" not in shown(ROWS, "title", limit=3) and "rows" not in shown(ROWS, "title")
    assert shown([], "title") == ""


def test_a_narrow_terminal_folds_texts_and_loses_none(monkeypatch):
    monkeypatch.setenv("COLUMNS", "40")
    text = shown([{"prompt": "b", "completion": "x" * 80, "reward": 1.25}], "title")
    assert max(map(len, text.splitlines())) <= 40
    assert text.count("x") == 80 and "1.25" in text


def test_a_table_of_long_texts_is_short(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    post = "SUBREDDIT: r/family\n\nTITLE: a week\n\nPOST: " + "i met maya. " * 200 + "\n\nTL;DR:"
    text = shown([{"query": post, "model response": "met maya " * 50, "score": 1.0}] * 3, "title", limit=3)
    assert len(text.splitlines()) <= 20
    assert tables.short_cell("a\n\nb") == "a\\n\\nb" and tables.short_cell("x" * 80) == "x" * 80
    cut = tables.short_cell(post)
    assert cut.startswith("SUBREDDIT: r/family") and cut.endswith("\\n\\nTL;DR:") and len(cut) <= 85


@pytest.mark.parametrize(
    "value, written", [(3, "3"), (2.0, "2.00"), (-0.126, "-0.13"), (True, "True"), ("a", "a"), (None, "None")]
)
def test_numbers_have_two_decimals_and_counts_none(value, written):
    assert tables.cell(value) == written


def test_markdown_keeps_bars_backslashes_and_line_ends_inside_a_cell():
    text = tables.markdown([{"a|b": "x | y\\z\nnext", "n": 1.0}, {"a|b": "plain"}])
    assert text.split("\n") == ["| a\\|b | n |", "| --- | --- |", "| x \\| y\\\\z<br>next | 1.00 |", "| plain |  |"]
    assert tables.markdown([]) == ""


def test_html_in_a_completion_stays_text_in_markdown():
    assert tables.markdown([{"completion": "<s> a & b"}]).endswith("| &lt;s&gt; a &amp; b |")


def test_unique_prompts_keeps_the_first_row_of_each():
    assert tables.unique_prompts(ROWS) == ROWS[:2]
    samples = [{"query": "q", "model response": text} for text in ("one", "two")]
    assert tables.unique_prompts(samples) == samples[:1]


def test_tensorboards_text_page_gets_the_table(tmp_path):
    folder = RunFolder.open(str(tmp_path / "ppo"), {"seed": 1})
    with MetricLogger.open(folder.path, report_to="tensorboard") as logger:
        logger.text(3, "completions/samples", tables.markdown(ROWS))
    found = [value for event in events(tmp_path / "ppo" / "tensorboard") for value in texts_of(event)]
    assert found == [(3, "completions/samples/text_summary", tables.markdown(ROWS))]
    with MetricLogger.open(folder.path) as logger:
        logger.text(3, "completions/samples", tables.markdown(ROWS))


def texts_of(event):
    for value in event.summary.value:
        assert value.metadata.plugin_data.plugin_name == "text"
        yield event.step, value.tag, value.tensor.string_val[0].decode()
