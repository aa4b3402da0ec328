"""Finds, pulls, checks and reads models. Nothing here imports torch."""
