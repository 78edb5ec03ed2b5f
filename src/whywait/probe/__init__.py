"""Probes: what the engine, the machine and the devices say of themselves. Run by ``sampler.py``, in its own process."""

# A probe's sample is a list of these: canonical name, labels as a JSON object (or None), value.
Row = tuple[str, "str | None", float]
