"""Anthropic's interface: /v1/messages."""
