"""The engine interface of the CY-LLM Engine: BaseEngine, its factory and its keyword names.

Classes of BaseEngine stand in the engine table beside Weft's own engines, once this package is imported, which
a module with such a class does.
"""

from __future__ import annotations

from weft.backends.starting import register_class
from weft.compat.adapted import start_adapted
from weft.compat.base_engine import BaseEngine

register_class(BaseEngine, start_adapted)
