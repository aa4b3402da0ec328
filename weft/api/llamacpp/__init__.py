"""The interface of llama.cpp's server: /completion and what is its own besides."""
