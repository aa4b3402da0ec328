"""Images: what is asked for, how it is drawn, and how the doors give it."""
