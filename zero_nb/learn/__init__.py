"""What helps a learner: a guess before the truth."""
