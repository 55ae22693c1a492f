"""Small tokenizers of the forms that published ones have."""

import itertools

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from rlhf_jax import data

_SPECIALS = {"<unk>": 0, "<s>": 1, "</s>": 2, "<pad>": 3}


def _loaded(model, bos):
    if bos:
        model.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 1)])
    model.add_special_tokens(list(_SPECIALS))
    hf = PreTrainedTokenizerFast(
        tokenizer_object=model, bos_token="<s>", eos_token="</s>", unk_token="<unk>", pad_token="<pad>"
    )
    return data.Tokenizer(hf=hf, name="small", pad_id=3, eos_id=2, vocab_size=len(hf))


def _bpe(words):
    """A BPE model of the characters of words, with a merge for each of their beginnings."""
    characters = sorted(set(itertools.chain(*words)))
    vocabulary = {**_SPECIALS, **{c: i for i, c in enumerate(characters, len(_SPECIALS))}}
    merges = []
    for word in words:
        for end in range(2, len(word) + 1):
            if word[:end] not in vocabulary:
                vocabulary[word[:end]] = len(vocabulary)
                merges.append((word[: end - 1], word[end - 1]))
    vocabulary |= {"zq": len(vocabulary), "xzq": len(vocabulary) + 1}  # whose beginning xz is two tokens
    merges += [("z", "q"), ("x", "zq")]
    return tokenizers.Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>"))


_LETTERS = "abcdefghijklmnopqrstuvwxyzQATRTLDSUBEICOP:;.?!/\n<>[]"


def space_before(form, bos=True):
    """A tokenizer that puts a space before a text: 'legacy' as Llama 2's and Mistral's, 'first' and 'always' as
    Metaspace does."""
    model = _bpe(["▁", "▁no", "▁yes", "▁is", "▁it", *_LETTERS])
    if form == "legacy":
        model.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        model.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    else:
        model.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=form, split=False)
        model.decoder = decoders.Metaspace(prepend_scheme=form, split=False)
    return _loaded(model, bos)


def byte_level(bos=False, use_regex=True):
    """A byte-level BPE, whose merges cross the end of a prompt that ends in a space or inside a word."""
    model = _bpe(["Ġno", "Ġyes", "nothing", "Ġ", *pre_tokenizers.ByteLevel.alphabet()])
    model.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=use_regex)
    model.decoder = decoders.ByteLevel()
    return _loaded(model, bos)
