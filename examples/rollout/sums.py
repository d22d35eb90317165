"""An environment for `pier rollout`: an agent asks the model for a sum; the reward is 1 if it is right.

pier rollout examples/rollout/sums.py -m script:examples/rollout/model.yaml -n 1 -r 2
"""

import pier.rollout as vf

AGENT = """
import json, os, urllib.request
question = open(os.environ["HARBOR_INSTRUCTION_PATH"]).read()
body = {"model": os.environ["OPENAI_MODEL"], "messages": [{"role": "user", "content": question}]}
headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
url = os.environ["OPENAI_BASE_URL"] + "/chat/completions"
print(urllib.request.urlopen(urllib.request.Request(url, json.dumps(body).encode(), headers)).read().decode())
"""


class Sums(vf.CliAgentEnv):
    async def post_sandbox_setup(self, state):
        await self.sandbox_client.upload_bytes(state["sandbox_id"], "/app/agent.py", AGENT.encode())


def right(completion, answer):
    return float(answer in str(completion[-1]))


def load_environment():
    rows = [{"question": f"What is {n} + 25?", "answer": str(n + 25)} for n in (17, 18)]
    return Sums(
        run_command="python3 /app/agent.py",
        dataset=vf.Environment.make_dataset(rows),
        rubric=vf.Rubric(right),
        docker_image="host",
    )
