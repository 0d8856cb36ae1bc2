"""Speculative decoding for hybrid recurrent language models: exact rollback, counted memory, and the
decision.
"""

__version__ = "0.1.0"
