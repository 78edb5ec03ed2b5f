"""Changes that cannot be, refused before anything is simulated."""

from __future__ import annotations

from whywait.errors import UsageError
from whywait.sim import techniques
from whywait.sim.deployment import Deployment

LAYOUT = techniques.LAYOUT
#: Number types that an engine has no kernels for, with the nearest that it has.
LACKS = {"llama.cpp": {"fp8-kv": "int8-kv (its q8_0)", "fp8-weights": "int8-weights (its q8_0)",
                       "fp4-weights": "int4-weights (its q4_0)"}}  # fmt: skip


def possible(d: Deployment, changes: str, layout: str | None, machine: str | None, model: str | None) -> None:
    """See that a change can be asked of a deployment; ``changes`` is all of it in the words of ``--apply``.

    Raises:
        UsageError: several machines or models, a word that is no layout, or a type that the engine lacks.
    """
    for flag, name in (("--machine", machine), ("--model", model)):
        names = [x.strip() for x in (name or "").split(",") if x.strip()]
        if len(names) > 1:
            raise UsageError(f"{flag} takes one name, not {len(names)}: {name}",
                             f"ask once for each: {flag} {names[0]}, then {flag} {names[1]}")  # fmt: skip
    for part in filter(None, (x.strip() for x in (layout or "").split(","))):
        word = part.partition("=")[0].partition(":")[0].strip()
        if word not in LAYOUT:
            more = "; others go with --apply" if word in techniques.TECHNIQUES else ""
            raise UsageError(f"{word} is no part of a layout", f"--layout takes {', '.join(LAYOUT)}{more}")
    engine = d.engine.policy
    for technique, args in techniques.parse(changes):
        engine = args.value if technique.name == "engine" else engine
        instead = LACKS.get(engine, {}).get(technique.name)
        if instead:
            raise UsageError(f"{engine} has no {technique.name}", f"nearest: {instead}")
