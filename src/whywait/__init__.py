"""whywait: what is your LLM service actually waiting on, and what would fix it?"""

__version__ = "0.1.0"
