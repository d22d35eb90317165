"""Words, quotes and variables of Dockerfiles, and names of images."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pier.errors import ImageError
from pier.image.copying import Ignore
from pier.image.dockerfile import expand, split
from pier.image.model import parse

VALUES = {"A": "1", "EMPTY": "", "PATH": "/bin", "V": "foobarbaz"}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("$A", "1"),
        ("${A}x", "1x"),
        ("$Ax", ""),
        ("$NONE.", "."),
        ("'$A'", "$A"),
        ('"$A b"', "1 b"),
        (r"\$A", "$A"),
        (r'"\$A \" \x"', r'$A " \x'),
        (r"a\ b", "a b"),
        ("${NONE:-d}", "d"),
        ("${EMPTY:-d}", "d"),
        ("${EMPTY-d}", ""),
        ("${A:-d}", "1"),
        ("${A:+s}", "s"),
        ("${EMPTY:+s}", ""),
        ("${EMPTY+s}", "s"),
        ("${NONE:-${A}}", "1"),
        ("${NONE:-$PATH/x}", "/bin/x"),
        ("/x:$PATH", "/x:/bin"),
        ("${V#*ba}", "rbaz"),
        ("${V##*ba}", "z"),
        ("${V%ba*}", "foobar"),
        ("${V%%ba*}", "foo"),
        ("${V/ba/X}", "fooXrbaz"),
        ("${V//ba/X}", "fooXrXz"),
        ("$", "$"),
        ("100%", "100%"),
    ],
)
def test_variables_are_replaced_and_quotes_taken_away(text: str, expected: str) -> None:
    assert expand(text, VALUES) == expected


@pytest.mark.parametrize("text", ["${A", "${}", "'open", '"open', "${A:-x", "${NONE:?needed}"])
def test_what_cannot_be_read_is_an_error(text: str) -> None:
    with pytest.raises(ImageError) as caught:
        expand(text, VALUES)
    assert caught.value.code == "dockerfile"
    assert caught.value.blame == "task"


def test_another_escape_character_leaves_backslashes_alone() -> None:
    assert expand(r"C:\dir`$A", VALUES, "`") == r"C:\dir$A"


def test_words_keep_their_quotes_and_escapes() -> None:
    assert split(r"""a "b c" d\ e 'f  g'h""") == ["a", '"b c"', r"d\ e", "'f  g'h"]


@given(
    st.lists(st.text(st.characters(codec="ascii", exclude_characters="'\\$\"", categories=["L", "N", "P"]), min_size=1))
)
def test_plain_words_are_what_they_were(words: list[str]) -> None:
    assert [expand(word, {}) for word in split("  ".join(words))] == words


@given(st.text())
def test_any_text_is_expanded_or_refused(text: str) -> None:
    try:
        assert isinstance(expand(text, VALUES), str)
    except ImageError as error:
        assert error.code == "dockerfile"


@pytest.mark.parametrize(
    ("text", "full", "familiar"),
    [
        ("ubuntu", "docker.io/library/ubuntu:latest", "ubuntu:latest"),
        ("org/app:1.0", "docker.io/org/app:1.0", "org/app:1.0"),
        ("ghcr.io/org/app", "ghcr.io/org/app:latest", "ghcr.io/org/app:latest"),
        ("localhost/app", "localhost/app:latest", "localhost/app:latest"),
        ("localhost:5000/a/b:t", "localhost:5000/a/b:t", "localhost:5000/a/b:t"),
        ("index.docker.io/library/x", "docker.io/library/x:latest", "x:latest"),
        ("a@sha256:" + "0" * 64, "docker.io/library/a@sha256:" + "0" * 64, "a@sha256:" + "0" * 64),
    ],
)
def test_references_have_one_full_name(text: str, full: str, familiar: str) -> None:
    assert str(parse(text)) == full
    assert parse(text).familiar == familiar
    assert parse(full) == parse(text)


@pytest.mark.parametrize("text", ["", "UPPER", "a b", "a:b:c", "../x", "x@sha256:12", "a//b", "-a", "a:" + "t" * 200])
def test_what_is_no_reference_is_refused(text: str) -> None:
    with pytest.raises(ImageError) as caught:
        parse(text)
    assert caught.value.code == "reference"


@pytest.mark.parametrize(
    ("lines", "left_out", "taken"),
    [
        (["*.log"], ["a.log"], ["dir/a.log", "a.txt"]),
        (["**/*.log"], ["a.log", "x/y/a.log"], ["a.logs"]),
        (["/build", "# comment", ""], ["build", "build/x"], ["src/build"]),
        (["docs", "!docs/keep.md"], ["docs/a.md", "docs"], ["docs/keep.md"]),
        (["*", "!src/**"], ["a", "b/c"], ["src/x", "src/deep/y"]),
        (["a?c", "[xy].t"], ["abc", "x.t"], ["a/c", "z.t"]),
        (["./x/", "y/../z"], ["x/1", "z"], ["y"]),
        (["**"], ["a", "b/c"], []),
        (["!a", "a"], ["a"], ["b"]),
    ],
)
def test_the_last_ignore_pattern_that_matches_decides(lines: list[str], left_out: list[str], taken: list[str]) -> None:
    ignore = Ignore(lines)
    assert [path for path in left_out if not ignore.excludes(path)] == []
    assert [path for path in taken if ignore.excludes(path)] == []
