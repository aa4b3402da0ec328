"""Replicas of one model behind edges: which replica a request goes to, and how many there should be."""
