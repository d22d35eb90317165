"""Grading: what is done before, while and after a task's tests decide, so that the verdict can be trusted."""

from pier.verifier.changes import Note
from pier.verifier.grade import Grade, Grading, grade
from pier.verifier.reward import RewardFiles, Rewards, parse_json, parse_text, read_verdict
from pier.verifier.secure import Secured, look_again, secure

__all__ = [
    "Grade",
    "Grading",
    "Note",
    "RewardFiles",
    "Rewards",
    "Secured",
    "grade",
    "look_again",
    "parse_json",
    "parse_text",
    "read_verdict",
    "secure",
]
