"""A tiny policy learns to count, by REINFORCE on pier's samples. It needs numpy, no GPU and no key.

    python examples/train/train.py

Each step runs a group of rollouts: an agent (`agent.py`) in its sandbox asks the policy three times for a word
and writes each down; the task's verifier grades the file. The policy is a table of logits: for the turn of the
conversation, how likely each of its words is. It starts at chance, one right word in ten.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import numpy as np

import pier
from pier import AgentConfig, Request, Rollout, Sampling, Tokens, Turn
from pier.wire.turn import Text, Usage

HERE = Path(__file__).resolve().parent
WORDS = ["0", "1", "2", "3", "4", "5", "6", "7", "8", "9"]
"""The policy's vocabulary: word i is the token i."""
USER, END = 10, 11
"""Two more tokens: a user's message, and the end of a turn."""
TURNS = 3


class TinyPolicy:
    """A softmax over words for each turn. Any object like this one can stand behind any agent."""

    vocab_size = 12

    def __init__(self, seed: int = 0) -> None:
        self.logits = np.zeros((TURNS, len(WORDS)))
        self.random = np.random.default_rng(seed)
        self.version = "0"  # recorded with every call

    async def __call__(self, request: Request) -> Turn:
        prompt = self.tokenize(request)
        turn = min(prompt.count(END), TURNS - 1)
        likely = self.log_probs(turn, request.sampling.temperature or 1.0)
        word = int(self.random.choice(len(WORDS), p=np.exp(likely)))
        tokens = Tokens(tuple(prompt), (word, END), (float(likely[word]), 0.0))
        return Turn((Text(WORDS[word]),), usage=Usage(len(prompt), 2), tokens=tokens)

    def tokenize(self, request: Request) -> list[int]:
        """The chat template. It only appends to the sampled tokens, so that a rollout is one sample."""
        ids: list[int] = []
        for message in request.messages:
            ids += [USER] if message.role == "user" else [WORDS.index(message.text), END]
        return ids

    def log_probs(self, turn: int, temperature: float = 1.0) -> np.ndarray:
        scaled = self.logits[turn] / temperature
        return scaled - np.log(np.exp(scaled - scaled.max()).sum()) - scaled.max()

    def learn(self, group: list[Rollout], rate: float) -> None:
        """One step of REINFORCE: words with a reward above the group's mean become more likely."""
        rewards = np.array([rollout.reward for rollout in group])
        gradient = np.zeros_like(self.logits)
        for rollout, advantage in zip(group, rewards - rewards.mean(), strict=True):
            (sample,) = rollout.trainable  # one sample: every prompt continued the one before it
            ids, mask = np.array(sample.input_ids), np.array(sample.loss_mask)
            words = ids[(mask == 1) & (ids < len(WORDS))]
            for turn, word in enumerate(words):
                gradient[turn] -= advantage * np.exp(self.log_probs(turn))
                gradient[turn, word] += advantage
        self.logits += rate * gradient / (rewards.std() + 1e-6)
        self.version = str(int(self.version) + 1)


async def train(steps: int = 40, group: int = 24, goal: float = 0.9) -> list[float]:
    """The mean reward of each step, until it is over the goal three times in a row."""
    policy, means = TinyPolicy(), list[float]()
    agent = AgentConfig(name="command", kwargs={"script": str(HERE / "agent.py")})
    for step in range(steps):
        stream = pier.rollouts(
            HERE / "task",
            agent=agent,
            policy=policy,
            group=group,
            concurrency=8,
            sampling=Sampling(temperature=1.0),
            image="host",
        )
        async for members in stream.groups():
            graded = [rollout for rollout in members if rollout.reward is not None]
            means.append(float(np.mean([rollout.reward for rollout in graded])))
            policy.learn(graded, rate=0.6)
        print(
            f"step {step + 1}: mean reward {means[-1]:.2f}, prefixes matched {stream.report.counts.prefix_match_rate}"
        )
        if min(means[-3:]) > goal and len(means) >= 3:
            break
    return means


if __name__ == "__main__":
    means = asyncio.run(train())
    print(f"from {means[0]:.2f} to {means[-1]:.2f} in {len(means)} steps")
    sys.exit(means[-1] <= 0.9)
