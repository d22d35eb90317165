"""Gives a part of the reward for each right pair, and none for an answer with wrong ones."""

import json


def is_prime(number):
    return number > 1 and all(number % divisor for divisor in range(2, int(number**0.5) + 1))


expected = [[n, n + 2] for n in range(198) if is_prime(n) and is_prime(n + 2)]
try:
    with open("/app/answer.json") as stream:
        answer = json.load(stream)
    wrong = [pair for pair in answer if pair not in expected]
    found = [pair for pair in expected if pair in answer]
except (OSError, ValueError, TypeError):
    wrong, found = [], []
reward = 0.0 if wrong else len(found) / len(expected)
with open("/logs/verifier/reward.json", "w") as stream:
    json.dump({"reward": reward}, stream)
