"""A row of a Schedule → its messages: shared beginning, earlier turns with stand-in answers, this turn."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from whywait.core.schedule import Schedule, Workload
from whywait.load.prompts import Prompter


class Message(NamedTuple):
    role: str
    content: str


def languages_of(workload: Workload) -> dict[str, tuple[str, ...]]:
    """Languages by class name; ``""`` is for classes that only a trace knows."""
    return {"": workload.classes[0].language, **{c.name: c.language for c in workload.classes}}


def shares(schedule: Schedule, row: int) -> bool:
    """Whether this request is meant to find what others left in the prefix cache."""
    pieces = schedule.blocks and schedule.blocks[row]
    return bool(schedule.session_id[row] >= 0 or schedule.prefix_group[row] >= 0 or pieces)


class Turns:
    """The messages of one schedule's rows."""

    def __init__(self, prompter: Prompter, schedule: Schedule, languages: Mapping[str, Sequence[str]]) -> None:
        self.prompter, self.schedule, self._languages = prompter, schedule, languages
        # Under a warm cache what is shared by name comes again, and nothing else does.
        named = prompter.cache == "warm" and bool(schedule.blocks or (schedule.prefix_group >= 0).any())
        self._own = dataclasses.replace(prompter, cache="cold") if named else prompter
        self._after = schedule.after_rows()

    def chain(self, row: int) -> list[int]:
        """The rows up to ``row``, which is the last, that its prompt holds: those of the session; but a turn whose
        prompt is too short for what was said before begins anew."""
        out = [row]
        while (before := self._before(out[-1])) >= 0:
            out.append(before)
        return out[::-1]

    def _before(self, row: int) -> int:
        before = int(self._after[row])
        return before if before >= 0 and self.schedule.prompt_tokens[row] > self._said(before) else -1

    def _said(self, row: int) -> int:
        """Tokens of a history up to the answer to ``row``."""
        s = self.schedule
        return int(s.prompt_tokens[row] + s.output_tokens[row] - s.thinking_tokens[row])

    def language(self, row: int) -> str:
        first = row
        while (before := int(self._after[first])) >= 0:
            first = before
        name = self.schedule.class_names[self.schedule.klass[first]]
        return self.prompter.language(int(self.schedule.id[first]), self._languages.get(name) or self._languages[""])

    def beginning(self, row: int, names: Sequence[int] = ()) -> list[Message]:
        """A prompt with what this row shares with others, and next to nothing else: its first blocks ``names``, or its
        system prompt and a word."""
        p, language = self.prompter, self.language(row)
        per_unit = p.fit(language).per_unit
        if names:
            whole = max(1, round(self.schedule.block_tokens / per_unit))
            return [Message("user", p.blocks(names, [whole] * len(names), language))]
        length = max(1, round(int(self.schedule.prefix_tokens[row]) / per_unit))
        system = p.system(int(self.schedule.prefix_group[row]), length, language)
        return [Message("system", system), Message("user", p.turn(0, 0, 1, language))]

    def _names(self, row: int) -> Sequence[int | str]:
        """The row's blocks; under a warm cache those no other request has are named anew in every run, so that an
        earlier one with the same seed did not leave them there."""
        names = self.schedule.blocks[row]
        if self._own is self.prompter:
            return names
        counts = self.schedule.block_counts()
        return [n if counts[n] > 1 else f"{self.prompter.salt}/{n}" for n in names]

    def units(self, row: int) -> int:
        """How long this turn's own text is to be, in units, so that the whole prompt has its tokens."""
        s, p = self.schedule, self.prompter
        known = p.exact.get(int(s.id[row]))
        if known is not None:
            return known
        fit, before = p.fit(self.language(row)), self._before(row)
        if s.blocks and s.blocks[row]:
            return fit.units(int(s.prompt_tokens[row]) - s.block_tokens * (len(s.blocks[row]) - 1))
        if before < 0:
            extra = int(s.prefix_tokens[row]) + (p.per_message if s.prefix_group[row] >= 0 else 0)
            return fit.units(int(s.prompt_tokens[row]) - extra)
        return max(1, round((int(s.prompt_tokens[row]) - self._said(before) - 2 * p.per_message) / fit.per_unit))

    def messages(self, row: int, units: int | None = None, trim: int = 0) -> list[Message]:
        """The messages; ``units`` is for another length of the last text than :meth:`units` says, without its last
        ``trim`` characters."""
        if units is None:
            trim = self.prompter.trims.get(int(self.schedule.id[row]), 0)
        s, p, language = self.schedule, self.prompter, self.language(row)
        units = self.units(row) if units is None else units
        per_unit = p.fit(language).per_unit
        if s.blocks and s.blocks[row]:
            whole = max(1, round(s.block_tokens / per_unit))
            names = self._names(row)
            return [Message("user", _cut(p.blocks(names, [whole] * (len(names) - 1) + [units], language), trim))]
        out = []
        chain = self.chain(row)
        number = int(s.id[chain[0]])
        if s.prefix_group[row] >= 0:
            length = max(1, round(int(s.prefix_tokens[row]) / per_unit))
            out.append(Message("system", p.system(int(s.prefix_group[row]), length, language)))
        for turn, at in enumerate(chain):
            length = units if at == row else self.units(at)
            cut = trim if at == row else p.trims.get(int(s.id[at]), 0)
            out.append(Message("user", _cut(self._own.turn(number, turn, length, language, bool(s.tool[at])), cut)))
            if at != row:
                answered = max(1, round(int(s.output_tokens[at] - s.thinking_tokens[at]) / per_unit))
                out.append(Message("assistant", p.answer(number, turn, answered, language)))
        return out


def _cut(text: str, trim: int) -> str:
    return text[:-trim] if trim else text
