"""Ranks that talk: worlds, their collectives, and the log of what was sent."""
