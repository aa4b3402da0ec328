"""OpenAI's newer interface: /v1/responses."""
