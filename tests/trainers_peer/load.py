"""Run by a Python that has the trainers' packages: each loads the rows that pier wrote for it with its own code.

`load.py TRAINER FILE` prints what the trainer made of the file, as JSON.
"""

import json
import sys


def verl(rows):
    from verl.experimental.agent_loop.agent_loop import AgentLoopOutput

    loaded = [AgentLoopOutput(**row).as_dict() for row in rows]
    return [
        {
            "prompts": each["prompts"].tolist(),
            "responses": each["responses"].tolist(),
            "mask": each["response_mask"].tolist(),
            "logprobs": each["rollout_log_probs"].tolist(),
            "reward": row["reward_score"],
        }
        for each, row in zip(loaded, rows, strict=True)
    ]


def trl(rows):
    import numpy
    from trl.experimental.async_grpo.async_rollout_worker import TrainingSequence
    from trl.experimental.async_grpo.packing import TreeRow

    packed = TreeRow()
    mean = sum(row["reward"] for row in rows) / len(rows)
    for row in rows:
        sequence = TrainingSequence(**{name: row[name] for name in TrainingSequence.__dataclass_fields__})
        packed.add(
            {
                "input_ids": numpy.asarray(sequence.input_ids),
                "completion_mask": numpy.asarray(sequence.completion_mask),
                "old_log_probs": numpy.asarray(sequence.old_log_probs, dtype=numpy.float32),
                "advantage": row["reward"] - mean,
                "group_id": row["group_id"],
            }
        )
    batch = packed.pack()
    return {
        "tokens": len(batch["input_ids"]),
        "trained": [batch["shift_labels"][i].item() for i in batch["token_index"].tolist()],
        "logprobs": batch["old_log_probs"].tolist(),
        "advantages": batch["advantages"].tolist(),
    }


def skyrl(rows):
    from skyrl.train.dataset.preprocess import convert_prompts_responses_to_batch_tensors

    class Tokenizer:
        pad_token_id = 0

    output = {name: [row[name] for row in rows] for name in rows[0]}  # a GeneratorOutput
    spread = [
        [0.0] * (len(ids) - 1) + [reward] for ids, reward in zip(output["response_ids"], output["rewards"], strict=True)
    ]
    found = convert_prompts_responses_to_batch_tensors(
        Tokenizer(),
        output["prompt_token_ids"],
        output["response_ids"],
        spread,
        output["loss_masks"],
        output["rollout_logprobs"],
    )
    sequences, attention, actions, rewards, masks, logprobs = found[:6]
    return {
        "sequences": sequences.tolist(),
        "attention": attention.sum(dim=1).tolist(),
        "actions": actions.sum(dim=1).tolist(),
        "rewards": rewards.sum(dim=1).tolist(),
        "masks": masks.tolist(),
        "logprobs": logprobs.tolist(),
    }


rows = [json.loads(line) for line in open(sys.argv[2])]
json.dump({"verl": verl, "trl": trl, "skyrl": skyrl}[sys.argv[1]](rows), sys.stdout)
