"""Reading Dockerfiles: what is an instruction, and the place of what is wrong."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pier.errors import ImageError
from pier.image.dockerfile import parse


def test_lines_go_on_after_the_escape_and_comments_inside_are_passed_over() -> None:
    file = parse("FROM a\n\n  RUN one && \\\n\n   # a comment\n   two \\  \n three\n# end\nCMD x\n")
    assert [(each.name, each.line) for each in file.instructions] == [("FROM", 1), ("RUN", 3), ("CMD", 9)]
    assert file.instructions[1].text.split() == ["one", "&&", "two", "three"]


def test_two_escapes_at_the_end_do_not_go_on() -> None:
    file = parse("FROM a\nRUN echo \\\\\nRUN b\n")
    assert [each.text for each in file.instructions] == ["a", "echo \\\\", "b"]


def test_directives_are_read_at_the_top_only() -> None:
    file = parse("# syntax=docker/dockerfile:1\n# escape=`\nFROM a\nRUN one `\n two\n# escape=\\\n")
    assert file.directives == {"syntax": "docker/dockerfile:1", "escape": "`"}
    assert file.instructions[1].text == "one  two"
    assert parse("# hello\n# escape=`\nFROM a\n").escape == "\\"


def test_exec_form_needs_an_array_of_strings() -> None:
    file = parse('FROM a\nRUN ["a", "b c"]\nRUN ["a", 1]\nRUN [ -f x ]\n')
    assert [each.exec_form for each in file.instructions[1:]] == [["a", "b c"], None, None]


def test_flags_come_before_the_text() -> None:
    copy = parse("FROM a\nCOPY --from=x --chown=1:2 --link a --not-a-flag /b\n").instructions[1]
    assert copy.flags == (("from", "x"), ("chown", "1:2"), ("link", ""))
    assert copy.text == "a --not-a-flag /b"
    assert (copy.flag("chown"), copy.flag("chmod")) == ("1:2", "")


def test_here_documents_are_read_up_to_their_names() -> None:
    text = (
        "FROM a\nRUN cat <<A >/x && tac <<-'B'\none $V\n# not a comment\nA\n\t\ttwo\n\tB\nRUN x <<<y; echo $((1<<2))\n"
    )
    run, other = parse(text).instructions[1:]
    assert [(doc.name, doc.text, doc.expands) for doc in run.heredocs] == [
        ("A", "one $V\n# not a comment\n", True),
        ("B", "two\n", False),
    ]
    assert other.heredocs == ()
    assert other.line == 8


@pytest.mark.parametrize(
    ("text", "line", "words"),
    [
        ("FROM a\nFOO bar\n", 2, "FOO is not an instruction"),
        ("FROM a\nONBUILD RUN x\n", 2, "ONBUILD is not supported"),
        ("FROM a\n\nCOPY --parents a b\n", 3, "COPY --parents is not supported"),
        ("FROM a\nRUN --security=insecure x\n", 2, "RUN --security is not supported"),
        ("FROM a\nRUN\n", 2, "RUN needs an argument"),
        ("FROM a\nRUN <<E\nx\n", 2, "the here-document E has no end"),
        ("# escape=x\nFROM a\n", 1, "escape"),
        ("FROM a\nCOPY --from=x\n", 2, "COPY needs an argument"),
    ],
)
def test_what_is_wrong_is_told_with_its_line(text: str, line: int, words: str) -> None:
    with pytest.raises(ImageError, match=words) as caught:
        parse(text, "some/Dockerfile")
    assert caught.value.message.startswith(f"some/Dockerfile:{line}: ")
    assert caught.value.code == "dockerfile"


def test_a_file_without_instructions_is_refused() -> None:
    with pytest.raises(ImageError, match="no instruction"):
        parse("# only\n# comments\n")


def test_windows_line_ends_are_read() -> None:
    assert parse("FROM a\r\nRUN b \\\r\n c\r\n").instructions[1].text == "b  c"


@given(st.text(alphabet="FROMRUNCOPY abc\\\n#<='\"[]-$", max_size=80))
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        parse(text)
    except ImageError as error:
        assert error.code == "dockerfile"
