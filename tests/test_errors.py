"""Whose fault it was is told by the exit code: one per family, stable, and the one the command line promises."""

from __future__ import annotations

import inspect

import pytest

from whywait import cli, errors
from whywait.errors import WhywaitError

PROMISED = {"GateFailed": 1, "UsageError": 2, "Undecided": 3, "ServiceError": 4, "InternalError": 5,
            "Invalid": 6, "ArmNotStarted": 7}  # fmt: skip
ALL = [c for c in vars(errors).values() if inspect.isclass(c) and issubclass(c, WhywaitError)]
RAISED = [c for c in ALL if c is not WhywaitError]
WRONG_FLAGS = [[], ["sing"], ["run", "--concurrency", "0"], ["run", "--concurrency", "2", "--rate", "3"]]


def _family(error: type[WhywaitError]) -> type[WhywaitError]:
    """The class right below the root."""
    return error.__mro__[error.__mro__.index(WhywaitError) - 1]


def _make(error: type[WhywaitError]) -> WhywaitError:
    return error("what is wrong", "what to try")


def test_every_family_has_an_exit_code_of_its_own():
    families = {_family(c) for c in RAISED}
    assert {c.__name__: c.exit_code for c in families} == PROMISED
    codes = [c.exit_code for c in families]
    assert len(set(codes)) == len(codes)
    assert errors.EXIT_OK not in codes
    assert errors.EXIT_INTERRUPTED not in codes


@pytest.mark.parametrize("error", RAISED, ids=lambda c: c.__name__)
def test_members_exit_as_their_family_does_and_say_whose_fault_it_was(error):
    assert error.exit_code == _family(error).exit_code
    assert (error.whose == "whywait") == (_family(error) is errors.InternalError)


@pytest.mark.parametrize("error", ALL, ids=lambda c: c.__name__)
def test_the_tree_drawn_at_the_top_is_the_tree_there_is(error):
    drawn = [line for line in (errors.__doc__ or "").splitlines() if error.__name__ in line.split()]
    assert len(drawn) == 1
    depth = error.__mro__.index(WhywaitError)
    assert drawn[0].index(error.__name__) == 4 + 4 * depth if depth else drawn[0].startswith("    W")
    if "exit" in drawn[0]:
        assert f"exit {error.exit_code} " in drawn[0]


def test_a_message_and_a_hint_are_kept_apart():
    error = _make(errors.Unreachable)
    assert (error.message, error.hint, str(error)) == ("what is wrong", "what to try", "what is wrong")
    missing = errors.MissingExtra("the embedded engine", "engine")
    assert missing.message == "the embedded engine needs the extra 'engine'"
    assert missing.hint == "pip install 'whywait[engine]' (in a clone of it: pip install '.[engine]')"


def _raise(error: BaseException):
    def verb(_args):
        raise error

    return verb


@pytest.mark.parametrize("error", [c for c in RAISED if c is not errors.MissingExtra], ids=lambda c: c.__name__)
def test_the_command_line_exits_with_it_and_says_what_to_try(error, monkeypatch, capsys):
    monkeypatch.setattr("whywait.verbs.measure.show", _raise(_make(error)))
    assert cli.main(["show", "x"]) == error.exit_code
    assert capsys.readouterr().err == "whywait: what is wrong\n  → what to try\n"


def test_faults_of_our_own_and_interruptions_have_their_codes(monkeypatch, capsys):
    monkeypatch.delenv("WHYWAIT_DEBUG", raising=False)
    monkeypatch.setattr("whywait.verbs.measure.show", _raise(ZeroDivisionError("oh")))
    assert cli.main(["show", "x"]) == 5
    said = capsys.readouterr().err
    assert "a fault of our own: ZeroDivisionError: oh at test_errors.py:" in said
    assert "Traceback" not in said
    monkeypatch.setattr("whywait.verbs.measure.show", _raise(KeyboardInterrupt()))
    assert cli.main(["show", "x"]) == 130


def test_a_debugging_user_gets_the_traceback(monkeypatch):
    monkeypatch.setenv("WHYWAIT_DEBUG", "1")
    monkeypatch.setattr("whywait.verbs.measure.show", _raise(ZeroDivisionError("oh")))
    with pytest.raises(ZeroDivisionError):
        cli.main(["show", "x"])


@pytest.mark.parametrize(
    "argv", [[], ["sing"], ["run", "--concurrency", "0"], ["run", "--concurrency", "2", "--rate", "3"]]
)
def test_usage_errors_of_flags_have_the_code_of_usage(argv, capsys):
    with pytest.raises(SystemExit) as caught:
        cli.main(argv)
    assert caught.value.code == errors.EXIT_USAGE
    assert "--help shows the flags" in capsys.readouterr().err


def test_the_help_names_the_codes():
    text = " ".join(cli.parser().format_help().split())
    assert "0 done, 1 a --fail-if gate failed, 2 usage, 3 undecided (--strict), 4 the service failed" in text
    assert "5 whywait's own fault, 6 the measurement is invalid (client late)" in text
    assert "7 an arm of ab did not start, 130 Ctrl-C" in text
