"""Published formulas. Imports nothing of the training side, so that comparing is a real test."""
