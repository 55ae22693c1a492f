"""What each token of a vocabulary adds to a text, as UTF-8 bytes."""

from __future__ import annotations

import json
import re
from typing import Any

from rlhf_jax.data.tokenizer import Tokenizer
from rlhf_jax.errors import UserError

_BYTE = re.compile("<0x([0-9A-Fa-f]{2})>")


def token_bytes(tokenizer: Tokenizer, rows: int) -> list[bytes | None]:
    """The bytes of each token in the middle of a text; joined they are the text of the tokens.

    A decoder that strips the space before a text's first word, as Llama 2's, is not followed in that.

    Args:
      tokenizer: byte-level, SentencePiece, or one whose tokens are joined as they are.
      rows: V, of the model's embedding.

    Returns:
      [V]; None for special tokens and ids without a token.

    Raises:
      UserError: the tokens of this tokenizer have no bytes of their own.
    """
    backend = getattr(tokenizer.hf, "backend_tokenizer", None)
    state = {} if backend is None else json.loads(backend.to_str())
    decoders = [] if backend is None else _flat(state["decoder"])
    kinds = {decoder["type"] for decoder in decoders}
    if not decoders or kinds - {"ByteLevel", "ByteFallback", "Fuse", "Metaspace", "Replace", "Strip"}:
        how = "in Python" if backend is None else f"by {', '.join(sorted(kinds)) or 'joining words with spaces'}"
        raise UserError(
            f"structured_outputs_regex needs a tokenizer whose tokens have bytes of their own (byte-level BPE or "
            f"SentencePiece); {tokenizer.name} decodes {how}"
        )
    contents = {token["id"]: token["content"] for token in state["added_tokens"] if not token["special"]}
    special = {token["id"] for token in state["added_tokens"] if token["special"]} | set(tokenizer.hf.all_special_ids)
    if "ByteLevel" in kinds:
        byte = {char: value for value, char in enumerate(_byte_characters())}

        def read(token: str) -> bytes:
            return bytes(byte[char] for char in token)
    else:
        replaced = [(d["pattern"]["String"], d["content"]) for d in decoders if d["type"] == "Replace"]
        replaced += [(d["replacement"], " ") for d in decoders if d["type"] == "Metaspace"]

        def read(token: str) -> bytes:
            if "ByteFallback" in kinds and (match := _BYTE.fullmatch(token)):
                return bytes([int(match[1], 16)])
            for old, new in replaced:
                token = token.replace(old, new)
            return token.encode()

    spelled: list[bytes | None] = [None] * rows
    for token, i in tokenizer.hf.get_vocab().items():
        if i < rows and i not in special:
            spelled[i] = contents[i].encode() if i in contents else read(token)
    return spelled


def _flat(decoder: Any) -> list[dict[str, Any]]:
    """The decoders of a sequence."""
    if decoder is None:
        return []
    return [part for inner in decoder["decoders"] for part in _flat(inner)] if "decoders" in decoder else [decoder]


def _byte_characters() -> list[str]:
    """The character that byte-level BPE writes for each byte: itself where it is printable, else from 256 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    code_points = iter(range(256, 512))
    return [chr(byte if byte in printable else next(code_points)) for byte in range(256)]
