"""Tokenizers: text to ids and back, an eos, and a pad id that has an embedding row."""

from __future__ import annotations

import dataclasses
import fnmatch
import os
import warnings
from collections.abc import Sequence
from typing import Any

import huggingface_hub

from rlhf_jax.data.fast_tokenizer import fast_tokenizer
from rlhf_jax.errors import UserError

PAD_TOKEN = "[PAD]"
_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")
# What any form of tokenizer may come in; config.json is AutoTokenizer's.
_ON_THE_HUB = (
    "tokenizer*",
    "*.model",
    "vocab*",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
)
NEOX_DEFAULT_PAD = "<|padding|>"
"""What transformers 5 makes up for every GPT-NeoX tokenizer that names no pad token, in a new row if need be."""


@dataclasses.dataclass(frozen=True)
class Tokenizer:
    """A Hugging Face tokenizer with the few things that training needs of it."""

    hf: Any
    """The transformers tokenizer itself."""
    name: str
    pad_id: int
    eos_id: int
    vocab_size: int
    """Ids in use, [PAD] included; at most the rows of the model's embedding."""

    def encode(self, text: str) -> list[int]:
        """Ids of a text, no special tokens added."""
        return self.hf(text, add_special_tokens=False, verbose=False)["input_ids"]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of each text, no special tokens added."""
        ids: list[list[int]] = []
        for start in range(0, len(texts), 1024):  # the tokenizer's working memory is many times the ids
            chunk = list(texts[start : start + 1024])
            ids += self.hf(chunk, add_special_tokens=False, return_attention_mask=False, verbose=False)["input_ids"]
        return ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        """The text of ids, spaces as they are. What a policy of NaN draws is no id, and left out."""
        return self.hf.decode(
            [int(i) for i in ids if i >= 0], skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )

    def token_texts(self, ids: Sequence[int]) -> list[str]:
        """The text that each id adds, special tokens as they are written; together they are the text of all.

        An id that is a part of a character adds nothing, the last one of it the whole character.
        """
        found, start, read = [], 0, 0
        for end in range(1, len(ids) + 1):
            # Beside the id before it: some decoders take the space off a text's first word.
            before, after = self.decode(ids[start:read]), self.decode(ids[start:end])
            whole = len(after) > len(before) and (end == len(ids) or not after.endswith("\ufffd"))
            found.append(after[len(before) :] if whole else "")
            start, read = (read, end) if whole else (start, read)
        return found


def _from_files(name_or_path: str, revision: str | None) -> Any:
    """tokenizer.json as it is, or what AutoTokenizer makes of other files. AutoTokenizer comes second because it
    imports torch where torch is installed, wants config.json, and gives every GPT-NeoX tokenizer a made-up pad.

    From the hub the files are fetched at once: transformers asks for each by itself, and where the hub cannot be
    reached it tries each again for minutes."""
    kind, folder = fast_tokenizer(), name_or_path
    if not os.path.isdir(folder):
        folder = huggingface_hub.snapshot_download(
            name_or_path, revision=revision, allow_patterns=[*_ON_THE_HUB, "config.json"], ignore_patterns=["*/*"]
        )
    if not any(fnmatch.fnmatch(file, pattern) for file in os.listdir(folder) for pattern in _ON_THE_HUB):
        raise OSError("it has no tokenizer.json")  # of a config.json alone AutoTokenizer makes an empty tokenizer
    try:
        hf = kind.from_pretrained(folder)
        if hf.eos_token_id is not None:
            return hf
    except (OSError, ValueError, TypeError, KeyError):
        pass  # AutoTokenizer reads more forms, and its error is the one to show
    from transformers import AutoTokenizer

    # Said, because unsaid it asks on the terminal whether to run a repository's code.
    hf = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    if hf.pad_token == NEOX_DEFAULT_PAD:
        hf = AutoTokenizer.from_pretrained(folder, pad_token=None, trust_remote_code=False)
    return hf


def _load(name_or_path: str, revision: str | None) -> Any:
    if name_or_path == "synthetic":
        from rlhf_jax.data.synthetic import build_tokenizer

        return build_tokenizer()
    advice = "Give tokenizer_name_or_path a hub name, a folder with tokenizer.json, or 'synthetic'."
    if os.path.isdir(name_or_path):
        if not any(os.path.exists(os.path.join(name_or_path, file)) for file in _FILES):
            raise UserError(f"no tokenizer in folder {name_or_path}: it has no tokenizer.json. {advice}")
    elif os.path.exists(name_or_path) or name_or_path.startswith((".", "/", "~")) or name_or_path.count("/") > 1:
        raise UserError(f"tokenizer {name_or_path!r}: there is no such folder. {advice}")
    try:
        return _from_files(name_or_path, revision)
    except Exception as error:  # transformers raises OSError, ValueError, KeyError and hub errors for a bad name
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
        raise UserError(
            f"no tokenizer could be loaded from {name_or_path!r} (revision {revision or 'main'}): {reason}. {advice}"
        ) from error


def load_tokenizer(name_or_path: str, revision: str | None = None, *, vocab_size: int | None = None) -> Tokenizer:
    """Loads a tokenizer and makes sure of its eos and pad.

    Without a pad token, [PAD] becomes the first id that no token has, as TRL adds it: Pythia's 50,277 ids leave rows of
    its 50,304 free. The same, with a warning, where pad equals eos: a policy could not tell an end from padding.

    Args:
      name_or_path: hub name, folder, or 'synthetic' for the built-in one.
      revision: hub revision.
      vocab_size: rows of the model's embedding; None: no model to check against.

    Raises:
      UserError: nothing loads from there; no eos; more ids than rows; no row free for [PAD].
    """
    hf = _load(name_or_path, revision)
    if hf.eos_token_id is None:
        raise UserError(
            f"tokenizer {name_or_path!r} has no eos token: responses could not end. "
            "Set eos_token in its tokenizer_config.json."
        )
    last = max(hf.get_vocab().values(), default=0)
    if vocab_size is not None and len(hf) <= vocab_size <= last:
        raise UserError(
            f"tokenizer {name_or_path!r} has an id {last}, but the model's embedding has {vocab_size} rows: "
            "they do not belong together; give tokenizer_name_or_path the model's own tokenizer"
        )
    if vocab_size is not None and len(hf) > vocab_size:
        raise UserError(
            f"tokenizer {name_or_path!r} has {len(hf)} ids but the model's embedding has {vocab_size} rows: "
            "they do not belong together; give tokenizer_name_or_path the model's own tokenizer"
        )
    if hf.pad_token_id is None or hf.pad_token_id == hf.eos_token_id:
        free = PAD_TOKEN in hf.get_vocab() or vocab_size is None or len(hf) < vocab_size
        why = "has no pad token" if hf.pad_token_id is None else f"pads with its eos ({hf.eos_token})"
        if not free:
            raise UserError(
                f"tokenizer {name_or_path!r} {why}, and no embedding row is free for {PAD_TOKEN}: the model has "
                f"{vocab_size} rows and all are in use. Add rows to the model, or a pad token to the tokenizer."
            )
        if hf.pad_token_id is not None:
            warnings.warn(
                f"tokenizer {name_or_path!r} {why}; {PAD_TOKEN} is used instead, so that an end is not taken "
                "for padding",
                stacklevel=2,
            )
        hf.add_special_tokens({"pad_token": PAD_TOKEN})
    return Tokenizer(
        hf=hf, name=str(name_or_path), pad_id=int(hf.pad_token_id), eos_id=int(hf.eos_token_id), vocab_size=len(hf)
    )


def save_tokenizer(tokenizer: Tokenizer, folder: str) -> None:
    """Writes the tokenizer's files; AutoTokenizer and `load_tokenizer` read them, [PAD] included."""
    tokenizer.hf.save_pretrained(folder)


def _first_difference(
    tokenizer: Tokenizer, name_or_path: str, revision: str | None
) -> tuple[int, str | None, str | None] | None:
    """(id, token here, token there) of the first id that means something else there; [PAD] may differ. None: no such
    id, or no tokenizer there to compare with."""
    try:
        other = _from_files(name_or_path, revision)
    except Exception:  # no tokenizer there: nothing to compare
        return None
    ours, theirs = ({i: token for token, i in hf.get_vocab().items()} for hf in (tokenizer.hf, other))
    for i in sorted(ours.keys() | theirs.keys()):
        pair = ours.get(i), theirs.get(i)
        if pair[0] != pair[1] and not (PAD_TOKEN in pair and None in pair):
            return i, *pair
    return None


def check_tokenizer_fits_model(tokenizer: Tokenizer, name_or_path: str, revision: str | None = None) -> None:
    """Checks a tokenizer that a config names against the one that a model comes with. A model that comes without is
    trusted. A few ids that differ (special tokens of another name) are a warning.

    Raises:
      UserError: over 1% of the ids that both have mean something else to the model.
    """
    try:
        other = _from_files(name_or_path, revision)
    except Exception:  # no tokenizer there: nothing to compare
        return
    ours, theirs = ({i: token for token, i in hf.get_vocab().items()} for hf in (tokenizer.hf, other))
    both = sorted(ours.keys() & theirs.keys())
    different = [i for i in both if ours[i] != theirs[i]]
    if not different:
        return
    i = different[0]
    what = (
        f"tokenizer_name_or_path {tokenizer.name}: {len(different):,} of {len(both):,} ids mean something else to "
        f"{name_or_path}; id {i} is {theirs[i]!r} there and {ours[i]!r} here"
    )
    if len(different) * 100 > len(both):
        raise UserError(f"{what}. The model would read other words: leave the option out, or give a model made for it.")
    warnings.warn(what, stacklevel=2)


def same_tokenizer(tokenizer: Tokenizer, name_or_path: str, revision: str | None = None) -> bool:
    """Whether ids mean the same to a model as to `tokenizer`. A model that comes without a tokenizer is trusted; [PAD]
    may differ."""
    return _first_difference(tokenizer, name_or_path, revision) is None


def check_same_tokenizer(tokenizer: Tokenizer, name_or_path: str, revision: str | None = None) -> None:
    """Checks that a model which reads the policy's ids was made for the same tokenizer; see `same_tokenizer`.

    Raises:
      UserError: names the first id that means something else there.
    """
    found = _first_difference(tokenizer, name_or_path, revision)
    if found is not None:
        i, ours, theirs = found
        raise UserError(
            f"the tokenizer of {name_or_path} is not the policy's ({tokenizer.name}): id {i} is {theirs!r} there "
            f"and {ours!r} here, so its scores would be of other text; use models made for one tokenizer"
        )
