"""One request's life, and the models in memory."""
