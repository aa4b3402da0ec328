"""The doors: HTTP as OpenAI speaks it, and the terminal. They know an engine by its contract alone."""
