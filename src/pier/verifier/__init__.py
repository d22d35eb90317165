"""TestPlan: what is done before, while and after a task's tests decide, so that the verdict can be trusted."""

from pier.verifier.changes import Note
from pier.verifier.grade import Grade, RewardFiles, Rewards, TestPlan, parse_json, parse_text, read_verdict, run_tests
from pier.verifier.secure import Secured, look_again, secure

__all__ = [
    "Grade",
    "Note",
    "RewardFiles",
    "Rewards",
    "Secured",
    "TestPlan",
    "look_again",
    "parse_json",
    "parse_text",
    "read_verdict",
    "run_tests",
    "secure",
]
