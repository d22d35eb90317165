"""What reward files say. Every content has one documented meaning; nothing is guessed.

`reward.json` is a flat object of finite numbers (true and false count as 1 and 0); `reward.txt` is one finite number,
which becomes the key `reward`. If both are there `reward.json` decides, and a disagreement is reported.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from pier.errors import VerifierError
from pier.tree import Tree, TreeError

REWARD_LIMIT = 1024 * 1024
"""How large a reward file may be, in bytes."""

Rewards = dict[str, float | int]


@dataclass(frozen=True, slots=True)
class RewardFiles:
    """The content of the two files; None for one that is not there."""

    json: bytes | None = None
    text: bytes | None = None

    @classmethod
    def in_copy(cls, directory: Tree) -> RewardFiles | None:
        """The files in a copy of the verifier's directory; None if one of them is not a plain file of at most
        `REWARD_LIMIT` bytes, or neither is there."""
        found: list[bytes | None] = []
        for name in ("reward.json", "reward.txt"):
            try:
                found.append(directory.read(name, REWARD_LIMIT))
            except FileNotFoundError:
                found.append(None)
            except TreeError:
                return None
        return cls(*found) if any(content is not None for content in found) else None


@dataclass(frozen=True, slots=True)
class Verdict:
    """Rewards by key, and what was odd about the files."""

    rewards: Rewards
    disagreement: str | None = None


def read_verdict(files: RewardFiles) -> Verdict:
    """The verdict that the files give. `VerifierError` with code `reward_missing`, `reward_empty` or
    `reward_invalid` if they give none."""
    if files.json is not None:
        rewards = parse_json(files.json)
        return Verdict(rewards, _disagreement(rewards, files.text))
    if files.text is not None:
        return Verdict({"reward": parse_text(files.text)})
    raise VerifierError(
        "the verifier wrote neither /logs/verifier/reward.json nor reward.txt",
        code="reward_missing",
        hint="look at verifier/test-stdout.txt in the trial's directory",
    )


def parse_text(content: bytes) -> float:
    """The number that a `reward.txt` holds."""
    text = _decode(content, "reward.txt").strip()
    try:
        value = float(text)
    except ValueError:
        raise _invalid(f"reward.txt: expected a number, got {_short(text)}") from None
    if not math.isfinite(value):
        raise _invalid(f"reward.txt: {_short(text)} is not finite")
    return value


def parse_json(content: bytes) -> Rewards:
    """The numbers that a `reward.json` holds, by key."""
    text = _decode(content, "reward.json")
    try:
        value = json.loads(text, object_pairs_hook=_no_duplicates)
    except (ValueError, RecursionError) as error:
        raise _invalid(f"reward.json: {_short(str(error), 200)}") from None
    if not isinstance(value, dict):
        raise _invalid(f"reward.json: expected a JSON object, got {_short(text)}")
    if bad := [key for key in value if not _is_text(key)]:
        raise _invalid(f"reward.json: the key {bad[0]!a} is not text")
    return {key: _number(key, item) for key, item in value.items()}


def _is_text(key: str) -> bool:
    try:
        key.encode()
    except UnicodeEncodeError:
        return False
    return True


def _number(key: str, value: Any) -> float | int:
    if isinstance(value, bool):
        return float(value)
    if not isinstance(value, (int, float)):
        raise _invalid(f"reward.json: {key}: expected a number, got {_short(json.dumps(value))}")
    try:
        finite = math.isfinite(value)
    except OverflowError:
        finite = False
    if not finite:
        raise _invalid(f"reward.json: {key}: the number is not finite")
    return value


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ValueError(f"the key {key!r} comes twice")
        found[key] = value
    return found


def _decode(content: bytes, name: str) -> str:
    if not content.strip():
        raise VerifierError(f"{name} is empty", code="reward_empty")
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError:
        raise _invalid(f"{name}: not UTF-8") from None


def _disagreement(rewards: Mapping[str, float | int], text: bytes | None) -> str | None:
    if text is None:
        return None
    try:
        value = parse_text(text)
    except VerifierError as error:
        return f"reward.json was taken; in addition, {error}"
    same = rewards.get("reward", next(iter(rewards.values())) if len(rewards) == 1 else None)
    if same is not None and math.isclose(same, value):
        return None
    return f"reward.json was taken; reward.txt says {value:g}"


def _invalid(message: str) -> VerifierError:
    return VerifierError(message, code="reward_invalid")


def _short(text: str, length: int = 60) -> str:
    shown = text if len(text) <= length else text[:length] + "…"
    return repr(shown)
