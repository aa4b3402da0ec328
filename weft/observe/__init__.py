"""What Weft tells of itself: logs and metrics."""
