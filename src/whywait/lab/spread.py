"""How many devices an engine was told to spread over: by the flags of its command and by its own log. Pure text work.

A flag counts first: with several cores each logs what it is alone. What neither says is 1, as every engine that has
such flags documents; unless a configuration file was given, which may say otherwise.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from pathlib import PurePath
from typing import Final

from whywait.engines import EngineTable
from whywait.lab.command import flag_value

_FILES: Final = ("--config", "--extra_llm_api_options", "--config-file")
_FACTS: Final = ("tensor_parallel", "pipeline_parallel", "data_parallel")
_SHORT: Final = {"tensor_parallel": "tp", "pipeline_parallel": "pp", "data_parallel": "dp"}
_STARTERS: Final = re.compile(r"serve|.*launch_server|.*api_server(\.py)?|trtllm-serve")


def _logged(table: EngineTable, fact: str, log: str) -> str:
    """What its log said of it last, a number above 0; '' where it did not."""
    found = re.findall(table.log_patterns[fact], log) if fact in table.log_patterns else []
    last = str(found[-1]) if found else ""
    return last if last.isascii() and last.isdigit() and int(last) else ""


def is_command(argv: Sequence[str]) -> bool:
    """Whether this is the command line that an engine with such flags is started by."""
    return any(_STARTERS.fullmatch(PurePath(word).name) for word in argv[:5])


def spread(table: EngineTable, argv: Sequence[str], log: str = "") -> tuple[int | None, str]:
    """Devices, and who says so; None where it is not said, or not in a number."""
    sizes, who = layout(table, argv, log)
    return None if sizes is None else math.prod(sizes.values()), who


def layout(table: EngineTable, argv: Sequence[str], log: str = "") -> tuple[dict[str, int] | None, str]:
    """The same by its parts: ``tp``, ``pp``, ``dp`` (or a fact's own name), those that are not 1."""
    if not argv or (not table.spread and not any(_logged(table, fact, log) for fact in _FACTS)):
        return None, ""
    sizes: dict[str, int] = {}
    said = []
    for fact, spellings in (table.spread or dict.fromkeys(_FACTS, ())).items():
        if fact == "data_parallel" and any(flag in argv for flag in table.spread_alike):
            continue
        given = [(flag, value) for flag in spellings if (value := flag_value(argv, flag)) is not None]
        logged = _logged(table, fact, log)
        if given:
            flag, value = given[0]
            if not (value.isascii() and value.isdigit() and int(value)):
                return None, ""
            size = int(value)
            said.append(f"{flag} {value}")
        elif logged:
            size = int(logged)
            if size != 1:
                said.append(f"{fact.replace('_', ' ')} {logged} in its log")
        elif any(flag_value(argv, flag) is not None for flag in _FILES):
            return None, ""
        else:
            continue
        if size != 1:
            sizes[_SHORT.get(fact, fact)] = size
    return sizes, f"its command: {', '.join(said)}" if said else "its command: no flag spreads it over more"
