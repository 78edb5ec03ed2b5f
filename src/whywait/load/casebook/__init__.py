"""Hand-written tasks: a JSONL each, as ``load/cases.py`` reads it, with a ``right`` and a ``wrong`` answer beside each
case, which a test holds against its grader."""
