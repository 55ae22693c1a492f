"""The console command: what it says without, with a wrong and with each command, and how fast."""

import os
import subprocess
import sys

import pytest

from rlhf_jax import cli
from rlhf_jax.config import shipped
from tests.helpers.paths import ROOT


def test_every_command_is_a_module_with_a_main_and_a_help(capsys):
    for command in cli.COMMANDS:
        try:
            status = cli.main([command, "--help"])
        except SystemExit as end:
            status = end.code
        assert status == 0 and capsys.readouterr().out.startswith(f"usage: rlhf-jax {command}"), command
        assert f"  {command} " in cli.usage()


WRONG = [
    (["trian"], "unknown command 'trian'. Did you mean train?"),
    (["--config", "quickstart.py"], "Did you mean rlhf-jax train --config?"),
    (["configs", "shw"], "unknown action 'shw'. Did you mean show?"),
    (["configs", "show", "qickstart"], "Did you mean quickstart"),
    (["configs", "show"], "configs show does not take 0 names"),
    (["train", "--config", "quickstat.py", "--help"], "Did you mean quickstart.py?"),
    (["report", "--no_png"], "rlhf-jax report needs the folder of a run"),
    (["chat", "--temperature", "1"], "rlhf-jax chat needs a model"),
    (["chat", "--top_p", "2"], "top_p is 2.0; it must be"),
]


@pytest.mark.parametrize(("words", "message"), WRONG, ids=[" ".join(words) for words, _ in WRONG])
def test_a_wrong_word_is_told_with_what_to_do(words, message, capsys):
    assert cli.main(words) == 2
    assert message in capsys.readouterr().err


def test_nothing_at_all_shows_the_usage_and_is_an_error(capsys):
    assert cli.main([]) == 2 and capsys.readouterr().out == cli.usage() + "\n"
    assert cli.main(["--version"]) == 0 and capsys.readouterr().out.startswith("rlhf_jax ")


def test_configs_are_listed_with_variants_shown_and_copied(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cli.main(["configs", "list"]) == 0
    listed = capsys.readouterr().out
    assert ":6.9b :12b" in listed and "goldrush.py" in listed
    assert cli.main(["configs", "show", "tldr_ppo"]) == 0
    assert capsys.readouterr().out.strip() == (ROOT / "configs" / "tldr_ppo.py").read_text().strip()
    assert cli.main(["configs", "show", "tldr_ppo.py:6.9b"]) == 0
    assert '"sft_model_path": "cleanrl/EleutherAI_pythia-6.9b-deduped__sft__tldr"' in capsys.readouterr().out
    assert cli.main(["configs", "copy", "quickstart_rloo", "mine.py"]) == 0
    assert (tmp_path / "mine.py").read_text() == (ROOT / "configs" / "quickstart_rloo.py").read_text()
    assert cli.main(["train", "--config", "mine.py", "--help"]) == 0
    assert cli.main(["configs", "copy", "quickstart", "mine.py"]) == 2 and "mine.py exists" in capsys.readouterr().err
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cli.main(["configs", "copy", "quickstart", "~"]) == 0 and (tmp_path / "quickstart.py").exists()
    assert shipped.variants(ROOT / "configs" / "goldrush.py") is None


def test_help_configs_and_errors_import_no_jax_and_end_quietly_when_nobody_reads():
    words = ("--help", "--version", "configs list", "train --config tldr_ppo.py --help")
    words += (
        "train --config tldr_ppo.py --kl_coeff 1",
        "train --config tldr_ppo.py --kl_coef x",
        "train --config no.py",
    )
    code = (
        f"import sys; import rlhf_jax; from rlhf_jax import cli; [cli.main(words.split()) for words in {words}]; "
        "sys.exit(int(bool({'jax', 'transformers', 'rich', 'orbax'} & {*sys.modules})))"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    line = f"{sys.executable} -m rlhf_jax.cli train --config tldr_ppo.py --help_all | head -1"
    done = subprocess.run(line, shell=True, env=env, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stdout.startswith("usage: ") and done.stderr == ""


@pytest.mark.parametrize("words", ["--help", "train --help", "configs list", "configs show tldr_ppo.py"])
def test_what_is_only_printed_ends_quietly_without_a_reader(words):
    env = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"} | {"PYTHONPATH": str(ROOT)}
    line = f"(sleep 0.5; exec {sys.executable} -m rlhf_jax.cli {words}) | true; exit ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", line], env=env, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
