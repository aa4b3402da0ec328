"""OpenAI's interface, and Weft's additions to it."""
