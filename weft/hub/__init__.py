"""Finding, pulling, checking and reading models. Nothing here imports torch."""
