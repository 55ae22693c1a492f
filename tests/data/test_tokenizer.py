"""Tokenizers: pad, eos, round trips, and what is refused."""

import json
import subprocess
import sys
import warnings

import pytest
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from rlhf_jax import data
from rlhf_jax.data import synthetic
from rlhf_jax.errors import UserError
from tests.helpers.chat_tokenizer import bytes_tokenizer

WORDS = ("<|endoftext|>", "[UNK]", "a", "b", " a", " b", "\n", " ", ".")


def write_tokenizer(folder, words=WORDS, **config):
    """A folder with tokenizer.json and tokenizer_config.json only, as published Pythia tokenizers are."""
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r" ?\w|\n| |\."), behavior="isolated")
    tokenizer.decoder = decoders.Fuse()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return str(folder)


def test_missing_pad_takes_the_first_free_row(tmp_path):
    tokenizer = data.load_tokenizer(write_tokenizer(tmp_path, eos_token="<|endoftext|>"), vocab_size=10)
    assert (tokenizer.pad_id, tokenizer.eos_id, tokenizer.vocab_size) == (9, 0, 10)


def test_gpt_neox_tokenizer_gets_pad_and_not_a_made_up_one(tmp_path):
    folder = write_tokenizer(tmp_path, tokenizer_class="GPTNeoXTokenizerFast", eos_token="<|endoftext|>")
    tokenizer = data.load_tokenizer(folder, vocab_size=16)
    assert tokenizer.hf.pad_token == "[PAD]" and tokenizer.pad_id == 9


def test_pad_equal_to_eos_is_replaced_with_a_warning(tmp_path):
    folder = write_tokenizer(tmp_path, eos_token="<|endoftext|>", pad_token="<|endoftext|>")
    with pytest.warns(UserWarning, match=r"eos.*\[PAD\]"):
        tokenizer = data.load_tokenizer(folder, vocab_size=10)
    assert tokenizer.pad_id == 9 != tokenizer.eos_id


def test_eos_pads_where_no_row_is_free(tmp_path):
    folder = write_tokenizer(tmp_path, eos_token="<|endoftext|>", pad_token="<|endoftext|>")
    tokenizer = data.load_tokenizer(folder, vocab_size=9)
    assert (tokenizer.pad_id, tokenizer.eos_id, tokenizer.vocab_size) == (0, 0, 9)
    without = data.load_tokenizer(write_tokenizer(tmp_path, eos_token="<|endoftext|>"), vocab_size=9)
    assert without.pad_id == 0 and data.own_pad_id(without.name) is None
    data.save_tokenizer(without, str(tmp_path / "out"))  # as TRL, so that transformers can pad a batch
    assert data.own_pad_id(str(tmp_path / "out")) == 0 and data.own_pad_id(str(tmp_path / "nowhere")) is None


def holes(folder, rows=(0, 1, 2, 3, 4, 5, 6, 7, 9), **config):
    """A folder with a tokenizer whose ids have holes."""
    path = write_tokenizer(folder, eos_token="<|endoftext|>", **config)
    state = json.loads((folder / "tokenizer.json").read_text())
    state["model"]["vocab"] = dict(zip(WORDS, rows, strict=True))
    (folder / "tokenizer.json").write_text(json.dumps(state))
    return path


def words(tokenizer):
    """What the ids of WORDS decode to."""
    return [tokenizer.decode([i]) for i in (0, 1, 2, 3, 4, 5, 6, 7, 9)]


@pytest.mark.parametrize("config", [{}, {"pad_token": "<|endoftext|>"}, {"pad_token": "<pad>"}], ids=str)
@pytest.mark.filterwarnings("ignore:.*pads with its eos")
def test_a_pad_is_put_after_the_largest_id_where_the_ids_have_holes(tmp_path, config):
    for rows, pad in ((None, 10), (12, 10), (11, 10), (10, 0)):
        tokenizer = data.load_tokenizer(holes(tmp_path, **config), vocab_size=rows)
        assert (tokenizer.pad_id, tokenizer.vocab_size) == (pad, max(pad, 9) + 1)
        assert words(tokenizer) == list(WORDS)
    assert tokenizer.encode("a.") == [2, 9]
    data.save_tokenizer(data.load_tokenizer(holes(tmp_path, **config)), str(tmp_path / "out"))
    again = data.load_tokenizer(str(tmp_path / "out"))
    assert again.pad_id == 10 and words(again) == list(WORDS)


def test_other_special_tokens_get_no_id_of_a_word_either(tmp_path):
    path = holes(tmp_path, bos_token="<s>", pad_token="<pad>")
    for rows, pads in ((None, (10, 11)), (12, (10, 11)), (11, (0,))):
        tokenizer = data.load_tokenizer(path, vocab_size=rows)
        assert tokenizer.hf.bos_token_id in (10, 11) and tokenizer.pad_id in pads and words(tokenizer) == list(WORDS)
        assert tokenizer.pad_id != tokenizer.hf.bos_token_id
    with pytest.raises(UserError, match="id 10.*10 rows"):
        data.load_tokenizer(path, vocab_size=10)


def test_added_tokens_keep_ids_that_lie_in_a_hole(tmp_path):
    path = holes(tmp_path, (0, 1, 2, 3, 4, 5, 6, 7, 20), bos_token="<s>")
    tokenizer = data.load_tokenizer(path, vocab_size=32)
    assert (tokenizer.hf.bos_token_id, tokenizer.pad_id, tokenizer.decode([20])) == (9, 21, ".")


def test_a_pad_that_is_unk_stays(tmp_path):
    path = write_tokenizer(tmp_path, eos_token="<|endoftext|>", unk_token="[UNK]", pad_token="[UNK]")
    assert data.load_tokenizer(path, vocab_size=9).pad_id == 1


def test_a_pad_of_its_own_is_kept_without_warning(tmp_path):
    folder = write_tokenizer(tmp_path, eos_token="<|endoftext|>", pad_token=".")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert data.load_tokenizer(folder, vocab_size=9).pad_id == 8


def test_more_ids_than_rows_is_refused(tmp_path):
    with pytest.raises(UserError, match="9 ids.*8 rows"):
        data.load_tokenizer(write_tokenizer(tmp_path, eos_token="<|endoftext|>"), vocab_size=8)


def test_no_eos_is_refused(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "gpt2"}))
    with pytest.raises(UserError, match="no eos token|no tokenizer could be loaded"):
        data.load_tokenizer(
            write_tokenizer(tmp_path, words=WORDS[1:], tokenizer_class="PreTrainedTokenizerFast"), vocab_size=16
        )


def test_folder_without_tokenizer_and_missing_folder_are_named(tmp_path):
    with pytest.raises(UserError, match="tokenizer.json"):
        data.load_tokenizer(str(tmp_path))
    with pytest.raises(UserError, match="nowhere'.*tokenizer_name_or_path"):
        data.load_tokenizer(str(tmp_path / "nowhere"))


def test_broken_tokenizer_json_is_named(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(UserError, match="no tokenizer could be loaded from"):
        data.load_tokenizer(str(tmp_path))


def test_encode_adds_no_special_tokens_and_decode_gives_spaces_back(tmp_path):
    tokenizer = data.load_tokenizer(write_tokenizer(tmp_path, eos_token="<|endoftext|>"), vocab_size=10)
    text = "a b.\n\n a ."
    assert tokenizer.decode(tokenizer.encode(text)) == text
    assert tokenizer.encode_batch([text, "a"]) == [tokenizer.encode(text), [2]]
    assert tokenizer.encode_batch([]) == []
    assert tokenizer.decode([2, 0, 9], skip_special_tokens=True) == "a"


def test_pieces_are_the_text_that_each_token_adds(tmp_path):
    several = bytes_tokenizer()
    ids = several.encode("a é 日🙂")
    assert several.token_texts(ids) == ["a", " ", "", "é", " ", "", "", "日", "", "", "", "🙂"]
    assert several.token_texts([ids[2], several.eos_id]) == ["", "\ufffd<|im_end|>"]  # half a character
    assert several.token_texts([]) == []
    words = Tokenizer(models.WordLevel({"▁a": 0, "▁b": 1, "[UNK]": 2}, unk_token="[UNK]"))
    words.decoder = decoders.Metaspace()  # takes the space off a text's first word
    hf = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="[UNK]")
    metaspace = data.Tokenizer(hf=hf, name="words", pad_id=2, eos_id=2, vocab_size=3)
    assert metaspace.token_texts([0, 1, 0]) == ["a", " b", " a"]


def test_saved_tokenizer_keeps_its_pad(tmp_path):
    first = data.load_tokenizer(write_tokenizer(tmp_path, eos_token="<|endoftext|>"), vocab_size=10)
    data.save_tokenizer(first, str(tmp_path / "out"))
    again = data.load_tokenizer(str(tmp_path / "out"), vocab_size=10)
    assert (again.pad_id, again.eos_id, again.vocab_size) == (first.pad_id, first.eos_id, first.vocab_size)


def test_synthetic_tokenizer_round_trips_and_loads_by_auto_tokenizer(tmp_path):
    tokenizer = data.load_tokenizer("synthetic")
    assert (tokenizer.eos_id, tokenizer.pad_id, tokenizer.vocab_size) == (0, 1, len(synthetic.vocabulary()))
    data.save_tokenizer(tokenizer, str(tmp_path))
    from transformers import AutoTokenizer

    auto = AutoTokenizer.from_pretrained(str(tmp_path))
    for row in synthetic.demonstrations(50):
        text = row["prompt"] + row["completion"]
        ids = tokenizer.encode(text)
        assert tokenizer.decode(ids) == text and 2 not in ids
        assert auto(text)["input_ids"] == ids and auto.decode(ids) == text
        assert tokenizer.encode(row["prompt"]) + tokenizer.encode(row["completion"]) == ids


def test_models_of_another_tokenizer_are_refused(tmp_path):
    ours, theirs = tmp_path / "ours", tmp_path / "theirs"
    ours.mkdir(), theirs.mkdir()
    tokenizer = data.load_tokenizer(write_tokenizer(ours, eos_token="<|endoftext|>"), vocab_size=10)
    data.check_same_tokenizer(tokenizer, write_tokenizer(ours, eos_token="<|endoftext|>"))
    data.check_same_tokenizer(tokenizer, str(tmp_path))  # no tokenizer there: trusted
    data.check_tokenizer_fits_model(tokenizer, str(tmp_path))
    assert data.same_tokenizer(tokenizer, str(tmp_path))
    other = write_tokenizer(theirs, words=("<|endoftext|>", "[UNK]", "b", "a"), eos_token="<|endoftext|>")
    with pytest.raises(UserError, match="id 2.*'b'.*'a'"):
        data.check_same_tokenizer(tokenizer, other)


def test_torch_is_not_imported():
    code = "import sys; from rlhf_jax import data; data.load_tokenizer('synthetic'); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_nobody_is_advised_to_install_torch():
    code = """
import importlib.util, sys
found = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == "torch" else found(name, *rest)
from rlhf_jax.data import fast_tokenizer
fast_tokenizer.fast_tokenizer()
import transformers
assert not transformers.is_torch_available()
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0 and done.stderr == "" == done.stdout, done.stderr
