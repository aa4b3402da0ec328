"""Pipelines of `diffusers` as painters. The library is imported when one is loaded, and not before."""
