"""Calls of one session told apart: who continues whom, and what each was for."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pier.trajectory.calls import Generation, Node
from pier.trajectory.lineage import Lineage, waited_without_answer
from pier.wire.turn import Message, Request, Sampling, Text, Tool, ToolCall, ToolResult, Turn

TOOLS = (Tool("bash", schema={"type": "object"}),)


def user(text: str) -> Message:
    return Message("user", (Text(text),))


def result(call: str, text: str) -> Message:
    return Message("user", (ToolResult(call, (Text(text),)),))


def said(turn: Turn) -> Message:
    return Message("assistant", turn.parts)


def calling(name: str, id_: str = "c") -> Turn:
    return Turn((ToolCall(id_, "bash", f'{{"command": "{name}"}}'),), "tool_use")


class Session:
    """Adds calls and shows their kinds."""

    def __init__(self) -> None:
        self.lineage = Lineage()

    def call(self, messages: list[Message], turn: Turn | None, **more: Any) -> Node:
        headers = {"user-agent": more.pop("program", "agent/1"), **more.pop("headers", {})}
        request = Request(
            more.pop("model", "m"),
            tuple(messages),
            system=(more.pop("system", "You are an agent."),),
            tools=more.pop("tools", TOOLS),
            dialect=more.pop("dialect", "chat"),
            **more,
        )
        number = len(self.lineage.nodes) + 1
        node = Node(number, request, turn, float(number), number + 0.5, headers)
        self.lineage.add(node)
        return node

    def kinds(self) -> list[str]:
        self.lineage.threads()
        return [node.kind for node in self.lineage.nodes]


def loop(session: Session, messages: list[Message], names: list[str], **more: Any) -> list[Message]:
    """A tool loop: each call extends the one before."""
    for number, name in enumerate(names):
        turn = calling(name, f"c{number}")
        session.call(messages, turn, **more)
        messages = [*messages, said(turn), result(f"c{number}", f"out {name}")]
    return messages


def test_a_plain_loop_is_one_thread() -> None:
    session = Session()
    messages = loop(session, [user("go")], ["a", "b"])
    session.call(messages, Turn((Text("done"),)))
    assert session.kinds() == ["main", "main", "main"]
    assert [node.parent.number if node.parent else None for node in session.lineage.nodes] == [None, 1, 2]
    assert session.lineage.nodes[1].new_messages == (result("c0", "out a"),)


def test_what_clients_change_on_the_way_does_not_break_a_thread() -> None:
    session = Session()
    turn = Turn((Text("I will look. "), ToolCall("c1", "bash", '{"a":1, "b":2}')), "tool_use")
    session.call([user("go <system-reminder>x</system-reminder>")], turn)
    rewritten = Message("assistant", (ToolCall("call_c1_0", "bash", '{"b": 2, "a": 1}'),))
    session.call([user("go"), rewritten, result("call_c1_0", "out")], Turn((Text("done"),)))
    assert session.kinds() == ["main", "main"]
    assert session.lineage.nodes[1].parent is session.lineage.nodes[0]


@pytest.mark.parametrize("changed", [0, 1, 2])
def test_a_command_that_its_client_shortens_is_known_by_its_id(changed: int) -> None:
    """Claude Code takes `cd DIR &&` off the commands in its history; from which call on differs."""
    session = Session()
    messages: list[Message] = [user("go")]
    for number in range(4):
        turn = calling(f"cd /app && step {number}", f"toolu_{number}")
        session.call(messages, turn)
        kept = calling(f"step {number}", f"toolu_{number}") if number >= changed else turn
        messages = [*messages, said(kept), result(f"toolu_{number}", f"out {number}")]
    session.call(messages, Turn((Text("done"),)))
    nodes = session.lineage.nodes
    assert session.kinds() == ["main"] * 5
    assert [node.parent.number if node.parent else None for node in nodes] == [None, 1, 2, 3, 4]
    assert [len(node.new_messages) for node in nodes] == [1] * 5


def test_histories_whose_old_commands_and_results_change_later_go_on() -> None:
    session = Session()
    messages = loop(session, [user("go")], ["cd /app && a", "cd /app && b", "cd /app && c"])
    short = [message if i not in (1, 3) else said(calling("x", f"c{i // 2}")) for i, message in enumerate(messages)]
    short[2] = result("c0", "[Old tool result content cleared]")
    session.call(short, Turn((Text("done"),)))
    assert session.kinds() == ["main"] * 4
    last = session.lineage.nodes[-1]
    assert last.parent is session.lineage.nodes[-2]
    assert last.new_messages == (result("c2", "out cd /app && c"),)


def test_servers_that_number_their_calls_anew_keep_retries_apart() -> None:
    session = Session()
    session.call([user("go")], calling("a", "call_0"))
    session.call([user("go")], calling("b", "call_0"))
    session.call([user("go"), said(calling("a", "call_0")), result("call_0", "out")], Turn((Text("done"),)))
    assert session.lineage.nodes[-1].parent is session.lineage.nodes[0]
    assert session.kinds() == ["main", "retry", "main"]


def test_titles_and_probes_are_side_calls_wherever_they_come() -> None:
    session = Session()
    session.call([user("Write a title for: go")], Turn((Text("Going"),)), tools=(), system="Titles.")
    messages = loop(session, [user("go")], ["a"])
    session.call([user("quota")], Turn((Text("x"),)), tools=(), sampling=Sampling(max_tokens=1))
    session.call(messages, Turn((Text("done"),)))
    assert session.kinds() == ["side", "main", "side", "main"]


def test_a_sub_agent_is_tied_to_the_call_that_began_it() -> None:
    session = Session()
    task = "Find all the tests in this repository."
    spawn = Turn((ToolCall("t1", "Task", f'{{"prompt": "{task}"}}'),), "tool_use")
    session.call([user("go")], spawn)
    inner = loop(session, [user(task)], ["grep"], system="You search.")
    session.call(inner, Turn((Text("two tests"),)), system="You search.")
    session.call([user("go"), said(spawn), result("t1", "two tests")], Turn((Text("done"),)))
    assert session.kinds() == ["main", "sub_agent", "sub_agent", "main"]
    assert session.lineage.nodes[1].spawned_by == (session.lineage.nodes[0], "t1")


def test_parallel_sub_agents_stay_apart() -> None:
    session = Session()
    tasks = ["Look into the first module.", "Look into the second module."]
    calls = tuple(ToolCall(f"t{i}", "Task", f'{{"prompt": "{task}"}}') for i, task in enumerate(tasks))
    session.call([user("go")], Turn(calls, "tool_use"))
    histories = [[user(task)] for task in tasks]
    for name in ("a", "b"):
        for index in range(2):
            turn = calling(f"{name}{index}")
            session.call(histories[index], turn, system="You look.")
            histories[index] += [said(turn), result("c", f"{name}{index}")]
    threads = session.lineage.threads()
    assert [(thread.kind, len(thread.nodes)) for thread in threads] == [("main", 1), ("sub_agent", 2), ("sub_agent", 2)]
    assert [thread.root.spawned_by[1] for thread in threads[1:] if thread.root.spawned_by] == ["t0", "t1"]


def test_a_header_is_enough_for_a_sub_agent() -> None:
    session = Session()
    loop(session, [user("go")], ["a"])
    session.call([user("hello")], Turn((Text("x"),)), headers={"x-claude-code-agent-id": "7"})
    assert session.kinds() == ["main", "sub_agent"]


def test_after_a_compaction_the_main_work_goes_on() -> None:
    session = Session()
    messages = loop(session, [user("go")], ["a", "b"])
    summary = Turn((Text("So far the repository was searched twice and nothing of note was found in it."),))
    session.call([*messages, user("Summarise all of this.")], summary)
    fresh = [user(f"This goes on from before. {summary.text}"), user("go")]
    fresh = loop(session, fresh, ["c"])
    session.call(fresh, Turn((Text("done"),)))
    assert session.kinds() == ["main", "main", "side", "compaction", "main"]
    assert len([thread for thread in session.lineage.threads() if thread.kind == "main"]) == 1


def test_a_retry_that_failed_and_one_that_was_not_used() -> None:
    session = Session()
    session.call([user("go")], None)
    used, unused = calling("a"), calling("b")
    session.call([user("go")], used)
    session.call([user("go")], unused)
    session.call([user("go"), said(used), result("c", "out")], Turn((Text("done"),)))
    assert session.kinds() == ["retry", "main", "retry", "main"]


def test_another_program_with_the_same_key_is_foreign() -> None:
    session = Session()
    messages = loop(session, [user("go")], ["a"], program="claude-cli/2")
    session.call([user("What is 2 + 2?")], Turn((Text("4"),)), tools=(), program="OpenAI/Python 1", system="x")
    session.call(messages, Turn((Text("done"),)), program="claude-cli/2")
    assert session.kinds() == ["main", "foreign", "main"]


def test_agents_without_tools_have_a_main_thread_too() -> None:
    session = Session()
    messages = [user("Task: do it")]
    for text in ("```bash\nls\n```", "```bash\npwd\n```"):
        turn = Turn((Text(text),))
        session.call(messages, turn, tools=())
        messages = [*messages, said(turn), user(f"output of {text}")]
    assert session.kinds() == ["main", "main"]


@given(data=st.data())
def test_every_call_is_in_one_thread_and_no_two_answers_to_one_question_count(data: st.DataObject) -> None:
    """Fuzzed trees: calls that extend, repeat, fork or begin anew."""
    session = Session()
    open_ends: list[list[Message]] = [[user("go")]]
    for number in range(data.draw(st.integers(1, 12))):
        messages = data.draw(st.sampled_from(open_ends))
        turn = data.draw(st.sampled_from([None, calling(f"x{number}"), Turn((Text(f"said {number}"),))]))
        session.call(messages, turn)
        if turn is not None:
            open_ends.append([*messages, said(turn), user(f"then {number}")])
        if data.draw(st.booleans()):
            open_ends.append([user(f"another {number}")])
    threads = session.lineage.threads()
    nodes = [node for thread in threads for node in thread.nodes]
    assert sorted(node.number for node in nodes) == [node.number for node in session.lineage.nodes]
    continued = {id(node.parent) for node in nodes}
    counted: dict[bytes, int] = {}
    for node in nodes:
        if node.kind != "retry" and id(node) not in continued:
            counted[node.chain[-1]] = counted.get(node.chain[-1], 0) + 1
    assert all(count == 1 for count in counted.values())


ANSWERED, CUT = True, False


@pytest.mark.parametrize(
    ("calls", "killed", "hung"),
    [
        ([], True, False),
        ([(0, 100, CUT)], True, True),
        ([(0, 5, ANSWERED), (5, 100, CUT)], True, True),
        ([(0, 5, ANSWERED), (5, 10, ANSWERED), (20, 100, CUT)], True, True),
        ([(0, 5, ANSWERED), (5, 35, CUT), (36, 66, CUT), (67, 100, CUT)], True, True),
        ([(0, 30, ANSWERED), (70, 100, CUT)], True, False),
        ([(0, 2, ANSWERED), (30, 100, ANSWERED)], True, False),
        ([(0, 2, ANSWERED), (2, 100, CUT), (3, 5, ANSWERED)], True, False),
        ([(0, 1, ANSWERED), (1, 11, CUT)], True, False),
        ([(0, 5, ANSWERED), (95, 100, CUT)], False, False),
        ([(99, 100, CUT)], False, False),
        ([(0, 10, ANSWERED), (10, 40, CUT), (40, 70, CUT), (70, 98, CUT)], False, True),
        ([(-900, -895, ANSWERED), (-890, -885, ANSWERED), (38, 100, CUT)], True, True),
        ([(-900, -870, ANSWERED), (38, 100, CUT)], True, False),
    ],
)
def test_a_model_that_no_longer_answers(calls: list[tuple[float, float, bool]], killed: bool, hung: bool) -> None:
    """The agent ends at 100."""
    request = Request("m", (user("go"),))
    made = [
        Generation(
            Node(number, request, None, float(begin), float(end), {}),
            "answered" if answered else "cancelled",
            answered=answered,
        )
        for number, (begin, end, answered) in enumerate(calls, 1)
    ]
    assert waited_without_answer(made, 100.0, killed=killed) is hung
