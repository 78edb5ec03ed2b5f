"""Every error whywait raises on purpose, drawn as a tree by whose fault it is.

::

    WhywaitError
    ├── UsageError            exit 2    the command, a file or a flag is wrong
    │   └── MissingExtra      exit 2    an optional dependency is not installed
    ├── ServiceError          exit 4    the service under test failed
    │   ├── Unreachable                 no TCP connection, DNS failure, TLS refused
    │   ├── Unauthorized                401 / 403
    │   ├── WrongModel                  the model name is not served here
    │   ├── NotAnEndpoint               it answers, but not an OpenAI-compatible stream
    │   └── EngineDied                  an engine we launched ended or never got ready
    ├── GateFailed            exit 1    a --fail-if condition or an SLO gate is not met
    ├── Undecided             exit 3    no verdict is supported (only with --strict)
    ├── Invalid               exit 6    the measurement is invalid: the client was late or did not keep the rate
    ├── ArmNotStarted         exit 7    an engine of a paired trial did not start
    └── InternalError         exit 5    ours: a bug in whywait

Each error carries one line that says what is wrong (``message``) and one that says what to try (``hint``).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable

EXIT_OK, EXIT_GATE, EXIT_USAGE, EXIT_UNDECIDED, EXIT_SERVICE, EXIT_INTERNAL, EXIT_INTERRUPTED = 0, 1, 2, 3, 4, 5, 130
EXIT_INVALID, EXIT_START = 6, 7


clean: Callable[[str], str] = str  # cuts secrets out of a text; core/secrets.py puts its own here when it learns of one


def scrub(exc: BaseException | None) -> None:
    """Cut secrets out of an exception and all that led to it: a service may echo a key in what it says."""
    seen: set[int] = set()
    while exc is not None and id(exc) not in seen:
        seen.add(id(exc))
        with contextlib.suppress(Exception):  # some libraries' exceptions are frozen; what they say is cleaned as text
            exc.args = tuple(clean(a) if isinstance(a, str) else a for a in exc.args)
        exc = exc.__cause__ or exc.__context__


def said_by(exc: BaseException) -> str:
    """The text of an exception without secrets; of one whose own text fails, that it does not say."""
    try:
        return clean(str(exc))
    except Exception:
        return "(it does not say)"


class WhywaitError(Exception):
    """Base of all; never raised itself."""

    exit_code = EXIT_INTERNAL
    whose = "whywait"

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(clean(message))
        self.message = clean(message)
        self.hint = clean(hint)


class UsageError(WhywaitError):
    exit_code = EXIT_USAGE
    whose = "the command"


class MissingExtra(UsageError):
    """An optional dependency is missing; ``extra`` names the one that brings it."""

    def __init__(self, what: str, extra: str) -> None:
        how = f"pip install 'whywait[{extra}]' (in a clone of it: pip install '.[{extra}]')"
        super().__init__(f"{what} needs the extra '{extra}'", how)


class ServiceError(WhywaitError):
    exit_code = EXIT_SERVICE
    whose = "the service"


class Unreachable(ServiceError):
    pass


class Unauthorized(ServiceError):
    pass


class WrongModel(ServiceError):
    pass


class NotAnEndpoint(ServiceError):
    pass


class EngineDied(ServiceError):
    whose = "the engine"


class GateFailed(WhywaitError):
    exit_code = EXIT_GATE
    whose = "the result"


class Undecided(WhywaitError):
    exit_code = EXIT_UNDECIDED
    whose = "the evidence"


class Invalid(WhywaitError):
    """What was measured is kept, but the load was not the one that was asked for."""

    exit_code = EXIT_INVALID
    whose = "the client"


class ArmNotStarted(WhywaitError):
    """One side of a paired trial; what its engine said last is in the message."""

    exit_code = EXIT_START
    whose = "the engine"


class InternalError(WhywaitError):
    exit_code = EXIT_INTERNAL
