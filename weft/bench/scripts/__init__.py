"""The CY-LLM Engine's eight commands, by their names and flags, over Weft's load generator: each as
`python -m weft.bench.scripts.NAME`, and as scripts/NAME.py."""
