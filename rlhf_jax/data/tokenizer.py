"""Tokenizers: encoding and decoding, eos, and a pad id within the model's embedding."""

from __future__ import annotations

import dataclasses
import fnmatch
import hashlib
import json
import os
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import huggingface_hub

from rlhf_jax import storage
from rlhf_jax.data import arithmetic, shapes, synthetic, tool_tasks
from rlhf_jax.data.fast_tokenizer import fast_tokenizer
from rlhf_jax.errors import UserError

BUILT_IN = {
    "synthetic": synthetic.build_tokenizer,
    "arithmetic": arithmetic.build_tokenizer,
    "shapes": shapes.build_tokenizer,
    "tool_tasks": tool_tasks.build_tokenizer,
}
"""Tokenizers of the built-in tasks by name."""
PAD_TOKEN = "[PAD]"
_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")
# Files of all tokenizer formats; AutoTokenizer also needs config.json.
_FILE_PATTERNS = (
    "tokenizer*",
    "*.model",
    "vocab*",
    "merges.txt",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
)
NEOX_DEFAULT_PAD = "<|padding|>"
"""The pad token that transformers 5 adds to GPT-NeoX tokenizers without one, even beyond the embedding."""


@dataclasses.dataclass(frozen=True)
class Tokenizer:
    """A Hugging Face tokenizer with the attributes that training uses."""

    hf: Any
    """The transformers tokenizer."""
    name: str
    pad_id: int
    eos_id: int
    vocab_size: int
    """The largest id, [PAD] included, plus 1; at most the rows of the model's embedding."""
    template_date: str | None = None
    """The day, as 2026-01-31, that chat templates print in place of today's; None: today's."""
    stop_ids: tuple[int, ...] | None = None
    """Ids that count as eos in its place (the option stop_token_ids)."""

    def identity(self) -> str | None:
        """What identifies everything that turns texts and conversations into ids; None if that cannot be told."""
        self.hf("", add_special_tokens=False)  # which sets the padding and truncation that encoding uses
        hf = self.hf
        parts: list[Any] = [self.eos_id, getattr(hf, "split_special_tokens", None)]
        try:
            backend = getattr(hf, "backend_tokenizer", None)
            if backend is None:  # a tokenizer in Python
                from datasets.fingerprint import Hasher

                parts.append(Hasher.hash(hf))
            else:
                parts.append(backend.to_str())
            parts += [hf.chat_template, hf.special_tokens_map]
            return hashlib.sha256(json.dumps(parts, sort_keys=True, default=str).encode()).hexdigest()
        except Exception:  # a user's class may refuse any of these
            return None

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """Ids that end a response: `stop_ids`, or eos alone."""
        return self.stop_ids or (self.eos_id,)

    @property
    def max_id(self) -> int:
        """The largest id of a token."""
        return max(self.hf.get_vocab().values(), default=0)

    def unused_ids(self, rows: int) -> tuple[int, ...]:
        """The ids below `rows`, the rows of an embedding, that belong to no token: most checkpoints have more rows than
        tokens. They decode to nothing."""
        return tuple(sorted(set(range(rows)) - set(self.hf.get_vocab().values())))

    def check_rows(self, rows: int, model: str) -> None:
        """Checks that a model which reads the ids of this tokenizer has a row for each token.

        Args:
          model: its name in the error.

        Raises:
          UserError: a token has an id beyond the rows.
        """
        if rows <= self.max_id:
            raise UserError(
                f"{model} has {rows} embedding rows, but the policy's tokenizer has id {self.max_id} "
                f"({self.hf.convert_ids_to_tokens(self.max_id)}): the two were not trained with one tokenizer"
            )

    def start_ids(self) -> list[int]:
        """What the tokenizer puts before a text: a bos for Llama, Gemma and Mistral, nothing for most.

        TRL encodes texts with it, and conversations without, since their template writes it.
        """
        ids = self.encode("a")
        full_ids = self.hf("a", verbose=False)["input_ids"]
        starts = (n for n in range(len(full_ids) - len(ids) + 1) if full_ids[n : n + len(ids)] == ids)
        return full_ids[: next(starts, 0)]

    def without_start(self, ids: Sequence[list[int]]) -> tuple[list[list[int]], list[bool]]:
        """Ids of texts without `start_ids`; and which texts began with them, as a chat template writes them."""
        start = self.start_ids()
        begun = [bool(start) and text_ids[: len(start)] == start for text_ids in ids]
        return [text_ids[len(start) :] if has else text_ids for text_ids, has in zip(ids, begun, strict=True)], begun

    def encode(self, text: str) -> list[int]:
        """Ids of a text, no special tokens added."""
        return self.hf(text, add_special_tokens=False, verbose=False)["input_ids"]

    def encode_as_text(self, text: str) -> list[int]:
        """As `encode`, special tokens in the text split into the tokens of their characters."""
        return self.hf(text, add_special_tokens=False, split_special_tokens=True, verbose=False)["input_ids"]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """Ids of each text, no special tokens added."""
        ids: list[list[int]] = []
        for start in range(0, len(texts), 1024):  # its working memory is many times the ids
            chunk = list(texts[start : start + 1024])
            ids += self.hf(chunk, add_special_tokens=False, return_attention_mask=False, verbose=False)["input_ids"]
        return ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        """The text of ids, without space cleanup. Negative ids, which a policy with NaN logits samples, are skipped."""
        return self.hf.decode(
            [int(i) for i in ids if i >= 0], skip_special_tokens=skip_special_tokens, clean_up_tokenization_spaces=False
        )

    def token_texts(self, ids: Sequence[int]) -> list[str]:
        """The text of each id, including special tokens; joined they are the text of all ids.

        Where several ids form one character, the last one has its text and the others "".
        """
        texts, start, read = [], 0, 0
        for end in range(1, len(ids) + 1):
            # Decoded with the previous id, since some decoders strip the space of a text's first word.
            before, after = self.decode(ids[start:read]), self.decode(ids[start:end])
            complete = len(after) > len(before) and (end == len(ids) or not after.endswith("\ufffd"))
            texts.append(after[len(before) :] if complete else "")
            start, read = (read, end) if complete else (start, read)
        return texts


def _from_files(name_or_path: str, revision: str | None) -> Any:
    """A tokenizer from tokenizer.json, or from other files by AutoTokenizer.

    AutoTokenizer is the fallback because it imports torch if installed, needs config.json, and adds a pad token to
    every GPT-NeoX tokenizer. Files on the hub are fetched in one call: transformers requests each file separately and
    retries each for minutes while the hub is unreachable.
    """
    tokenizer_class, folder = fast_tokenizer(), storage.local_copy(name_or_path, (*_FILE_PATTERNS, "*.json"))
    if not os.path.isdir(folder):
        folder = huggingface_hub.snapshot_download(
            name_or_path, revision=revision, allow_patterns=[*_FILE_PATTERNS, "config.json"], ignore_patterns=["*/*"]
        )
    if not any(fnmatch.fnmatch(file, pattern) for file in os.listdir(folder) for pattern in _FILE_PATTERNS):
        raise OSError("it has no tokenizer.json")  # AutoTokenizer makes an empty tokenizer from config.json alone
    try:
        hf = tokenizer_class.from_pretrained(folder)
        if hf.eos_token_id is not None:
            return hf
    except (OSError, ValueError, TypeError, KeyError):
        pass  # AutoTokenizer reads more formats; if it fails too, its error is reported
    from transformers import AutoTokenizer

    # Without an explicit trust_remote_code it prompts on the terminal.
    hf = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    if hf.pad_token == NEOX_DEFAULT_PAD:
        hf = AutoTokenizer.from_pretrained(folder, pad_token=None, trust_remote_code=False)
    return hf


def _load(name_or_path: str, revision: str | None) -> Any:
    if name_or_path in BUILT_IN:
        return BUILT_IN[name_or_path]()
    name_or_path = storage.local_copy(name_or_path, (*_FILE_PATTERNS, "*.json"))
    names = "'synthetic', 'arithmetic', 'shapes' or 'tool_tasks'"
    advice = f"Set tokenizer_name_or_path to a hub name, a folder with tokenizer.json, {names}."
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


def _fix_ids(hf: Any, ids: Mapping[str, int]) -> bool:
    """Sets the ids of all tokens; false if this tokenizer's cannot be set.

    They become the model's own tokens: the ids of added ones are not read from a file, but counted from the number of
    the others on, which is the id of another token where the ids have holes.
    """
    backend = getattr(hf, "backend_tokenizer", None)
    state = None if backend is None else json.loads(backend.to_str())
    if state is None or not isinstance(state["model"].get("vocab"), dict):
        return False
    state["model"]["vocab"] = dict(ids)
    state["added_tokens"] = [token for token in state["added_tokens"] if token["content"] in ids]
    hf._tokenizer = type(backend).from_str(json.dumps(state))
    return True


def _add(hf: Any, tokens: Sequence[str]) -> bool:
    """Gives new special tokens the ids after the largest one; false if this tokenizer cannot."""
    ids = hf.get_vocab()
    first = max(ids.values()) + 1
    if first != len(ids) and not _fix_ids(hf, {**ids, **dict(zip(tokens, range(first, first + len(tokens))))}):
        return False
    hf.add_tokens(list(tokens), special_tokens=True)
    return True


def _separate_ids(hf: Any, rows: int | None) -> None:
    """Gives added tokens ids of their own. Where ids have holes, transformers gives tokens that the configuration names
    and the vocabulary lacks the ids of other tokens. A pad token for which the embedding has no row is dropped."""
    ids, backend = hf.get_vocab(), getattr(hf, "backend_tokenizer", None)
    if backend is None or len(set(ids.values())) == len(ids):
        return
    vocabulary = backend.get_vocab(with_added_tokens=False)
    added = sorted(ids.keys() - vocabulary.keys(), key=ids.__getitem__)
    if hf.pad_token in added and rows is not None and max(vocabulary.values()) + len(added) >= rows:
        added.remove(hf.pad_token)
        hf.pad_token = None
    if _fix_ids(hf, vocabulary) and added:
        _add(hf, added)


def load_tokenizer(name_or_path: str, revision: str | None = None, *, vocab_size: int | None = None) -> Tokenizer:
    """Loads a tokenizer and ensures that it has an eos and a pad token.

    Without a pad token, [PAD] is added after the largest id, as TRL's examples of TL;DR do: Pythia has 50,277 ids and
    50,304 embedding rows. If pad equals eos, [PAD] replaces it with a warning. If the embedding has no row for [PAD],
    as in Llama 3, eos pads, as in TRL's trainers. Masks come from lengths, so the pad id changes no mask.

    Args:
      name_or_path: hub name, folder, or a name in `BUILT_IN`.
      vocab_size: rows of the model's embedding; None: no check against a model.

    Raises:
      UserError: loading fails, there is no eos, or more ids than embedding rows.
    """
    hf = _load(name_or_path, revision)
    if hf.eos_token_id is None:
        raise UserError(
            f"tokenizer {name_or_path!r} has no eos token, so responses could not end. "
            "Set eos_token in its tokenizer_config.json."
        )
    _separate_ids(hf, vocab_size)
    last = max(hf.get_vocab().values(), default=0)
    if vocab_size is not None and len(hf) <= vocab_size <= last:
        raise UserError(
            f"tokenizer {name_or_path!r} has id {last}, but the model's embedding has {vocab_size} rows. Set "
            "tokenizer_name_or_path to the tokenizer of the model"
        )
    if vocab_size is not None and len(hf) > vocab_size:
        raise UserError(
            f"tokenizer {name_or_path!r} has {len(hf)} ids but the model's embedding has {vocab_size} rows. Set "
            "tokenizer_name_or_path to the tokenizer of the model"
        )
    pads_with_eos = hf.pad_token_id == hf.eos_token_id
    if hf.pad_token_id is None or pads_with_eos:
        free = PAD_TOKEN in hf.get_vocab() or ((vocab_size is None or last + 1 < vocab_size) and _add(hf, [PAD_TOKEN]))
        if pads_with_eos and free:
            warnings.warn(
                f"tokenizer {name_or_path!r} pads with its eos ({hf.eos_token}); {PAD_TOKEN} is used instead, to tell "
                "the end of a response from padding",
                stacklevel=2,
            )
        if free:
            hf.add_special_tokens({"pad_token": PAD_TOKEN})
        else:
            hf.pad_token = hf.eos_token
    return Tokenizer(
        hf=hf,
        name=str(name_or_path),
        pad_id=int(hf.pad_token_id),
        eos_id=int(hf.eos_token_id),
        vocab_size=max(hf.get_vocab().values()) + 1,
    )


def save_tokenizer(tokenizer: Tokenizer, folder: str) -> None:
    """Writes the tokenizer's files, including [PAD], for AutoTokenizer and `load_tokenizer`."""
    tokenizer.hf.save_pretrained(folder)


def own_pad_id(name_or_path: str, revision: str | None = None) -> int | None:
    """The pad id in the files of a model's tokenizer; None if the model has no tokenizer, or that no pad."""
    try:
        return _from_files(name_or_path, revision).pad_token_id
    except Exception:  # transformers raises many types for a model without a tokenizer
        return None


def _vocabularies(
    tokenizer: Tokenizer, name_or_path: str, revision: str | None
) -> tuple[dict[int, str], dict[int, str]] | None:
    """id -> token of `tokenizer` and of a model's tokenizer; None if the model has no tokenizer."""
    try:
        other = _from_files(name_or_path, revision)
    except Exception:  # transformers raises many types for a model without a tokenizer
        return None
    ours, theirs = ({i: token for token, i in hf.get_vocab().items()} for hf in (tokenizer.hf, other))
    return ours, theirs


def _first_difference(
    tokenizer: Tokenizer, name_or_path: str, revision: str | None
) -> tuple[int, str | None, str | None] | None:
    """(id, our token, the model's token) of the first id with different tokens, other than [PAD]; None if there is no
    such id, or the model has no tokenizer."""
    if (vocabularies := _vocabularies(tokenizer, name_or_path, revision)) is None:
        return None
    ours, theirs = vocabularies
    for i in sorted(ours.keys() | theirs.keys()):
        pair = ours.get(i), theirs.get(i)
        if pair[0] != pair[1] and not (PAD_TOKEN in pair and None in pair):
            return i, *pair
    return None


def check_tokenizer_fits_model(tokenizer: Tokenizer, name_or_path: str, revision: str | None = None) -> None:
    """Checks a configured tokenizer against that of a model; a model without a tokenizer passes. Few different ids
    (renamed special tokens) are a warning.

    Raises:
      UserError: more than 1% of the common ids have different tokens.
    """
    if (vocabularies := _vocabularies(tokenizer, name_or_path, revision)) is None:
        return
    ours, theirs = vocabularies
    both = sorted(ours.keys() & theirs.keys())
    different = [i for i in both if ours[i] != theirs[i]]
    if not different:
        return
    i = different[0]
    difference = (
        f"tokenizer_name_or_path {tokenizer.name}: {len(different):,} of {len(both):,} ids mean something else to "
        f"{name_or_path}; id {i} is {theirs[i]!r} there and {ours[i]!r} here"
    )
    if len(different) * 100 > len(both):
        raise UserError(f"{difference}. Leave the option out, or use a model trained with this tokenizer.")
    warnings.warn(difference, stacklevel=2)


def same_tokenizer(tokenizer: Tokenizer, name_or_path: str, revision: str | None = None) -> bool:
    """Whether a model's tokenizer has the ids of `tokenizer`, other than [PAD]; true for a model without one."""
    return _first_difference(tokenizer, name_or_path, revision) is None


def check_same_tokenizer(tokenizer: Tokenizer, name_or_path: str, revision: str | None = None) -> None:
    """Checks that a model which reads the policy's ids has the same tokenizer; see `same_tokenizer`.

    Raises:
      UserError: the tokenizers differ; names the first different id.
    """
    difference = _first_difference(tokenizer, name_or_path, revision)
    if difference is not None:
        i, ours, theirs = difference
        raise UserError(
            f"the tokenizer of {name_or_path} is not the policy's ({tokenizer.name}): id {i} is {theirs!r} there "
            f"and {ours!r} here, so it would score another text; use models with the same tokenizer"
        )
