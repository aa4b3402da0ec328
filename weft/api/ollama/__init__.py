"""Ollama's interface: /api/chat and the rest below /api."""
