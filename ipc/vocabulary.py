"""Whether two models mean the same by their token ids, read from their checkpoint directories.

Speculation passes bare ids between lanes, so ids must stand for the same text on both. It must not know how
text is split into tokens.
"""

from __future__ import annotations

import hashlib
import json
from typing import TYPE_CHECKING, Any

from ipc.errors import WireError
from ipc.messages import Vocabulary

if TYPE_CHECKING:
    from pathlib import Path


class VocabularyMismatch(WireError):
    """Target and speculator do not share their token ids."""


def read(directory: Path) -> Vocabulary:
    """Size of the embedding (padding rows included) and SHA-256 of the (id, token) pairs, sorted by id.

    The fingerprint is empty if there is no tokenizer.json. Raises OSError or ValueError for a broken
    checkpoint.
    """
    size, tokens = _size(directory), _tokens(directory)
    if tokens is None:
        return Vocabulary(size, "")
    pairs = json.dumps(sorted(tokens.items()), ensure_ascii=True, separators=(",", ":"))
    return Vocabulary(size, hashlib.sha256(pairs.encode()).hexdigest())


def check_same(target: Path, speculator: Path) -> None:
    """Raises VocabularyMismatch, one line, unless both directories share their token ids.

    Models of one family pad their embeddings differently: sizes may differ if the tokenizers are the same. If
    a tokenizer is missing, equal sizes have to do.
    """
    sizes = _size(target), _size(speculator)
    ours, theirs = _tokens(target), _tokens(speculator)
    both = f"target {target.name} has {sizes[0]} tokens and speculator {speculator.name} has {sizes[1]}"
    if ours is None or theirs is None:
        if sizes[0] != sizes[1]:
            bare = target if ours is None else speculator
            raise VocabularyMismatch(
                f"{both}, and {bare.name} has no tokenizer.json to show that the difference is padding; "
                f"use a speculator of the target's family"
            )
        return
    if ours == theirs:
        return
    token = min(i for i in ours.keys() | theirs.keys() if ours.get(i) != theirs.get(i))
    raise VocabularyMismatch(
        f"{both}; their token ids differ, first at id {token}: {_shown(ours, token)} in {target.name}, "
        f"{_shown(theirs, token)} in {speculator.name}; use a speculator of the target's family"
    )


def _shown(tokens: dict[int, str], token: int) -> str:
    return repr(tokens[token]) if token in tokens else "no token"


def _size(directory: Path) -> int:
    size = _object(directory / "config.json").get("vocab_size")
    if not isinstance(size, int) or isinstance(size, bool) or size < 1:
        raise ValueError(
            f"{directory / 'config.json'} has vocab_size {size!r}, expected a whole number above 0"
        )
    return size


def _tokens(directory: Path) -> dict[int, str] | None:
    path = directory / "tokenizer.json"
    if not path.is_file():
        return None
    content = _object(path)
    try:
        vocab = content["model"]["vocab"]
        # Unigram models keep a list of (token, score) in the order of the ids, all others a map to ids.
        entries = (
            enumerate(pair[0] for pair in vocab)
            if isinstance(vocab, list)
            else ((i, t) for t, i in vocab.items())
        )
        tokens = {int(i): str(token) for i, token in entries}
        tokens |= {int(added["id"]): str(added["content"]) for added in content.get("added_tokens") or ()}
    except (KeyError, TypeError, IndexError, AttributeError, ValueError) as error:
        raise ValueError(f"{path} is not a tokenizer: {error!r}") from error
    return tokens


def _object(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds no JSON object")
    return content
