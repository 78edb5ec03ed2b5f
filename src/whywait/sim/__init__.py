"""Producer 2: a service of numbers. Engines as schedulers over a table of step times; writes the same Run."""
