"""Terminus 2, Harbor's own agent: calls its model from outside the sandbox and types into a terminal inside.

It needs the package `harbor` in pier's environment, and `tmux` and `bash` in the image.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, ClassVar

from pier.agent.harbor import HarborAgent, version_of
from pier.errors import UsageError
from pier.plugin import load


class Terminus2(HarborAgent):
    name = "terminus-2"
    defaults: ClassVar[Mapping[str, Any]] = {"record_terminal_session": False}
    options = (
        "max_turns",
        "parser_name",
        "temperature",
        "reasoning_effort",
        "max_thinking_tokens",
        "enable_summarize",
        "proactive_summarization_threshold",
        "interleaved_thinking",
        "model_info",
        "trajectory_config",
        "tmux_pane_width",
        "tmux_pane_height",
        "record_terminal_session",
        "use_responses_api",
        "llm_kwargs",
        "llm_call_kwargs",
    )

    def __init__(self) -> None:
        os.environ.setdefault("LITELLM_LOCAL_MODEL_COST_MAP", "True")
        try:
            self.kind = load("harbor.agents.terminus_2:Terminus2")
        except UsageError as error:
            message = f"the agent terminus-2 needs the package harbor in pier's environment: {error.message}"
            raise UsageError(message, hint="pip install harbor", code="no-harbor") from error
        self.version = version_of(self.kind)
