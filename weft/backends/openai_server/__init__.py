"""Servers that speak OpenAI's interface, behind the engine contract: another machine computes, this side serves."""
